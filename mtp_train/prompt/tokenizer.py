"""Loads a tokenizer, and hashes that say which tokenizer and template made the token ids, so that a later stage can refuse others."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# One of these is in every folder that transformers reads a tokenizer from.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def sha256_text(text: str) -> str:
    """Hex sha256 of the text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex sha256 over what decides token ids: vocabulary, merges, normalisation, splitting, added tokens.

    Padding and truncation are left out: calls change them on the fly, and no id depends on them here. ValueError for a
    tokenizer without a ``tokenizers`` backend, whose merges cannot be read in one form.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__}: expected a tokenizer with a tokenizers (fast) backend, found a slow one; "
            "convert it (save a tokenizer.json) so that its identity can be stated"
        )
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for volatile in ("padding", "truncation"):
        state.pop(volatile, None)
    return sha256_text(json.dumps(state, sort_keys=True, ensure_ascii=True))


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder on disk; code that comes with it is run only where asked for. ValueError where none is there."""
    if not path.is_dir():
        raise ValueError(f"{path}: expected a model folder with a tokenizer, found {'a file' if path.exists() else 'nothing there'}")
    if not any((path / name).is_file() for name in _FILES):
        raise ValueError(f"{path}: expected a tokenizer, found none of {', '.join(_FILES)}; put them beside the model's weights")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file is told in many ways, by the tokenizers package as Exception itself
        raise ValueError(f"{path}: expected a tokenizer ({_FILES[0]}, {_FILES[1]}), found: {' '.join(str(error).split())}") from error
