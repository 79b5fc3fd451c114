"""How readers know the prompts of a source: what its manifests say of themselves, or the names of its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtp_train.prompt.load import find
from mtp_train.prompt.manifest import MANIFEST_SUFFIXES, read_manifest


def described(source: str | Path | Sequence[str | Path]) -> tuple[str, str]:
    """A label and a description of a source as ``load_prompts`` takes it; nothing but the manifests is read."""
    sources = [source] if isinstance(source, str | Path) else list(source)
    found = [_described(str(one)) for one in sources]
    labels = dict.fromkeys(label for label, _ in found)
    return ", ".join(labels), "; ".join(dict.fromkeys(about for _, about in found))


def _described(source: str) -> tuple[str, str]:
    path = find(source)
    label = path.name if path.exists() else source  # a hub id, or what is no longer there
    if path.suffix in MANIFEST_SUFFIXES and path.is_file():
        try:
            manifest = read_manifest(path)
        except ValueError:  # of a report that outlived it
            return _flat(label), f"prompts of {_flat(label)}"
        label = manifest.title or manifest.name
        return _flat(label), _flat(manifest.description or f"prompts of {label}")
    return _flat(label), f"prompts of {_flat(label)}"


def _flat(text: str) -> str:
    """On one line, and printable: a file's name may hold anything."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
