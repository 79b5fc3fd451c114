"""Whole responses through the target: hidden states, tapped layers and the teacher, packed without padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from mtp_train.batch.shift import teacher_rows
from mtp_train.engine.base import PrefillSettings
from mtp_train.engine.hf_model import TargetModel
from mtp_train.nn.attention import PackedAttention
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.records import Response, Sample, Teacher

# Rows of logits at a time: 128 x 49152 in float32 are 25 MB, near what two cores' caches and one matrix product like.
_TEACHER_ROWS = 128
# Tokens per block of the two-level top-k.
_BLOCK_TOKENS = 64


@torch.inference_mode()
def prefill(target: TargetModel, responses: Iterable[Response], settings: PrefillSettings, *, max_prefill_tokens: int) -> Iterator[Sample]:
    """Yield one sample per response, in order.

    Consecutive responses are packed up to ``max_prefill_tokens`` tokens a forward. As nothing is padded, sorting by
    length would gain nothing. A longer response is read in chunks over a KV cache, so that memory stays bounded.
    """
    for group in _groups(responses, max_prefill_tokens):
        if len(group) == 1 and len(group[0].token_ids) > max_prefill_tokens:
            hidden_TD, taps_TLD = _chunked(target, group[0], settings.target_layer_ids, max_prefill_tokens)
        else:
            hidden_TD, taps_TLD = _packed(target, group, settings.target_layer_ids)
        first = 0
        for response in group:
            rows = slice(first, first + len(response.token_ids))
            yield _sample(target, response, hidden_TD[rows], None if taps_TLD is None else taps_TLD[rows], settings.top_k)
            first = rows.stop


def _groups(responses: Iterable[Response], max_tokens: int) -> Iterator[list[Response]]:
    group: list[Response] = []
    num_tokens = 0
    for response in responses:
        if not response.token_ids:
            raise ValueError(f"response {response.prompt_id}: expected at least one token, found none")
        if group and num_tokens + len(response.token_ids) > max_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(response)
        num_tokens += len(response.token_ids)
    if group:
        yield group


def _packed(target: TargetModel, group: Sequence[Response], layer_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    bounds = [0]
    for response in group:
        bounds.append(bounds[-1] + len(response.token_ids))
    position_T = torch.cat([torch.arange(len(response.token_ids), device=target.device) for response in group])
    token_ids = [token for response in group for token in response.token_ids]
    return target.forward_with_taps(torch.tensor(token_ids, device=target.device), position_T, PackedAttention(bounds=bounds), layer_ids)


def _chunked(target: TargetModel, response: Response, layer_ids: Sequence[int], chunk: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    cache = RaggedCache(num_slots=1)
    cache.reserve(len(response.token_ids))
    parts = []
    for first in range(0, len(response.token_ids), chunk):
        token_ids_T = torch.tensor(response.token_ids[first : first + chunk], device=target.device)
        context = RaggedAttention(cache=cache, slots=[0], counts=[len(token_ids_T)])
        parts.append(target.forward_with_taps(token_ids_T, context.positions(target.device), context, layer_ids))
        context.commit()
    taps = [taps_TLD for _, taps_TLD in parts if taps_TLD is not None]
    return torch.cat([hidden_TD for hidden_TD, _ in parts]), torch.cat(taps) if taps else None


def _sample(target: TargetModel, response: Response, hidden_TD: torch.Tensor, taps_TLD: torch.Tensor | None, top_k: int | None) -> Sample:
    loss_mask_T = torch.tensor(response.loss_mask)
    teacher = None if top_k is None else _teacher(target, hidden_TD, teacher_rows(loss_mask_T), top_k)
    return Sample(
        sample_id=response.prompt_id,
        token_ids_T=torch.tensor(response.token_ids),
        loss_mask_T=loss_mask_T,
        hidden_TD=hidden_TD.cpu().clone(),
        taps_TLD=None if taps_TLD is None else taps_TLD.cpu().clone(),
        teacher=teacher,
        category=response.category,
    )


def _teacher(target: TargetModel, hidden_TD: torch.Tensor, row_M: torch.Tensor, top_k: int) -> Teacher:
    """The target's most probable tokens at rows, its softmax taken in float32. Non-finite values stay as they are."""
    vocabulary = target.lm_head.weight.shape[0]
    if not 1 <= top_k <= vocabulary:
        raise ValueError(f"top_k: expected 1 to {vocabulary} (the target's vocabulary), found {top_k}")
    ids, log_probs, log_sums = [], [], []
    for rows in row_M.to(hidden_TD.device).split(_TEACHER_ROWS):
        logits_RV = target.logits(hidden_TD[rows])
        top_RC, ids_RC = top_candidates(logits_RV, top_k)
        log_sum_R = _log_sum_exp(logits_RV, top_RC[:, :1].float())
        ids.append(ids_RC.cpu())
        log_probs.append((top_RC.float() - log_sum_R[:, None]).cpu())
        log_sums.append(log_sum_R.cpu())
    if not ids:
        return Teacher(
            row_M=row_M,
            ids_MC=torch.zeros((0, top_k), dtype=torch.int64),
            log_probs_MC=torch.zeros((0, top_k)),
            log_sum_exp_M=torch.zeros(0),
        )
    return Teacher(row_M=row_M, ids_MC=torch.cat(ids), log_probs_MC=torch.cat(log_probs), log_sum_exp_M=torch.cat(log_sums))


def _log_sum_exp(logits_RV: torch.Tensor, best_R1: torch.Tensor) -> torch.Tensor:
    """Float32 log-sum-exp of each row, given its largest logit."""
    return best_R1[:, 0] + (logits_RV.float() - best_R1).exp_().sum(-1).log()


def top_candidates(logits_RV: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` largest logits of each row, falling, and their ids.

    Exact by two levels: the k largest elements lie in the k blocks whose maxima are largest, so that only those blocks
    are searched. Of equal logits at the edge of the k, any may be kept.
    """
    rows, vocabulary = logits_RV.shape
    num_blocks = vocabulary // _BLOCK_TOKENS
    if vocabulary % _BLOCK_TOKENS or num_blocks <= 2 * top_k:
        top = logits_RV.topk(top_k, dim=-1)
        return top.values, top.indices
    blocks_RBW = logits_RV.view(rows, num_blocks, _BLOCK_TOKENS)
    block_RC = blocks_RBW.amax(-1).topk(top_k, dim=-1).indices
    found_RCW = blocks_RBW.gather(1, block_RC[..., None].expand(-1, -1, _BLOCK_TOKENS))
    top = found_RCW.flatten(1).topk(top_k, dim=-1)
    block = block_RC.gather(1, top.indices // _BLOCK_TOKENS)
    return top.values, block * _BLOCK_TOKENS + top.indices % _BLOCK_TOKENS
