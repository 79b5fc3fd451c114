"""What the processes of ``processes.py`` run: trainers of a recipe, one after the other, as ranks of one torchrun job.

Started by path, with ``JOB`` in its globals: ``environment``, ``log`` (where both streams go) and ``runs``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def load_recipes() -> Any:
    """The conftest beside this file, which makes recipes and trainers."""
    spec = importlib.util.spec_from_file_location("trainer_conftest", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    recipes = importlib.util.module_from_spec(spec)
    sys.modules["trainer_conftest"] = recipes
    spec.loader.exec_module(recipes)
    return recipes


def main(job: dict[str, Any]) -> None:
    stream = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ.update(job["environment"])
    recipes = load_recipes()
    for settings in job["runs"]:
        recipe, out, stop_after = recipes.Recipe(**settings["recipe"]), Path(settings["out"]), settings["stop_after"]
        print(f"=== {out.name}: {recipe.parallel}, after {time.process_time():.1f} s of CPU", flush=True)
        hook = None if stop_after is None else recipes.stop_after(stop_after, settings["signal"])
        try:
            trainer = recipe.trainer(out, on_validate=hook)
            if settings["late"] is not None and os.environ.get("RANK") == str(settings["late"][0]):
                time.sleep(settings["late"][1])
            trainer.run()
        except SystemExit as ended:
            print(f"=== {out.name} exits with {ended.code}", flush=True)
            if settings is job["runs"][-1]:
                raise
        except BaseException:
            traceback.print_exc()
            raise


main(JOB)  # type: ignore[name-defined]  # noqa: F821 - given by whoever starts this file
