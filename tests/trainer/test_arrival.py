"""A training that waits for a shard saves what it has and leaves when it is told to, and goes on to the same end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train.cache.reader import CacheReader
from mtp_train.records import Sample
from mtp_train.trainer.state import complete_steps


class Waiting(CacheReader):
    """A cache whose shards come from afar, and stop coming after so many samples."""

    num_samples = 0
    come, waits = threading.Event(), threading.Event()

    @property
    def is_local(self) -> bool:
        return False

    def __getitem__(self, number: int) -> Sample:
        if Waiting.num_samples == 0:
            Waiting.waits.set()
            Waiting.come.wait()
        else:
            Waiting.num_samples -= 1
        return super().__getitem__(number)


@pytest.mark.parametrize(("num_samples", "number", "status"), [(40, signal.SIGUSR1, 75), (1, signal.SIGTERM, 143)])
def test_it_saves_and_leaves_while_it_waits(
    recipe: Any, recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_samples: int, number: int, status: int
) -> None:
    recipe = replace(recipe, validation_fraction=0.0, save_every=None)
    recipe.trainer(tmp_path / "whole").run()
    monkeypatch.setattr(recipes, "CacheReader", Waiting)
    Waiting.num_samples, Waiting.come, Waiting.waits = num_samples, threading.Event(), threading.Event()

    def tell() -> None:
        Waiting.waits.wait()
        time.sleep(0.5)  # the steps that were read before are trained on
        os.kill(os.getpid(), number)

    threading.Thread(target=tell).start()
    try:
        with pytest.raises(SystemExit) as ended:
            recipe.trainer(tmp_path / "parts").run()
        assert ended.value.code == status
        steps = complete_steps(tmp_path / "parts")
        said = json.loads((tmp_path / "parts" / "interrupted.json").read_text())
        assert said == {"signal": signal.Signals(number).name, "step": steps[-1] if steps else 0, "exit_status": status}
        assert bool(steps) == (num_samples > 1)
    finally:
        Waiting.come.set()
    Waiting.num_samples = -1
    recipe.trainer(tmp_path / "parts").run()
    assert (tmp_path / "parts" / "head.safetensors").read_bytes() == (tmp_path / "whole" / "head.safetensors").read_bytes()
