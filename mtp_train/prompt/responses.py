"""Responses on disk: one JSON line per answered prompt, continued after an interruption, complete when marked so.

A folder holds ``meta.json`` (identity: what made the answers), ``responses.jsonl`` (rank 0; further ranks write
``responses-<rank>.jsonl``) and, once all is done, ``finished.json`` with the count and the files' sha256.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mtp_train import runtime
from mtp_train.records import Response
from mtp_train.typed import fit

META = "meta.json"
FINISHED = "finished.json"
FORMAT_VERSION = 1
_LINE: dict[str, Any] = {
    "prompt_id": str,
    "token_ids": tuple[int, ...],
    "loss_mask": tuple[int, ...],
    "messages": tuple[dict, ...],
    "finish_reason": str,
    "category": str,
    "source": str,
}


class ResponseWriter:
    """Appends responses to a folder; ``done_ids`` are the prompts that need no answer any more.

    ``identity`` says what makes the answers (target name and fingerprint, tokenizer and template sha256, engine and
    version, sampling); a folder made by another is refused with both values. A line cut off by a kill is cut away on
    opening, and its prompt is answered again. Each process writes a file of its own (``rank``), and sees what the
    others had written when it opened.
    """

    def __init__(self, *, directory: Path, identity: Mapping[str, Any], rank: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        _claim(directory, identity)
        self._path = directory / (f"responses-{rank}.jsonl" if rank else "responses.jsonl")
        if not self.finished:  # a finished file has no line that was being written: one that seems so is damaged, and stays to be told
            _cut_torn_line(self._path)
        self.done_ids: set[str] = {response.prompt_id for response in _read_all(directory)}
        self._stream = open(self._path, "ab")  # noqa: SIM115 - lives as long as the writer, closed by close()

    @property
    def finished(self) -> bool:
        """All prompts of an earlier run were answered. Adding one takes the mark away until :meth:`finish`."""
        return (self.directory / FINISHED).exists()

    def write(self, response: Response) -> None:
        """Append one response; what has returned from here survives a kill of the process."""
        if response.prompt_id in self.done_ids:
            raise ValueError(f"{self._path}: prompt {response.prompt_id!r} has an answer already; skip what is in done_ids")
        (self.directory / FINISHED).unlink(missing_ok=True)
        self._stream.write(_to_line(response))
        self._stream.flush()
        self.done_ids.add(response.prompt_id)

    def finish(self) -> int:
        """Mark the folder complete, unless it holds no response, and return their number. Called by one process, when all have
        closed theirs."""
        self.close()
        count = len(_read_all(self.directory))
        if not count:
            return 0
        runtime.atomic_write_json(self.directory / FINISHED, {"num_responses": count, "sha256": _hashes(self.directory)})
        return count

    def close(self) -> None:
        """Flush to the disk itself and close; a second call does nothing."""
        if not self._stream.closed:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_responses(directory: Path, *, allow_unfinished: bool = False) -> list[Response]:
    """All responses of a folder by ascending prompt id, so that an interrupted run reads as one that was not.

    ValueError where the folder isn't complete (unless allowed), a line is broken, the count is not the marked one, or a
    file is not the one that was there when it was finished.
    """
    read_meta(directory)
    finished = directory / FINISHED
    if not finished.exists() and not allow_unfinished:
        raise ValueError(
            f"{directory}: expected finished responses, found {FINISHED} missing; run regenerate again, it continues where it stopped"
        )
    responses = _read_all(directory)
    if finished.exists():
        remedy = f"delete {FINISHED} and run regenerate again"
        marked = runtime.read_object(finished, {"num_responses": int, "sha256": dict[str, str]}, remedy=remedy)
        found = _hashes(directory)
        if odd := sorted(name for name in marked["sha256"].keys() | found.keys() if marked["sha256"].get(name) != found.get(name)):
            raise ValueError(
                f"{directory / odd[0]}: expected the file of sha256 {marked['sha256'].get(odd[0])} ({FINISHED}), found "
                f"{found.get(odd[0], 'none')}: it was changed or damaged; restore it, or delete it and {FINISHED} and run regenerate again"
            )
        if marked["num_responses"] != len(responses):
            raise ValueError(f"{directory}: expected {marked['num_responses']} responses ({FINISHED}), found {len(responses)}; {remedy}")
    return sorted(responses, key=lambda response: response.prompt_id)


def _hashes(directory: Path) -> dict[str, str]:
    """sha256 of each file that holds answers: a process that had none to give leaves an empty one."""
    return {path.name: runtime.sha256_file(path) for path in sorted(directory.glob("responses*.jsonl")) if path.stat().st_size}


def read_meta(directory: Path) -> dict[str, Any]:
    """The identity that the folder's answers were made with. ValueError where the folder holds none."""
    if not (directory / META).is_file():
        raise ValueError(
            f"{directory}: expected responses ({META} and responses.jsonl), found none; run regenerate first, with the same run="
        )
    kinds = {"format_version": int, "identity": dict}
    meta = runtime.read_object(directory / META, kinds, remedy="it is damaged: restore it, or delete the folder and regenerate")
    if meta["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{directory / META}: expected format_version {FORMAT_VERSION}, found {meta['format_version']}; regenerate the responses"
        )
    identity: dict[str, Any] = meta["identity"]
    return identity


def _claim(directory: Path, identity: Mapping[str, Any]) -> None:
    """Write the identity of a new folder, or refuse one that other settings made."""
    wanted = json.loads(json.dumps(identity))  # as it reads back: tuples become lists
    answered = any(directory.glob("responses*.jsonl"))  # looked for first: another rank writes its meta before its answers
    if not (directory / META).exists():
        if answered:
            raise ValueError(
                f"{directory}: expected {META} beside the responses, found none; what made them is not known: use another folder"
            )
        # Of several processes the first one's stands, and the others are held against it.
        runtime.create_json(directory / META, {"format_version": FORMAT_VERSION, "identity": wanted})
    found = read_meta(directory)
    differing = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    if differing:
        pairs = "; ".join(f"{key}: this run has {wanted.get(key)!r}, the folder {found.get(key)!r}" for key in differing)
        back = f"engine.dtype={found['dtype']} continues it; else " if differing == ["dtype"] else ""
        raise ValueError(f"{directory} was made by other settings ({pairs}); {back}use another run folder, or delete this one")


def _cut_torn_line(path: Path) -> None:
    """Cut the file behind its last line end: what stands after it was being written when the process was killed."""
    if not path.exists():
        return
    with open(path, "r+b") as stream:
        position = end = stream.seek(0, os.SEEK_END)
        while position > 0:
            step = min(position, 1 << 16)
            stream.seek(position - step)
            newline = stream.read(step).rfind(b"\n")
            if newline >= 0:
                position = position - step + newline + 1
                break
            position -= step
        if position < end:
            stream.truncate(position)
            stream.flush()
            os.fsync(stream.fileno())


def _read_all(directory: Path) -> list[Response]:
    responses: dict[str, Response] = {}
    for path in sorted(directory.glob("responses*.jsonl")):
        with open(path, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                if not raw.endswith(b"\n"):
                    break  # being written by another process, or torn: its writer cuts it away
                response = _from_line(raw, f"{path}, line {number}")
                if response.prompt_id in responses:
                    raise ValueError(
                        f"{path}, line {number}: prompt {response.prompt_id!r} has two answers; delete the folder and regenerate"
                    )
                responses[response.prompt_id] = response
    return list(responses.values())


def _to_line(response: Response) -> bytes:
    record = {
        "prompt_id": response.prompt_id,
        "category": response.category,
        "source": response.source,
        "finish_reason": response.finish_reason,
        "messages": list(response.messages),
        "token_ids": list(response.token_ids),
        "loss_mask": [int(flag) for flag in response.loss_mask],
    }
    return (json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n").encode("utf-8")


def _from_line(raw: bytes, where: str) -> Response:
    try:
        found = json.loads(raw)
        record = {key: fit(kind, found[key], key) for key, kind in _LINE.items()}
        return Response(**{**record, "loss_mask": tuple(bool(flag) for flag in record["loss_mask"])})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{where}: expected one response as JSON, found {type(error).__name__}: {error}; "
            f"restore the file, or delete it and {FINISHED} and run regenerate again"
        ) from error
