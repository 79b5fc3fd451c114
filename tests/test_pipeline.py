"""The five stages through the command line on a tiny target: end to end, twice, on two processes, and killed midway."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.shell import Done, Shell

pytestmark = pytest.mark.timeout(900)  # several stages in each, on a machine that may be busy

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

    def __init__(self, folder: Path, target: Path, shell: Shell) -> None:
        self.folder, self.target, self.shell = folder, target, shell
        folder.mkdir(parents=True, exist_ok=True)
        self.prompts = folder.parent / "prompts.jsonl"
        words = ["red", "green", "blue", "one", "two", "three", "four", "five", "six", "seven"]
        rows = [{"prompt": f"{words[i % 10]} {words[(3 * i) % 10]} {i}?"} for i in range(20)]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def words(self, stage: str, *words: str) -> list[str]:
        settings = [*STAGE_SETTINGS[stage], "target=local", f"target.path={self.target}", "target.name=tiny", f"run={self.folder}"]
        if stage in ("regenerate", "precompute"):
            settings.append(f"prompt.source=[{self.prompts}]")
        if stage == "evaluate":
            settings.append(f"prompt_sets.project.source=[{self.prompts}]")
        return [*settings, *words]

    def __call__(self, stage: str, *words: str) -> Done:
        return self.shell.wait(self.shell.start(f"mtp_train.{stage}", self.words(stage, *words)))

    def ok(self, stage: str, *words: str) -> str:
        done = self(stage, *words)
        assert done.code == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    def refused(self, stage: str, *words: str) -> str:
        done = self(stage, *words)
        assert done.code == 2, (done.code, done.stderr[-3000:])
        assert "Traceback" not in done.stderr
        return done.stderr

    def killed(self, stage: str, where: str, number: int, *words: str) -> None:
        """Run a stage until the ``number``-th call of ``where``, and kill it there."""
        done = self.shell.wait(self.shell.start(f"mtp_train.{stage}", self.words(stage, *words), die=(where, number)))
        assert done.code == -signal.SIGKILL, (done.code, done.stderr[-3000:])

    def two_ranks(self, stage: str, *words: str) -> None:
        """Two processes with what torchrun tells them; whether torchrun itself starts them makes no difference to a stage."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        jobs = []
        for rank in ("0", "1"):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            jobs.append(self.shell.start(f"mtp_train.{stage}", self.words(stage, *words), **told, MASTER_PORT=port))
        for done in [self.shell.wait(job) for job in jobs]:
            assert done.code == 0, done.stderr[-3000:]

    def responses(self) -> dict[str, tuple[list[int], list[int]]]:
        rows = [json.loads(line) for file in (self.folder / "responses").glob("responses*.jsonl") for line in file.read_text().splitlines()]
        assert len({row["prompt_id"] for row in rows}) == len(rows), "a prompt is answered once"
        return {row["prompt_id"]: (row["token_ids"], row["loss_mask"]) for row in rows}

    def cache_bytes(self) -> dict[str, bytes]:
        """All that a reader reads; the commit, and with it the seal, is all in the manifest that may differ."""
        found = {file.name: file.read_bytes() for file in sorted((self.folder / "cache").glob("shard-*"))}
        return found | {
            "manifest.json": re.sub(rb'"(git_commit|seal)": [^,}]*', b"", (self.folder / "cache" / "manifest.json").read_bytes())
        }

    def weights(self, name: str = "mtp") -> bytes:
        return (self.folder / "checkpoint" / name / "head.safetensors").read_bytes()

    def report(self) -> dict[str, Any]:
        found = json.loads((self.folder / "report" / "report.json").read_text(encoding="utf-8"))["data"]
        assert isinstance(found, dict)
        return found

    def piece(self, name: str) -> dict[str, Any]:
        """A measurement without the time that it took."""
        found = json.loads((self.folder / "report" / "pieces" / "mtp" / f"{name}.json").read_text(encoding="utf-8"))["measurement"]
        return {"prompts": found["acceptance"]["prompts"], "identity": found["identity"], "notes": found["acceptance"]["notes"]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, shell: Shell) -> Run:
    """A run whose stages all ran once, with two heads."""
    run = Run(tmp_path_factory.mktemp("pipeline") / "run", tiny_llama, shell)
    run.ok("regenerate")
    run.ok("precompute")
    run.ok("train")
    run.ok("train", "head=eagle")
    run.ok("evaluate", "name=mtp")
    run.ok("evaluate", "name=eagle")
    run.ok("export", "name=mtp")
    return run


def test_the_report_holds_both_heads_and_the_identity(finished: Run) -> None:
    report = finished.report()
    assert [head["name"] for head in report["heads"]] == ["eagle", "mtp"] and not report["notes"]
    proofs = [m["identity"] for m in report["measurements"] if m["identity"] is not None]
    assert len(proofs) == 2
    for proof in proofs:
        assert proof["num_prompts"] == 20 and all(d["logit_gap"] <= 1e-4 for d in proof["differences"])
    page = (finished.folder / "report" / "index.html").read_text(encoding="utf-8")
    assert ">eagle<" in page and ">mtp<" in page
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_the_estimate_is_the_measured_count(finished: Run) -> None:
    """fp32, greedy: the walk over the cache counts what real decoding counts, prompt by prompt."""
    report = finished.report()
    for head in ("mtp", "eagle"):
        here = [m for m in report["measurements"] if m["head"] == head and m["acceptance"]["temperature"] == 0 and m["identity"] is None]
        measured, estimate = sorted(here, key=lambda m: m["acceptance"]["measured_by"] == "estimate")
        counts = [[(p["num_drafts"], p["num_accepted_per_position"]) for p in m["acceptance"]["prompts"]] for m in (measured, estimate)]
        assert counts[0] == counts[1] and sum(drafts for drafts, _ in counts[0]) > 20


def test_the_export_loads_back_to_the_trained_head(finished: Run) -> None:
    from mtp_train.exporter.hf import load_exported
    from mtp_train.exporter.proof import prove, read_probe

    served, checkpoint = finished.folder / "served" / "mtp-hf", finished.folder / "checkpoint" / "mtp"
    tensors = load_file(served / "model.safetensors")
    trained = load_file(checkpoint / "head.safetensors")
    assert sorted(t.numpy().tobytes() for t in tensors.values()) == sorted(t.numpy().tobytes() for t in trained.values())
    graph = load_exported(served, target_path=finished.target)
    assert prove(graph, tensors, read_probe(checkpoint), dtype="float32")["largest_difference"]["logits"] < 1e-5


def test_a_target_with_latent_attention_and_experts_goes_through_all_stages(tmp_path: Path, tiny_deepseek: Path, shell: Shell) -> None:
    """DeepSeek-V2: in fp32 its speculation writes what plain decoding writes, the estimate counts what decoding counts, and the
    export, run through transformers' eager layer, is the trained head."""
    run = Run(tmp_path / "run", tiny_deepseek, shell)
    run.ok("regenerate", "prompt.limit=12")
    run.ok("precompute")
    run.ok("train", "num_steps=4")
    run.ok("evaluate", "prompt_sets.project.limit=8", "name=mtp")
    run.ok("export", "name=mtp")
    report = run.report()
    (proof,) = [m["identity"] for m in report["measurements"] if m["identity"] is not None]
    assert proof["num_prompts"] == 8 and all(d["logit_gap"] <= 1e-4 for d in proof["differences"])
    greedy = [m["acceptance"] for m in report["measurements"] if m["acceptance"]["temperature"] == 0 and m["identity"] is None]
    counts = [[(p["num_drafts"], p["num_accepted_per_position"]) for p in acceptance["prompts"]] for acceptance in greedy]
    assert len(counts) == 2 and counts[0] == counts[1] and sum(drafts for drafts, _ in counts[0]) > 20
    proof = json.loads((run.folder / "served" / "mtp-hf" / "export.json").read_text(encoding="utf-8"))["proof"]
    assert proof["largest_difference"]["logits"] < 1e-5


def test_a_second_call_does_nothing_twice(finished: Run) -> None:
    """Not a file of the run is written again (but the locks), and the target's model is not even loaded."""
    calls = (("regenerate",), ("precompute",), ("train",), ("evaluate", "name=mtp"), ("export", "name=mtp"))
    for stage, *words in calls:  # whatever the tests before have done to the shared run
        finished.ok(stage, *words)
    stamps = {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in _files(finished.folder)}
    said = {}
    for stage, *words in calls:
        die = ("mtp_train.engine.hf_model:TargetModel.__init__", 1)  # a process that loads the model kills itself
        done = finished.shell.wait(finished.shell.start(f"mtp_train.{stage}", finished.words(stage, *words), die=die))
        assert done.code == 0, (stage, done.stderr[-3000:])
        said[stage] = done.stdout + done.stderr
    assert "20 of 20 answers are there already" in said["regenerate"]
    assert "0 tokens to read" in said["precompute"]
    assert "nothing left to do" in said["train"]
    for name in ("project.greedy", "project.greedy.estimate", "project.sampled", "project.sampled.estimate", "identity"):
        assert f"{name} is measured already" in said["evaluate"]
    assert "already there" in said["export"]
    assert len(stamps) > 40 and {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in _files(finished.folder)} == stamps


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_two_processes_of_one_stage_do_not_write_to_one_folder(finished: Run, tmp_path: Path, shell: Shell) -> None:
    """The second is refused, by the number of the first, and the first ends as if it had been alone."""
    run = Run(tmp_path / "run", finished.target, shell)
    wait = ("mtp_train.prompt.responses:ResponseWriter.write", 3)
    first = shell.start("mtp_train.regenerate", run.words("regenerate"), stop=wait)
    shell.until_stopped(first)
    assert f"found another process at it (process {first.pid} on " in run.refused("regenerate")
    os.kill(first.pid, signal.SIGCONT)
    assert shell.wait(first).code == 0
    assert run.responses() == finished.responses()


def test_sigterm_ends_a_stage_as_an_interrupt_does(finished: Run, tmp_path: Path, shell: Shell) -> None:
    run = Run(tmp_path / "run", finished.target, shell)
    job = shell.start("mtp_train.regenerate", run.words("regenerate"), stop=("mtp_train.prompt.responses:ResponseWriter.write", 3))
    shell.until_stopped(job)
    os.kill(job.pid, signal.SIGTERM)
    os.kill(job.pid, signal.SIGCONT)
    done = shell.wait(job)
    assert done.code == 143 and "Traceback" not in done.stderr
    assert done.stderr.endswith("\nmtp-train regenerate: ended by SIGTERM; the same command continues\n")
    assert "answers are there already" in run.ok("regenerate")


def test_a_signal_outside_of_trainings_steps_ends_it_with_its_status(finished: Run, shell: Shell) -> None:
    """While it starts, while it waits for a process that does not come, and while it writes the head; the same command continues."""
    words = finished.words("train", "name=told")
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for where, number, status, told in (
        ("mtp_train.trainer.objective:Objective.__init__", signal.SIGUSR1, 75, {}),
        ("accelerate.state:PartialState.__init__", signal.SIGUSR1, 75, rank),
        ("mtp_train.trainer.loop:Trainer.__init__", signal.SIGTERM, 143, {}),
        ("mtp_train.trainer.loop:Trainer._finish", signal.SIGUSR1, 75, {}),
    ):
        own = finished.words("train", "name=apart", "packs_per_step=2") if told else words
        job = shell.start("mtp_train.train", own, stop=(where, 1), **told)
        shell.until_stopped(job)
        if told:
            os.kill(job.pid, signal.SIGCONT)
            time.sleep(1)
        os.kill(job.pid, number)
        os.kill(job.pid, signal.SIGCONT)
        done = shell.wait(job)
        assert done.code == status and "Traceback" not in done.stderr, done.stderr[-3000:]
        said = f"stopped by {signal.Signals(number).name}, nothing was left to save; the same command continues\n"
        assert done.stderr.endswith("" if told else said), done.stderr[-3000:]
    noted = finished.folder / "checkpoint" / "told" / "interrupted.json"
    last = max(int(path.name.partition("-")[2]) for path in noted.parent.glob("step-*"))
    assert json.loads(noted.read_text(encoding="utf-8")) == {"signal": "SIGUSR1", "step": last, "exit_status": 75}
    finished.ok("train", "name=told")
    assert finished.weights("told") == finished.weights() and not noted.exists()


def test_two_calls_of_precompute_share_one_cache_and_another_is_refused(finished: Run, tmp_path: Path, shell: Shell) -> None:
    """The first is stopped in the middle of a shard; the second makes the rest, and takes over what the first, killed, was at."""
    run = Run(tmp_path / "run", finished.target, shell)
    shutil.copytree(finished.folder / "responses", run.folder / "responses")
    first = shell.start("mtp_train.precompute", run.words("precompute"), stop=("mtp_train.cache.shard:ShardBuilder.add", 5))
    shell.until_stopped(first)
    claims = sorted(path.name for path in (run.folder / "cache").glob(".*.claim.*"))
    assert len(claims) == 1
    assert "shard_tokens 128, expected 64" in run.refused("precompute", "shard_tokens=64")
    second = shell.start("mtp_train.precompute", run.words("precompute"))
    while len(list((run.folder / "cache").glob("shard-*.json"))) < 8:
        time.sleep(0.05)
    assert not (run.folder / "cache" / "manifest.json").exists()
    os.kill(first.pid, signal.SIGKILL)
    assert shell.wait(first).code == -signal.SIGKILL and shell.wait(second).code == 0
    assert run.cache_bytes() == finished.cache_bytes()
    assert not list((run.folder / "cache").glob(".*"))


def test_training_beside_precompute_or_from_a_url_gives_the_same_head(finished: Run, tmp_path: Path, shell: Shell) -> None:
    """Offline, streamed, hybrid, fetched: the same batches, and so the same bits."""
    words = ["validation.fraction=0", "shuffle_shards=2", "max_prefetch=1", "tokens_per_pack=128", "checkpoint.every=4"]
    finished.ok("train", *words, "name=offline")
    said = finished.ok("train", *words, "name=url", f"cache=local://{finished.folder}/cache", "fetch.max_bytes=1MB")
    assert "are in use at once, of" in said and finished.weights("url") == finished.weights("offline")
    for mode, room in (("stream", ["max_bytes=2MB"]), ("hybrid", [])):
        run = Run(tmp_path / mode / "run", finished.target, shell)
        shutil.copytree(finished.folder / "responses", run.folder / "responses")
        assert "set it to 0" in run.refused("train", f"mode={mode}", f"cache={finished.folder}/cache")
        training = shell.start("mtp_train.train", run.words("train", *words, f"mode={mode}"))
        making = shell.start("mtp_train.precompute", run.words("precompute", f"mode={mode}", *room))
        for job in (training, making):
            done = shell.wait(job)
            assert done.code == 0, done.stderr[-3000:]
        assert run.weights() == finished.weights("offline")
        assert (run.folder / "cache" / "manifest.json").exists() == (mode == "hybrid")
    assert run.cache_bytes() == finished.cache_bytes()
    assert "expected no finished cache" in run.refused("precompute", "mode=stream", "max_bytes=2MB")
    refused = finished.refused("train", "cache=s3://bucket/cache", "mode=hybrid", "name=none")
    assert "expected offline with a cache behind a URL" in refused
    words = [f"cache=local://{finished.folder}/cache", "fetch.max_bytes=60kB", "validation.fraction=0", "name=none"]
    assert "shuffle_shards" in finished.refused("train", *words)


def test_a_mixture_of_two_caches_trains(finished: Run, tmp_path: Path) -> None:
    lengths = sorted(len(ids) for ids, _ in finished.responses().values())
    finished.ok("precompute", f"max_length_tokens={lengths[10]}", f"out={tmp_path}/short")
    mixture = f"mixture={{all: {{cache: '{finished.folder}/cache', share: 1}}, short: {{cache: '{tmp_path}/short', share: 3.0}}}}"
    said = finished.ok("train", mixture, "validation.fraction=0", "name=mixed")
    assert "samples of" in said and finished.weights("mixed") != finished.weights("mtp")
    head = json.loads((finished.folder / "checkpoint" / "mixed" / "head.json").read_text(encoding="utf-8"))
    assert head["made_by"]["settings"]["mixture"]["short"]["share"] == 3.0
    assert "mixture.short.share: begun with" in finished.refused(
        "train", mixture.replace("3.0", "2.0"), "validation.fraction=0", "name=mixed"
    )
    finished.ok("precompute", "top_k=4", f"out={tmp_path}/other")
    message = finished.refused("train", mixture.replace("/short", "/other"), "name=none")
    assert "mixture.short: expected a cache like that of mixture.all" in message and "top_k: expected 8, found 4" in message
    assert "share" in finished.refused("train", mixture.replace(", share: 3.0", ""), "name=none")


@pytest.mark.slow
def test_torchrun_starts_a_stage(finished: Run, tmp_path: Path, shell: Shell) -> None:
    """The launcher itself, with Pythons of its own; the forked pair of the next test says the same of both stages."""
    run = Run(tmp_path / "run", finished.target, shell)
    words = ["--standalone", "--nproc-per-node", "2", "-m", "mtp_train.regenerate", *run.words("regenerate")]
    done = shell.wait(shell.start("torch.distributed.run", words))
    assert done.code == 0, done.stderr[-3000:]
    assert (run.folder / "responses" / "responses-1.jsonl").stat().st_size
    assert f"answers to write (this process's; 2 share {len(finished.responses())})" in done.stderr
    assert run.responses() == finished.responses()


def test_two_processes_write_what_one_writes(finished: Run, tmp_path: Path, shell: Shell) -> None:
    run = Run(tmp_path / "run", finished.target, shell)
    run.two_ranks("regenerate")
    assert all((run.folder / "responses" / name).stat().st_size for name in ("responses.jsonl", "responses-1.jsonl"))
    run.two_ranks("precompute")
    assert run.responses() == finished.responses()
    assert run.cache_bytes() == finished.cache_bytes()


def test_killed_in_every_stage_it_ends_the_same(finished: Run, tmp_path: Path, shell: Shell) -> None:
    run = Run(tmp_path / "run", finished.target, shell)
    run.killed("regenerate", "mtp_train.prompt.responses:ResponseWriter.write", 8)
    assert 0 < len(run.responses()) < 20
    run.refused("precompute")
    with open(run.folder / "responses" / "responses.jsonl", "ab") as stream:
        stream.write(b'{"prompt_id": "half a li')
    run.ok("regenerate")
    assert run.responses() == finished.responses()

    run.killed("precompute", "mtp_train.cache.writer:CacheWriter.write_shard", 2)
    assert len(list((run.folder / "cache").glob("shard-*.safetensors"))) == 1
    assert "found 1 of 9 shards; run the same precompute again" in run.refused("train")
    run.ok("precompute")
    assert run.cache_bytes() == finished.cache_bytes()

    run.killed("train", "mtp_train.trainer.saving:Saver.save", 3)
    assert not (run.folder / "checkpoint" / "mtp" / "head.json").exists()
    assert "run train" in run.refused("evaluate")
    assert "continuing after step 4" in run.ok("train")
    assert run.weights() == finished.weights()

    run.killed("evaluate", "mtp_train.engine.measure:Pieces.get", 4)
    assert not (run.folder / "report" / "index.html").exists()
    again = run.ok("evaluate")
    for name in ("project.greedy", "project.greedy.estimate", "project.sampled", "project.sampled.estimate", "identity"):
        assert (f"{name} is measured already" in again) == (name not in ("project.sampled.estimate", "identity"))
        assert run.piece(name) == finished.piece(name)


def test_what_comes_before_is_missing_and_named(finished: Run, tmp_path: Path, shell: Shell) -> None:
    empty = Run(tmp_path / "run", finished.target, shell)
    for stage, before in (("precompute", "regenerate"), ("train", "precompute"), ("evaluate", "train"), ("export", "train")):
        assert f"run {before}" in empty.refused(stage)
    assert not [path for path in empty.folder.rglob("*") if path.is_file()], "a refused stage writes nothing"


def test_a_head_that_is_not_there_is_told_beside_those_that_are(finished: Run) -> None:
    message = finished.refused("export", "name=mpt")
    assert "found no head.json; did you mean mtp? heads there: " in message and "run train first" in message


def test_another_target_and_another_template_are_refused_with_both_values(
    finished: Run, tmp_path: Path, tiny_llama_tied: Path, shell: Shell
) -> None:
    copy = tmp_path / "another_template"
    shutil.copytree(finished.target, copy)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").replace("+ '\n' }}{% endfor %}", "+ '\n\n' }}{% endfor %}"), encoding="utf-8")
    mine = json.loads((finished.folder / "cache" / "manifest.json").read_text(encoding="utf-8"))["identity"]
    for target, key in ((tiny_llama_tied, "target_fingerprint"), (copy, "template_hash")):
        other = Run(finished.folder, target, shell)
        for stage in ("regenerate", "precompute", "train", "evaluate", "export"):
            message = other.refused(stage)
            assert mine[key][:12] in message, (stage, message)
            found = set(re.findall(r"\b[0-9a-f]{12,64}\b", message))
            assert len({value[:12] for value in found}) > 1, f"{stage}: both values: {message}"
            assert re.search(r"use |choose |regenerate |train ", message), f"{stage}: the remedy: {message}"
    # A head beside a report of its own, so that it is the head itself that is refused.
    for target in (tiny_llama_tied, copy):
        alone = Run(finished.folder, target, shell)
        assert "expected a head of this target" in alone.refused("evaluate", f"out={tmp_path}/report")


def test_other_settings_are_refused_and_leave_the_record_of_the_run_that_stands(finished: Run) -> None:
    records = {path: path.read_bytes() for path in finished.folder.rglob("settings.*.json")}
    assert len(records) >= 5
    assert "max_new_tokens" in finished.refused("regenerate", "sampling.max_new_tokens=5")
    assert "top_k: expected 4, found 8" in finished.refused("precompute", "top_k=4")
    assert "lr" in finished.refused("train", "optimizer.lr=0.5")
    # What auto would come to on another machine.
    assert "engine.dtype=float32 continues it" in finished.refused("regenerate", "engine.dtype=bfloat16")
    assert "dtype: expected 'bfloat16', found 'float32'" in finished.refused("precompute", "engine.dtype=bfloat16")
    trained = json.loads((finished.folder / "checkpoint/mtp/settings.train.json").read_text())["settings"]["precision"]
    other = {"bf16": "fp32", "fp32": "bf16"}[trained]
    assert f"now '{other}'" in finished.refused("train", f"precision={other}")
    assert "num_answers" in finished.refused("regenerate", "num_answers=0")
    assert "no_such_set" in finished.refused("evaluate", "ways.greedy.prompt_sets=[no_such_set]")
    assert {path: path.read_bytes() for path in records} == records
    unknown = finished("train", "no_such_key=1")
    assert unknown.code != 0 and "no_such_key" in unknown.stderr and "Traceback" not in unknown.stderr


def test_answers_to_other_prompts_are_not_kept(finished: Run, tmp_path: Path, shell: Shell) -> None:
    """Rows are known by their number where a file gives no ids: an edited file must not keep the answers of the old one."""
    run = Run(tmp_path / "run", finished.target, shell)
    run.ok("regenerate", "prompt.limit=3")
    run.prompts.write_text(run.prompts.read_text(encoding="utf-8").replace("red red 0?", "what else?"), encoding="utf-8")
    message = run.refused("regenerate", "prompt.limit=3")
    assert "what else?" in message and "red red 0?" in message and "use another run folder" in message


def test_another_source_is_refused_and_a_larger_limit_goes_on(finished: Run, tmp_path: Path, shell: Shell) -> None:
    run = Run(tmp_path / "run", finished.target, shell)
    run.ok("regenerate", "prompt.limit=3")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "one?"}\n', encoding="utf-8")
    message = run.refused("regenerate", f"prompt.source=[{other}]")
    assert "found 3 others, the first to 'prompts/row-1' of prompts" in message and f"prompt.source=[{other}]" not in message
    assert len(run.responses()) == 3
    said = run.ok("regenerate", f"prompt.source=[{run.prompts},{other}]", "prompt.limit=null")
    assert "3 of 21 answers are there already" in said
    command = f"next: python -m mtp_train.precompute target=local target.path={run.target} target.name=tiny run={run.folder}"
    assert said.rstrip().endswith(command) and len(run.responses()) == 21


def test_where_no_prompt_can_be_answered_the_reason_is_said(finished: Run, tmp_path: Path, shell: Shell) -> None:
    run = Run(tmp_path / "run", finished.target, shell)
    message = run.refused("regenerate", "max_length_tokens=20")
    assert "expected prompts that can be answered, found none: 0 of 20 rows kept; skipped 20 prompt_too_long" in message
    assert "run regenerate again" in run.refused("precompute"), "nothing is marked as finished"


def test_a_training_of_constant_rate_can_be_lengthened(finished: Run, tmp_path: Path) -> None:
    words = ["schedule.kind=constant", f"out={tmp_path}/head", "checkpoint.every=null", "validation.fraction=0"]
    finished.ok("train", *words, "num_steps=2")
    said = finished.ok("train", *words, "num_steps=3")
    assert "continuing after step 2" in said
    assert said.rstrip().endswith(f" run={finished.folder} checkpoint={tmp_path}/head name=mtp") and "mtp_train.evaluate" in said
    cosine = finished.refused("train", "num_steps=9")
    assert "num_steps: begun with 8, now 9" in cosine


def test_what_was_begun_otherwise_is_told_before_the_target_is_opened(finished: Run) -> None:
    """Which takes long: here there is none to open."""
    nowhere = "target.path=/nowhere"
    assert "tokens_per_pack: begun with 256, now 128" in finished.refused("train", nowhere, "tokens_per_pack=128")
    assert "codec: expected one of ['bf16', 'float32', 'fp8', 'int8'], found 'int4'" in finished.refused(
        "precompute", nowhere, "codec=int4"
    )
    said = finished.refused("precompute", nowhere, "target_layer_ids=[0]")
    assert "target_layer_ids" in said and "/nowhere" not in said
    assert "top_k" in finished.refused("precompute", nowhere, "top_k=4")


def test_a_name_cannot_leave_the_run(finished: Run) -> None:
    assert "it becomes a folder" in finished.refused("train", "name=../../escaped")
    for stage in ("evaluate", "export"):
        assert "it becomes a folder" in finished.refused(stage, "name=../../escaped", f"checkpoint={finished.folder}/checkpoint/mtp")
    assert not (finished.folder.parent / "escaped").exists() and not (finished.folder / "escaped").exists()


def test_schemes_come_into_one_report_beside_the_chain(finished: Run, tmp_path: Path) -> None:
    """A tree of the head and a scheme without one, through the command line: the same texts, each under its own name."""
    words = [word for word in finished.words("evaluate") if "num_speculative_tokens" not in word]
    out = [f"out={tmp_path}/report", "ways.sampled.estimate=false"]
    schemes = (
        ["name=mtp"],
        ["name=mtp", "decoding=dynamic_tree", "decoding.max_depth=3", "decoding.width=2", "decoding.max_nodes=5"],
        ["decoding=prompt_lookup"],
    )
    for scheme in schemes:
        done = finished.shell.wait(finished.shell.start("mtp_train.evaluate", [*words, *out, *scheme]))
        assert done.code == 0, done.stderr[-3000:]
    assert "draft_sampling is greedy (q one-hot), not probabilistic" in done.stderr
    data = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))["data"]
    assert [head["name"] for head in data["heads"]] == ["mtp", "prompt_lookup"]
    texts: dict[tuple[str, str], dict[str, list[int]]] = {}
    for item in data["measurements"]:
        acceptance = item["acceptance"]
        if item["identity"] is not None:
            assert item["identity"]["differences"] == [] and item["identity"]["num_prompts"] == 20
        elif acceptance["temperature"] == 0 and acceptance["measured_by"] == "hf":
            texts[item["head"], acceptance["decoding"]] = {prompt["prompt_id"]: prompt["token_ids"] for prompt in acceptance["prompts"]}
    assert set(texts) == {("mtp", "chain"), ("mtp", "dynamic_tree"), ("prompt_lookup", "prompt_lookup")}
    assert len({json.dumps(text, sort_keys=True) for text in texts.values()}) == 1
    page = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "tree (dynamic\\_tree), depth 3, 5 nodes less mtp, chain, K = 5" in page


def test_a_repeated_evaluate_says_what_it_measures_keeps_and_replaces(finished: Run, tmp_path: Path) -> None:
    """A chain and a tree of 10 tokens, then the chain of 6 alone, greedy only, on three of the same prompts."""
    mine = tmp_path / "held_out <b>.jsonl"
    mine.write_text("".join(finished.prompts.read_text(encoding="utf-8").splitlines(keepends=True)[:12]), encoding="utf-8")
    words = [
        f"out={tmp_path}/report",
        f"prompt_sets.project.source=['{mine}']",
        "ways.sampled.estimate=false",
        "ways.greedy.estimate=false",
    ]
    tree = ["decoding=dynamic_tree", "decoding.max_depth=3", "decoding.width=2", "decoding.max_nodes=5"]
    plain = [word for word in finished.words("evaluate") if "num_speculative_tokens" not in word]
    said = finished.ok("evaluate", *words)
    assert (
        "evaluate: to measure: project: 12 prompts, at most 10 tokens each (greedy and plain, sampled); project: 12 prompts, at most 64 "
        "tokens each (identity and plain). 0 of 3 are measured already, the others decode 1,896 tokens at most; prompt_sets.NAME.limit="
    ) in said
    assert "held_out <b>.jsonl (12 prompts, at most 10 new tokens each)" in " ".join(said.split())
    report = tmp_path / "report" / "report.md"
    assert "prompts of held\\_out &lt;b&gt;.jsonl: 12 prompts" in report.read_text(encoding="utf-8")
    assert "the project's own" not in report.read_text(encoding="utf-8")
    done = finished.shell.wait(finished.shell.start("mtp_train.evaluate", [*plain, *words, *tree]))
    assert done.code == 0 and "paired over the same prompts" in report.read_text(encoding="utf-8"), done.stderr[-3000:]
    shorter = ["max_new_tokens=6", "ways.sampled.prompt_sets=[]"]
    said = finished.ok("evaluate", *words, *shorter)
    assert "1 of 2 are measured already, the others decode 144 tokens at most" in said
    page = report.read_text(encoding="utf-8")
    for text in (
        "left out, since they were not measured alike: max\\_new\\_tokens 10 and 6.",
        "before and now: max\\_new\\_tokens 10 and 6.",
        "is of an earlier evaluate, with max\\_new\\_tokens 10, and was not measured again.",
    ):
        assert text in page
        assert text.replace("\\", "") in " ".join(said.split()), "on the terminal as well"
    assert "sampled at temperature 1" in page, "its piece is on disk"


def test_eagle3_goes_through_every_stage(finished: Run, tmp_path: Path, shell: Shell) -> None:
    """A cache with taps serves both heads: the one that reads them, and the one that does not, whose weights stay the same."""
    run = Run(tmp_path / "run", finished.target, shell)
    shutil.copytree(finished.folder / "responses", run.folder / "responses")
    words = ["head=eagle3", "head.target_layer_ids=[0,1]", "head.draft_vocab_size=64", "draft_steps=2", "depth_weights=[1.0,0.5]"]
    assert "target_layer_ids=[0,1], or choose" in run.refused("train", *words, "noise_scale=0", f"cache={finished.folder}/cache")
    run.ok("precompute", "target_layer_ids=[1,0]")
    assert "set noise_scale=0" in run.refused("train", *words)
    run.ok("train")
    assert run.weights() == finished.weights()
    assert "draft vocabulary: 64 of 320 tokens" in run.ok("train", *words, "noise_scale=0")
    head = json.loads((run.folder / "checkpoint" / "eagle3" / "head.json").read_text(encoding="utf-8"))
    assert head["settings"]["target_layer_ids"] == [0, 1] and len(head["draft_vocabulary_sha256"]) == 64
    run.ok("evaluate", "name=eagle3")
    report = run.report()
    (proof,) = [m["identity"] for m in report["measurements"] if m["identity"] is not None]
    assert proof["num_prompts"] == 20 and all(d["logit_gap"] <= 1e-4 for d in proof["differences"])
    here = [m for m in report["measurements"] if m["acceptance"]["temperature"] == 0 and m["identity"] is None]
    measured, estimated = sorted(here, key=lambda m: m["acceptance"]["measured_by"] == "estimate")
    counts = [[(p["num_drafts"], p["num_accepted_per_position"]) for p in m["acceptance"]["prompts"]] for m in (measured, estimated)]
    assert counts[0] == counts[1] and sum(drafts for drafts, _ in counts[0]) > 20
    run.ok("export", "name=eagle3")
    run.ok("export", "name=eagle3", "exporter=vllm", "exporter.dtype=float32", "exporter.allow_plugin=false")
    for exporter in ("hf", "vllm"):
        served = load_file(run.folder / "served" / f"eagle3-{exporter}" / "model.safetensors")
        assert served["d2t"].shape == (64,) and served["lm_head.weight"].shape == (64, 64)
    run.ok("train", *words, "noise_scale=0", "packs_per_step=2", "name=one")
    run.two_ranks("train", *words, "noise_scale=0", "packs_per_step=2", "name=two")
    one, two = (load_file(run.folder / "checkpoint" / name / "head.safetensors") for name in ("one", "two"))
    assert one["draft_ids"].equal(two["draft_ids"]), "each process counts its share"
    assert all(float((tensor - two[name]).abs().max()) <= 2e-4 for name, tensor in one.items())


def test_medusa_and_a_draft_model_go_through_the_same_stages(finished: Run, tmp_path: Path, shell: Shell) -> None:
    """From one cache, into one report; each says what it must be trained with."""
    run = Run(tmp_path / "run", finished.target, shell)
    shutil.copytree(finished.folder / "cache", run.folder / "cache")
    medusa = ["head=medusa", "head.num_heads=3"]
    assert "set draft_steps=3" in run.refused("train", *medusa)
    run.ok("train", *medusa, "draft_steps=3")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    draft = ["head=draft_model", *(f"head.config.{key}={value}" for key, value in sizes.items())]
    assert "set noise_scale=0" in run.refused("train", *draft, "losses.hidden_l1=0")
    draft += ["noise_scale=0"]
    assert "set losses.hidden_l1=0 +losses.forward_kl=1.0" in run.refused("train", *draft)
    draft += ["losses.hidden_l1=0", "losses.topk_kl=1.0", "packs_per_step=2"]
    run.ok("train", *draft)
    run.two_ranks("train", *draft, "name=two")
    one, two = (load_file(run.folder / "checkpoint" / name / "head.safetensors") for name in ("draft_model", "two"))
    assert all(float((tensor - two[name]).abs().max()) <= 2e-4 for name, tensor in one.items())
    for name, words in (("medusa", [*medusa, "draft_steps=3"]), ("draft_model", draft)):
        said = run.ok("train", *words, "num_steps=1", f"name={name}_again", f"start_from={run.folder}/checkpoint/{name}")
        assert f"starts from {run.folder}/checkpoint/{name} (mtp_train)" in said and "start from data" not in said
        run.ok("evaluate", f"name={name}")
        report = run.report()
        assert all(m["identity"]["differences"] == [] for m in report["measurements"] if m["identity"] is not None)
        here = [m for m in report["measurements"] if m["head"] == name and m["identity"] is None and not m["acceptance"]["temperature"]]
        measured, estimated = sorted(here, key=lambda m: m["acceptance"]["measured_by"] == "estimate")
        counts = [[(p["num_drafts"], p["num_accepted_per_position"]) for p in m["acceptance"]["prompts"]] for m in (measured, estimated)]
        assert counts[0] == counts[1] and sum(drafts for drafts, _ in counts[0]) > 20
        run.ok("export", f"name={name}")
        run.ok("export", f"name={name}", "exporter=vllm", "exporter.dtype=float32")
    assert [head["name"] for head in run.report()["heads"]] == ["draft_model", "medusa"]


def test_the_blocks_of_a_target_are_trained_on_and_go_back_into_it(
    tmp_path: Path, with_block: Callable[..., Path], tiny_llama: Path, shell: Shell
) -> None:
    """Two blocks, one per depth: read from the target, drafting as estimated, trained, stitched back, and read again; a training is
    not continued from other weights than it began with."""
    target = with_block(tiny_llama, layout="deepseek", num_blocks=2)
    run = Run(tmp_path / "run", target, shell)
    run.ok("regenerate", "prompt.limit=12")
    run.ok("precompute")
    words = ["start_from=target", "head.num_blocks=2"]
    assert "draft_steps: expected at least head.num_blocks=2" in run.refused("train", *words, "draft_steps=1")
    assert "set head.num_blocks=2" in run.refused("train", "start_from=target", "draft_steps=2")
    words.append("draft_steps=2")
    assert "starts from" in run.ok("train", *words, "num_steps=2")
    assert "started_from" in run.refused("train", *words[1:], "num_steps=2")
    made_by = json.loads((run.folder / "checkpoint" / "mtp" / "head.json").read_text(encoding="utf-8"))["made_by"]
    assert made_by["started_from"]["layout"] == "deepseek_mtp"
    run.ok("evaluate", "prompt_sets.project.limit=8", "name=mtp")
    report = run.report()
    greedy = [m["acceptance"] for m in report["measurements"] if m["acceptance"]["temperature"] == 0 and m["identity"] is None]
    counts = [[(p["num_drafts"], p["num_accepted_per_position"]) for p in acceptance["prompts"]] for acceptance in greedy]
    assert len(counts) == 2 and counts[0] == counts[1] and sum(drafts for drafts, _ in counts[0]) > 20
    assert "vllm serve" in run.ok("export", "name=mtp", "exporter=stitch")
    stitched = Run(tmp_path / "again", run.folder / "served" / "mtp-stitch", shell)
    for folder in ("responses", "cache"):
        shutil.copytree(run.folder / folder, stitched.folder / folder)
    assert "target_fingerprint" in stitched.refused("train", *words), "it is another target now"
    run.ok("export", "name=mtp", "exporter=hf")


def test_own_answers_that_are_too_long_are_counted_beside_the_cache(finished: Run, tmp_path: Path) -> None:
    lengths = {name: len(ids) for name, (ids, _) in finished.responses().items()}
    limit = sorted(lengths.values())[len(lengths) // 2]
    too_long = sorted(name for name, length in lengths.items() if length > limit)
    assert 0 < len(too_long) < len(lengths)
    said = finished.ok("precompute", f"max_length_tokens={limit}", f"out={tmp_path}/cache")
    skips = json.loads((tmp_path / "cache" / "skips.json").read_text(encoding="utf-8"))
    assert (skips["num_rows"], skips["num_kept"], skips["num_skipped"]) == (len(lengths), len(lengths) - len(too_long), len(too_long))
    (reason,) = skips["skipped"]
    assert reason == "too_long" and skips["skipped"][reason]["count"] == len(too_long)
    assert skips["skipped"][reason]["examples"][0]["row"] in too_long
    assert f"skipped {len(too_long)} too_long" in said
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text(encoding="utf-8"))
    assert sorted(name for shard in manifest["shards"] for name in shard["sample_ids"]) == sorted(lengths.keys() - set(too_long))
    assert "max_length_tokens=5" in finished.refused("precompute", "max_length_tokens=5", f"out={tmp_path}/none")
    assert not (tmp_path / "none").exists()


def test_the_estimate_s_head_is_where_the_engine_is(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's ``meta`` device, which every machine has and no default chooses. A head cannot be made there, so that it is
    made on the CPU, from the shared weights that it would be given."""
    from omegaconf import OmegaConf

    from mtp_train import evaluate
    from mtp_train.engine.hf import HfEngine
    from mtp_train.opening import head_loader, open_target
    from mtp_train.stage import load_word
    from mtp_train.target.weights import read_shared

    named = {"name": "tiny", "kind": "path", "path": str(finished.target), "trust_remote_code": False}
    target = open_target(OmegaConf.create(named))
    given = []

    def loader(target: Any) -> Any:
        def load(path: Path, shared: Any) -> Any:
            given.append(shared)
            return head_loader(target)(path, read_shared(target.path))

        return load

    monkeypatch.setattr(evaluate, "head_loader", loader)
    settings = {key: value for key, value in load_word("engine", "hf").items() if key != "_target_"} | {"device": "meta"}
    engine = HfEngine(**settings, target_path=target.path, trust_remote_code=False, load_head=None)
    head = evaluate._loader(target, engine)(finished.folder / "checkpoint" / "mtp")
    assert {parameter.device.type for parameter in head.parameters()} == {"meta"}
    assert (given[0].embedding_VD.device.type, given[0].lm_head_VD.device.type) == ("meta", "meta")


def test_costs_and_the_failure_mode_lead_to_advice(finished: Run, tmp_path: Path) -> None:
    """A step's costs are timed, the report takes them up with temperature 1.5 beside, and advise answers from both."""
    out, shell = tmp_path / "run" / "report", finished.shell
    target = ["--target", "local", f"path={finished.target}", "name=tiny", "--run", str(finished.folder), "--out", str(out)]
    cells = [
        "--batch-sizes",
        "1",
        "4",
        "--num-tokens",
        "1",
        "2",
        "4",
        "--draft-lengths",
        "1",
        "3",
        "--context-tokens",
        "16",
        "--num-repeats",
        "3",
    ]
    timed = shell.wait(shell.start("tools.measure_costs", ["--name", "mtp", *target, *cells, "dtype=float32"]))
    assert timed.code == 0, timed.stderr[-3000:]
    assert f"costs: {out}/costs/hf.mtp.json" in timed.stdout and "a draft step" in timed.stdout
    assert "Milliseconds: hf (" in timed.stdout
    refused = shell.wait(shell.start("tools.measure_costs", ["--name", "mtp", *target, "no_such=1"]))
    assert refused.code == 2 and "no_such=1" in refused.stderr and "Traceback" not in refused.stderr

    said = finished.ok("evaluate", f"out={out}", "failure_mode=[project]", "identity.num_prompts=0", "batch_size=4", "engine.batch_size=4")
    assert f" run={finished.folder} name=mtp exporter=hf\n" in said and "next: python -m mtp_train.export " in said
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "sampled at temperature 1.5, drafts probabilistic" in page
    assert "Where drafts stop being taken" in page and "greedy drafts, temperature 1.5 less 0" in page
    assert "What a step costs, and the best K" in page and "Speed-up by draft length, 4 sequences" in page

    words = [f"runs=[{out.parent}]", f"out={tmp_path}/advice", "workload.temperature=1.2", "workload.concurrency=3"]
    missing = shell.wait(shell.start("mtp_train.advise", words))
    assert missing.code == 2 and f"run python tools/measure_costs.py --run {out.parent} --name mtp --engine vllm" in missing.stderr
    done = shell.wait(shell.start("mtp_train.advise", [*words, "costs=hf"]))
    assert done.code == 0, done.stderr[-3000:]
    advice = json.loads((tmp_path / "advice" / "advice.json").read_text(encoding="utf-8"))
    assert {option["draft_sampling"] for option in advice["options"]} == {"greedy", "probabilistic"}
    assert {option["sequences"] for option in advice["options"]} == {3} and advice["answer"] in " ".join(done.stdout.split())
    assert "## When to fall back" in (tmp_path / "advice" / "advice.md").read_text(encoding="utf-8")


def test_a_run_is_of_one_target(finished: Run, tiny_llama_tied: Path, tmp_path: Path) -> None:
    """A command that forgot which one is refused before it works, with the words that make it right; elsewhere any target goes."""
    other = [f"target.path={tiny_llama_tied}", "target.name=other"]
    before = sorted(finished.folder.rglob("*"))
    for stage, words in {"evaluate": ["decoding=prompt_lookup"], "precompute": ["answers=given"], "train": ["name=new"]}.items():
        said = finished.refused(stage, *words, *other)
        assert f"target: expected that of {finished.folder}, tiny (responses/meta.json: target_fingerprint" in said
        assert "found other (target_fingerprint" in said
        assert f"add target=local target.path={finished.target} target.name=tiny, or choose another run" in said
    asked = ["--run", str(finished.folder), "--name", "none", "--target", "local", f"path={tiny_llama_tied}", "name=other"]
    done = finished.shell.wait(finished.shell.start("tools.measure_costs", asked))
    assert done.code == 2 and f"add --target local path={finished.target} name=tiny" in done.stderr, done.stderr
    assert sorted(finished.folder.rglob("*")) == before
    finished.ok("regenerate", *other, "prompt.limit=1", f"out={tmp_path}/responses")


def test_the_certificate_is_of_the_run_s_own_target(finished: Run, tmp_path: Path) -> None:
    """The tool takes a target as ``measure_costs`` does, and refuses a head that it could not use before it draws anything."""
    out, head = tmp_path / "report", finished.folder / "checkpoint" / "mtp"
    target = ["--target", "local", f"path={finished.target}", "name=tiny"]

    def certify(*words: str, checkpoint: Path = head) -> Done:
        given = ["--out", str(out), "--num-prompts", "2", "--max-new-tokens", "6", "--checkpoint", str(checkpoint), *words]
        return finished.shell.wait(finished.shell.start("tools.certify", given))

    for said, done in {
        "expected a head (head.json and head.safetensors), found no head.json": certify(*target, checkpoint=tmp_path / "none"),
        "target local: path: expected a value, found none": certify("--target", "local"),
        "expected one that each head can draft with, found ['medusa_tree', 'lookahead']": certify(
            *target, "--schemes", "medusa_tree", "lookahead"
        ),
        "target.path: expected a model folder": certify("--target", "local", f"path={tmp_path}/none"),
    }.items():
        assert done.code == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert "sampled case" not in done.stderr and not out.exists()
    done = certify(*target, "--temperatures", "--schemes", "chain", "prompt_lookup")
    assert done.code == 0, done.stderr[-3000:]
    certificate = json.loads((out / "certificate.json").read_text(encoding="utf-8"))["certificate"]
    config = json.loads((head / "head.json").read_text(encoding="utf-8"))
    assert certificate["target_fingerprint"] == config["target"]["target_fingerprint"]
    assert [
        (case["head"], case["weights_sha256"], case["decoding"], case["identity"]["num_prompts"]) for case in certificate["greedy"]
    ] == [
        ("mtp", config["weights_sha256"], "chain", 2),
        ("none", None, "prompt_lookup", 2),
    ]


def test_an_interrupted_certificate_takes_over_no_cases_of_another_head(finished: Run, tmp_path: Path, shell: Shell) -> None:
    """The head is trained again under its name, as another one, before the certificate goes on."""
    out, head = tmp_path / "report", tmp_path / "checkpoint" / "mtp"
    words = ["--out", str(out), "--checkpoint", str(head), "--target", "local", f"path={finished.target}", "name=tiny"]
    words += ["--temperatures", "--num-prompts", "2", "--max-new-tokens", "6", "--schemes", "chain", "prompt_lookup"]
    shutil.copytree(finished.folder / "checkpoint" / "mtp", head)
    killed = shell.wait(shell.start("tools.certify", words, die=("mtp_train.engine.hf:HfEngine.speculate", 2)))
    assert killed.code == -signal.SIGKILL and (out / "certificate.unfinished.json").is_file(), killed.stderr[-3000:]
    shutil.rmtree(head)
    shutil.copytree(finished.folder / "checkpoint" / "eagle", head)
    done = shell.wait(shell.start("tools.certify", words))
    assert done.code == 0, done.stderr[-3000:]
    assert "certificate: 1 cases of other heads are made again" in done.stderr and "is done already" not in done.stderr
    case, _ = json.loads((out / "certificate.json").read_text(encoding="utf-8"))["certificate"]["greedy"]
    assert case["weights_sha256"] == json.loads((head / "head.json").read_text(encoding="utf-8"))["weights_sha256"]


def test_kinds_of_heads_are_compared_in_one_table(finished: Run, tmp_path: Path) -> None:
    """Trained and decoded with in processes of their own, as chain and as tree; called again, nothing is done again."""
    out = tmp_path / "heads"
    evaluate = ["prompt_sets.project.limit=3", "max_new_tokens=8", "ways.greedy.plain=false", "batch_size=3"]
    evaluate += ["ways.sampled.prompt_sets=[project]", "ways.sampled.plain=false"]  # measured too, and not what the table says
    words = [
        "--run",
        str(finished.folder),
        "--out",
        str(out),
        "--heads",
        "medusa",
        "--target",
        "local",
        f"path={finished.target}",
        "name=tiny",
    ]
    words += ["--repeats", "1", "--timed-steps", "2", "--evaluate", *evaluate]
    train = ["num_steps=3", "validation.fraction=0", "validation.every=null", "schedule.warmup_steps=1", "chunk_rows=64"]
    seen = []
    out.mkdir()
    (out / "speeds.json").write_text('{"about": {"threads": 4}, "tokens_per_s": {"medusa": [1.0]}}')  # of other settings: timed anew
    for _ in range(2):
        done = finished.shell.wait(finished.shell.start("tools.compare_heads", [*words, "--", *train]))
        assert done.code == 0, done.stderr[-3000:]
        assert done.stdout.strip() == (out / "heads.md").read_text(encoding="utf-8").strip()
        seen.append(json.loads((out / "heads.json").read_text(encoding="utf-8"))["rows"])
        seen.append((out / "checkpoint" / "medusa" / "head.safetensors").stat().st_mtime_ns)
    [row] = seen[0]
    assert (row["head"], row["tree"], row["steps"], row["num_prompts"], len(row["rates"])) == ("medusa", "medusa_tree", 3, 3, 5)
    report = json.loads((out / "report" / "report.json").read_text(encoding="utf-8"))["data"]
    chains = {m["acceptance"]["temperature"]: m["acceptance"] for m in report["measurements"] if m["acceptance"]["scheme"] == "chain"}
    accepted, drafts = (
        sum(of(prompt) for prompt in chains[0.0]["prompts"])
        for of in (lambda prompt: prompt["num_accepted_per_position"][0], lambda prompt: prompt["num_drafts"])
    )
    assert len(chains) == 2 and row["rates"][0][0] == pytest.approx(accepted / drafts)
    assert row["tree_length"][0] >= 1 and row["tokens_per_s"] > 1 and row["bytes"] > 0
    assert seen[:2] == seen[2:]
    for wrong, said in (
        (["--", "no_such=1"], "no_such"),
        (["--timed-steps", "1"], "timed_steps"),
        (["--heads", "eagle", "eagle"], "once"),
    ):
        refused = finished.shell.wait(finished.shell.start("tools.compare_heads", [*words, *wrong]))
        assert refused.code == 2 and said in refused.stderr and "Traceback" not in refused.stderr
