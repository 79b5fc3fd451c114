"""``engine.dtype`` and ``precision`` are auto from answers to head, on a device that multiplies bfloat16 and on one that does not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.conftest import write_tiny_llama
from tests.shell import Done, Shell

pytestmark = pytest.mark.timeout(600)  # nine stages, on a machine that may be busy

SETTINGS = {
    "regenerate": ["prompt=file", "engine.device=cpu", "engine.batch_size=4", "sampling.max_new_tokens=8"],
    "precompute": ["prompt=file", "engine.device=cpu", "codec=float32", "top_k=8"],
    "train": ["device=cpu", "num_steps=2", "tokens_per_pack=256", "validation.fraction=0", "checkpoint.every=1", "schedule.warmup_steps=0"],
}
SAID = "=auto: float32, since the device here has no instructions"


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"question {n}?"}) + "\n" for n in range(8)), encoding="utf-8")
    return ["target=local", f"target.path={write_tiny_llama(tmp_path / 'target')}", "target.name=tiny", f"run={tmp_path / 'run'}"]


def run(shell: Shell, stage: str, base: list[str], on: str, *words: str) -> Done:
    """A stage on a CPU that says of itself whether it has instructions for products of bfloat16."""
    prompts = [] if stage == "train" else [f"prompt.source=[{Path(base[-1].partition('=')[2]).parent / 'prompts.jsonl'}]"]
    says = {"avx512_bf16": on == "bf16"}
    return shell.wait(shell.start(f"mtp_train.{stage}", [*base, *SETTINGS[stage], *prompts, *words], capabilities=says))


def stated(folder: Path) -> dict[str, str]:
    """What each stage's output says that it was made in."""
    answers = json.loads((folder / "responses" / "meta.json").read_text(encoding="utf-8"))
    cache = json.loads((folder / "cache" / "manifest.json").read_text(encoding="utf-8"))
    head = json.loads((folder / "checkpoint" / "mtp" / "head.json").read_text(encoding="utf-8"))
    return {"regenerate": str(answers), "precompute": cache["identity"]["dtype"], "train": head["made_by"]["settings"]["precision"]}


@pytest.mark.slow
@pytest.mark.parametrize(("on", "dtype", "precision"), [("bf16", "bfloat16", "bf16"), ("none", "float32", "fp32")])
def test_what_auto_came_to_is_stated_and_not_continued_under_the_other(
    base: list[str], tmp_path: Path, shell: Shell, on: str, dtype: str, precision: str
) -> None:
    """Each stage says where it takes float32, states what it took, and refuses where it would take the other, until that is named."""
    other = {"bf16": "none", "none": "bf16"}[on]
    names = {"regenerate": f"engine.dtype={dtype}", "precompute": f"engine.dtype={dtype}", "train": f"precision={precision}"}
    both = {"regenerate": ("'bfloat16'", "'float32'"), "precompute": ("'bfloat16'", "'float32'"), "train": ("'bf16'", "'fp32'")}
    for stage, named in names.items():
        done = run(shell, stage, base, on)
        assert done.code == 0, done.stderr[-3000:]
        assert (SAID in done.stderr) == (on == "none"), done.stderr
        refused = run(shell, stage, base, other)
        assert refused.code == 2 and all(value in refused.stderr for value in both[stage]), refused.stderr[-3000:]
        assert "Traceback" not in refused.stderr
        continued = run(shell, stage, base, other, named)
        assert continued.code == 0, continued.stderr[-3000:]
    found = stated(tmp_path / "run")
    assert f"'dtype': '{dtype}'" in found["regenerate"]
    assert (found["precompute"], found["train"]) == (dtype, precision)


def test_processes_that_come_to_different_dtypes_write_no_answers(base: list[str], tmp_path: Path, shell: Shell) -> None:
    """Two machines of one torchrun job, of which one has the instructions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    words = [*base, *SETTINGS["regenerate"], f"prompt.source=[{tmp_path / 'prompts.jsonl'}]"]
    jobs = [
        shell.start("mtp_train.regenerate", words, capabilities={"avx512_bf16": rank == "0"}, RANK=rank, LOCAL_RANK=rank, **told)
        for rank in ("0", "1")
    ]
    for done in [shell.wait(job) for job in jobs]:
        said = "engine.dtype=auto: expected all processes to come to one value, found bfloat16 on process 0, float32 on process 1"
        assert done.code == 2 and said in done.stderr, done.stderr[-3000:]
    assert not (tmp_path / "run" / "responses").exists()
