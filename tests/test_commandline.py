"""The command that a stage names as the next one: what was typed, ready to paste into a shell."""

from __future__ import annotations

import shlex

from mtp_train.commandline import as_text, next_command, remember


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
