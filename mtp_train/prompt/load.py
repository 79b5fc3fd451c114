"""Loads prompts from a file, a manifest or a hub data set, and counts what it leaves out and why."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtp_train.prompt.files import SUFFIXES, Row, read_file
from mtp_train.prompt.manifest import MANIFEST_SUFFIXES, Manifest, check_sha256, read_manifest
from mtp_train.prompt.shapes import SHAPES, ShapedRow, check_field_map, shape_row
from mtp_train.prompt.skips import RowFault, Skip, SkipCounts
from mtp_train.records import Prompt

BadRowPolicy = Literal["skip", "error"]
BAD_ROW_POLICIES: tuple[BadRowPolicy, ...] = ("skip", "error")
LONG_RECIPE = "long_recipe"
FORMATS = (*SHAPES, LONG_RECIPE)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One source with its manifest read and its path resolved; ``path`` is None for a hub id."""

    manifest: Manifest
    path: Path | None


def load_prompts(
    *,
    source: str | Path | Sequence[str | Path],
    on_bad_row: BadRowPolicy,
    deduplicate: bool,
    format: str | None = None,
    field_map: Mapping[str, str] | None = None,
    revision: str | None = None,
    config: str | None = None,
    split: str | None = None,
    data_files: str | Sequence[str] | None = None,
    category: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
) -> tuple[list[Prompt], SkipCounts]:
    """All prompts of one or several sources, in their order, and the counts of what was left out.

    ``source``: a file (JSONL, JSON, Parquet, text), a manifest (``.yaml``), a folder that ``datasets`` can load, or a
    hub id (``owner/name``, with ``revision``). A relative path is looked for in the working folder, then where this
    package keeps its own ``data``. ``format`` forces a shape instead of telling it by each row's columns;
    ``field_map`` is {known column: the data set's own}. What is given here goes before what a manifest says.
    ``on_bad_row``: ``skip`` counts rows that cannot be used and goes on, ``error`` stops at the first with its number.
    ``deduplicate`` keeps the first of conversations that differ in white space or Unicode form only. ``limit`` keeps
    that many prompts: the first ones, or with a ``seed`` a random choice, in the source's order.

    ValueError for a source that is missing, empty, not UTF-8, of unknown columns, or not what its manifest says. A
    source all of whose rows are skipped gives an empty list: the caller refuses it with ``counts.summary()``.
    """
    if on_bad_row not in BAD_ROW_POLICIES:
        raise ValueError(f"on_bad_row: expected one of {', '.join(BAD_ROW_POLICIES)}, found {on_bad_row!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least 1 or null, found {limit}")
    check_field_map(field_map)
    overrides: dict[str, Any] = {"format": format, "field_map": field_map, "revision": revision, "config": config}
    overrides |= {"split": split, "data_files": data_files, "category": category}
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise ValueError("source: expected at least one file, manifest or hub id, found an empty list")
    counts = SkipCounts()
    seen: set[bytes] | None = set() if deduplicate else None
    prompts: list[Prompt] = []
    for one in sources:
        resolved = _resolve(str(one), {key: value for key, value in overrides.items() if value is not None})
        for prompt in _read_source(resolved, counts, seen, on_bad_row):
            prompts.append(prompt)
            if seed is None and len(prompts) == limit:
                counts.num_kept = len(prompts)
                _check_unique(prompts)
                return prompts, counts
    _check_unique(prompts)
    if limit is not None and len(prompts) > limit:
        chosen = sorted(random.Random(seed).sample(range(len(prompts)), limit))
        why = f"{len(prompts) - limit} of {len(prompts)} prompts left out by limit {limit}, seed {seed}"
        counts.note(Skip(reason="sampled", why=why), row="all")
        prompts = [prompts[index] for index in chosen]
    counts.num_kept = len(prompts)
    return prompts, counts


def _resolve(source: str, overrides: dict[str, Any]) -> _Source:
    path = find(source)
    if path.suffix in MANIFEST_SUFFIXES:
        manifest = read_manifest(path)
        manifest = Manifest(**{**{name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}, **overrides})
        beside = path.parent / manifest.source
        where = beside if beside.exists() else None
    else:
        manifest = Manifest(name=path.stem, source=source, licence="not stated", **overrides)
        where = path if path.exists() else None
    if manifest.format is not None and manifest.format not in FORMATS:
        raise ValueError(f"{source}: expected format among {', '.join(FORMATS)} or null, found {manifest.format!r}")
    check_field_map(manifest.field_map)
    looks_local = manifest.source.startswith((".", "/", "~")) or Path(manifest.source).suffix.lower() in (*SUFFIXES, *MANIFEST_SUFFIXES)
    if where is None and (looks_local or manifest.source.count("/") != 1):
        there = path.parent / manifest.source if path.suffix in MANIFEST_SUFFIXES else path
        raise ValueError(f"{source}: expected a file, a folder or a hub id (owner/name), found nothing at {there}")
    return _Source(manifest=manifest, path=where)


def find(source: str) -> Path:
    """The path as given, or, where that leads nowhere, under this package's checkout or installation: verbs run in any folder."""
    path = Path(source).expanduser()
    package = Path(__file__).resolve().parent.parent
    return next((place for place in (path, package.parent / path, package / path) if place.exists()), path)


def _read_source(source: _Source, counts: SkipCounts, seen: set[bytes] | None, on_bad_row: BadRowPolicy) -> Iterator[Prompt]:
    manifest = source.manifest
    if manifest.sha256 is not None and source.path is not None and source.path.is_file():
        check_sha256(source.path, manifest.sha256)
    counts.sources.append({key: getattr(manifest, key) for key in ("name", "source", "revision", "split", "licence", "sha256")})
    before = counts.num_rows
    used: set[str] = set()
    made = _materialised(source, counts) if manifest.format == LONG_RECIPE else _shaped(source, counts, on_bad_row, used)
    for number, prompt in made:
        if seen is not None:
            key = _normal_form(prompt.messages)
            if key in seen:
                counts.skip(Skip(reason="duplicate", why=f"{prompt.prompt_id}: the same messages as an earlier row"), row=number)
                continue
            seen.add(key)
        yield prompt
    found = counts.num_rows - before
    if found == 0:
        raise ValueError(f"{source.path or manifest.source}: expected rows, found none")
    if manifest.count is not None and found != manifest.count:
        raise ValueError(f"{manifest.name}: expected {manifest.count} rows (its manifest), found {found}; the data set has changed")


def _materialised(source: _Source, counts: SkipCounts) -> Iterator[tuple[int, Prompt]]:
    from mtp_train.prompt.long_documents import materialise

    if source.path is None or source.manifest.split is None:
        raise ValueError(
            f"{source.manifest.name}: format {LONG_RECIPE} expects source (the recipe's path) and split, found {source.manifest}"
        )
    prompts, provenance = materialise(source.path, source.manifest.split)
    counts.sources[-1]["made_from"] = provenance
    for number, prompt in enumerate(prompts, start=1):
        counts.num_rows += 1
        yield number, prompt


def _shaped(source: _Source, counts: SkipCounts, on_bad_row: BadRowPolicy, used: set[str]) -> Iterator[tuple[int, Prompt]]:
    manifest = source.manifest
    where = source.path or manifest.source
    any_shape = False
    for row in _rows(source):
        counts.num_rows += 1
        try:
            if row.fault is not None:
                raise RowFault(row.fault.reason, row.fault.why)
            shaped = shape_row(row.value, shape=manifest.format, field_map=manifest.field_map)
        except RowFault as fault:
            if fault.skip.reason == "unknown_columns" and not any_shape:
                raise ValueError(
                    f"{where}, row {row.number}: no known shape; {fault.skip.why}; name the columns with field_map, the known one first, "
                    "such as prompt.field_map='{prompt: question}'"
                ) from None
            if on_bad_row == "error":
                raise ValueError(f"{where}, row {row.number}: {fault} (on_bad_row=error; on_bad_row=skip counts it and goes on)") from None
            counts.skip(fault.skip, row=row.number)
            any_shape |= fault.skip.reason not in ("truncated_line", "broken_json", "row_type")
            continue
        any_shape = True
        for note in shaped.notes:
            counts.note(note, row=row.number)
        yield row.number, _prompt(shaped, row.number, manifest, used)


def _prompt(shaped: ShapedRow, number: int, manifest: Manifest, used: set[str]) -> Prompt:
    """Named by the row itself where it can be, by its number where not, or where the name is taken: the same every time."""
    prompt_id = shaped.prompt_id or f"{manifest.name}/{shaped.row_id if shaped.row_id else f'row-{number}'}"
    if prompt_id in used:
        prompt_id = f"{prompt_id}#row-{number}"
    used.add(prompt_id)
    category = shaped.category or manifest.category or "uncategorised"
    return Prompt(prompt_id=prompt_id, messages=shaped.messages, category=category, source=manifest.name)


def _rows(source: _Source) -> Iterator[Row]:
    if source.path is not None and source.path.is_file():
        yield from read_file(source.path)
        return
    manifest = source.manifest
    if source.path is None and manifest.revision is None:
        raise ValueError(f"{manifest.source}: no file or folder is there, and a hub data set needs a revision (a commit), found none")
    import datasets

    # What it says of a fault, and the bar that it leaves there, would stand above our own message.
    said, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            str(source.path) if source.path is not None else manifest.source,
            name=manifest.config,
            revision=manifest.revision if source.path is None else None,
            split=manifest.split or "train",
            data_files=manifest.data_files,
        )
    except (OSError, ValueError, IndexError, datasets.exceptions.DatasetsError) as error:  # IndexError: for the folder /
        where = source.path or f"{manifest.source} at {manifest.revision}"
        broken = source.path is not None and isinstance(error, datasets.exceptions.DatasetGenerationError)
        fault = _first_fault(source.path) if broken and source.path is not None else None
        raise ValueError(
            f"{where}: datasets cannot load it (split {manifest.split or 'train'}): {error}"
            + (f"; {fault}; mend it, or name the files in prompt.source=[...], where such rows are counted and left out" if fault else "")
        ) from error
    finally:
        datasets.logging.set_verbosity(said)
        if not bars:
            datasets.enable_progress_bars()
    for number, value in enumerate(rows, start=1):
        yield Row(number=number, value=value)


def _first_fault(folder: Path) -> str | None:
    """The first file and row of a folder that cannot be read, in words; None where it is not in a file of ours."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES):
        try:
            fault = next(((row.number, row.fault.why) for row in read_file(path) if row.fault is not None), None)
        except ValueError as error:
            return str(error)
        if fault is not None:
            return f"{path}, row {fault[0]}: {fault[1]}"
    return None


def _normal_form(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for conversations that differ only in white space and Unicode composition."""
    form = [
        [m["role"], " ".join(unicodedata.normalize("NFC", m["content"]).split()), m.get("tool_calls"), m.get("reasoning_content")]
        for m in messages
    ]
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).digest()


def _check_unique(prompts: Sequence[Prompt]) -> None:
    seen: dict[str, str] = {}
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise ValueError(
                f"prompt id {prompt.prompt_id!r} occurs in {seen[prompt.prompt_id]} and in {prompt.source}: ids must be unique in a run; "
                "give the sources different names (a manifest each)"
            )
        seen[prompt.prompt_id] = prompt.source
