"""The losslessness certificate: how far what was drawn is from what should have been, and which texts are the same.

Sampled decoding is held against the target's own joint distribution of several tokens, enumerated over a small vocabulary:
the total variation distance and the Kullback-Leibler divergence of the drawn frequencies from it, and the p-value of a
G-test. Frequencies of exact draws are not at divergence 0: its mean is (cells - 1) / (2 draws) nats (Miller 1955), the
estimator's bias, which must lie well below the bound for the bound to say something. Greedy decoding is held against
plain decoding token for token (``identity.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtp_train.acceptance.identity import Identity
from mtp_train.acceptance.verify import expected_distance

# A wrong rule is to be told from chance: the divergence that must not be reached, and the p-value below which exact draws
# fall once in a thousand certificates (divided by the number of cases, Bonferroni).
KL_BOUND_NATS = 0.01
LEAST_P_VALUE = 0.001
# Of the bound, the most that the bias of exact draws may be: else the bound says little, or exact draws exceed it.
_MOST_BIAS = 0.25
# Cells of fewer expected draws are pooled for the p-value, whose distribution is an approximation (Cochran 1954).
LEAST_EXPECTED = 5.0
SHOWN_DIGITS = 16  # of a hash, in tables and sentences


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Of frequencies from an exact distribution. ``exact_draws_tv`` bounds the mean total variation distance of exact draws;
    ``num_pooled`` are the cells of the G-test."""

    num_draws: int
    num_cells: int
    total_variation: float
    exact_draws_tv: float
    kl_nats: float
    bias_nats: float
    p_value: float
    num_pooled: int


@dataclass(frozen=True, kw_only=True)
class SampledCase:
    """One scheme at one temperature. ``drafted``: the shape of its drafts, in words; ``acceptance_length`` says that drafts
    were both taken and refused."""

    decoding: str
    drafted: str
    draft_sampling: str
    temperature: float
    num_tokens: int
    acceptance_length: float
    distances: Distances


@dataclass(frozen=True, kw_only=True)
class GreedyCase:
    """One scheme's greedy texts against plain greedy decoding, in float32. ``weights_sha256`` says which head of that name drafted; None
    for a scheme without a head."""

    head: str
    decoding: str
    drafted: str
    prompt_set: str
    identity: Identity
    weights_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """``engine`` and ``target`` (the small one, of which everything can be enumerated) say what was measured; ``target_fingerprint`` is
    of the greedy texts' target, the heads' own. None: no such texts, or written before certificates stated whose they are."""

    sampled: tuple[SampledCase, ...]
    greedy: tuple[GreedyCase, ...]
    engine: str
    target: str
    provenance: dict[str, Any]
    target_fingerprint: str | None = None

    @property
    def least_p_value(self) -> float:
        return LEAST_P_VALUE / max(1, len(self.sampled))

    def passes(self, case: SampledCase) -> bool:
        return case.distances.kl_nats < KL_BOUND_NATS and case.distances.p_value >= self.least_p_value

    @property
    def holds(self) -> bool:
        return all(self.passes(case) for case in self.sampled) and all(case.identity.holds for case in self.greedy)

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        assert self.sampled or self.greedy, "a certificate of nothing"
        cells = max((case.distances.num_cells for case in self.sampled), default=0)
        bias = max((case.distances.bias_nats for case in self.sampled), default=0.0)
        worst = max((case.distances.kl_nats for case in self.sampled), default=0.0)
        least = min((case.distances.p_value for case in self.sampled), default=1.0)
        same = sum(case.identity.num_identical for case in self.greedy)
        asked = sum(case.identity.num_prompts for case in self.greedy)
        drawn = (
            f"{len(self.sampled)} sampled cases over up to {cells} cells, largest KL {worst:.5f} nats (bound {KL_BOUND_NATS:g}; "
            f"{bias:.5f} of it would be the bias of exact draws), least p-value {least:.3g} (must be {self.least_p_value:.1e} or more)"
        )
        texts = f"greedy texts the same as plain decoding: {same} of {asked}"
        said = "; ".join([drawn if self.sampled else "no sampled case", texts if self.greedy else "no greedy texts compared"])
        return f"{'Lossless' if self.holds else 'NOT lossless'}: {said}."


def check_num_draws(num_draws: int, *, num_cells: int) -> None:
    """ValueError for too few draws, whose frequencies would be far from the law though each is exact."""
    least = math.ceil((num_cells - 1) / (2 * _MOST_BIAS * KL_BOUND_NATS))
    if num_draws < least:
        raise ValueError(
            f"num_draws: expected at least {least} for {num_cells} cells, so that the bias of exact draws is at most {_MOST_BIAS:g} of the "
            f"bound ({KL_BOUND_NATS:g} nats), found {num_draws}; draw more, or take a smaller vocabulary"
        )


def distances(counts: Sequence[int], exact: Sequence[float]) -> Distances:
    """Compare how often each cell was drawn with its exact probability.

    Errors: ValueError where something was drawn that has probability 0.
    """
    count, law = torch.tensor(counts, dtype=torch.float64), torch.tensor(exact, dtype=torch.float64)
    assert count.shape == law.shape and abs(float(law.sum()) - 1) < 1e-6, (count.shape, float(law.sum()))
    if bool(((law == 0) & (count > 0)).any()):
        raise ValueError(f"certificate: expected no draws of what has probability 0, found {int(count[law == 0].sum())}")
    num = int(count.sum())
    possible = law > 0
    count, law = count[possible], law[possible]
    frequency = count / num
    p_value, num_pooled = _g_test(count, law * num)
    return Distances(
        num_draws=num,
        num_cells=len(law),
        total_variation=float((frequency - law).abs().sum() / 2),
        exact_draws_tv=expected_distance(law.tolist(), num),
        kl_nats=float(torch.special.xlogy(frequency, frequency / law).sum()),
        bias_nats=(len(law) - 1) / (2 * num),
        p_value=p_value,
        num_pooled=num_pooled,
    )


def _g_test(count: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """The chance that exact draws are as far off (G = 2 sum O log(O / E), chi-square of cells - 1 degrees), and its cells."""
    order = expected.argsort(descending=True)
    count, expected = count[order], expected[order]
    few = int((expected < LEAST_EXPECTED).sum())
    if few:
        # The rare cells in one, and into it the next ones until that is not rare itself.
        last = len(expected) - few
        while last > 1 and float(expected[last:].sum()) < LEAST_EXPECTED:
            last -= 1
        count = torch.cat([count[:last], count[last:].sum()[None]])
        expected = torch.cat([expected[:last], expected[last:].sum()[None]])
    if len(count) < 2:
        return 1.0, len(count)
    g = 2 * float(torch.special.xlogy(count, count / expected).sum())
    degrees = torch.tensor((len(count) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(max(g, 0.0) / 2, dtype=torch.float64))), len(count)


def sampled_rows(certificate: Certificate) -> list[list[str]]:
    """The sampled cases as rows of a table, after ``SAMPLED_COLUMNS``."""
    return [
        [
            case.drafted,
            case.draft_sampling,
            f"{case.temperature:g}",
            f"{case.acceptance_length:.2f}",
            f"{case.distances.num_draws}",
            f"{case.distances.num_cells}",
            f"{case.distances.total_variation:.4f} ({case.distances.exact_draws_tv:.4f})",
            f"{case.distances.kl_nats:.5f}",
            f"{case.distances.bias_nats:.5f}",
            f"{case.distances.p_value:.3f}",
            "yes" if certificate.passes(case) else "NO",
        ]
        for case in certificate.sampled
    ]


SAMPLED_COLUMNS = (
    "drafts",
    "drafted",
    "temperature",
    "acceptance length",
    "draws",
    "cells",
    "total variation (of exact draws at most, in the mean)",
    "KL, nats",
    "bias, nats",
    "p-value",
    "holds",
)
GREEDY_COLUMNS = ("head", "weights sha256", "drafts", "prompts", "the same text", "tokens compared", "ties", "holds")


def greedy_rows(certificate: Certificate) -> list[list[str]]:
    """The greedy cases as rows of a table, after ``GREEDY_COLUMNS``."""
    return [
        [
            case.head,
            "–" if case.weights_sha256 is None else case.weights_sha256[:SHOWN_DIGITS],
            case.drafted,
            case.prompt_set,
            f"{case.identity.num_identical} of {case.identity.num_prompts}",
            f"{case.identity.num_tokens}",
            f"{sum(difference.is_tie for difference in case.identity.differences)}",
            "yes" if case.identity.holds else "NO",
        ]
        for case in certificate.greedy
    ]
