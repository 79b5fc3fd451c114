"""The verbs with engine=vllm through the command line: results, kill -9 and a full disk midway, nothing left over, the report."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import vllm_for_tests as own
from safetensors.torch import load_file

from tests.shell import ROOT, Done, Shell, environment

pytestmark = [*own.NEEDS_VLLM, pytest.mark.timeout(900)]

ENGINE = ["dtype=float32", "batch_size=4", "enforce_eager=true", "cpu_kv_cache_gib=1", "cpu_threads=1", "max_prefill_tokens=96"]
STAGES = {
    "regenerate": ["prompt=file", "sampling.max_new_tokens=12"],
    "precompute": ["prompt=file", "codec=float32", "top_k=8", "shard_tokens=128"],
    "train": ["num_steps=4", "tokens_per_pack=256", "checkpoint.every=4", "validation.every=4", "validation.fraction=0.2"],
    "evaluate": [
        "benchmark@prompt_sets.project=file",
        "ways.greedy.prompt_sets=[project]",
        "~ways.sampled",
        "decoding.num_speculative_tokens=3",
        "max_new_tokens=10",
        "identity.num_prompts=0",
    ],
}


class Run:
    """One run folder, driven as a user drives it."""

    def __init__(self, folder: Path, target: Path, shell: Shell) -> None:
        self.folder, self.target, self.shell = folder, target, shell
        folder.mkdir(parents=True)
        self.prompts = folder / "prompts.jsonl"
        words = ["red", "green", "blue", "one", "two", "three", "four", "five", "six", "seven"]
        rows = [{"prompt": f"{words[i % 10]} {words[(3 * i) % 10]} {i}?"} for i in range(20)]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def words(self, stage: str, engine: str | None) -> list[str]:
        found = ["target=local", f"target.path={self.target}", "target.name=tiny", f"run={self.folder}", *STAGES[stage]]
        if engine is not None:
            found += [f"engine={engine}", *(f"engine.{setting}" for setting in (ENGINE if engine == "vllm" else ENGINE[:2]))]
        if stage in ("regenerate", "precompute"):
            found.append(f"prompt.source=[{self.prompts}]")
        return [*found, f"prompt_sets.project.source=[{self.prompts}]"] if stage == "evaluate" else found

    def ok(self, stage: str, engine: str | None = "vllm", *words: str) -> str:
        done = self.shell.wait(self.shell.start(f"mtp_train.{stage}", [*self.words(stage, engine), *words]))
        assert done.code == 0, done.stderr[-3000:]
        return done.stderr

    def at_call(self, stage: str, where: str, number: int, *, most_bytes: int | None = None) -> Done:
        """Run a stage until the ``number``-th call of ``where``, and kill it there, or let no longer file be written from there on."""
        words = self.words(stage, "vllm")
        happens: dict[str, Any] = {"die": (where, number)} if most_bytes is None else {"full": (where, number, most_bytes)}
        return self.shell.wait(self.shell.start(f"mtp_train.{stage}", words, **happens))

    def responses(self) -> dict[str, tuple[list[int], list[int], str]]:
        rows = [json.loads(line) for line in (self.folder / "responses" / "responses.jsonl").read_text().splitlines()]
        assert len({row["prompt_id"] for row in rows}) == len(rows), "a prompt is answered once"
        return {row["prompt_id"]: (row["token_ids"], row["loss_mask"], row["finish_reason"]) for row in rows}

    def shards(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in sorted((self.folder / "cache").glob("shard-*"))}

    def cache_bytes(self) -> dict[str, bytes]:
        """All that a reader reads; the commit is the only word in the manifest that may differ."""
        manifest = (self.folder / "cache" / "manifest.json").read_bytes()
        return self.shards() | {"manifest.json": re.sub(rb'"git_commit": [^,]*', b"", manifest)}

    def left_over(self, stage: str) -> list[str]:
        """vLLM's own folders; the lock file of the one process that writes stays, and is held by nobody."""
        return [path.name for path in (self.folder / {"regenerate": "responses", "precompute": "cache"}[stage]).glob(".vllm-*")]

    def wait_for_processes_to_end(self) -> None:
        """vLLM's processes know the folder by its name on their command line, their children by their parents."""
        deadline = time.monotonic() + 30
        while (found := _processes_of(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not found, f"still running: {found}"


def _processes_of(folder: Path) -> dict[int, str]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in line:
            found[int(path.parent.name)] = line
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, served_llama: Path, shell: Shell) -> Run:
    """A run whose answers engine=hf wrote, and whose cache vLLM wrote from them without an interruption."""
    run = Run(tmp_path_factory.mktemp("reference") / "run", served_llama, shell)
    run.ok("regenerate", "hf")
    run.ok("precompute")
    return run


def test_regenerate_killed_and_continued_writes_the_same_answers(reference: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", reference.target, reference.shell)
    done = run.at_call("regenerate", "mtp_train.prompt.responses:ResponseWriter.write", 8)
    assert done.code == -signal.SIGKILL, done.stderr[-3000:]
    run.wait_for_processes_to_end()
    assert len(run.responses()) == 7 and len(run.left_over("regenerate")) == 1
    assert "7 of 20 answers are there already" in run.ok("regenerate")
    assert run.responses() == reference.responses()
    assert run.left_over("regenerate") == []


def test_precompute_killed_and_out_of_room_writes_the_same_cache(reference: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", reference.target, reference.shell)
    (run.folder / "responses").symlink_to(reference.folder / "responses")
    expected = reference.cache_bytes()
    shards = [name for name in expected if name.endswith(".safetensors")]
    assert len(shards) >= 6

    done = run.at_call("precompute", "mtp_train.cache.writer:CacheWriter.write_shard", 3)
    assert done.code == -signal.SIGKILL, done.stderr[-3000:]
    run.wait_for_processes_to_end()
    first = run.shards()
    assert sorted(first) == sorted(name for shard in shards[:2] for name in (shard, shard.replace(".safetensors", ".json")))
    assert len(run.left_over("precompute")) == 1

    done = run.at_call("precompute", "mtp_train.cache.writer:CacheWriter.write_shard", 2, most_bytes=4096)
    assert done.code == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "File too large" in done.stderr and "then run the same command again" in done.stderr
    run.wait_for_processes_to_end()
    assert len(run.shards()) == len(first) + 2 and run.left_over("precompute") == []

    assert f"in {len(shards) - 3} of {len(shards)} shard(s)" in run.ok("precompute")
    assert run.cache_bytes() == expected
    assert run.left_over("precompute") == []


def test_the_cache_is_the_reference_engine_s(reference: Run, tmp_path: Path) -> None:
    """Every number of the cache against engine=hf, to float32's rounding."""
    run = Run(tmp_path / "run", reference.target, reference.shell)
    (run.folder / "responses").symlink_to(reference.folder / "responses")
    run.ok("precompute", "hf")
    assert sorted(run.shards()) == sorted(reference.shards())
    for name in run.shards():
        if not name.endswith(".safetensors"):
            continue
        ours, theirs = (load_file(side.folder / "cache" / name) for side in (run, reference))
        assert set(ours) == set(theirs)
        for key, tensor in ours.items():
            gap = (tensor.double() - theirs[key].double()).abs().max()
            # Log-probabilities are kept in float16: one step of it at their size.
            assert gap <= (0.01 if key == "teacher.log_probs" else 1e-4), (name, key, gap)


@pytest.fixture(scope="module")
def checkpoint(reference: Run) -> Path:
    """A head trained on that cache."""
    reference.ok("train", None)
    return reference.folder / "checkpoint" / "mtp"


def test_three_ways_to_measure_agree_on_a_trained_head(reference: Run, checkpoint: Path, tmp_path: Path) -> None:
    """tools/compare_engines.py as a user calls it: three measurements, the target and the head row by row, nothing at fault."""
    sizes = ["--num-prompts", "4", "--num-traced", "2", "--max-new-tokens", "8", "--batch-size", "4", "--threads", "1"]
    words = ["--target", "local", f"path={reference.target}", "--checkpoint", str(checkpoint), *sizes, "--out", str(tmp_path / "parity.md")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "compare_engines.py"), *words], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = (tmp_path / "parity.md").read_text(encoding="utf-8")
    for part in ("estimate - vLLM 0.0000", "reference - vLLM 0.0000", "4 of 4 answers are the same", "| top_k log_probs |"):
        assert part in said, said
    assert "agree within their intervals. Every stage of target and head is within its tolerance" in said, said
    assert "--hf-overrides" in said and "| depth 2 logits |" in said


def test_evaluate_exports_measures_and_says_how_to_serve(reference: Run, checkpoint: Path) -> None:
    """A head, and prompt lookup beside it, in one report: counts, plain decoding, the estimate, and every flag of the server."""
    assert checkpoint.is_dir()
    reference.ok("evaluate")
    reference.ok("evaluate", "vllm", "decoding=prompt_lookup", "ways.greedy.plain=false")
    report = json.loads((reference.folder / "report" / "report.json").read_text(encoding="utf-8"))["data"]
    assert [head["name"] for head in report["heads"]] == ["mtp", "prompt_lookup"]
    head, estimate, lookup = report["measurements"]
    assert [m["acceptance"]["measured_by"] for m in (head, estimate, lookup)] == ["vllm", "estimate", "vllm"]
    assert [m["acceptance"]["decoding"] for m in (head, lookup)] == ["chain", "prompt_lookup"]
    assert head["plain"]["num_tokens"] == sum(len(prompt["token_ids"]) for prompt in head["acceptance"]["prompts"])
    counts = [[(p["num_drafts"], p["num_accepted_per_position"]) for p in m["acceptance"]["prompts"]] for m in (head, estimate)]
    assert counts[0] == counts[1] and len(counts[0]) == 20
    notes = head["acceptance"]["notes"]
    assert notes["class"] == notes["draft_class"] == "MiMoMTP" and notes["attention"] and notes["version"].startswith("vllm ")
    assert notes["flags"]["speculative_config"]["draft_sample_method"] == "greedy"
    html, text = ((reference.folder / "report" / name).read_text(encoding="utf-8") for name in ("index.html", "report.md"))
    for flag in ("vllm serve", "--speculative-config", "--hf-overrides", "--dtype float32"):
        assert flag in notes["serve"] and flag in html and flag in text
    assert f"MiMoMTP (stock, no plugin), attention {', '.join(notes['attention'])}" in html
    assert '"num_speculative_tokens": 3' in notes["serve"] and '"draft_sample_method": "greedy"' in notes["serve"]
    assert "ngram" in lookup["acceptance"]["notes"]["serve"]
    assert not list((reference.folder / "report").rglob(".vllm-*"))
