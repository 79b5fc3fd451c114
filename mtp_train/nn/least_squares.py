"""Ridge regression over data that comes in pieces: the linear map that, of all, makes the smallest squared error."""

from __future__ import annotations

import torch
from torch.nn import functional

# Its ridge where heads begin. On 57k answer tokens of SmolLM2-135M: held-out agreement of a pair head before any step 0.291 with 0.001
# or 0.01, 0.273 with 0.1 (tools/results/LOG.md).
RIDGE = 0.001


class LeastSquares:
    """Collects (inputs, wanted outputs) rows and solves for the map between them.

    Holds X'X and X'Y in float64, whatever the number of rows: (I, I) and (I, O). The products of each piece are float32
    where the device has nothing faster, since 64-bit ones cost several times as much and rows are noisy anyway.
    """

    def __init__(self, *, num_inputs: int, num_outputs: int, device: torch.device) -> None:
        self.num_rows = 0
        self._gram_II = torch.zeros((num_inputs, num_inputs), dtype=torch.float64, device=device)
        self._cross_IO = torch.zeros((num_inputs, num_outputs), dtype=torch.float64, device=device)

    def add(self, inputs_MI: torch.Tensor, wanted_MO: torch.Tensor) -> None:
        """Count M rows in."""
        inputs_MI, wanted_MO = inputs_MI.float(), wanted_MO.float()
        self.num_rows += inputs_MI.shape[0]
        self._gram_II += inputs_MI.T @ inputs_MI
        self._cross_IO += inputs_MI.T @ wanted_MO

    def solve(self, *, ridge: float) -> torch.Tensor:
        """The map W, float32 (O, I), that minimises |X W' - Y|^2 + ridge * sum_i (X'X)_ii |W_i|^2: each input is punished in units
        of its own mean square (ridge regression, Hoerl and Kennard 1970, on inputs of one scale), so that those of an
        embedding count beside hidden states a hundred times as large."""
        assert self.num_rows > 0 and ridge > 0, (self.num_rows, ridge)
        scale_I = self._gram_II.diagonal()
        scale_I = scale_I.clamp_min(1e-12 * float(scale_I.max()))  # an input that is always 0 gets the weight 0
        factor_II = torch.linalg.cholesky(self._gram_II + torch.diag(ridge * scale_I))
        return torch.cholesky_solve(self._cross_IO, factor_II).T.float()


def before_norm(hidden_MD: torch.Tensor, *, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows that an RMSNorm with these weights turns into ``hidden_MD``; of the many, those with a mean square of 1."""
    directions_MD = torch.where(weight_D == 0, 0.0, hidden_MD / weight_D)
    return functional.rms_norm(directions_MD, directions_MD.shape[-1:], eps=eps)


# SiLU falls to -0.278 at -1.278 and is flat there: what it should give is cut where it is still steep enough to be told apart.
_LEAST_SILU = -0.2689  # its value at -1


def before_silu(wanted: torch.Tensor) -> torch.Tensor:
    """Numbers of at least -1 that SiLU turns into ``wanted``, or into the nearest that it can give: Newton's method from above,
    where SiLU is convex."""
    wanted = wanted.clamp_min(_LEAST_SILU)
    x = torch.where(wanted > 0, wanted + 0.5, 0.0)
    for _ in range(12):
        gate = x.sigmoid()
        x = x - (x * gate - wanted) / (gate * (1 + x * (1 - gate)))
    return x
