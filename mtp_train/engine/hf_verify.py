"""Judges the drafts of several sequences by the target's logits: chains all at once, trees one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_train.acceptance.draft import Draft, Judged
from mtp_train.acceptance.verify import check_finite, probabilities, uniforms, verify_greedy, verify_sampled
from mtp_train.acceptance.verify_tree import verify_tree_greedy, verify_tree_sampled
from mtp_train.engine.base import Sampling
from mtp_train.engine.hf_generate import choose


def judge(drafts: Sequence[Draft], logits_RV: torch.Tensor, generators: Sequence[torch.Generator], sampling: Sampling) -> list[Judged]:
    """What the target accepts of each draft, and its own token behind that.

    ``logits_RV`` are the target's, sequence by sequence: behind its last token, then behind each candidate. ValueError where
    they are not finite.
    """
    counts = [draft.num_candidates + 1 for draft in drafts]
    assert logits_RV.shape[0] == sum(counts), (logits_RV.shape, counts)
    check_finite(logits_RV, of="target")
    chains = all(draft.is_chain for draft in drafts)
    if sampling.temperature == 0:
        best_R = choose(logits_RV, generators, temperature=0.0, top_p=1.0)
        if chains:
            return _chains(*verify_greedy(best_R=best_R, drafts=[draft.token_ids for draft in drafts]))
        ends = torch.tensor(counts).cumsum(0).tolist()
        return [verify_tree_greedy(best_R=best_R[end - n : end], draft=draft) for draft, end, n in zip(drafts, ends, counts, strict=True)]
    uniform_R = uniforms(generators, counts)
    if chains:
        return _chains(
            *verify_sampled(
                p_RV=probabilities(logits_RV, temperature=sampling.temperature, top_p=sampling.top_p),
                q_QV=_stack(drafts),
                drafts=[draft.token_ids for draft in drafts],
                uniform_R=uniform_R,
            )
        )
    return [
        verify_tree_sampled(
            p_RV=probabilities(logits, temperature=sampling.temperature, top_p=sampling.top_p), draft=draft, uniform_R=uniform
        )
        for draft, logits, uniform in zip(drafts, logits_RV.split(counts), uniform_R.split(counts), strict=True)
    ]


def _chains(num_accepted: Sequence[int], next_token: Sequence[int]) -> list[Judged]:
    return [Judged(list(range(count)), token) for count, token in zip(num_accepted, next_token, strict=True)]


def _stack(drafts: Sequence[Draft]) -> torch.Tensor | None:
    """What the chains' tokens were drawn from, behind one another; None where they were not drawn."""
    q_rows = [draft.q_PV for draft in drafts if draft.q_PV is not None]
    assert not q_rows or len(q_rows) == sum(1 for draft in drafts if draft.num_candidates), "drawn tokens carry their q"
    return torch.cat(q_rows) if q_rows else None
