"""Counts the bytes of tensors that live at each moment of a computation, by what they are for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

COPIES = "weights in bf16"


class LiveBytes(TorchDispatchMode):
    """While on, every new storage counts under the current ``phase`` until it is freed, in forward and backward alike.

    Casts of ``parameters`` (autocast's) count under ``COPIES``; ``parameters`` and ``others``, and all that share their storage, do
    not count. ``peaks`` holds, per phase, the largest sum and what it was made of. Works on real tensors and on those without
    memory (``FakeTensorMode``); what a kernel allocates inside itself is not seen.
    """

    def __init__(self, *, phase: str, parameters: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.phase = phase
        self.now = 0
        self.peaks: dict[str, tuple[int, dict[int, tuple[str, int]]]] = {}
        self._live: dict[int, tuple[str, int]] = {}
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storage -> its number; below 0: not counted
        for number, tensors in ((-1, parameters), (-2, others)):
            for tensor in tensors:
                self._numbers[tensor.untyped_storage()] = number
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        copies = func is torch.ops.aten._to_copy.default and self._numbers.get(args[0].untyped_storage()) == -1
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, COPIES if copies else self.phase)
        return out

    def of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The numbers under which tensors of now appear in ``peaks``."""
        return {self._numbers[tensor.untyped_storage()] for tensor in tensors}

    def _see(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            return
        number, size = self._next, storage.nbytes()
        self._next += 1
        self._numbers[storage] = number
        self._live[number] = (kind, size)
        self.now += size
        weakref.finalize(storage, self._free, number).atexit = False
        if self.now > self.peaks.get(self.phase, (-1, {}))[0]:
            self.peaks[self.phase] = (self.now, dict(self._live))

    def _free(self, number: int) -> None:
        self.now -= self._live.pop(number)[1]
