"""``parallel=zero1``, ``zero2`` and ``zero3``: DeepSpeed shares out the optimizer, the gradients too, the weights too."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mtp_train.trainer.module import TrainingModule
from mtp_train.trainer.optim import build_optimizer
from mtp_train.trainer.parallel import Parallel, check_elementwise, flat, read_entries, trained_parameters
from mtp_train.trainer.settings import OptimizerSettings
from mtp_train.trainer.state import WEIGHT, Piece, StateReader

if TYPE_CHECKING:
    from accelerate import Accelerator

# Elements that are reduced or gathered at once; DeepSpeed holds a buffer of as many.
BUCKET_ELEMENTS = 2**26


class _Stretch(NamedTuple):
    """What of a parameter lies here: ``length`` elements from ``start`` on, in the flat tensor that the optimizer steps,
    from ``offset`` on. ``group`` and ``place``: where DeepSpeed lists their gradient."""

    held: torch.Tensor
    offset: int
    start: int
    length: int
    group: int
    place: int


class Zero(Parallel):
    """DeepSpeed's ZeRO (Rajbhandari et al. 2020) around the plain optimizer, in float32: mixed precision is our own autocast,
    clipping and the accumulation's scale the loop's. What it holds where is read from its flat partitions."""

    sharded = True

    def __init__(
        self, *, accelerator: Accelerator, module: TrainingModule, optimizer: OptimizerSettings, stage: int, packs_per_process: int
    ) -> None:
        self._main, self._stage = accelerator.is_main_process, stage
        self._rank, self._num_processes = accelerator.process_index, accelerator.num_processes
        deepspeed = _import_deepspeed(accelerator.device)
        module.to(accelerator.device)
        inner = build_optimizer(module, optimizer, dtype=module.dtype)
        check_elementwise(inner, f"zero{stage}")
        self._deepspeed = deepspeed
        self._parameters = trained_parameters(module.head)
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=inner, config=_config(stage, packs_per_process))
        super().__init__(module=module, model=self._engine, optimizer=inner)
        names = {parameter: name for name, parameter in self._parameters.items()}
        self._stretches = {names[parameter]: stretch for parameter, stretch in self._partition()}

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # counts the pack; the weights change at the last one

    def gradients(self) -> dict[str, torch.Tensor]:
        averaged = self._engine.optimizer.averaged_gradients
        return {
            name: averaged[stretch.group][stretch.place].view(-1)[: stretch.length]  # behind it is padding, which may hold anything
            for name, stretch in self._stretches.items()
        }

    def step(self) -> None:
        self._engine.step()

    def pieces(self) -> dict[str, Piece]:
        found = {}
        for name, stretch in self._stretches.items():
            here = slice(stretch.offset, stretch.offset + stretch.length)
            entries = self.optimizer.state[stretch.held]
            # The counter is one for the whole group, and each parameter is saved by itself.
            state = {entry: flat(held)[here] if held.ndim else held.clone() for entry, held in entries.items()}
            found[name] = Piece(start=stretch.start, tensors={WEIGHT: stretch.held.detach()[here], **state})
        return found

    def load_optimizer(self, state: StateReader) -> None:
        for name, stretch in self._stretches.items():
            entries = self.optimizer.state[stretch.held]
            for entry, tensor in read_entries(state, name, start=stretch.start, stop=stretch.start + stretch.length).items():
                if tensor.ndim:
                    entries.setdefault(entry, torch.zeros_like(stretch.held, requires_grad=False))
                    entries[entry][stretch.offset : stretch.offset + stretch.length].copy_(tensor)
                else:
                    entries[entry] = tensor.to(stretch.held.device)

    def trained_weights(self) -> dict[str, torch.Tensor]:
        if self._stage < 3:
            return {name: parameter.detach() for name, parameter in self._parameters.items()}
        found = {}
        for name, parameter in self._parameters.items():
            with self._deepspeed.zero.GatheredParameters([parameter]):
                if self._main:
                    found[name] = parameter.detach().cpu().clone()
        return found

    def _partition(self) -> Iterator[tuple[nn.Parameter, _Stretch]]:
        zero: Any = self._engine.optimizer
        if self._stage < 3:
            # A group's parameters lie behind one another, padded, cut into equal parts wherever the cuts fall.
            for group, parameters in enumerate(zero.bit16_groups):
                held, begin, place = zero.single_partition_of_fp32_groups[group], 0, 0
                first = self._rank * held.numel()
                for parameter in parameters:
                    start, stop = max(first, begin), min(first + held.numel(), begin + parameter.numel())
                    if start < stop:
                        yield parameter, _Stretch(held, start - first, start - begin, stop - start, group, place)
                        place += 1
                    begin += parameter.numel()
            return
        # Every parameter is flattened, padded and cut by itself; the parts of a group lie behind one another.
        for group, parameters in enumerate(zero.fp16_groups):
            held, offset = zero.fp32_partitioned_groups_flat[group], 0
            for place, parameter in enumerate(parameters):
                size = parameter.ds_tensor.ds_numel
                start, stop = (min(parameter.ds_numel, size * number) for number in (self._rank, self._rank + 1))
                if start < stop:
                    yield parameter, _Stretch(held, offset, start, stop - start, group, place)
                offset += size


def _config(stage: int, packs_per_process: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # a pack; nothing but logging reads it
        "gradient_accumulation_steps": packs_per_process,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # its default clips at 1
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "stage3_param_persistence_threshold": 0,  # norms lie in shards as all else does
            "memory_efficient_linear": False,  # it would put a linear of its own in place of torch's, everywhere
        },
    }


def _import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, quiet, on our device; its process group is the one that accelerate opened."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError:
        raise ValueError(
            "parallel=zero1, zero2 and zero3: expected the package deepspeed, found none; install it "
            "(DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed) or choose parallel=fsdp2"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its own calls, one line each time; the names are those of torch before 2.13.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # On a CPU it would compile a shared-memory exchange at the first start (minutes; a killed compiler leaves a lock on which
    # every later start waits for ever). gloo does as well for what CPUs are used for here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
