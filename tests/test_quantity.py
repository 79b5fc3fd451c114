"""Numbers as people write and read them."""

from __future__ import annotations

import pytest

from mtp_train.quantity import parse_bytes, parse_count, show_bytes, show_count, show_duration, show_flops


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (7, 7),
        (5e8, 500_000_000),
        ("500M", 500_000_000),
        ("1.5B", 1_500_000_000),
        ("2k", 2000),
        ("0.1k", 100),
        ("1_000", 1000),
        ("1e9", 10**9),
        ("3 T", 3 * 10**12),
    ],
)
def test_counts(written: int | float | str, meant: int) -> None:
    assert parse_count(written, where="x") == meant


@pytest.mark.parametrize(
    ("written", "meant"), [("80GB", 80 * 10**9), ("64GiB", 64 * 2**30), ("30.72TB", 30_720_000_000_000), (512, 512), ("1 B", 1)]
)
def test_bytes(written: int | str, meant: int) -> None:
    assert parse_bytes(written, where="x") == meant


@pytest.mark.parametrize("written", ["", "many", "5X", "-1M", "1.5", "M", "nan", "1e400", True])
def test_anything_else_is_refused_by_name(written: object) -> None:
    with pytest.raises(ValueError, match=r"prompt\.num_tokens: expected a number such as 500M or 1\.5B, found"):
        parse_count(written, where="prompt.num_tokens")  # type: ignore[arg-type]


def test_shown_with_three_digits() -> None:
    assert [show_count(n) for n in (12, 999, 999.7, 7187, 989_900_000, 70_553_706_496)] == ["12", "999", "1.00k", "7.19k", "990M", "70.6B"]
    assert [show_bytes(n) for n in (0, 594, 16_541, 8.27e12)] == ["0 B", "594 B", "16.5 kB", "8.27 TB"]
    assert show_flops(1.48e19) == "14.8 EFLOP"


def test_durations_have_two_units_at_most() -> None:
    shown = [show_duration(s) for s in (0.44, 9.96, 59.6, 62, 3599.6, 7199, 11_520, 90_000, 172_799)]
    assert shown == ["0.4 s", "10 s", "1 min", "1 min 2 s", "1 h", "2 h", "3 h 12 min", "1 d 1 h", "2 d"]
