"""A table of costs from a machine's rates, where the machine is not at hand: the roofline of planning, with rows in blocks.

It assumes that a head is one decoder layer of the target, a projection of two hidden sizes, and the lm_head, and counts nothing
for scheduling and sampling: it says where the limits lie, and a measurement says what is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from mtp_train.acceptance.costs import CostTable, Timing
from mtp_train.planning.hardware import Hardware
from mtp_train.planning.sizes import TargetSizes, Weights
from mtp_train.planning.work import decode_step_s

_VERIFIED = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_DRAFTED = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of a machine's rates that decoding is assumed to reach, bytes per weight and per number of the KV cache, and the devices
    that share a copy of the target."""

    decode_compute: float
    decode_memory: float
    weight_bytes: float
    kv_bytes: float
    tensor_parallel: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"assume.{field.name}: expected above 0, found {getattr(self, field.name)}")


def modelled_costs(
    *, target: TargetSizes, fingerprint: str, hardware: Hardware, rates: Rates, head: str | None, context_tokens: int, most_sequences: int
) -> CostTable:
    """The table of a target with a head (None: alone) on ``hardware``, up to ``most_sequences`` and eight times as many rows of a head.

    Errors: ValueError where the target does not fit the devices that share it, and for fewer than no tokens of context.
    """
    if context_tokens < 0:
        raise ValueError(f"context_tokens: expected at least 0, found {context_tokens}")
    if rates.tensor_parallel > hardware.num_devices:
        raise ValueError(f"assume.tensor_parallel: expected at most {hardware.num_devices} devices, found {rates.tensor_parallel}")
    weights = target.num_parameters * rates.weight_bytes / rates.tensor_parallel
    if weights > hardware.usable_bytes:
        raise ValueError(
            f"hardware: expected at most {hardware.usable_bytes / 1e9:.1f} GB of weights per device, found {weights / 1e9:.1f} GB of "
            f"{target.name} on {rates.tensor_parallel}; raise assume.tensor_parallel"
        )
    batch_sizes = [1]
    while batch_sizes[-1] < 8 * most_sequences:
        batch_sizes.append(2 * batch_sizes[-1])
    drafter = _head_sizes(target)

    def cell(sizes: TargetSizes, batch_size: int, rows: int, times: int) -> float:
        seconds, _ = decode_step_s(
            sizes,
            hardware,
            rates,
            tensor_parallel=rates.tensor_parallel,
            batch_size=batch_size,
            tokens=rows,
            context=float(context_tokens),
        )
        return times * seconds

    return CostTable(
        source="modelled",
        engine="roofline",
        engine_version=f"{rates.decode_memory:g} of memory's rate, {rates.decode_compute:g} of the products'",
        dtype=f"{rates.weight_bytes:g} bytes per weight",
        device=f"{rates.tensor_parallel} x {hardware.device}",
        target_name=target.name,
        target_fingerprint=fingerprint,
        head=head,
        context_tokens=context_tokens,
        verify=tuple(_timing(b, n, cell(target, b, n, 1)) for b in batch_sizes for n in _VERIFIED),
        drafting=() if head is None else tuple(_timing(b, k, cell(drafter, b, 1, k)) for b in batch_sizes for k in _DRAFTED),
        notes={"hardware": hardware.source},
    )


def _head_sizes(target: TargetSizes) -> TargetSizes:
    """One layer of the target with a projection before it."""
    layers, share = target.layers, 1 / target.num_layers
    one = Weights(
        num_matrix=round(layers.num_matrix * share) + 2 * target.hidden_size**2,
        num_expert=round(layers.num_expert * share),
        num_other=round(layers.num_other * share),
        chosen=layers.chosen,
    )
    return replace(target, layers=one, num_layers=1, num_kv=round(target.num_kv * share))


def _timing(batch_size: int, num_tokens: int, seconds: float) -> Timing:
    return Timing(batch_size=batch_size, num_tokens=num_tokens, seconds=seconds, low_s=seconds, high_s=seconds, num_repeats=1)
