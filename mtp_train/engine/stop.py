"""Which tokens end an answer: read from a target's folder, without loading the model."""

from __future__ import annotations

from pathlib import Path

from mtp_train.runtime import read_json


def stop_token_ids(path: Path, *, trust_remote_code: bool) -> tuple[int, ...]:
    """End-of-turn tokens of the target in ``path``: those of generation_config.json and config.json and the tokenizer's own."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            listed = read_json(path / name).get("eos_token_id")
            if listed is not None:
                found |= {listed} if isinstance(listed, int) else set(listed)
    if (path / "tokenizer_config.json").is_file() or (path / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        eos = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code).eos_token_id
        if eos is not None:
            found.add(eos)
    return tuple(sorted(found))
