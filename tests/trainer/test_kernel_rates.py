"""Rates of matrix products: each way is measured, and nothing is left running."""

import pytest
import torch

from mtp_train.trainer.kernel_rates import WAYS, KernelRates


@pytest.mark.parametrize("two_cores", [False, True])
def test_rates_of_every_kernel_in_every_way(two_cores: bool) -> None:
    threads = torch.get_num_threads()
    rates = KernelRates(torch.zeros(64, 16).bfloat16(), chunk_rows=8, intermediate_size=32, two_cores=two_cores)
    try:
        rates.measure()
        rates.measure()
        assert torch.get_num_threads() == 1
        names = {"project", "back", "layer", "copy"}
        assert set(rates.per_cpu_s()) == names and min(rates.per_cpu_s().values()) > 0
        for way in WAYS if two_cores else WAYS[:1]:
            assert set(rates.medians(way)) == names and min(rates.medians(way).values()) > 0
        assert two_cores or rates._other is None
    finally:
        rates.close()
        torch.set_num_threads(threads)
    if rates._other is not None:
        assert rates._other._process.exitcode == 0
