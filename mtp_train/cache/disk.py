"""How many bytes a cache will take, counted from the responses alone, and whether its disk has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_train.cache.codec import bytes_per_token
from mtp_train.cache.writer import free_bytes
from mtp_train.quantity import show_bytes, show_count
from mtp_train.records import Response

# Per sample: bounds in its shard, and its entries in sidecar, manifest and plan (README.md, Size), but for its id.
SAMPLE_BYTES, ID_COPIES = 16 + 51 + 73 + 79, 3


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """What decides a cache's bytes beside the tokens themselves; the words are those of ``CacheIdentity``."""

    codec: str
    hidden_size: int
    vocab_size: int
    num_taps: int
    top_k: int | None

    def per_token(self, *, answer_share: float) -> float:
        """Bytes per token where that share of the tokens is the target's own text."""
        return bytes_per_token(
            codec=self.codec,
            hidden_size=self.hidden_size,
            num_taps=self.num_taps,
            vocab_size=self.vocab_size,
            top_k=self.top_k,
            answer_share=answer_share,
        )

    def of(self, responses: Sequence[Response]) -> int:
        """Bytes of the cache of these responses, its JSON files included: the formula of README.md at their own share of answers."""
        num_tokens = sum(len(response.token_ids) for response in responses)
        num_teacher_rows = sum(sum(response.loss_mask[1:]) for response in responses)
        per_sample = sum(SAMPLE_BYTES + ID_COPIES * len(response.prompt_id) for response in responses)
        return round(num_tokens * self.per_token(answer_share=num_teacher_rows / max(1, num_tokens))) + per_sample


def check_fits(path: Path, responses: Sequence[Response], size: CacheSize, *, max_bytes: int | None = None) -> int:
    """Refuse to begin, or to continue, a cache in ``path`` that its disk cannot hold. Returns the bytes still to be written.

    What finished files lie in ``path`` counts as written; ``max_bytes``: of a longer cache only so much lies there at a time.
    Errors: ValueError with the bytes needed, those free, and the remedies.
    """
    expected = size.of(responses) if max_bytes is None else min(max_bytes, size.of(responses))
    found = [file for file in path.iterdir() if file.suffix in (".safetensors", ".json") and file.name[0] != "."] if path.is_dir() else []
    held = sum(file.stat().st_size for file in found)
    needed, free = max(0, expected - held), free_bytes(path)
    if needed > free:
        num_tokens = sum(len(response.token_ids) for response in responses)
        raise ValueError(
            f"{path}: expected room for {show_bytes(needed)} ({needed} bytes: {show_count(num_tokens)} tokens of "
            f"{expected / max(1, num_tokens):.0f} bytes with codec={size.codec}, top_k={size.top_k} and {size.num_taps} tapped layers, "
            f"less the {held} bytes that are there), found {show_bytes(free)} ({free} bytes) free on that disk; make room, name a larger "
            "disk with out=, store less (codec=, top_k=, target_layer_ids=), or take fewer prompts"
        )
    return needed
