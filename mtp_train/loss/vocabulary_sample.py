"""A part of the vocabulary, drawn anew for each pack, whose softmax stands for the whole one: importance sampling.

The partition function Z = sum_v e^{z_v} is estimated by the tokens that are always in (here: what the teacher thinks
likely) and n drawn uniformly without replacement from the N others, each of which stands for N / n: adding log(N / n) to its
logit, the log-q correction of Bengio and Senecal (2003) and Jean et al. (2015, arXiv 1412.2007), makes the estimate of Z
unbiased. Its logarithm, which losses use, is biased low by about Var(Z estimate) / 2 Z^2 (Jensen's inequality).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True)
class VocabularySample:
    """``ids_S`` (int64) the tokens, those that are always in first; ``log_weight_S`` (float32) what to add to their logits;
    ``column_V`` (int64) each token's place among the S, S where it is not drawn."""

    ids_S: torch.Tensor
    log_weight_S: torch.Tensor
    column_V: torch.Tensor

    @classmethod
    def draw(cls, always: torch.Tensor, *, num_others: int, vocab_size: int, seed: str) -> VocabularySample:
        """The tokens in ``always`` (any shape, int64) and ``num_others`` of the rest, or all of it where it is smaller.

        The same seed and tokens draw the same sample on every machine's CPU and on every process.
        """
        digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        inside_V = torch.zeros(vocab_size, dtype=torch.bool)
        inside_V[always.flatten()] = True
        rest = (~inside_V).nonzero(as_tuple=True)[0]
        drawn = rest[torch.randperm(rest.shape[0], generator=generator)[:num_others]]
        first = inside_V.nonzero(as_tuple=True)[0]
        ids_S = torch.cat([first, drawn])
        log_weight_S = torch.zeros(ids_S.shape[0])
        if drawn.shape[0]:
            log_weight_S[first.shape[0] :] = torch.tensor(rest.shape[0] / drawn.shape[0]).log()
        column_V = torch.full((vocab_size,), ids_S.shape[0], dtype=torch.int64)
        column_V[ids_S] = torch.arange(ids_S.shape[0])
        return cls(ids_S=ids_S, log_weight_S=log_weight_S, column_V=column_V)

    def corrected(self, logits_RS: torch.Tensor) -> torch.Tensor:
        """Logits of the drawn tokens as those of what each stands for, in at least float32; with gradient."""
        return logits_RS.to(torch.promote_types(logits_RS.dtype, torch.float32)) + self.log_weight_S

    def to(self, device: torch.device) -> VocabularySample:
        return VocabularySample(**{field.name: getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)})
