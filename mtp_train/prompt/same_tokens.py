"""Whether two models number their tokens alike, so that one can draft for the other."""

from __future__ import annotations

from pathlib import Path

from mtp_train.prompt.tokenizer import load_tokenizer

_NUM_SHOWN = 3


def check_same_tokens(draft_path: Path, target_path: Path, *, num_rows: int, trust_remote_code: bool) -> None:
    """ValueError unless both folders' tokenizers give every token the same id, all of them among the first ``num_rows``: rows
    beyond are padding. How text is cut into tokens may differ, since a draft model is only ever given the target's."""
    draft, target = (load_tokenizer(path, trust_remote_code=trust_remote_code).get_vocab() for path in (draft_path, target_path))
    differs = sorted(token for token in draft.keys() | target.keys() if draft.get(token) != target.get(token))
    if differs:
        shown = "; ".join(
            f"{token!r}: {target.get(token, 'none')} there, {draft.get(token, 'none')} here" for token in differs[:_NUM_SHOWN]
        )
        raise ValueError(
            f"head.checkpoint {draft_path}: expected the token ids of the target at {target_path}, found {len(differs)} tokens that differ "
            f"({shown}); a draft model must read and write the target's ids: choose one of the same family"
        )
    if (largest := max(target.values())) >= num_rows:
        raise ValueError(
            f"head.checkpoint {draft_path}: expected rows for all of the tokenizer's ids, up to {largest}, found {num_rows}; "
            "only padding may be missing"
        )
