"""``exporter=stitch``: a trained multi-token-prediction block, put back into a copy of the target's own checkpoint.

A checkpoint that holds such a block (DeepSeek-V3's or Qwen3-Next's layout) is served with it by any engine that knows the model. The
copy is the checkpoint byte for byte, but for the block's tensors: those have the names, shapes and dtypes that were there, so that
their bytes take the old ones' places, and neither a shard's header nor the index changes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mtp_train.exporter.base import MANIFEST, Exporter, ExportResult, Source, finished_export, identity_of, publishing, read_source, rename
from mtp_train.exporter.graph import PairGraph
from mtp_train.exporter.hf import pair_table
from mtp_train.exporter.proof import prove, read_probe, same_tensors
from mtp_train.exporter.served import serve_command
from mtp_train.published.read import Published, open_published
from mtp_train.runtime import log
from mtp_train.target.files import read_tensor, tensor_files
from mtp_train.target.weights import SharedWeights, read_shared

_CHUNK_BYTES = 16 * 1024**2


class StitchExporter(Exporter):
    """Writes a whole model folder. ``link``: files in which nothing changes are hard links to the target's own, which take no space;
    False copies them. ``overwrite``: whether another head's export in the same folder may be replaced."""

    word = "stitch"

    def __init__(self, *, link: bool, trust_remote_code: bool, overwrite: bool) -> None:
        self.link, self.overwrite = link, overwrite

    def export(self, checkpoint: Path, target_path: Path, out: Path) -> ExportResult:
        if out.resolve().is_relative_to(target_path.resolve()):
            raise ValueError(f"out: expected a folder outside the target's, which is copied whole, found {out}; choose another out=")
        source = read_source(checkpoint, target_path)
        published = _published(source)
        identity = identity_of(source, word=self.word, settings={"layout": published.word})
        finished = finished_export(out, identity=identity)
        if finished is not None:
            return finished
        files = tensor_files(target_path)
        changed = _stored(source, published, files)
        with publishing(out, identity=identity, overwrite=self.overwrite) as publication:
            shards = {files[name].relative_to(target_path) for name in changed}
            for relative in _files(target_path):
                self._place(target_path / relative, publication.folder / relative, changes=relative in shards)
            for relative in sorted(shards):
                own = {name: tensor for name, tensor in changed.items() if files[name].relative_to(target_path) == relative}
                replace_tensors(publication.folder / relative, own)
                check_rest(target_path / relative, publication.folder / relative, changed=own)
            publication.proof = _prove(source, publication.folder, changed, shared=read_shared(target_path))
            config = {"method": "mtp", "num_speculative_tokens": published.settings["num_blocks"]}
            publication.serve = serve_command(target=str(out), speculative_config=config, hf_overrides=None, flags=())
        assert publication.result is not None
        return publication.result

    def _place(self, original: Path, copy: Path, *, changes: bool) -> None:
        """A file of the target in the copy, as a link where nothing of it changes and the file system has links."""
        copy.parent.mkdir(parents=True, exist_ok=True)
        original = original.resolve()  # a hub's snapshot is made of symbolic links
        if self.link and not changes:
            try:
                os.link(original, copy)
                return
            except OSError as error:
                log(f"{original} cannot be linked ({error.strerror}): copied")
        shutil.copyfile(original, copy)


def _published(source: Source) -> Published:
    """The block that lies in the target, where the head is one that can take its place.

    Errors: ValueError where the target holds none, or the head is of another graph.
    """
    found = open_published(source.target_path, target_path=source.target_path)
    if found.layout is None or not found.layout.in_target:
        raise ValueError(f"exporter=stitch: expected a target that holds a block of its own, found {found.word} in {source.target_path}")
    found.check(head=source.head["head"], settings={"num_blocks": 1, "projection_bias": False, **source.head["settings"]})
    return found


def _stored(source: Source, published: Published, files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """The head's tensors under the checkpoint's names, in the dtypes that they have there.

    Errors: ValueError unless they are the block's, in number and shape.
    """
    assert published.layout is not None
    named = published.stored_names(source.tensors, column_order=source.head["settings"]["column_order"])
    there = {name for name in files if published.layout.holds(name)}
    if odd := sorted(there ^ named.keys()):
        raise ValueError(
            f"exporter=stitch: expected a head with the tensors of {published.word} in {source.target_path}, found {len(odd)} on one side "
            f"only: {', '.join(odd[:4])}"
        )
    stored = {}
    for name, tensor in named.items():
        old = read_tensor(dict(files), name)
        if old.shape != tensor.shape:
            raise ValueError(f"exporter=stitch: expected {name} of shape {tuple(old.shape)}, found {tuple(tensor.shape)} in the head")
        stored[name] = tensor.to(old.dtype).contiguous()
    return stored


def _files(folder: Path) -> list[Path]:
    """All files of a model folder, hidden ones and an earlier export's manifest left out; relative to it."""
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if not any(part.startswith(".") for part in path.parts) and path != Path(MANIFEST)]


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and where its data begins."""
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(size)), 8 + size


def _places(file: Path, names: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """From where to where each tensor lies in the file."""
    header, first = _header(file)
    return {name: (first + header[name]["data_offsets"][0], first + header[name]["data_offsets"][1]) for name in names}


def replace_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors over those of the same names, shapes and dtypes."""
    places = _places(file, tensors)
    with open(file, "r+b") as stream:
        for name, tensor in tensors.items():
            start, end = places[name]
            data = tensor.reshape(-1).view(torch.uint8).numpy()
            assert data.nbytes == end - start, (name, data.nbytes, end - start)
            stream.seek(start)
            stream.write(data.data)


def check_rest(original: Path, copy: Path, *, changed: Mapping[str, torch.Tensor]) -> None:
    """ValueError unless all bytes but those of the changed tensors are the original's."""
    places = sorted(_places(original, changed).values())
    borders = [0, *(border for place in places for border in place), original.stat().st_size]
    if copy.stat().st_size != original.stat().st_size:
        raise ValueError(
            f"export: expected {copy.name} of {original.stat().st_size} bytes, found {copy.stat().st_size}; the disk lost some"
        )
    for start, end in zip(borders[::2], borders[1::2], strict=True):
        for one, two in zip(_pieces(original, start, end), _pieces(copy, start, end), strict=True):
            if one != two:
                raise ValueError(f"export: expected {copy.name} to keep all that is not the head's, found other bytes; the disk damaged it")


def _pieces(file: Path, start: int, end: int) -> Iterator[bytes]:
    with open(file, "rb") as stream:
        stream.seek(start)
        while start < end and (piece := stream.read(min(_CHUNK_BYTES, end - start))):
            start += len(piece)
            yield piece


def _prove(source: Source, folder: Path, written: Mapping[str, torch.Tensor], *, shared: SharedWeights) -> dict[str, Any]:
    """Read the block back from the new folder, as a training would that starts from it, and run it against the head's probe."""
    files = tensor_files(folder)
    same_tensors(written, {name: read_tensor(files, name) for name in written})
    settings = source.head["settings"]
    found = open_published(folder, target_path=folder)
    tensors = found.tensors(source.tensors, column_order=settings["column_order"], shared=shared)
    config = {**settings, "target_config": source.target_config}
    renamed = rename(tensors, pair_table(settings.get("num_blocks", 1)))
    graph = PairGraph(config=config, tensors=renamed, shared=shared)
    exact = all(tensor.dtype == torch.float32 for tensor in written.values())
    return prove(graph, renamed, read_probe(source.checkpoint), dtype="float32" if exact else "bfloat16")
