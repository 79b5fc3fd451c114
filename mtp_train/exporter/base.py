"""The contract of an exporter: a trained head becomes the folder that an engine loads, and is proven equal before it appears.

An exporter is ``read_source`` -> a table of renames -> ``publishing`` (write, read back, prove) -> ``ExportResult``. It reads
``head.json`` and never imports ``head/``, so that formats and heads stay a sum and not a product.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from mtp_train.checkpoint import read_head_config, read_head_tensors
from mtp_train.lock import alone
from mtp_train.published.layout import renamed
from mtp_train.runtime import SEAL, atomic_write_json, fsync_directory, provenance, read_object, seal, sha256_file
from mtp_train.target.files import read_model_config
from mtp_train.target.spec import fingerprint

FORMAT_VERSION = 1
MANIFEST = "export.json"  # written last: identity, proof, sha256 of every file


@dataclass(frozen=True, kw_only=True)
class Source:
    """What an exporter reads: ``head`` is the checkpoint's head.json, ``tensors`` its weights (float32),
    ``target_config`` the target's config.json as it stands."""

    checkpoint: Path
    head: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    target_path: Path
    target_config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A finished export. ``files`` maps each file's name to its sha256; ``proof`` says what was compared, over how many
    rows, within which tolerance and how far apart it was; ``serve`` how to load it, ready to paste."""

    path: Path
    identity: dict[str, Any]
    files: dict[str, str]
    proof: dict[str, Any]
    serve: str
    reused: bool  # True: the same export stood there already, its checksums are right, and nothing was written


class Exporter(ABC):
    """Writes one format. What its format cannot hold is a ValueError that says which part and who can.

    Constructors take the keys of their yaml, ``overwrite`` among them, and ``trust_remote_code``, which is the target's
    setting and which the verb passes.
    """

    word: ClassVar[str]  # its name in conf/exporter and on the command line

    @abstractmethod
    def export(self, checkpoint: Path, target_path: Path, out: Path) -> ExportResult:
        """Write the head in ``checkpoint``, trained on the target at ``target_path``, into the folder ``out``.

        ``out`` appears whole or not at all. Where it holds the same export already, nothing is done (``reused``).
        Errors: ValueError where the head, the target or the format do not fit, where ``out`` holds something else, and
        where what was written does not compute what the head does.
        """


def read_source(checkpoint: Path, target_path: Path) -> Source:
    """Read a checkpoint and the config of its target.

    Errors: ValueError where the checkpoint is none or damaged, or was trained on another target.
    """
    head = read_head_config(checkpoint)
    target_config = read_model_config(target_path)
    expected, found = head["target"].get("target_fingerprint"), fingerprint(target_path)
    if expected != found:
        raise ValueError(
            f"{target_path}: expected the target that {checkpoint} was trained on ({head['target'].get('target_name')}, "
            f"weights sha256 {expected}), found weights of sha256 {found}; point target.path= at that target"
        )
    return Source(
        checkpoint=checkpoint, head=head, tensors=read_head_tensors(checkpoint), target_path=target_path, target_config=target_config
    )


class Rename(NamedTuple):
    """One row of an exporter's table. Both names may end in ``*``: then whatever follows the prefix is kept."""

    ours: str
    theirs: str


def rename(tensors: Mapping[str, torch.Tensor], table: Sequence[Rename]) -> dict[str, torch.Tensor]:
    """The tensors under their new names; each must have exactly one row.

    Errors: ValueError where a tensor has no row (it would be dropped without a word) or two, or two get one name.
    """
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found = [new for row in table if (new := renamed(name, old=row.ours, new=row.theirs)) is not None]
        if len(found) != 1:
            raise ValueError(
                f"export: expected one rule for the tensor {name!r}, found {found or 'none'}; this format does not hold such a head"
            )
        if found[0] in named:
            raise ValueError(f"export: expected one tensor per name, found two for {found[0]!r}")
        named[found[0]] = tensor
    return named


def identity_of(source: Source, *, word: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two exports the same: the format with its settings, the head to the byte, the target's config."""
    return {
        "format_version": FORMAT_VERSION,
        "exporter": word,
        "settings": json.loads(json.dumps(dict(settings))),  # as it is read back: tuples are lists there
        "head": source.head["head"],
        "head_weights_sha256": source.head["weights_sha256"],
        "head_settings_sha256": _sha256_json({key: source.head[key] for key in ("head", "method", "hidden_state", "settings", "target")}),
        "target_config_sha256": _sha256_json(source.target_config),
    }


def _sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8")).hexdigest()


def _read_manifest(out: Path) -> dict[str, Any]:
    """An export's manifest. ValueError where it is damaged."""
    remedy = f"it is damaged: delete {out} and export again"
    document = read_object(out / MANIFEST, {"identity": dict, "files": dict[str, str], "proof": dict, "serve": str}, remedy=remedy)
    if odd := sorted({"num_rows", "num_depths", "tolerance", "largest_difference"} - document["proof"].keys()):
        raise ValueError(f"{out / MANIFEST}: expected a proof that states {', '.join(odd)}, found none; {remedy}")
    return document


def finished_export(out: Path, *, identity: Mapping[str, Any]) -> ExportResult | None:
    """The export that stands in ``out``, where it is the same one and all its checksums are right; otherwise None."""
    if not (out / MANIFEST).is_file():
        return None
    document = _read_manifest(out)
    if document["identity"] != dict(identity) or document.get(SEAL) != seal(document):
        return None
    for name, expected in document["files"].items():
        if not (out / name).is_file() or sha256_file(out / name) != expected:
            return None
    return ExportResult(
        path=out, identity=document["identity"], files=document["files"], proof=document["proof"], serve=document["serve"], reused=True
    )


@dataclass(kw_only=True)
class Publication:
    """An export in the making: write files into ``folder``, read them back, then fill ``proof`` and ``serve``."""

    folder: Path
    proof: dict[str, Any] = field(default_factory=dict)
    serve: str = ""
    result: ExportResult | None = None


@contextmanager
def publishing(out: Path, *, identity: Mapping[str, Any], overwrite: bool) -> Iterator[Publication]:
    """Give a hidden folder beside ``out``; when the block ends well, put it in the place of ``out`` by a rename.

    The manifest is written into it last, with the sha256 of every file. A block that fails leaves nothing; a process that
    is killed leaves a hidden folder that the next export removes. ``result`` is filled after the block.
    Errors: ValueError where ``out`` holds another export and ``overwrite`` is off, or anything that is no export, and
    where another process is writing it.
    """
    if not out.name:
        raise ValueError(f"out: expected the name of a folder to be made, found {out}; name one")
    with alone(out.with_name(f".{out.name}.lock"), writes=out, wait=False), _placing(out, identity, overwrite) as publication:
        yield publication


@contextmanager
def _placing(out: Path, identity: Mapping[str, Any], overwrite: bool) -> Iterator[Publication]:
    partial, replaced = (out.with_name(f".{out.name}.{suffix}") for suffix in ("partial", "replaced"))
    if replaced.exists() and not out.exists():  # killed between the two renames below
        os.rename(replaced, out)
    _refuse_to_overwrite(out, identity=identity, overwrite=overwrite)
    for leftover in (partial, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    publication = Publication(folder=partial)
    try:
        yield publication
        assert publication.proof and publication.serve, "an exporter must prove what it wrote and say how to load it"
        files = {path.relative_to(partial).as_posix(): sha256_file(path) for path in sorted(partial.rglob("*")) if path.is_file()}
        document = {"identity": dict(identity), "files": files, "proof": publication.proof, "serve": publication.serve}
        document |= {"provenance": provenance()}
        atomic_write_json(partial / MANIFEST, {**document, SEAL: seal(document)})
        readable = (partial / MANIFEST).stat().st_mode  # safetensors writes for its owner only; a server is often another user
        for name in files:
            if (partial / name).stat().st_nlink == 1:  # a link's mode is that of the file it was made of
                (partial / name).chmod(readable)
        _fsync_tree(partial)
        if out.exists():
            os.rename(out, replaced)
        os.rename(partial, out)
        fsync_directory(out.parent)
    finally:
        for leftover in (partial, replaced):
            if leftover.exists() and (leftover == partial or out.exists()):
                shutil.rmtree(leftover)
    publication.result = ExportResult(
        path=out, identity=dict(identity), files=files, proof=publication.proof, serve=publication.serve, reused=False
    )


def _refuse_to_overwrite(out: Path, *, identity: Mapping[str, Any], overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not (out / MANIFEST).is_file():
        raise ValueError(
            f"{out}: expected an export (a folder with {MANIFEST}) or nothing there, found something else; choose another out="
        )
    found = _read_manifest(out)["identity"]
    differs = {key: (found.get(key), value) for key, value in identity.items() if found.get(key) != value}
    if differs and not overwrite:
        shown = "; ".join(f"{key}: there {there!r}, now {now!r}" for key, (there, now) in differs.items())
        raise ValueError(
            f"{out}: expected an export of the same head, found another ({shown}); choose another out= or exporter.overwrite=true"
        )


def _fsync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
    fsync_directory(folder)
