"""The acceptance estimate of a head from cached samples: no decoding, one unroll over the target's own answers.

What is estimated, and why the walk makes it unbiased, says ``acceptance/estimate.py``; here the hits are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch.nn import functional

from mtp_train.acceptance.estimate import Answer, answers, bases, coupled_hits, walk
from mtp_train.acceptance.verify import check_finite, probabilities, request_generator
from mtp_train.batch.packing import pack
from mtp_train.engine.base import DraftSampling, Sampling
from mtp_train.engine.greedy_hits import GreedyHits
from mtp_train.head.base import Head
from mtp_train.nn.wanted import WantedRows
from mtp_train.records import Acceptance, Batch, DraftStep, PromptAcceptance, Sample
from mtp_train.target.draft_vocabulary import DraftVocabulary

# Rows of logits at a time where drafts are drawn; two such blocks are alive, p and q.
_ROWS = 128


@torch.inference_mode()
def estimate(
    head: Head,
    samples: Iterable[Sample],
    *,
    num_speculative_tokens: int,
    draft_sampling: DraftSampling,
    sampling: Sampling,
    max_batch_tokens: int,
    device: torch.device,
) -> Acceptance:
    """Estimate what chains of ``num_speculative_tokens`` would have had accepted on the samples' answers.

    ``sampling`` is what the answers were generated with: its ``max_new_tokens`` ends the walk as it ended them, its
    temperature and top_p make p and q. The head must be on ``device``; the samples carry the layers that it taps, in its
    order. A sample with several answers counts as that many prompts (``<sample_id>:<n>``). Drafts from q at a temperature
    above 0 are simulated with ``sampling.seed``.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens: expected at least 1, found {num_speculative_tokens}")
    if head.num_depths is not None and num_speculative_tokens > head.num_depths:
        raise ValueError(
            f"num_speculative_tokens: expected at most {head.num_depths}, which head {head.word} speaks about at once, "
            f"found {num_speculative_tokens}"
        )
    head.eval()
    prompts: list[PromptAcceptance] = []
    dtype = "none"
    for group in _groups(samples, max_batch_tokens):
        batch = pack(group).to(device)
        found = _Answers(group, batch, num_speculative_tokens=num_speculative_tokens, seed=sampling.seed)
        draft = None if head.draft_ids_U is None else DraftVocabulary.of(head.draft_ids_U, vocab_size=head.shared.embedding_VD.shape[0])
        greedy = GreedyHits(batch.token_ids_T[batch.loss_mask_T], draft=draft)
        for depth, step in enumerate(islice(head.unroll(batch, wanted=found.wanted(batch.bounds)), num_speculative_tokens)):
            dtype = str(step.hidden_TD.dtype).removeprefix("torch.")
            alive_A = found.alive(depth)
            base_A = found.base_M[alive_A]
            label_A = batch.token_ids_T[base_A + depth + 2]
            if draft_sampling == "greedy" or sampling.temperature == 0:
                found.hits_MK[alive_A, depth] = greedy(step, base_A, label_A)
            else:
                uniform_A = found.uniform_MK[alive_A, depth]
                found.hits_MK[alive_A, depth] = _drawn_hits(head, batch, depth, step, base_A, label_A, uniform_A, sampling)
            if not len(found.alive(depth + 1)):
                break
        prompts += found.walks(sampling.max_new_tokens)
    return Acceptance(
        prompts=tuple(prompts),
        scheme="chain",
        num_speculative_tokens=num_speculative_tokens,
        temperature=sampling.temperature,
        draft_sampling=draft_sampling,
        measured_by="estimate",
        engine_version=f"torch {torch.__version__}",
        dtype=dtype,
        notes={"top_p": sampling.top_p, "seed": sampling.seed, "max_new_tokens": sampling.max_new_tokens},
    )


class _Answers:
    """The answers of a batch and, per base, which of its drafts are hits; ``base_M`` are rows of the batch."""

    def __init__(self, group: Sequence[Sample], batch: Batch, *, num_speculative_tokens: int, seed: int) -> None:
        self.found: list[tuple[Sample, str, Answer]] = []
        rows, ends, draws = [], [], []
        for sample, first in zip(group, batch.bounds, strict=False):
            spans = answers(sample.loss_mask_T.tolist())
            for number, span in enumerate(spans):
                name = sample.sample_id if len(spans) == 1 else f"{sample.sample_id}:{number}"
                self.found.append((sample, name, span))
                rows += [first + row for row in bases(span)]
                ends += [first + span.last] * len(bases(span))
                # A stream of its own: the coins must not hang together with the draws that wrote the answer.
                generator = request_generator(seed=seed, request_id=f"estimate {name}")
                draws.append(torch.rand(len(bases(span)), num_speculative_tokens, generator=generator, dtype=torch.float64))
        device = batch.token_ids_T.device
        self.base_M = torch.tensor(rows, dtype=torch.int64, device=device)
        self.end_M = torch.tensor(ends, dtype=torch.int64, device=device)
        self.hits_MK = torch.zeros((len(rows), num_speculative_tokens), dtype=torch.bool, device=device)
        self.uniform_MK = (torch.cat(draws) if draws else torch.zeros((0, num_speculative_tokens))).to(device)

    def alive(self, depth: int) -> torch.Tensor:
        """Bases whose drafts were hits up to this depth and whose next one still speaks about a token of the answer."""
        inside_M = self.base_M + depth + 2 < self.end_M
        return (inside_M & self.hits_MK[:, :depth].all(-1)).nonzero(as_tuple=True)[0]

    def wanted(self, bounds: Sequence[int]) -> WantedRows | None:
        """What an unroll must compute: depth 0 of the bases, and of each later depth what is alive there."""
        wanted = WantedRows.of(self.base_M.cpu(), bounds=bounds)
        if wanted is None:
            return None
        return replace(wanted.to(self.base_M.device), still=lambda depth: self.base_M[self.alive(depth)])

    def walks(self, max_new_tokens: int) -> Iterator[PromptAcceptance]:
        hits = self.hits_MK.tolist()
        used = 0
        for sample, name, span in self.found:
            count = len(bases(span))
            yield walk(
                hits[used : used + count],
                prompt_id=name,
                category=sample.category,
                num_prompt_tokens=span.first,
                token_ids=sample.token_ids_T[span.first : span.last].tolist(),
                num_speculative_tokens=self.hits_MK.shape[1],
                max_new_tokens=max_new_tokens,
            )
            used += count


def _drawn_hits(
    head: Head,
    batch: Batch,
    depth: int,
    step: DraftStep,
    base_A: torch.Tensor,
    label_A: torch.Tensor,
    uniform_A: torch.Tensor,
    sampling: Sampling,
) -> torch.Tensor:
    """Whether each base's token was its draft, drawn from q, by the coins ``uniform_A``."""
    lm_head_VD = head.shared.lm_head_VD
    hits = [torch.zeros(0, dtype=torch.bool, device=base_A.device)]
    for base_R, label_R, uniform_R in zip(*(x_A.split(_ROWS) for x_A in (base_A, label_A, uniform_A)), strict=True):
        target_RV = functional.linear(batch.hidden_TD[base_R + depth + 1].to(lm_head_VD.dtype), lm_head_VD)
        logits_RV = head.over_target(step.project(step.hidden_TD[base_R]))
        check_finite(logits_RV, of=f"head {head.word}")
        p_R, q_R = (_of_label(x_RV, label_R, sampling) for x_RV in (target_RV, logits_RV))
        hits.append(coupled_hits(p_R, q_R, uniform_R))
    return torch.cat(hits)


def _of_label(logits_RV: torch.Tensor, label_R: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probability of each row's actual token."""
    p_RV = probabilities(logits_RV, temperature=sampling.temperature, top_p=sampling.top_p)
    return p_RV.gather(1, label_R[:, None])[:, 0]


def _groups(samples: Iterable[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        if group and num_tokens + sample.num_tokens > max_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(sample)
        num_tokens += sample.num_tokens
    if group:
        yield group
