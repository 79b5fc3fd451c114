"""What the user or the machine is to mend ends as one message and an exit status; what is ours shows its traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_train.faults import printable, telling, told

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("key: expected 1, found 2"), "key: expected 1, found 2"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/y"), "/x/y: the system says: No space left on device; make room there"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/x"), "/x: the system says: Permission denied; choose another folder"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), b"/x"), "/x: the system says: Read-only file system; choose a folder that can"),
        (OSError("no number at all"), "the system says: no number at all"),
        (MemoryError(), "out of memory: the system gave no more; take less at once"),
        (NotImplementedError("engine=server does not prefill; engine=hf does"), "engine=server does not prefill; engine=hf does"),
        (ModuleNotFoundError("No module named 'vllm'", name="vllm"), "No module named 'vllm'; install what this choice needs"),
    ],
)
def test_a_mendable_error_is_told(error: Exception, message: str) -> None:
    assert (told(error) or "").startswith(message)


@pytest.mark.parametrize(
    "error", [KeyError("a"), TypeError("b"), AssertionError("c"), AttributeError("d"), ModuleNotFoundError("x", name="mtp_train.x")]
)
def test_an_error_of_ours_is_not(error: Exception) -> None:
    assert told(error) is None


def test_a_full_disk_is_told_from_torch_s_writer_too(tmp_path: Path) -> None:
    """safetensors says it in words only; here a limit on file sizes stands for the disk."""
    code = (
        "import resource, torch; from mtp_train.faults import telling; from safetensors.torch import save_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"with telling('train'): save_file({{'a': torch.zeros(100000)}}, {str(tmp_path / 'x')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "mtp-train train: the system says: File too large; raise the limit on file sizes" in done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x07\x00\r", r"\x1b[31mred\x07\x00\r"),
        ("a\u202eb\u2066c\u200f", r"a\u202eb\u2066c\u200f"),
        ("\x9b2J", r"\x9b2J"),
        ("שלום 日本 é 👩\u200d💻", "שלום 日本 é 👩\u200d💻"),
    ],
)
def test_nothing_that_steers_a_terminal_is_printed(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(("raised", "code"), [(ValueError("\x1b[2Jno"), 2), (KeyboardInterrupt(), 130)])
def test_an_end_has_its_status(raised: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, telling("train"):
        raise raised
    assert end.value.code == code
    said = capsys.readouterr().err
    assert said.startswith("\nmtp-train train: ") and "\x1b" not in said


def test_the_traceback_is_shown_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_TRAIN_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no"), telling("train"):
        raise ValueError("no")


def test_a_closed_pipe_ends_quietly() -> None:
    """As ``... --help | head -1`` does."""
    done = subprocess.run(
        [f"{sys.executable} -m mtp_train.train --help | head -c 10; echo $PIPESTATUS"],
        cwd=ROOT, shell=True, executable="/bin/bash", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr


TERMINATED = """
import os, signal, sys, time
from mtp_train.faults import telling
with telling("evaluate"), telling("evaluate"):
    if sys.argv[1] == "twice":
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.write(writes, b".")
        time.sleep(20)
        os._exit(0)
    os.read(reads, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    finally:
        print("closed", flush=True)
"""


def test_sigterm_closes_what_is_open_and_says_that_the_same_command_continues() -> None:
    done = subprocess.run([sys.executable, "-c", TERMINATED, "once"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 143 and done.stdout == "-15\nclosed\n"
    assert done.stderr == "\nmtp-train evaluate: ended by SIGTERM; the same command continues\n"
    done = subprocess.run([sys.executable, "-c", TERMINATED, "twice"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -15 and not done.stderr
