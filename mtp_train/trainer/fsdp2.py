"""``parallel=fsdp2``: weights, gradients and optimizer state in shards of rows, by torch's fully_shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mtp_train.trainer.module import TrainingModule
from mtp_train.trainer.optim import build_optimizer
from mtp_train.trainer.parallel import Parallel, flat, read_entries, trained_parameters
from mtp_train.trainer.settings import OptimizerSettings
from mtp_train.trainer.state import WEIGHT, Piece, StateReader

if TYPE_CHECKING:
    from accelerate import Accelerator


class Fsdp2(Parallel):
    """The head is one unit: it is one decoder layer, and a step's depths read it again and again, so that its weights are
    gathered once before a forward and given up after the backward. Each process keeps rows of every parameter: the first
    axis cut into equal parts, the last ones shorter or empty (torch.chunk's way). Muon's products of whole matrices work on
    the shards too, which DTensor exchanges for them."""

    sharded = True

    def __init__(self, *, accelerator: Accelerator, module: TrainingModule, optimizer: OptimizerSettings) -> None:
        self._main = accelerator.is_main_process
        self._rank, self._num_processes = accelerator.process_index, accelerator.num_processes
        module.to(accelerator.device)
        mesh = init_device_mesh(accelerator.device.type, (self._num_processes,))
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no average; the division is then a kernel of its own
        # Kept, since a forward puts the gathered parameters in their place.
        self._parameters: dict[str, DTensor] = {}
        for name, parameter in trained_parameters(module.head).items():
            assert isinstance(parameter, DTensor), name
            self._parameters[name] = parameter
        super().__init__(module=module, model=module, optimizer=build_optimizer(module, optimizer, dtype=module.dtype))

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                found[name] = parameter.grad.to_local()
        return found

    def pieces(self) -> dict[str, Piece]:
        found = {}
        for name, parameter in self._parameters.items():
            start, stop = self._stretch(parameter)
            entries = {WEIGHT: _local(parameter), **{entry: _local(held) for entry, held in self.optimizer.state[parameter].items()}}
            if start < stop:
                found[name] = Piece(start=start, tensors=entries)
        return found

    def load_optimizer(self, state: StateReader) -> None:
        for name, parameter in self._parameters.items():
            start, stop = self._stretch(parameter)
            held = {}
            for entry, tensor in read_entries(state, name, start=start, stop=stop).items():
                held[entry] = torch.zeros_like(parameter, requires_grad=False) if tensor.ndim else tensor.to(parameter.device)
                _local(held[entry]).copy_(tensor)
            self.optimizer.state[parameter] = held

    def trained_weights(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self._parameters.items():
            whole = parameter.full_tensor()  # one at a time on the device; every process takes part
            if self._main:
                found[name] = whole.detach().cpu()
        return found

    def _stretch(self, parameter: DTensor) -> tuple[int, int]:
        """Which elements of the flattened parameter lie here."""
        rows, per_row = parameter.shape[0], parameter.numel() // parameter.shape[0]
        most = -(-rows // self._num_processes)
        first, last = (min(rows, most * number) for number in (self._rank, self._rank + 1))
        assert parameter.to_local().shape[0] == last - first, (parameter.shape, parameter.to_local().shape)
        return first * per_row, last * per_row


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
