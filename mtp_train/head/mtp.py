"""``head=mtp``: DeepSeek-V3's multi-token-prediction module, all RMSNorms in place."""

from __future__ import annotations

from mtp_train.head.pair import PairHead


class Mtp(PairHead):
    """``PairHead`` as the engines' MTP classes compute it; its yaml switches all norms on."""

    word = "mtp"
    method = "mtp"
