"""Every experiment's settings are settings of their stages."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
STAGES = ("regenerate", "precompute", "train", "evaluate", "export", "plan", "advise")


@pytest.mark.parametrize("word", EXPERIMENTS)
def test_settings_are_known_to_their_stages(word: str) -> None:
    from hydra import compose, initialize_config_dir

    from mtp_train.stage import load_word

    node = load_word("experiment", word)
    assert node.keys() <= set(STAGES)
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        for stage, settings in node.items():
            found = compose(config_name=stage, overrides=settings, return_hydra_config=True)
            for setting in settings:
                key, _, value = setting.lstrip("+").partition("=")
                if "@" not in key and not (ROOT / "conf" / key).is_dir() and "{" not in value and "[" not in value:
                    assert str(_at(found, key)) == str(_number(value)), setting


def _at(node: object, key: str) -> object:
    from omegaconf import OmegaConf

    return OmegaConf.select(node, key)  # type: ignore[arg-type]


def _number(value: str) -> object:
    import yaml

    return (
        yaml.safe_load(value)
        if value.replace(".", "").replace("e-", "").isdigit()
        else {"null": None, "true": True, "false": False}.get(value, value)
    )
