"""Numbers as people write and read them: 500M tokens, 30.7 TB, 3 h 12 min."""

from __future__ import annotations

import math
import re

_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_count(value: int | float | str, *, where: str) -> int:
    """A count: 1000, 2k, 500M, 1.5B (billions), 1T. Errors: ValueError, named after ``where``, for anything else."""
    return _parse(value, {**_COUNTS, "K": 10**3, "G": 10**9}, where=where, example="500M or 1.5B")


def parse_bytes(value: int | float | str, *, where: str) -> int:
    """A size: plain bytes, 80GB (powers of ten), 64GiB (powers of two). Errors: ValueError, named after ``where``, for anything else."""
    return _parse(value, {**_BYTES, "": 1, "KB": 10**3}, where=where, example="80GB or 64GiB")


def _parse(value: int | float | str, units: dict[str, int], *, where: str, example: str) -> int:
    match = _NUMBER.fullmatch(str(value))
    number = float(match[1].replace("_", "")) * units[match[2]] if match and match[2] in units else math.nan
    # A fraction of a token or a byte is somebody's slip; that of float arithmetic (0.1 * 10**3) is not.
    if not math.isfinite(number) or abs(number - round(number)) > 1e-6 * max(1.0, number):
        raise ValueError(f"{where}: expected a number such as {example}, found {value!r}")
    return round(number)


def show_count(number: float) -> str:
    """Three significant digits: 70.6B, 123M, 7.19k, 12."""
    return _show(number, ("", "k", "M", "B", "T", "Qa"), gap="")


def show_bytes(number: float) -> str:
    """Three significant digits in powers of ten: 8.27 TB, 16.5 kB."""
    return _show(number, ("B", "kB", "MB", "GB", "TB", "PB"), gap=" ")


def show_flops(number: float) -> str:
    """Floating-point operations: 14.8 EFLOP."""
    return _show(number, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"), gap=" ")


def _show(number: float, units: tuple[str, ...], *, gap: str) -> str:
    power = 0
    while power + 1 < len(units) and abs(number) >= 999.5:
        number, power = number / 1000, power + 1
    digits = 0 if number == round(number) and power == 0 else max(0, 2 - int(math.log10(max(abs(number), 1.0))))
    return f"{number:.{digits}f}{gap}{units[power]}".rstrip()


def show_duration(seconds: float) -> str:
    """Two units at most: 4 d 3 h, 3 h 12 min, 5 min 2 s, 0.4 s."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = round((whole % size) / part)
            rest, carried = (0, 1) if rest * part >= size else (rest, 0)
            return f"{whole // size + carried} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
