"""Shows one sample as aligned columns: position, token id, token, whether it counts, and what the target expects next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_train.prompt.responses import META, read_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mtp_train.records import Sample, Teacher

_MAX_TOKEN_CHARS = 28


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What can be shown of a response or a cached sample. ``guesses`` is {position: (token id, probability)}."""

    sample_id: str
    category: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    guesses: dict[int, tuple[int, float]] | None


def read_shown(directory: Path, *, index: int | None, sample_id: str | None) -> Shown:
    """One sample of a responses folder or a cache, by its number or its id. ValueError where there is none."""
    if (directory / META).exists():
        responses = read_responses(directory, allow_unfinished=True)
        number = _find([response.prompt_id for response in responses], index, sample_id, directory)
        found = responses[number]
        return Shown(sample_id=found.prompt_id, category=found.category, token_ids=found.token_ids, loss_mask=found.loss_mask, guesses=None)
    from mtp_train.cache.reader import CacheReader

    reader = CacheReader(directory)
    if sample_id is not None:
        index = _find([reader[number].sample_id for number in range(len(reader))], None, sample_id, directory)
    return from_sample(reader[_in_range(index or 0, len(reader), directory)])


def from_sample(sample: Sample) -> Shown:
    """A cached sample, with the teacher's most probable token where the cache keeps a teacher."""
    return Shown(
        sample_id=sample.sample_id,
        category=sample.category,
        token_ids=tuple(sample.token_ids_T.tolist()),
        loss_mask=tuple(bool(flag) for flag in sample.loss_mask_T.tolist()),
        guesses=None if sample.teacher is None else _top_guesses(sample.teacher),
    )


def format_shown(shown: Shown, tokenizer: PreTrainedTokenizerBase, *, begin: int = 0, end: int | None = None) -> str:
    """The table, positions ``begin`` to ``end`` (exclusive).

    ``next`` stands in the row of the position whose logits it comes from: it speaks about the token one row below.
    Control characters and anything outside printable characters are escaped, so that a sample cannot steer a terminal.
    """
    rows = list(_rows(shown, tokenizer, begin, len(shown.token_ids) if end is None else end))
    header = ("pos", "id", "token", "mask") + (("next", "p(next)") if shown.guesses is not None else ())
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    numeric = {0, 1, 5}
    lines = [
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    counted = sum(shown.loss_mask)
    title = f"{_escape(shown.sample_id)}  category {_escape(shown.category) or 'none'}  {len(shown.token_ids)} tokens, {counted} count in the loss"
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _rows(shown: Shown, tokenizer: PreTrainedTokenizerBase, begin: int, end: int) -> Iterator[tuple[str, ...]]:
    for position in range(max(begin, 0), min(end, len(shown.token_ids))):
        token_id = shown.token_ids[position]
        row: tuple[str, ...] = (str(position), str(token_id), _token(tokenizer, token_id), "1" if shown.loss_mask[position] else ".")
        if shown.guesses is not None:
            guess = shown.guesses.get(position)
            row += ("", "") if guess is None else (_token(tokenizer, guess[0]), f"{guess[1]:.3f}")
        yield row


def _token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """One token's text in quotes. A piece of a character decodes to U+FFFD: shown as the vocabulary spells it instead."""
    text = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if "\ufffd" in text:
        piece = tokenizer.convert_ids_to_tokens(token_id)
        return f"<{_escape(str(piece))}>"
    escaped = _escape(text)
    return f"'{escaped if len(escaped) <= _MAX_TOKEN_CHARS else escaped[: _MAX_TOKEN_CHARS - 3] + '...'}'"


def _escape(text: str) -> str:
    """Printable characters as they are, all others (line ends, control codes, direction marks) as Python escapes."""
    return "".join(character if character.isprintable() and character != "\\" else ascii(character)[1:-1] for character in text)


def _top_guesses(teacher: Teacher) -> dict[int, tuple[int, float]]:
    rows: Sequence[int] = teacher.row_M.tolist()
    ids: Sequence[int] = teacher.ids_MC[:, 0].tolist()
    log_probs: Sequence[float] = teacher.log_probs_MC[:, 0].tolist()
    return {row: (token, math.exp(log_prob)) for row, token, log_prob in zip(rows, ids, log_probs, strict=True)}


def _find(ids: Sequence[str], index: int | None, sample_id: str | None, directory: Path) -> int:
    if sample_id is None:
        return _in_range(index or 0, len(ids), directory)
    if sample_id not in ids:
        raise ValueError(f"{directory}: expected a sample {sample_id!r}, found {len(ids)} others, such as {', '.join(ids[:3]) or 'none'}")
    return ids.index(sample_id)


def _in_range(index: int, count: int, directory: Path) -> int:
    if not 0 <= index < count:
        raise ValueError(f"{directory}: expected a sample number from 0 to {count - 1}, found {index}")
    return index
