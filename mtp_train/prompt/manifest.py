"""Reads a data set's manifest: where it comes from, at which revision, under which licence, in which form."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mtp_train import runtime

MANIFEST_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One ``data/manifests/*.yaml``. ``source`` is a path beside the manifest, or a hub id, which needs ``revision``.

    ``count`` is the number of rows and ``sha256`` the hash of a local file; both are checked where given. A ``split``,
    a hub ``config`` and ``data_files`` are what ``datasets.load_dataset`` takes. ``title`` and ``description`` are how a report names
    the prompts; ``notes`` is for people.
    """

    name: str
    source: str
    licence: str
    format: str | None = None
    field_map: dict[str, str] | None = None
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    data_files: str | list[str] | None = None
    category: str | None = None
    count: int | None = None
    sha256: str | None = None
    notes: str | None = None
    title: str | None = None
    description: str | None = None


_NAMES = tuple(field.name for field in fields(Manifest))
_REQUIRED = ("name", "source", "licence")


def read_manifest(path: Path) -> Manifest:
    """The manifest in ``path``. ValueError, naming file and key, for a broken, incomplete or misspelt one."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: expected a manifest, found nothing there") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML in UTF-8, found {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping with {', '.join(_NAMES)}, found {type(values).__name__}")
    if unknown := [key for key in values if key not in _NAMES]:
        raise ValueError(f"{path}: expected keys among {', '.join(_NAMES)}, found {', '.join(map(str, unknown))}")
    if missing := [key for key in _REQUIRED if not isinstance(values.get(key), str) or not values[key]]:
        raise ValueError(f"{path}: expected text under {', '.join(_REQUIRED)}, found none under {', '.join(missing)}")
    return Manifest(**_checked(values, path))


def _checked(values: dict[str, Any], path: Path) -> dict[str, Any]:
    for key in ("format", "revision", "config", "split", "category", "sha256", "notes", "title", "description"):
        if values.get(key) is not None and not isinstance(values[key], str):
            raise ValueError(f"{path}: expected {key} as text (quote it), found {values[key]!r}")
    if values.get("count") is not None and (not isinstance(values["count"], int) or values["count"] < 1):
        raise ValueError(f"{path}: expected count as a number of rows, found {values['count']!r}")
    if values.get("field_map") is not None and not isinstance(values["field_map"], dict):
        raise ValueError(f"{path}: expected field_map as a mapping, found {values['field_map']!r}")
    return values


def check_sha256(path: Path, expected: str) -> None:
    """ValueError unless the file's bytes have the stated hash."""
    found = runtime.sha256_file(path)
    if found != expected:
        raise ValueError(
            f"{path}: expected sha256 {expected} (its manifest), found {found}; restore the file, or state the new hash and count"
        )
