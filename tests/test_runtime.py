"""What every stage needs from the machine: lines and bars on one terminal."""

from __future__ import annotations

import pytest

from mtp_train.runtime import log, progress


def test_a_line_stands_above_an_open_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(desc="work", unit="step", total=3) as bar:
        bar.update()
        log("a line")
    shown = [part.rstrip() for line in capsys.readouterr().err.split("\n") for part in line.split("\r")]
    assert "[mtp-train] a line" in shown, "nothing of the bar in its line"
    assert shown.index("[mtp-train] a line") < max(index for index, part in enumerate(shown) if part.startswith("work:"))
