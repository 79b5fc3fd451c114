"""The optimizer: AdamW, or Muon for the matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mtp_train.trainer.settings import OptimizerSettings

_OF_TOKENS = {"lm_head", "lm_heads", "embed_tokens"}  # matrices that have a row for each token


class _Uncast(TorchFunctionMode):
    """torch's Muon casts what it multiplies to bfloat16; in here it stays what it was, in a tensor of its own as after a cast."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return args[0].clone() if func is torch.Tensor.bfloat16 else func(*args, **(kwargs or {}))


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon over ``matrices`` and AdamW over ``rest``, as one optimizer with one state; ``dtype``, bfloat16 or float32, is
    what Muon multiplies in."""

    def __init__(self, *, matrices: list[nn.Parameter], rest: list[nn.Parameter], settings: OptimizerSettings, dtype: torch.dtype) -> None:
        self._muon = torch.optim.Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
        self._uncast = dtype != torch.bfloat16
        self._adamw = _adamw(rest, settings) if rest else None  # a head may be nothing but matrices
        super().__init__([*matrices, *rest], {})
        self.param_groups = [*self._muon.param_groups, *(() if self._adamw is None else self._adamw.param_groups)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes gradients before it steps"
        # The two work on this optimizer's groups and state, whatever has been put in their place meanwhile (load_state_dict).
        self._muon.param_groups, self._muon.state = self.param_groups[:1], self.state
        with _Uncast() if self._uncast else nullcontext():
            self._muon.step()
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state
            self._adamw.step()


def build_optimizer(model: nn.Module, settings: OptimizerSettings, *, dtype: torch.dtype) -> torch.optim.Optimizer:
    """The optimizer over a model's parameters: weight decay on matrices only, not on norms and biases. ``dtype`` is that of training's
    matrix products, which Muon's are among; parameters and state are float32.

    Muon takes what multiplies hidden states inside the layers; a head's own lm_heads and embedding, whose rows are tokens, stay
    AdamW's (as Jordan et al. advise), and so do stacked experts, which torch's Muon cannot take.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if settings.rule == "adamw":
        return _adamw(list(named.values()), settings)
    matrices = [parameter for name, parameter in named.items() if parameter.ndim == 2 and not _OF_TOKENS & set(name.split("."))]
    chosen = set(matrices)
    rest = [parameter for parameter in named.values() if parameter not in chosen]
    if not matrices:
        raise ValueError("optimizer.rule=muon: expected a head with matrices inside its layers, found none; choose adamw")
    return MuonAdamW(matrices=matrices, rest=rest, settings=settings, dtype=dtype)


def _adamw(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    # Fused kernels exist for these; elsewhere torch chooses.
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=fused or None,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
