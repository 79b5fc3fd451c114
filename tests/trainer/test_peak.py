"""Bytes at the fullest moment, counted where they are known."""

from __future__ import annotations

import torch

from mtp_train.trainer.peak import peak_bytes


def test_the_peak_is_what_lived_at_once() -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        first = torch.zeros(1_000_000)
        second = first + 1  # 8 MB
        del first
        kept.append(second[:10].clone())
        third = torch.zeros(500_000)  # 6 MB
        del second, third

    assert 8_000_000 <= peak_bytes(run, device=torch.device("cpu")) < 8_100_000
