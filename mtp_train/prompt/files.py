"""Reads rows from JSONL, JSON, Parquet and text files, and says exactly where a file is broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.prompt.skips import Skip

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".md")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WHITESPACE = " \t\n\r"
# What the decoder raises: also for a number of thousands of digits, and for brackets nested a thousand deep.
_NOT_JSON = (ValueError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row as the file holds it, or the ``fault`` that keeps it from being read. ``number`` counts from 1 (lines, in JSONL)."""

    number: int
    value: Any = None
    fault: Skip | None = None


def read_file(path: Path) -> Iterator[Row]:
    """The rows of one file, told apart by its suffix and, for ``.json``, by its first character (array or lines).

    Raises ValueError for a missing or empty file, an unknown suffix, and text that is not UTF-8 (with the byte
    position). A broken row is yielded with its fault: what to do about it is the caller's policy.
    """
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'nothing there'}")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: expected one of {', '.join(SUFFIXES)}, found suffix {path.suffix!r}; rename or convert the file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: expected rows, found an empty file (0 bytes)")
    if path.suffix.lower() == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix.lower() in (".txt", ".md"):
        text = _decode(path.read_bytes().removeprefix(_BYTE_ORDER_MARK), path=path, offset=0)
        yield Row(number=1, value={"text": text})
    elif _is_json_array(path):
        yield from _read_array(path)
    else:
        yield from _read_lines(path)


def _decode(raw: bytes, *, path: Path, offset: int) -> str:
    """UTF-8 or a ValueError with the position in the file (``offset`` is where ``raw`` begins)."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        raise ValueError(
            f"{path}: expected UTF-8, found byte 0x{raw[error.start]:02x} at byte position {offset + error.start} ({error.reason}); "
            f"convert the file, for example: iconv -f {encoding} -t UTF-8 {path.name}"
        ) from None


def _is_json_array(path: Path) -> bool:
    with open(path, "rb") as stream:
        head = stream.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip()
    return head.startswith(b"[")


def _read_lines(path: Path) -> Iterator[Row]:
    """JSON lines. Split at ``\\n`` bytes only: U+2028 and the like are text inside a row, not line ends."""
    size = path.stat().st_size
    offset = 0
    with open(path, "rb") as stream:
        for number, raw in enumerate(stream, start=1):
            begin, offset = offset, offset + len(raw)
            if number == 1 and raw.startswith(_BYTE_ORDER_MARK):
                raw, begin = raw.removeprefix(_BYTE_ORDER_MARK), len(_BYTE_ORDER_MARK)
            unended = offset == size and not raw.endswith(b"\n")
            if unended and _cut_inside_character(raw):
                yield Row(number=number, fault=Skip(reason="truncated_line", why=f"line {number} (the last) ends inside a UTF-8 character"))
                continue
            text = _decode(raw, path=path, offset=begin).strip(_WHITESPACE)
            if not text:
                continue
            try:
                yield Row(number=number, value=json.loads(text))
            except _NOT_JSON as error:
                if number == 1 and (whole := _whole_object(path)) is not None:
                    yield Row(number=1, value=whole)
                    return
                reason = "truncated_line" if unended else "broken_json"
                last = " (the last, which has no line end: cut off while it was written?)" if unended else ""
                where = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
                yield Row(number=number, fault=Skip(reason=reason, why=f"line {number}{last} is not JSON: {where}"))


def _cut_inside_character(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.end == len(raw) and error.reason == "unexpected end of data"
    return False


def _whole_object(path: Path) -> Any | None:
    """The file as one indented JSON object, or None where it isn't one."""
    try:
        return json.loads(path.read_bytes().removeprefix(_BYTE_ORDER_MARK))
    except _NOT_JSON:
        return None


def _read_array(path: Path) -> Iterator[Row]:
    """The elements of a JSON array, one by one, so that a file cut short still gives what stands before the cut."""
    raw = path.read_bytes()
    mark = len(_BYTE_ORDER_MARK) if raw.startswith(_BYTE_ORDER_MARK) else 0
    text = _decode(raw[mark:], path=path, offset=mark)
    decoder = json.JSONDecoder()
    position = _skip_whitespace(text, 0) + 1
    number = 0
    while True:
        position = _skip_whitespace(text, position)
        if number == 0 and text[position : position + 1] == "]":
            return
        number += 1
        try:
            value, position = decoder.raw_decode(text, position)
        except _NOT_JSON as error:
            where = f"{error.msg} at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
            why = f"element {number} is not JSON: {where}; nothing after it can be read"
            yield Row(number=number, fault=Skip(reason="broken_json", why=why))
            return
        yield Row(number=number, value=value)
        position = _skip_whitespace(text, position)
        if text[position : position + 1] == "]":
            return
        if text[position : position + 1] != ",":
            why = f"the array is not closed after element {number}: expected ',' or ']', found {text[position : position + 1]!r}; cut off?"
            yield Row(number=number + 1, fault=Skip(reason="broken_json", why=why))
            return
        position += 1


def _skip_whitespace(text: str, position: int) -> int:
    while position < len(text) and text[position] in _WHITESPACE:
        position += 1
    return position


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number=number, value=value)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a Parquet file, found: {error} (after row {number})") from error
