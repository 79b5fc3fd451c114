"""What a plan says of a small run is what the run takes: bytes of its cache, parameters of its head, memory of its training.

Memory is torch's own account of what its CPU allocator gave out (the profiler's), not the process' resident size: beside a tiny
model, the libraries and what the allocator keeps back are most of that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mtp_train.planning.hardware import Hardware
from mtp_train.planning.plan import cache_row
from mtp_train.planning.sizes import TargetSizes, Weights
from mtp_train.planning.work import Workload

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # several stages, on a machine that may be busy
PACK, TOP_K, DEPTHS = 1024, 16, 2

# Runs stages one after the other, each in a process forked from one that has the libraries, and the training under the profiler.
DRIVER = """
import json, os, runpy, sys, traceback
import accelerate, hydra, rich.table, safetensors.torch, torch, transformers

def run(job):
    sys.argv = ["stage", *job["words"]]
    runpy.run_module("mtp_train." + job["stage"], run_name="__main__", alter_sys=True)

def measured(job):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(job)
    profiler.export_chrome_trace(job["trace"])
    events = json.load(open(job["trace"]))["traceEvents"]
    held = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
    json.dump({"peak_bytes": max(held)}, open(job["trace"], "w"))

for job in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            (measured if "trace" in job else run)(job)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        os._exit(1)
os._exit(0)
"""


def run_stages(jobs: Sequence[dict[str, Any]]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", DRIVER, json.dumps(jobs)], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache, a training in each precision, what they took, and the plans that were made for them."""
    target = request.getfixturevalue(f"tiny_{request.param}")
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"prompt": f"question {n}? " * 3, "completion": f"the answer to {n} is {n * n}; " * (3 + n % 4)} for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    here = ["target=local", f"target.path={target}", "target.name=tiny"]
    jobs: list[dict[str, Any]] = [
        {
            "stage": "precompute",
            "words": [
                *here,
                f"run={folder}",
                "answers=given",
                "prompt=file",
                f"prompt.source=[{folder}/rows.jsonl]",
                f"top_k={TOP_K}",
                "engine.dtype=float32",
                "target_layer_ids=[0]",
                "shard_tokens=4096",
            ],
        }
    ]
    common = [f"tokens_per_pack={PACK}", f"draft_steps={DEPTHS}", "chunk_rows=512"]
    for precision in ("fp32", "bf16"):
        words = [*here, f"run={folder}", f"name={precision}", f"precision={precision}", "num_steps=3", "validation.fraction=0", *common]
        jobs.append({"stage": "train", "words": words, "trace": f"{folder}/{precision}.measured.json"})
        words = [*here, f"precision={precision}", f"out={folder}/{precision}.plan.json", *common]
        words += ["hardware=2cpu", "hardware.num_devices=1", "packs_per_step=1", "parallel=single", f"top_k={TOP_K}"]
        words += ["prompt.num_tokens=6k", "prompt.mean_length_tokens=250", "prompt.answer_share=0.5", "target_layer_ids=[0]"]
        jobs.append({"stage": "plan", "words": words})
    run_stages(jobs)
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_training_takes_the_memory_that_was_planned(runs: Path, precision: str) -> None:
    planned = json.loads((runs / f"{precision}.plan.json").read_text(encoding="utf-8"))["memory"][0]
    measured = json.loads((runs / f"{precision}.measured.json").read_text(encoding="utf-8"))["peak_bytes"]
    assert planned["mode"] == "single"
    assert planned["total_bytes"] == pytest.approx(measured, rel=0.15)


def test_the_head_has_the_parameters_that_were_planned(runs: Path) -> None:
    from safetensors import safe_open

    planned = json.loads((runs / "fp32.plan.json").read_text(encoding="utf-8"))["head"]["num_parameters"]
    with safe_open(runs / "checkpoint" / "fp32" / "head.safetensors", framework="pt") as opened:
        assert sum(opened.get_tensor(name).numel() for name in opened.keys()) == planned  # noqa: SIM118 - not a dict


def test_the_cache_takes_the_bytes_that_were_planned(runs: Path) -> None:
    """At this cache's own share of answers and length of conversations; the target of the plan is the one that was read."""
    from mtp_train.cache.reader import read_manifest

    plan = json.loads((runs / "fp32.plan.json").read_text(encoding="utf-8"))
    manifest = read_manifest(runs / "cache")
    files = [file for file in (runs / "cache").iterdir() if file.name.startswith(("shard-", "manifest", "plan"))]
    work = Workload(
        **{
            **plan["work"],
            "num_tokens": manifest.num_tokens,
            "answer_share": manifest.num_teacher_rows / manifest.num_tokens,
            "mean_length_tokens": round(manifest.num_tokens / manifest.num_samples),
        }
    )
    sizes = {name: value for name, value in plan["target"].items() if name in TargetSizes.__dataclass_fields__}
    target = TargetSizes(**{**sizes, "layers": Weights(**sizes["layers"])})
    planned = cache_row("bf16", target, Hardware(**plan["hardware"]), work)
    assert planned.total_bytes == pytest.approx(sum(file.stat().st_size for file in files), rel=0.02)
