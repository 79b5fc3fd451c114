"""Shows one sample as aligned columns: position, token id, token, whether it counts, and what the target expects next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_train.cache.reader import CacheReader
from mtp_train.prompt.responses import META, read_meta, read_responses
from mtp_train.prompt.tokenizer import tokenizer_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mtp_train.records import Teacher

_MAX_TOKEN_CHARS = 28


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What can be shown of a response or a cached sample. ``guesses`` is {position: (token id, probability)}.

    ``tokenizer_hash`` is what the folder states, None where it states none.
    """

    sample_id: str
    category: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    guesses: dict[int, tuple[int, float]] | None
    tokenizer_hash: str | None


def read_shown(directory: Path, *, index: int | None, sample_id: str | None) -> Shown:
    """One sample of a responses folder or a cache, by its number or its id. ValueError where there is none."""
    if (directory / META).exists():
        responses = read_responses(directory, allow_unfinished=True)
        found = responses[_find([response.prompt_id for response in responses], index, sample_id, directory)]
        return Shown(
            sample_id=found.prompt_id,
            category=found.category,
            token_ids=found.token_ids,
            loss_mask=found.loss_mask,
            guesses=None,
            tokenizer_hash=read_meta(directory).get("tokenizer_hash"),
        )
    reader = CacheReader(directory, verify="first_read")
    sample = reader[_find(reader.sample_ids, index, sample_id, directory)]
    return Shown(
        sample_id=sample.sample_id,
        category=sample.category,
        token_ids=tuple(sample.token_ids_T.tolist()),
        loss_mask=tuple(bool(flag) for flag in sample.loss_mask_T.tolist()),
        guesses=None if sample.teacher is None else _top_guesses(sample.teacher),
        tokenizer_hash=reader.identity.tokenizer_hash,
    )


def format_shown(shown: Shown, tokenizer: PreTrainedTokenizerBase, *, begin: int = 0, end: int | None = None) -> str:
    """The table, positions ``begin`` to ``end`` (exclusive).

    ``next`` stands in the row of the position whose logits it comes from: it speaks about the token one row below.
    Control characters and anything outside printable characters are escaped, so that a sample cannot steer a terminal.
    ValueError for another tokenizer than the one the sample was made with.
    """
    if shown.tokenizer_hash is not None and (found := tokenizer_sha256(tokenizer)) != shown.tokenizer_hash:
        raise ValueError(
            f"expected the tokenizer that made the sample (sha256 {shown.tokenizer_hash}), found {found}; name the target's folder"
        )
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
    sizes = f"{len(shown.token_ids)} tokens, {sum(shown.loss_mask)} count in the loss"
    title = f"{_escape(shown.sample_id)}  category {_escape(shown.category) or 'none'}  {sizes}"
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
    text = str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if "\ufffd" in text:
        return f"<{_escape(str(tokenizer.convert_ids_to_tokens(token_id)))}>"
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
    if sample_id is not None and sample_id not in ids:
        raise ValueError(f"{directory}: expected a sample {sample_id!r}, found {len(ids)} others, such as {', '.join(ids[:3]) or 'none'}")
    number = ids.index(sample_id) if sample_id is not None else index or 0
    if not 0 <= number < len(ids):
        raise ValueError(f"{directory}: expected a sample number from 0 to {len(ids) - 1}, found {number}")
    return number
