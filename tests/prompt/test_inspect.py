"""The table of a sample: columns in line, text escaped, the teacher's guess in the row that made it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers_for_tests as toks

from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
from mtp_train.cache.plan import PlannedSample
from mtp_train.cache.writer import CacheWriter
from mtp_train.prompt.build import build_response
from mtp_train.prompt.inspect import format_shown, read_shown
from mtp_train.prompt.responses import ResponseWriter
from mtp_train.prompt.template import ChatTemplate
from mtp_train.records import Prompt, Sample, Teacher


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(tokenizer=toks.make_tokenizer(toks.CHATML))


def answered(template, answer: str, prompt_id: str = "p"):
    messages = ({"role": "user", "content": "q\x1b[31m"}, {"role": "assistant", "content": answer})
    prompt = Prompt(prompt_id=prompt_id, messages=messages, category="chat", source="s")
    return build_response(prompt, template, max_length=99, policy="drop")


def folder(tmp_path, responses):
    with ResponseWriter(directory=tmp_path, identity={"target": "tiny"}) as writer:
        for response in responses:
            writer.write(response)
    return tmp_path


def test_a_response_as_columns(tmp_path, template):
    response = answered(template, "é\nok")
    text = format_shown(read_shown(folder(tmp_path, [response]), index=0, sample_id=None), template.tokenizer)
    title, header, *lines = text.split("\n")
    assert title == f"p  category chat  {len(response.token_ids)} tokens, {sum(response.loss_mask)} count in the loss"
    assert header.split() == ["pos", "id", "token", "mask"]
    assert len(lines) == len(response.token_ids)
    column = header.index("mask")
    assert [line[column] == "1" for line in lines] == list(response.loss_mask)
    assert [int(line.split()[1]) for line in lines] == list(response.token_ids)
    assert lines[-1].split()[2:] == ["'<|im_end|>'", "1"]
    assert "\x1b" not in text
    assert "'\\x1b'" in text
    assert "'\\n'" in text


def test_a_piece_of_a_character_is_shown_as_the_vocabulary_spells_it(tmp_path, template):
    text = format_shown(read_shown(folder(tmp_path, [answered(template, "é")]), index=0, sample_id=None), template.tokenizer)
    assert "<Ã>" in text
    assert "\ufffd" not in text


def cached(tmp_path, template, response, **changes):
    """The response in a cache whose teacher is right about every token of the answer, with probability 0.75."""
    import torch

    rows = [position - 1 for position, flag in enumerate(response.loss_mask) if flag]
    identity = CacheIdentity(
        **{
            "format_version": FORMAT_VERSION,
            "target_name": "tiny",
            "target_fingerprint": "aa11",
            "tokenizer_hash": template.tokenizer_sha256,
            "template_hash": template.template_sha256,
            "hidden_state": "post_norm",
            "target_layer_ids": (),
            "dtype": "float32",
            "codec": "float32",
            "top_k": 2,
            "engine": "hf",
            "engine_version": "transformers 5",
            "quantization": None,
            "hidden_size": 2,
            "vocab_size": len(template.tokenizer),
            "git_commit": None,
            **changes,
        }
    )
    teacher = Teacher(
        row_M=torch.tensor(rows),
        ids_MC=torch.tensor([[response.token_ids[row + 1], 5] for row in rows]),
        log_probs_MC=torch.tensor([[math.log(0.75), math.log(0.125)]] * len(rows)),
        log_sum_exp_M=torch.zeros(len(rows)),
    )
    sample = Sample(
        sample_id=response.prompt_id,
        token_ids_T=torch.tensor(response.token_ids),
        loss_mask_T=torch.tensor(response.loss_mask),
        hidden_TD=torch.zeros(len(response.token_ids), 2),
        teacher=teacher,
        category=response.category,
    )
    writer = CacheWriter(path=tmp_path, identity=identity, samples=[PlannedSample.of(response)], shard_tokens=1000)
    for index, _ in writer.missing_shards():
        writer.write_shard(index, [sample])
    writer.finish()
    return rows


def test_the_teachers_guess_stands_where_it_was_made(tmp_path, template):
    response = answered(template, "ok")
    rows = cached(tmp_path, template, response)
    shown = read_shown(tmp_path, index=None, sample_id="p")
    title, header, *lines = format_shown(shown, template.tokenizer).split("\n")
    assert title.startswith("p  category chat")
    assert header.split() == ["pos", "id", "token", "mask", "next", "p(next)"]
    guesses = {int(line.split()[0]): line.split()[-2:] for line in lines if line.endswith("0.750")}
    assert sorted(guesses) == rows
    # each guess is right, so it reads like the token one row below
    assert [guesses[row][0] for row in rows] == [lines[row + 1].split()[2] for row in rows]
    window = format_shown(shown, template.tokenizer, begin=2, end=4).split("\n")[2:]
    assert [line.split()[0] for line in window] == ["2", "3"]


def test_another_tokenizer_is_refused(tmp_path, template):
    cached(tmp_path, template, answered(template, "ok"), tokenizer_hash="0123")
    with pytest.raises(ValueError, match=r"expected the tokenizer that made the sample \(sha256 0123\), found"):
        format_shown(read_shown(tmp_path, index=0, sample_id=None), template.tokenizer)


def test_the_tool_prints_it_and_says_what_is_wrong(tmp_path, template):
    response = answered(template, "ok")
    directory = folder(tmp_path / "responses", [response])
    template.tokenizer.save_pretrained(tmp_path / "target")
    tool = Path(__file__).resolve().parents[2] / "tools" / "inspect_batch.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tool.parents[1]), os.environ.get("PYTHONPATH", "")])}

    def run(*words):
        command = [sys.executable, str(tool), str(directory), "--tokenizer", str(tmp_path / "target"), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False)

    done = run("--id", "p")
    assert (done.returncode, done.stdout) == (0, format_shown(read_shown(directory, index=0, sample_id=None), template.tokenizer) + "\n")
    done = run("--index", "7")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a sample number from 0 to 0, found 7" in done.stderr


def test_samples_are_found_by_number_and_id(tmp_path, template):
    directory = folder(tmp_path, [answered(template, "a", "one"), answered(template, "b", "two")])
    assert read_shown(directory, index=1, sample_id=None).sample_id == "two"
    assert read_shown(directory, index=None, sample_id="two").sample_id == "two"
    with pytest.raises(ValueError, match="from 0 to 1, found 2"):
        read_shown(directory, index=2, sample_id=None)
    with pytest.raises(ValueError, match="such as one, two"):
        read_shown(directory, index=None, sample_id="three")
