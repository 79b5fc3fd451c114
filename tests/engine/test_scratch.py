"""A scratch folder is there while its owner lives, and is removed by the next one where it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from mtp_train.engine.scratch import ScratchFolder

OWNER = "import sys, time; from pathlib import Path; from mtp_train.engine.scratch import ScratchFolder\n"
OWNER += "print(ScratchFolder(parent=Path(sys.argv[1])).path, flush=True)\ntime.sleep(600)"


def test_a_folder_lives_as_long_as_its_owner(tmp_path: Path) -> None:
    parent = tmp_path / "not" / "there yet"
    one = ScratchFolder(parent=parent)
    (one.path / "inner").mkdir()
    (one.path / "inner" / "file").write_text("x", encoding="utf-8")
    other = ScratchFolder(parent=parent)
    assert one.path != other.path and (one.path / "inner" / "file").is_file(), "a living owner's folder is left alone"
    one.close()
    other.close()
    assert list(parent.iterdir()) == []


def test_what_a_killed_owner_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "file").write_text("x", encoding="utf-8")
        ScratchFolder(parent=tmp_path).close()
        assert (left / "file").is_file()
        owner.send_signal(signal.SIGKILL)
    assert left.is_dir(), "nobody removes it at once"
    ScratchFolder(parent=tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
