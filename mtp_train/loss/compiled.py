"""torch.compile for passes over the logits, where a training asks for it (``compile=true``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

_asked: ContextVar[bool] = ContextVar("compiled_passes", default=False)


@contextmanager
def compiled_passes(asked: bool) -> Iterator[None]:
    """Inside, and where ``asked``, losses run their compiled passes; the first call of each compiles it, some tens of seconds."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def compiled_or_none(passes: Callable[..., Any]) -> Callable[..., Any] | None:
    """``passes`` compiled for any number of rows, or None where nobody asked.

    Errors, when called: ValueError where torch cannot compile here.
    """
    return _telling(passes) if _asked.get() else None


@cache
def _telling(passes: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(passes, dynamic=True)

    def run(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ValueError(
                "compile: expected that torch.compile works here (it needs a C++ compiler on a CPU, Triton on a GPU), found: "
                f"{' '.join(str(error).split())[:300]}; install it, or set compile=false"
            ) from error

    return run
