"""``head=eagle``: EAGLE-1's autoregressive head (Li et al. 2024), which strips the norms that ``mtp`` keeps."""

from __future__ import annotations

from mtp_train.head.pair import PairHead


class Eagle(PairHead):
    """``PairHead`` as the engines' EAGLE classes compute it; its yaml switches all norms off."""

    word = "eagle"
    method = "eagle"
