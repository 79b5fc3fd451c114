"""The five stages through the command line on a tiny target: end to end, twice, on two processes, and killed midway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # each test starts several stages, and Python's imports alone take seconds on a busy machine

ROOT = Path(__file__).resolve().parent.parent
STAGE_SETTINGS = {
    "regenerate": ["prompt=file", "engine.dtype=float32", "engine.batch_size=4", "sampling.max_new_tokens=12"],
    "precompute": ["prompt=file", "engine.dtype=float32", "codec=float32", "top_k=8", "shard_tokens=128"],
    "train": ["num_steps=8", "tokens_per_pack=256", "checkpoint.every=2", "validation.every=4", "validation.fraction=0.2", "log_every=1"],
    "evaluate": [
        "engine.dtype=float32",
        "benchmark@prompt_sets.project=file",
        "ways.greedy.prompt_sets=[project]",
        "ways.sampled.prompt_sets=[project]",
        "decoding.num_speculative_tokens=3",
        "max_new_tokens=10",
        "identity.num_prompts=null",
    ],
    "export": [],
}


class Run:
    """One run folder of the tiny target, driven as a user drives it."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.target = folder, target
        folder.mkdir(parents=True, exist_ok=True)
        self.prompts = folder.parent / "prompts.jsonl"
        words = ["red", "green", "blue", "one", "two", "three", "four", "five", "six", "seven"]
        rows = [{"prompt": f"{words[i % 10]} {words[(3 * i) % 10]} {i}?"} for i in range(20)]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def command(self, stage: str, *words: str, processes: int = 1) -> list[str]:
        base = [sys.executable, "-m"]
        if processes > 1:
            base += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
        settings = [*STAGE_SETTINGS[stage], "target=local", f"target.path={self.target}", "target.name=tiny", f"run={self.folder}"]
        if stage in ("regenerate", "precompute"):
            settings.append(f"prompt.source=[{self.prompts}]")
        if stage == "evaluate":
            settings.append(f"prompt_sets.project.source=[{self.prompts}]")
        return [*base, f"mtp_train.{stage}", *settings, *words]

    def __call__(self, stage: str, *words: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
        command = self.command(stage, *words, processes=processes)
        return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=240, check=False)

    def ok(self, stage: str, *words: str, processes: int = 1) -> str:
        done = self(stage, *words, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    def refused(self, stage: str, *words: str) -> str:
        done = self(stage, *words)
        assert done.returncode == 2, (done.returncode, done.stderr[-3000:])
        assert "Traceback" not in done.stderr
        return done.stderr

    def kill_when(self, stage: str, ready: Path, *words: str) -> None:
        """Start a stage and SIGKILL it as soon as a file of that pattern is there; it may end first, which is fine too."""
        process = subprocess.Popen(
            self.command(stage, *words), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        until = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < until and not any(ready.parent.glob(ready.name)):
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def responses(self) -> dict[str, tuple[list[int], list[int]]]:
        rows = [json.loads(line) for file in (self.folder / "responses").glob("responses*.jsonl") for line in file.read_text().splitlines()]
        return {row["prompt_id"]: (row["token_ids"], row["loss_mask"]) for row in rows}

    def cache_bytes(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in sorted((self.folder / "cache").glob("shard-*"))}

    def weights(self, name: str = "mtp") -> bytes:
        return (self.folder / "checkpoint" / name / "head.safetensors").read_bytes()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Run:
    """A run whose stages all ran once, with two heads."""
    run = Run(tmp_path_factory.mktemp("pipeline") / "run", tiny_llama)
    run.ok("regenerate")
    run.ok("precompute")
    run.ok("train")
    run.ok("train", "head=eagle")
    run.ok("evaluate", "name=mtp")
    run.ok("evaluate", "name=eagle")
    run.ok("export", "name=mtp")
    return run


def test_the_report_holds_both_heads_and_the_identity(finished: Run) -> None:
    report = json.loads((finished.folder / "report" / "report.json").read_text())["data"]
    assert [head["name"] for head in report["heads"]] == ["eagle", "mtp"]
    proofs = [m["identity"] for m in report["measurements"] if m["identity"] is not None]
    assert len(proofs) == 2
    for proof in proofs:
        assert proof["num_prompts"] == 20 and all(d["logit_gap"] <= 1e-4 for d in proof["differences"])
    page = (finished.folder / "report" / "index.html").read_text(encoding="utf-8")
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_the_estimate_is_the_measured_count(finished: Run) -> None:
    """fp32, greedy: the walk over the cache counts what real decoding counts, prompt by prompt."""
    report = json.loads((finished.folder / "report" / "report.json").read_text())["data"]
    for head in ("mtp", "eagle"):
        here = [m for m in report["measurements"] if m["head"] == head and m["acceptance"]["temperature"] == 0 and m["identity"] is None]
        measured, estimate = sorted(here, key=lambda m: m["acceptance"]["measured_by"] == "estimate")
        counts = [[(p["num_drafts"], p["num_accepted_per_position"]) for p in m["acceptance"]["prompts"]] for m in (measured, estimate)]
        assert counts[0] == counts[1] and sum(drafts for drafts, _ in counts[0]) > 20


def test_a_second_call_does_nothing_twice(finished: Run) -> None:
    before = (finished.responses(), finished.cache_bytes(), finished.weights())
    stamps = {file: file.stat().st_mtime_ns for file in (finished.folder / "report" / "pieces").rglob("project*.json")}
    assert "20 of 20 answers are there already" in finished.ok("regenerate")
    assert "0 tokens to read" in finished.ok("precompute")
    finished.ok("train")
    assert "project.greedy is measured already" in finished.ok("evaluate", "name=mtp")
    finished.ok("export", "name=mtp")
    assert (finished.responses(), finished.cache_bytes(), finished.weights()) == before
    assert stamps and {file: file.stat().st_mtime_ns for file in stamps} == stamps


def test_two_processes_write_what_one_writes(finished: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", finished.target)
    run.ok("regenerate", processes=2)
    run.ok("precompute", processes=2)
    assert run.responses() == finished.responses()
    assert run.cache_bytes() == finished.cache_bytes()


def test_killed_in_every_stage_it_ends_the_same(finished: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", finished.target)
    run.kill_when("regenerate", run.folder / "responses" / "responses.jsonl")
    run.ok("regenerate")
    assert run.responses() == finished.responses()
    run.kill_when("precompute", run.folder / "cache" / "shard-00001.json")
    run.ok("precompute")
    assert run.cache_bytes() == finished.cache_bytes()
    run.kill_when("train", run.folder / "checkpoint" / "mtp" / "step-*")
    run.ok("train")
    assert run.weights() == finished.weights()
    run.kill_when("evaluate", run.folder / "report" / "pieces" / "mtp" / "project.greedy.json")
    assert "measured already" in run.ok("evaluate")
    names = ("project.greedy.json", "project.sampled.json", "identity.json")
    for name in names:
        found, wanted = (json.loads((r.folder / "report" / "pieces" / "mtp" / name).read_text()) for r in (run, finished))
        assert found["measurement"]["acceptance"]["prompts"] == wanted["measurement"]["acceptance"]["prompts"]


def test_what_does_not_fit_is_refused_with_the_remedy(finished: Run, tmp_path: Path, tiny_llama_tied: Path) -> None:
    empty = Run(tmp_path / "run", finished.target)
    assert "regenerate" in empty.refused("precompute")
    assert "precompute" in empty.refused("train")
    assert "train" in empty.refused("evaluate")
    other = Run(finished.folder, tiny_llama_tied)
    for stage in ("precompute", "train", "evaluate"):
        message = other.refused(stage)
        assert "expected" in message and "found" in message, message
    assert "max_new_tokens" in finished.refused("regenerate", "sampling.max_new_tokens=5")
    unknown = finished("train", "no_such_key=1")
    assert unknown.returncode != 0 and "no_such_key" in unknown.stderr


def test_a_refused_run_leaves_the_record_of_the_one_that_stands(finished: Run) -> None:
    record = finished.folder / "responses" / "settings.regenerate.json"
    before = record.read_bytes()
    finished.refused("regenerate", "sampling.max_new_tokens=7")
    assert record.read_bytes() == before
    assert "num_answers" in finished.refused("regenerate", "num_answers=0")


def test_a_name_cannot_leave_the_run(finished: Run) -> None:
    assert "it becomes a folder" in finished.refused("train", "name=../../escaped")
    for stage in ("evaluate", "export"):
        assert "it becomes a folder" in finished.refused(stage, "name=../../escaped", f"checkpoint={finished.folder}/checkpoint/mtp")
    assert not (finished.folder.parent / "escaped").exists() and not (finished.folder / "escaped").exists()
