"""Compares an engine with the reference on the same tokens, stage by stage, so that a gap has a place and a size.

Stages of the target (``compare_samples``): hidden states, tapped layers, logits, top-k. Stages of drafting
(``compare_drafts``), in the order in which one rests on the other: the target's hidden states that the head reads, the
head's hidden states at each depth given what vLLM gave it to read, and its logits. The first that is beyond its
tolerance is the one at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mtp_train.engine.vllm_trace import DraftRows
from mtp_train.head.base import Head
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.records import Sample


class Tolerance(NamedTuple):
    """What a stage may be apart: the root mean square of its rows' errors, and the largest of them."""

    rms: float
    max: float


# Measured on SmolLM2-135M over 1024 tokens (CPU), vLLM against transformers in the same dtype: float32 rms 1.4e-6, max
# 1.1e-5; bfloat16 rms 1.6e-2, max 0.10 (a tapped layer against float32: 0.17, at an attention sink), argmax agreement
# 0.976, KL 1.1e-3 nats; transformers' own bfloat16 is as far from its float32 (1.4e-2, 0.14, 0.980, 7.9e-4). On cores without AMX
# bfloat16 is further apart: hidden 2.6e-2, logits 5.0e-2, at most 0.29, 0.972, 1.9e-3 (tools/results/parity_bfloat16.md).
# tools/compare_engines.py measures them again for any target (tools/results/parity_float32.md).
TOLERANCES: Mapping[str, Tolerance] = {"float32": Tolerance(1e-5, 1e-4), "bfloat16": Tolerance(0.08, 0.5)}


@dataclass(kw_only=True)
class Gap:
    """How far two engines are apart at one stage. A row's error is the norm of the difference over the norm of the
    reference's row: the rows of one stage differ in size by a factor of hundreds (attention sinks)."""

    stage: str
    num_rows: int = 0
    rms_error: float = 0.0
    max_error: float = 0.0
    worst: str = ""
    num_argmax_equal: int = 0
    sum_kl_nats: float = 0.0
    _sum_square: float = 0.0

    def add(self, expected: torch.Tensor, found: torch.Tensor, *, where: Sequence[str]) -> None:
        """Count rows (R, anything); ``where`` names each."""
        assert expected.shape == found.shape and len(where) == expected.shape[0], (expected.shape, found.shape, len(where))
        if not len(where):
            return
        size_R = expected.double().flatten(1).norm(dim=1).clamp_min(1e-30)
        error_R = (expected.double() - found.double()).flatten(1).norm(dim=1) / size_R
        error_R = torch.where(error_R.isfinite(), error_R, torch.inf)
        row = int(error_R.argmax())
        if float(error_R[row]) >= self.max_error:
            self.max_error, self.worst = float(error_R[row]), where[row]
        self._sum_square += float(error_R.square().sum())
        self.num_rows += len(where)
        self.rms_error = (self._sum_square / self.num_rows) ** 0.5

    def add_logits(self, expected_RV: torch.Tensor, found_RV: torch.Tensor, *, where: Sequence[str]) -> None:
        """Count rows of logits: their error, whether the top token is the same, and KL(expected || found)."""
        self.add(expected_RV, found_RV, where=where)
        if not len(where):
            return
        self.num_argmax_equal += int((expected_RV.argmax(-1) == found_RV.argmax(-1)).sum())
        p_RV, q_RV = expected_RV.double().log_softmax(-1), found_RV.double().log_softmax(-1)
        self.sum_kl_nats += float((p_RV.exp() * (p_RV - q_RV)).sum())

    @property
    def argmax_agreement(self) -> float:
        return self.num_argmax_equal / self.num_rows if self.num_rows else 1.0

    @property
    def mean_kl_nats(self) -> float:
        return self.sum_kl_nats / self.num_rows if self.num_rows else 0.0


@dataclass(kw_only=True)
class Conformance:
    """All stages of one comparison, in the order in which one rests on the other."""

    tolerance: Tolerance
    gaps: dict[str, Gap] = field(default_factory=dict)

    def at(self, stage: str) -> Gap:
        return self.gaps.setdefault(stage, Gap(stage=stage))

    @property
    def fault(self) -> Gap | None:
        """The first stage whose errors are beyond the tolerance; None where all hold."""
        return next(
            (gap for gap in self.gaps.values() if not (gap.max_error <= self.tolerance.max and gap.rms_error <= self.tolerance.rms)), None
        )


def compare_samples(expected: Iterable[Sample], found: Iterable[Sample], *, lm_head_VD: torch.Tensor, tolerance: Tolerance) -> Conformance:
    """Compare what two engines' ``prefill`` gave for the same responses, in the same order.

    Errors: ValueError where the samples are not of the same tokens.
    """
    result = Conformance(tolerance=tolerance)
    for ours, theirs in zip(expected, found, strict=True):
        if ours.sample_id != theirs.sample_id or not torch.equal(ours.token_ids_T, theirs.token_ids_T):
            raise ValueError(f"conformance: expected the tokens of {ours.sample_id}, found {theirs.sample_id} or other tokens")
        where = [f"{ours.sample_id} position {i}" for i in range(ours.num_tokens)]
        if ours.taps_TLD is not None and theirs.taps_TLD is not None:
            for index in range(ours.taps_TLD.shape[1]):
                result.at(f"tap {index}").add(ours.taps_TLD[:, index], theirs.taps_TLD[:, index], where=where)
        result.at("hidden").add(ours.hidden_TD, theirs.hidden_TD, where=where)
        head = lm_head_VD.float()
        result.at("logits").add_logits(ours.hidden_TD.float() @ head.T, theirs.hidden_TD.float() @ head.T, where=where)
        _compare_teachers(result, ours, theirs)
    return result


def _compare_teachers(result: Conformance, ours: Sample, theirs: Sample) -> None:
    if ours.teacher is None or theirs.teacher is None:
        return
    if not torch.equal(ours.teacher.row_M, theirs.teacher.row_M):
        raise ValueError(f"conformance: {ours.sample_id}: expected teachers at the same rows")
    where = [f"{ours.sample_id} row {int(row)}" for row in ours.teacher.row_M]
    result.at("log_sum_exp").add(ours.teacher.log_sum_exp_M[:, None], theirs.teacher.log_sum_exp_M[:, None], where=where)
    # Values in falling order: near ties may swap their ids, not their values.
    result.at("top_k log_probs").add(ours.teacher.log_probs_MC, theirs.teacher.log_probs_MC, where=where)
    gap = result.at("top_k log_probs")
    gap.num_argmax_equal += int((ours.teacher.ids_MC[:, :1] == theirs.teacher.ids_MC[:, :1]).sum()) if len(where) else 0


@torch.inference_mode()
def compare_drafts(
    trace: Iterable[DraftRows],
    *,
    head: Head,
    target_hidden: Mapping[str, torch.Tensor],
    answers: Mapping[str, Sequence[int]],
    tolerance: Tolerance,
) -> Conformance:
    """Replay vLLM's draft forwards with our own head and compare every row that counted.

    ``answers``: prompt and answer of each request, token by token; ``target_hidden`` what the head reads of the reference's
    hidden states of them (``Head.read_target``). The head reads at depth 0 what vLLM gave it to read, so that a gap of the
    target does not show as one of the head; at later depths it reads its own. Drafting must have been at least 2 deep: the
    second depth's position says which rows of the first were accepted.
    """
    result = Conformance(tolerance=tolerance)
    replays: dict[str, _Replay] = {}
    for rows in trace:
        if rows.request_id not in replays:
            replays[rows.request_id] = _Replay(head, rows.request_id, target_hidden[rows.request_id], answers[rows.request_id])
        replays[rows.request_id].take(rows, result)
    return result


class _Replay:
    """One request's drafting, replayed over a KV cache of its own."""

    def __init__(self, head: Head, request_id: str, target_hidden_TD: torch.Tensor, token_ids: Sequence[int]) -> None:
        self.head, self.request_id, self.target_hidden_TD, self.token_ids = head, request_id, target_hidden_TD, token_ids
        self.cache = RaggedCache(num_slots=1)
        self.num_bases = 0
        self.first: DraftRows | None = None
        self.feedback_1D = target_hidden_TD[:1]

    def take(self, rows: DraftRows, result: Conformance) -> None:
        if rows.depth == 0:
            self.cache.truncate(0, self.num_bases)
            self.first = rows
            return
        if rows.depth == 1:
            assert self.first is not None
            self._enter(self.first, last=int(rows.position_R[0]) - 1, result=result)
        result.at(f"depth {rows.depth} feedback").add(self.feedback_1D, rows.read_RD, where=[self._where(rows.position_R[0])])
        self._draft(rows, result)

    def _where(self, position: int | torch.Tensor) -> str:
        return f"{self.request_id} position {int(position)}"

    def _enter(self, rows: DraftRows, *, last: int, result: Conformance) -> None:
        """The first forward's rows up to ``last`` are bases that count; what lies behind was rejected."""
        count = last + 1 - self.num_bases
        if int(rows.position_R[0]) != self.num_bases or not 1 <= count <= len(rows.position_R):
            raise ValueError(
                f"conformance: {self.request_id}: expected bases from position {self.num_bases} on, "
                f"found {rows.position_R.tolist()} with {last} the last"
            )
        kept = DraftRows(
            request_id=rows.request_id,
            step=rows.step,
            depth=0,
            **{
                name: getattr(rows, name)[:count]
                for name in ("token_ids_R", "position_R", "read_RD", "hidden_RD", "feedback_RD", "logits_RV")
            },
        )
        for position, token in zip(kept.position_R.tolist(), kept.token_ids_R.tolist(), strict=True):
            if position + 1 < len(self.token_ids) and self.token_ids[position + 1] != token:
                raise ValueError(
                    f"conformance: {self._where(position)}: expected the head to read token "
                    f"{self.token_ids[position + 1]}, which follows there, found {token}"
                )
        inside = kept.position_R < len(self.target_hidden_TD)
        where = [self._where(position) for position in kept.position_R[inside]]
        result.at("target hidden").add(self.target_hidden_TD[kept.position_R[inside]], kept.read_RD[inside], where=where)
        self.feedback_1D = kept.read_RD
        self._draft(kept, result)
        self.num_bases += count

    def _draft(self, rows: DraftRows, result: Conformance) -> None:
        context = RaggedAttention(cache=self.cache, slots=[0], counts=[len(rows.position_R)], depth=rows.depth)
        drafted = self.head.draft(token_ids_T=rows.token_ids_R, hidden_TD=self.feedback_1D, position_T=rows.position_R, context=context)
        context.commit()
        where = [self._where(position) for position in rows.position_R]
        result.at(f"depth {rows.depth} hidden").add(drafted.hidden_TD, rows.hidden_RD, where=where)
        logits_RU, found_RU = self.head.project(drafted.hidden_TD), self._drafted_columns(rows.logits_RV)
        result.at(f"depth {rows.depth} logits").add_logits(logits_RU, found_RU, where=where)
        self.feedback_1D = drafted.feedback_TD[-1:]

    def _drafted_columns(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """vLLM's logits of the tokens that the head can draft; all others must be impossible there too."""
        ids_U = self.head.draft_ids_U
        if ids_U is None:
            return logits_RV
        outside_RV = logits_RV.index_fill(1, ids_U, float("-inf"))
        if not bool((outside_RV == float("-inf")).all()):
            raise ValueError(
                f"conformance: {self.request_id}: expected vLLM to draft from the head's {ids_U.shape[0]} tokens alone, found others; "
                "its d2t is not the head's"
            )
        return logits_RV[:, ids_U]
