"""The prompt and benchmark settings: every key that the loader takes and no other, and what lives here loads."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml

from mtp_train.prompt.load import load_prompts
from mtp_train.prompt.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = sorted([*(ROOT / "conf" / "prompt").glob("*.yaml"), *(ROOT / "conf" / "benchmark").glob("*.yaml")])
LOCAL = {"project_train": 488, "project_heldout": 80, "gsm8k": 80, "humaneval": 80}


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_yaml_is_the_call(path):
    settings = read(path)
    assert set(settings) == set(inspect.signature(load_prompts).parameters)
    sources = settings["source"] if isinstance(settings["source"], list) else [settings["source"]]
    for source in sources:
        if source != "???":  # to be given on the command line
            assert read_manifest(ROOT / source).name == Path(source).stem
    if path.stem in LOCAL:
        prompts, counts = load_prompts(**settings)
        assert len(prompts) == counts.num_rows == LOCAL[path.stem]
    else:
        assert path.stem == "file" or read_manifest(ROOT / sources[0]).revision
