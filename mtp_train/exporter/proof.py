"""Proves an export: the same logits as the trained head on its probe, and no tensor that could be left out unnoticed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtp_train.exporter.graph import Graph

PROBE = "probe.safetensors"
# How far logits and hidden states of an export may lie from the trained head's, as a share of the largest magnitude. float32:
# other kernels and orders of summation (measured on random heads without norms, the worst case: 3e-7 at depth 0, 1e-5 at
# depth 2). bfloat16: weights rounded to 8 bits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
# Tokens and depths over which each tensor is perturbed: enough for every part of the graph to take part.
_PERTURBED_TOKENS, _PERTURBED_DEPTHS, _LEAST_TOKENS = 24, 2, 4  # depths: and as many as there are blocks
# A tensor counts only if moving it moves some logit by this share of the largest one; float32 rounding stays below.
_MATTERS = 1e-5
# Noise on a tensor: half its own size and at least this, since a tensor that begins at zero has a size of its learning rate after a
# few steps. Where the rest of the graph drowns it, so many times as much.
_LEAST_NOISE, _LOUDER = 0.1, (1.0, 30.0, 1000.0)

LogitsOf = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


class ProbeSample(NamedTuple):
    """One sample that the trained head was run on. ``token_ids_T``, ``hidden_TD`` (the target's, post-norm) and ``taps_TLD`` (None
    where the head reads none) are its inputs. ``expected_hidden`` and ``expected_logits`` hold, per depth k, what the head gave at
    the rows 0 .. T - 2 - k, which read a token of the sample."""

    token_ids_T: torch.Tensor
    hidden_TD: torch.Tensor
    taps_TLD: torch.Tensor | None
    expected_hidden: tuple[torch.Tensor, ...]
    expected_logits: tuple[torch.Tensor, ...]


def read_probe(checkpoint: Path) -> list[ProbeSample]:
    """Read the probe that ``train`` wrote beside a head.

    Errors: ValueError where there is none, or it holds no sample of at least two tokens.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = checkpoint / PROBE
    if not path.is_file():
        raise ValueError(f"{path}: expected the probe that train writes beside a head, found none; finish or repeat the training")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path}: expected a whole safetensors file, found {error}; delete it and run train again, which writes it"
        ) from error
    if missing := {"bounds", "token_ids_T", "hidden_TD", "hidden_0_TD", "logits_0_TV"} - tensors.keys():
        raise ValueError(f"{path}: expected a probe, found no {', '.join(sorted(missing))}; delete it and run train again, which writes it")
    num_depths = sum(name.startswith("logits_") for name in tensors)
    bounds = tensors["bounds"].tolist()
    samples = []
    for first, last in itertools.pairwise(bounds):
        ends = [last - 1 - depth for depth in range(num_depths) if last - 1 - depth > first]
        if ends:
            samples.append(
                ProbeSample(
                    tensors["token_ids_T"][first:last],
                    tensors["hidden_TD"][first:last].float(),
                    tensors["taps_TLD"][first:last].float() if "taps_TLD" in tensors else None,
                    tuple(tensors[f"hidden_{depth}_TD"][first:end].float() for depth, end in enumerate(ends)),
                    tuple(tensors[f"logits_{depth}_TV"][first:end].float() for depth, end in enumerate(ends)),
                )
            )
    if not samples:
        raise ValueError(f"{path}: expected a sample of at least two tokens, found none; repeat the training with longer samples")
    return samples


def prove(graph: Graph, tensors: Mapping[str, torch.Tensor], probe: list[ProbeSample], *, dtype: str) -> dict[str, Any]:
    """Compare the exported graph with the trained head on its probe, then perturb each tensor; what the manifest says of it.

    ``tensors`` are the graph's, as read back from the export; ``dtype`` what they were written in.
    Errors: ValueError where logits or hidden states lie outside ``TOLERANCE``, or a tensor moves nothing.
    """
    tolerance = TOLERANCE[dtype]
    worst = {"hidden": 0.0, "logits": 0.0}
    num_rows = 0
    graph.load(tensors)
    for number, sample in enumerate(probe):
        steps = graph.unroll(
            token_ids_T=sample.token_ids_T, hidden_TD=sample.hidden_TD, taps_TLD=sample.taps_TLD, num_depths=len(sample.expected_logits)
        )
        for depth, (step, hidden, logits) in enumerate(zip(steps, sample.expected_hidden, sample.expected_logits, strict=True)):
            for what, expected, found in (("hidden", hidden, step.hidden_TD), ("logits", logits, step.logits_TV)):
                where = f"{what} of probe sample {number} at depth {depth}"
                difference = compare(where, expected=expected, found=found[: expected.shape[0]], tolerance=tolerance)
                worst[what] = max(worst[what], difference)
            num_rows += logits.shape[0]
    longest = max(probe, key=lambda sample: sample.token_ids_T.shape[0])
    if longest.token_ids_T.shape[0] < _LEAST_TOKENS:
        raise ValueError(
            f"{PROBE}: expected a sample of at least {_LEAST_TOKENS} tokens, for every tensor to take part, found "
            f"{longest.token_ids_T.shape[0]}; repeat the training with longer samples"
        )

    num_depths = max(_PERTURBED_DEPTHS, graph.num_blocks)

    def logits_of(changed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        graph.load(changed)
        token_ids_T, hidden_TD = longest.token_ids_T[:_PERTURBED_TOKENS], longest.hidden_TD[:_PERTURBED_TOKENS]
        taps_TLD = None if longest.taps_TLD is None else longest.taps_TLD[:_PERTURBED_TOKENS]
        steps = graph.unroll(token_ids_T=token_ids_T, hidden_TD=hidden_TD, taps_TLD=taps_TLD, num_depths=num_depths)
        return torch.cat([step.logits_TV[: token_ids_T.shape[0] - 1 - depth] for depth, step in enumerate(steps)])

    moved = every_tensor_matters(tensors, logits_of)
    graph.load(tensors)
    return {
        "compared_with": PROBE,
        "num_rows": num_rows,
        "num_depths": max(len(sample.expected_logits) for sample in probe),
        "tolerance": tolerance,
        "largest_difference": worst,
        "least_effect_of_a_tensor": min(moved.items(), key=lambda item: item[1]),
    }


def same_tensors(written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> None:
    """ValueError unless what was read back is what was to be written, bit for bit."""
    if set(written) != set(read):
        raise ValueError(
            f"export: expected the tensors {sorted(written)} in the file, found {sorted(read)}; the disk or the writer lost some"
        )
    for name, tensor in written.items():
        if tensor.dtype != read[name].dtype or not torch.equal(tensor, read[name]):
            raise ValueError(
                f"export: expected {name} in the file as it was written, found other values; the disk or the writer damaged it"
            )


def compare(what: str, *, expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> float:
    """Largest difference, as a share of the largest expected magnitude.

    Errors: ValueError where it exceeds ``tolerance`` or anything is not finite.
    """
    if expected.shape != found.shape:
        raise ValueError(f"export: {what}: expected shape {tuple(expected.shape)}, found {tuple(found.shape)}")
    difference = _apart(expected, found)
    if not difference <= tolerance:  # also where it is NaN
        raise ValueError(
            f"export: {what}: expected the trained head's values within {tolerance:g} of their largest magnitude, found them "
            f"{difference:.3g} apart; the exported graph is not the trained one, and nothing was written (or {PROBE} beside the "
            "head is damaged: delete it and run train again, which writes it)"
        )
    return difference


def perturbed(tensor: torch.Tensor, *, seed: int, loudness: float = 1.0) -> torch.Tensor:
    """The tensor with noise of half its own size and at least 0.1, times ``loudness``, drawn from ``seed``. Integers are the offsets
    of a draft vocabulary: the last two of its tokens change places."""
    if not tensor.is_floating_point():
        return torch.cat([tensor[:-2], tensor[-1:] + 1, tensor[-2:-1] - 1])
    generator = torch.Generator().manual_seed(seed)
    size = float(tensor.float().square().mean().sqrt())
    noise = torch.randn(tensor.shape, generator=generator) * max(0.5 * size, _LEAST_NOISE) * loudness
    return (tensor.float() + noise).to(tensor.dtype)


def every_tensor_matters(tensors: Mapping[str, torch.Tensor], logits_of: LogitsOf) -> dict[str, float]:
    """How far each tensor, perturbed alone, moves the logits (as a share of the largest). One that moves nothing only because
    another is still zero, as both branches of a layer are before the first step, is perturbed beside all others.

    ``logits_of`` computes logits from all tensors. Errors: ValueError where even large noise on one moves nothing: a file with
    such a tensor says less than it seems to, and an engine that ignores it would not be noticed.
    """
    plain = logits_of(tensors)
    moved = {
        name: _apart(plain, logits_of({**tensors, name: perturbed(tensor, seed=index)}))
        for index, (name, tensor) in enumerate(tensors.items())
    }
    silent = [name for name, effect in moved.items() if not effect > _MATTERS]
    if not silent:
        return moved
    around = {name: perturbed(tensor, seed=index) for index, (name, tensor) in enumerate(tensors.items())}
    plain = logits_of(around)
    for index, name in enumerate(silent, start=len(tensors)):
        for loudness in _LOUDER:
            other = logits_of({**around, name: perturbed(around[name], seed=index, loudness=loudness)})
            moved[name] = _apart(plain, other)
            if moved[name] > _MATTERS:
                break
        else:
            raise ValueError(
                f"export: expected every tensor to change the logits, found that {name} does not, with noise {_LOUDER[-1]:g} times "
                "its own size and all others changed too; it is not part of this graph"
            )
    return moved


def _apart(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Largest difference, as a share of the largest finite expected magnitude. -inf on both sides (a token that cannot be drafted)
    is none; on one side it is an infinite one, and NaN stays NaN."""
    impossible = (expected == float("-inf")) & (found == float("-inf"))
    difference = torch.where(impossible, 0.0, (expected.double() - found.double()).abs())
    scale = torch.where(expected.isfinite(), expected.double().abs(), 0.0).max()
    return float(difference.max()) / max(float(scale), 1e-12)
