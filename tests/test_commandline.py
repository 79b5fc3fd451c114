"""The command that a stage names as the next one: what was typed, ready to paste into a shell."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_train.commandline import as_text, check_words, next_command, remember


def test_the_next_command_keeps_target_run_and_folder_as_they_were_typed() -> None:
    typed = ["experiment=demo", "target=local", "target.path=/m/ü 1", "+target.sizes=null", "run=runs/it's [1]", "num_steps=3", "~seed"]
    remember([*typed, "out=/x/my cache", "--cfg", "targets.path=no", "prompt.source=[a]"])
    words = shlex.split(next_command("train", reads="cache"))
    assert words == ["python", "-m", "mtp_train.train", *typed[:5], "cache=/x/my cache"]
    assert as_text(words[3:], readable=lambda word: " " not in word)[2] == "target.path='/m/ü 1'", "as the stage before read it"
    remember(["run=r", "name=x", "checkpoint=c", "checkpoint.every=3", "out=report"])
    assert next_command("export", reads=None, also=["name=x"]) == "python -m mtp_train.export run=r checkpoint=c name=x"
    remember([])
    assert next_command("precompute", reads="responses") == "python -m mtp_train.precompute"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--num_steps=3", "expected num_steps=3, found --num_steps=3;"),
        ("head=mtp --num-steps 3", "expected num-steps=3, found --num-steps 3;"),
        ("run runs/mine", "expected run=runs/mine, found run runs/mine;"),
        ("run=x seed", "expected seed=..., found seed;"),
        ("--cfg job job", "expected job=..., found job;"),
        ("-x --cfg job", "expected x=..., found -x;"),
    ],
)
def test_a_word_that_is_no_setting_is_told_which_one_was_meant(typed: str, said: str) -> None:
    with pytest.raises(ValueError, match="settings are key=value: expected ") as told:
        check_words("train", typed.split())
    assert said in str(told.value)


@pytest.mark.parametrize("typed", ["", "--cfg job run=x", "-m seed=1,2", "--info config ~seed +a.b=1 --cfg=job", "run=a=b -c job ++x=-y"])
def test_settings_and_hydra_s_options_pass(typed: str) -> None:
    assert check_words("train", typed.split()) == typed.split()


@pytest.mark.parametrize(
    ("tool", "least"),
    [
        ("measure_costs", {"context-tokens": "at least 2", "num-repeats": "at least 3", "draft-lengths": "two or more"}),
        ("certify", {"num-draws": "at least 200 for each cell but one", "vocabulary": "at least 2"}),
    ],
)
def test_a_tool_s_help_names_defaults_and_what_is_refused_below(tool: str, least: dict[str, str]) -> None:
    root = Path(__file__).resolve().parent.parent
    shown = subprocess.run([sys.executable, str(root / "tools" / f"{tool}.py"), "--help"], check=True, capture_output=True, text=True)
    told = {part.split()[0]: " ".join(part.split()) for part in shown.stdout.partition("\noptions:")[2].split("\n  --")[1:]}
    for option, words in least.items():
        assert words in told[option] and "default: " in told[option]
    silent = {option for option, text in told.items() if "default: " not in text}
    assert silent <= {"run", "name", "target", "out", "checkpoint"}, "these are asked for, or begin as none"
