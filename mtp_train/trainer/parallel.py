"""How the processes of a run share one step's work: what each computes, holds and saves."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import nn

from mtp_train.head.base import Head
from mtp_train.runtime import log
from mtp_train.trainer.module import TrainingModule
from mtp_train.trainer.optim import build_optimizer
from mtp_train.trainer.settings import OptimizerSettings
from mtp_train.trainer.state import WEIGHT, Piece, StateReader

if TYPE_CHECKING:
    from accelerate import Accelerator

Mode = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """``mode``: ``single``, one process; ``ddp``, every process holds all (torch's DistributedDataParallel through accelerate);
    ``fsdp2``, weights, gradients and optimizer lie in shards (torch's fully_shard); ``zero1``, ``zero2``, ``zero3``,
    DeepSpeed's stages: the optimizer lies in shards, and the gradients, and the weights. ``context``: how many consecutive
    processes compute each pack together (``nn/context.py``), for samples that are too long for one."""

    mode: Mode
    context: int

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"parallel.context: expected at least 1, found {self.context}")
        if self.mode not in get_args(Mode):
            raise ValueError(f"parallel.mode: expected one of {get_args(Mode)}, found {self.mode!r}")


class Parallel(ABC):
    """One head with its optimizer, spread over the processes. All processes call all methods, in one order.

    ``model`` is called as the ``TrainingModule`` is. Gradients are averaged over the processes, so that whoever wants their
    sum multiplies the loss by the number of processes. ``sharded``: each process holds a part of the gradients and of the
    optimizer's state, not all of them.
    """

    sharded: ClassVar[bool]

    def __init__(self, *, module: TrainingModule, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.model, self.optimizer = module, model, optimizer

    def accumulating(self) -> AbstractContextManager[Any]:
        """Around every forward and backward of a step but the last: gradients need not be shared yet."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add a loss' gradients; ``last`` of its step or not."""
        loss.backward()

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """The averaged gradients, or this process' part of them, by parameter: changed in place, they are what is stepped with."""

    def step(self) -> None:
        """Update the weights and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    @abstractmethod
    def pieces(self) -> dict[str, Piece]:
        """What this process saves of the trained parameters: over all processes, each element once."""

    @abstractmethod
    def load_optimizer(self, state: StateReader) -> None:
        """Take the optimizer's state from a saved one, whoever wrote it. The weights were loaded before they were shared out."""

    @abstractmethod
    def trained_weights(self) -> dict[str, torch.Tensor]:
        """The trained parameters, whole; only the main process need keep them."""

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """All that ``head.safetensors`` holds, on the main process."""
        return with_constants(self.module.head, self.trained_weights())


def with_constants(head: nn.Module, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``trained`` weights and what else the head's state dict holds (buffers), in the order of the state dict."""
    return {name: trained[name] if name in trained else tensor.detach() for name, tensor in head.state_dict().items()}


def trained_parameters(head: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}


class Replicated(Parallel):
    """``single`` and ``ddp``: every process holds all, and the main one saves it."""

    sharded = False

    def __init__(self, *, accelerator: Accelerator, module: TrainingModule, optimizer: OptimizerSettings) -> None:
        self._accelerator = accelerator
        with warnings.catch_warnings():  # accelerate knows DistributedDataParallel's settings by the names before torch 2.13
            warnings.filterwarnings("ignore", message=r"`broadcast_buffers` is deprecated", category=FutureWarning)
            model = accelerator.prepare_model(module)  # DistributedDataParallel where there are several processes
        super().__init__(module=module, model=model, optimizer=build_optimizer(module, optimizer, dtype=module.dtype))
        self._parameters = trained_parameters(module.head)

    def accumulating(self) -> AbstractContextManager[Any]:
        return self._accelerator.no_sync(self.model)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}

    def pieces(self) -> dict[str, Piece]:
        if not self._accelerator.is_main_process:
            return {}
        return {
            name: Piece(start=0, tensors={WEIGHT: flat(parameter), **flat_entries(self.optimizer.state[parameter])})
            for name, parameter in self._parameters.items()
        }

    def load_optimizer(self, state: StateReader) -> None:
        for name, parameter in self._parameters.items():
            read = read_entries(state, name, start=0, stop=parameter.numel())
            held = {entry: tensor.view(parameter.shape) if tensor.ndim else tensor for entry, tensor in read.items()}
            self.optimizer.state[parameter] = {entry: tensor.to(parameter.device) for entry, tensor in held.items()}

    def trained_weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements on one axis; one without an axis as it is."""
    return tensor.detach().reshape(-1) if tensor.ndim else tensor.detach()


def flat_entries(entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """An optimizer's state of one parameter, each tensor on one axis."""
    return {entry: flat(tensor) for entry, tensor in entries.items() if isinstance(tensor, torch.Tensor)}


def read_entries(state: StateReader, name: str, *, start: int, stop: int) -> dict[str, torch.Tensor]:
    """The optimizer's saved state over a stretch of one parameter."""
    return {entry: state.read(name, entry, start=start, stop=stop) for entry in state.entries(name) if entry != WEIGHT}


def check_elementwise(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """ValueError unless an optimizer can work on any stretch of a matrix by itself."""
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ValueError(
            f"parallel={mode}: expected an optimizer that works element by element, since DeepSpeed cuts matrices anywhere, "
            f"found {type(optimizer).__name__}; set optimizer.rule=adamw, or choose parallel=ddp or fsdp2, which do Muon's products"
        )


def check_projection(head: Head, mode: str) -> None:
    """ValueError where weights lie in shards that only a module's own forward puts together, and the objective needs them beyond."""
    if mode == "zero3" and head.projection_parameters:
        raise ValueError(
            f"parallel=zero3: expected a head that speaks through the target's lm_head, found {head.word}, which has one of its own that "
            "the losses differentiate by; choose parallel=zero2 or fsdp2"
        )


def make_parallel(
    settings: ParallelSettings,
    *,
    accelerator: Accelerator,
    module: TrainingModule,
    optimizer: OptimizerSettings,
    packs_per_process: int,
) -> Parallel:
    """Spread a head over the processes; ``packs_per_process`` forwards and backwards make a step.

    Errors: ValueError where the mode and the number of processes, or the optimizer, do not go together.
    """
    mode, num_processes = settings.mode, accelerator.num_processes
    if mode == "single" and num_processes > 1:
        raise ValueError(f"parallel=single: expected one process, found {num_processes}; choose ddp, fsdp2, zero1, zero2 or zero3")
    if num_processes == 1 and mode not in ("single", "ddp"):
        log(f"parallel={mode} on one process: there is nobody to share with, it holds everything itself")
    if num_processes == 1 or mode == "ddp":
        return Replicated(accelerator=accelerator, module=module, optimizer=optimizer)
    if mode == "fsdp2":
        from mtp_train.trainer.fsdp2 import Fsdp2

        return Fsdp2(accelerator=accelerator, module=module, optimizer=optimizer)
    from mtp_train.trainer.zero import Zero

    check_projection(module.head, mode)
    stage = int(mode.removeprefix("zero"))
    return Zero(accelerator=accelerator, module=module, optimizer=optimizer, stage=stage, packs_per_process=packs_per_process)
