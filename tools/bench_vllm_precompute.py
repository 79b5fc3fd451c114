"""Precompute through vLLM, its cache written, against the bare engine's prefill of the same prompts, interleaved.

python tools/bench_vllm_precompute.py --responses runs/demo/responses --out tools/results/vllm_precompute.md

Bare is vLLM as anyone would start it for hidden states: ``LLM(runner="pooling")``, ``encode(pooling_task="token_embed")``,
with the same batch sizes, dtype and threads, and nothing kept. Ours are the steps of ``precompute engine=vllm``: hidden
states (and top-k log-probabilities at answer positions) taken out of vLLM's process, encoded, checked, hashed and synced
to disk. Both processes are started before the first repeat and stay; each repeat runs bare, hidden, top-k once, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtp_train.faults import telling
from mtp_train.opening import add_target_option, open_named_target
from mtp_train.runtime import environment_apart, log, provenance

_TICKS = os.sysconf("SC_CLK_TCK")
_AIMS = {"hidden": 0.9, "top-k": 0.8}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_option(parser)
    parser.add_argument("--responses", type=Path, required=True, help="answers to read, as regenerate wrote them: RUN/responses")
    parser.add_argument("--num-tokens", type=int, default=8192, help="take responses up to so many tokens, evenly out of all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--shard-tokens", type=int, default=16384)
    parser.add_argument("--max-prefill-tokens", type=int, default=8192)
    parser.add_argument("--compile", action="store_true", help="let vLLM compile (minutes at its two starts); off: enforce_eager")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of each vLLM on a CPU")
    parser.add_argument("--scratch", type=Path, default=None, help="where caches are written; off: the system's temporary folder")
    parser.add_argument("--out", type=Path, default=None, help="also write the table there")
    return parser.parse_args()


def cpu_s(*pids: int) -> float:
    """CPU seconds that processes have used, all their threads together."""
    found = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        found += (int(fields[11]) + int(fields[12])) / _TICKS
    return found


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One run: its wall time, and the CPU time of all processes that took part."""

    wall_s: float
    cpu_s: float


def timed(run: Callable[[], None], *pids: int) -> Timing:
    before, started = cpu_s(*pids), time.perf_counter()
    run()
    return Timing(wall_s=time.perf_counter() - started, cpu_s=cpu_s(*pids) - before)


class Bare:
    """vLLM's pooling runner in a process of its own, fed with one line per run."""

    def __init__(self, llm: dict[str, Any], prompts: Sequence[Sequence[int]], environment: dict[str, str], log_path: Path) -> None:
        self._num_tokens = sum(map(len, prompts))
        self._log = open(log_path, "wb")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--bare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**environment_apart(), **environment},
        )
        self._say({"llm": llm, "prompts": [list(prompt) for prompt in prompts]})

    def _say(self, message: dict[str, Any]) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("rows "):
                return int(line.split()[1])
        raise ValueError(f"bare vLLM ended with status {self.process.wait()}; see {self._log.name}")

    def run(self) -> None:
        """Prefill all prompts once. ValueError unless it hands out one hidden vector per token."""
        if (found := self._say({})) != self._num_tokens:
            raise ValueError(f"bare vLLM: expected one vector for each of {self._num_tokens} tokens, found {found}")

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self._log.close()


def bare_process() -> None:
    """The other side of ``Bare``."""
    from vllm import LLM, PoolingParams

    first = json.loads(sys.stdin.readline())
    llm = LLM(**first["llm"])
    prompts = [{"prompt_token_ids": ids} for ids in first["prompts"]]
    print("rows 0", flush=True)
    for _ in sys.stdin:
        out = llm.encode(prompts, pooling_task="token_embed", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        print("rows", sum(len(found.outputs.data) for found in out), flush=True)
    os._exit(0)


def choose(folder: Path, num_tokens: int) -> list[Any]:
    """Responses of about ``num_tokens`` tokens together, every n-th of all by their length, in the order of their ids."""
    from mtp_train.prompt.responses import read_responses

    found = sorted((r for r in read_responses(folder) if any(r.loss_mask)), key=lambda response: len(response.token_ids))
    total = sum(len(response.token_ids) for response in found)
    every = max(1, total // num_tokens)
    return sorted(found[every // 2 :: every], key=lambda response: response.prompt_id)


def measure(arguments: argparse.Namespace) -> str:
    from mtp_train.engine.base import PrefillSettings
    from mtp_train.engine.vllm import VllmEngine
    from mtp_train.stage import build, load_word

    target = open_named_target(arguments.target)
    responses = choose(arguments.responses, arguments.num_tokens)
    changed = {
        "dtype": arguments.dtype,
        "enforce_eager": not arguments.compile,
        "cpu_threads": arguments.threads,
        "max_prefill_tokens": arguments.max_prefill_tokens,
    }
    engine: VllmEngine = build(
        {**load_word("engine", "vllm"), **changed}, target_path=target.path, trust_remote_code=target.trust_remote_code, load_head=None
    )
    arguments.dtype = engine.dtype
    shared = engine.settings.prefill_llm(taps=False)
    # vLLM's pooling runner makes a tokenizer and asks for one even where prompts are token ids; none of its time is measured.
    ours_alone = ("worker_extension_cls", "generation_config", "max_model_len", "skip_tokenizer_init")
    llm = {name: value for name, value in shared.items() if name not in ours_alone}
    llm |= {"runner": "pooling", "convert": "embed", "pooler_config": {"task": "token_embed", "use_activation": False}}
    timings: dict[str, list[Timing]] = {"bare": [], "hidden": [], "top-k": []}
    kept = {
        "hidden": PrefillSettings(target_layer_ids=(), top_k=None),
        "top-k": PrefillSettings(target_layer_ids=(), top_k=arguments.top_k),
    }
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder, engine.prefill_pool(kept["hidden"]) as pool:
        prompts = [response.token_ids for response in responses]
        bare = Bare(llm, prompts, engine.settings.environment(0, probe=False), Path(folder) / "bare.txt")
        num_tokens = sum(map(len, prompts))
        for repeat in range(arguments.repeats + 1):  # the first warms up and is left out
            found: dict[str, Timing] = {}
            found["bare"] = timed(bare.run, bare.process.pid)
            for name, settings in kept.items():
                write = partial(write_cache, engine, pool, target, responses, settings, Path(folder) / f"{name}.{repeat}", arguments)
                found[name] = timed(write, os.getpid(), *pool.pids)
            log(f"repeat {repeat}: " + ", ".join(f"{name} {num_tokens / timing.wall_s:.0f} tok/s" for name, timing in found.items()))
            for name, timing in found.items():
                timings[name] += [timing] if repeat else []
        bare.close()
    return report(arguments, timings, responses, engine, of=target.spec.name)


def write_cache(
    engine: Any, pool: Any, target: Any, responses: Sequence[Any], settings: Any, path: Path, arguments: argparse.Namespace
) -> None:
    """What ``precompute`` does between an engine that has started and a finished cache."""
    from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
    from mtp_train.cache.plan import PlannedSample
    from mtp_train.cache.writer import CacheWriter
    from mtp_train.engine.vllm_prefill import prefill_groups

    identity = CacheIdentity(
        format_version=FORMAT_VERSION,
        **target.identity(),
        hidden_state="post_norm",
        target_layer_ids=(),
        dtype=engine.dtype,
        codec="bf16",
        top_k=settings.top_k,
        engine=engine.word,
        engine_version=engine.version,
        quantization=None,
        hidden_size=target.spec.hidden_size,
        vocab_size=target.spec.vocab_size,
        git_commit=None,
    )
    by_id = {response.prompt_id: response for response in responses}
    planned = [PlannedSample.of(response) for response in responses]
    writer = CacheWriter(path=path, identity=identity, samples=planned, shard_tokens=arguments.shard_tokens)
    missing = list(writer.missing_shards())
    groups = ([by_id[i] for i in ids] for _, ids in missing)
    shards = prefill_groups(pool, groups, settings, batch_tokens=engine.batch_tokens)
    for (index, _), samples in zip(missing, shards, strict=False):
        writer.write_shard(index, samples)
    writer.finish()


def report(arguments: argparse.Namespace, timings: dict[str, list[Timing]], responses: Sequence[Any], engine: Any, *, of: str) -> str:
    """The table, with ratios taken within each repeat and their median."""
    num_tokens = sum(len(response.token_ids) for response in responses)
    num_answer = sum(sum(response.loss_mask) for response in responses)
    lengths = sorted(len(response.token_ids) for response in responses)
    made_by, stated = provenance(), engine.describe()
    lines = [
        "# Precompute through vLLM against the bare engine's prefill",
        "",
        f"`python tools/bench_vllm_precompute.py {_words(arguments)}`",
        "",
        f"{made_by['machine']}; {engine.version}, torch {made_by['packages'].get('torch')}, {', '.join(stated['attention'])}, "
        f"{arguments.dtype}, {'compiled' if arguments.compile else 'eager'}, {arguments.threads} thread(s) per vLLM; "
        f"target {of}; commit {made_by['git_commit']}.",
        "",
        f"{len(responses)} responses, {num_tokens} tokens ({num_answer / num_tokens:.0%} answer tokens), lengths {lengths[0]} to "
        f"{lengths[-1]}, median {lengths[len(lengths) // 2]}; {arguments.repeats} interleaved repeats after one to warm up; medians "
        "[lowest, highest]. Ratios are to the bare engine in the same repeat.",
        "",
        "| | tokens/s | ratio | aim | tokens per CPU-s (all processes) | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in timings.items():
        wall, cpu = [num_tokens / timing.wall_s for timing in found], [num_tokens / timing.cpu_s for timing in found]
        ratios = [bare.wall_s / ours.wall_s for bare, ours in zip(timings["bare"], found, strict=True)]
        cpu_ratios = [bare.cpu_s / ours.cpu_s for bare, ours in zip(timings["bare"], found, strict=True)]
        aim = "" if name not in _AIMS else f"{_AIMS[name]:g}: {'reached' if statistics.median(ratios) >= _AIMS[name] else 'missed'}"
        label = {"bare": "bare `encode`", "hidden": "ours, hidden states", "top-k": f"ours, and top-{arguments.top_k}"}[name]
        lines.append(f"| {label} | {_spread(wall, 0)} | {_spread(ratios, 3)} | {aim} | {_spread(cpu, 0)} | {_spread(cpu_ratios, 3)} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def _words(arguments: argparse.Namespace) -> str:
    words = [f"--responses RUN/responses --num-tokens {arguments.num_tokens} --repeats {arguments.repeats} --dtype {arguments.dtype}"]
    words += [f"--top-k {arguments.top_k} --threads {arguments.threads}", *(["--compile"] if arguments.compile else [])]
    return " ".join(words)


def main() -> int:
    if sys.argv[1:] == ["--bare"]:
        bare_process()
    arguments = parse()
    try:
        table = measure(arguments)
    except ValueError as error:
        print(f"bench_vllm_precompute: {error}", file=sys.stderr)
        return 2
    print(table)
    if arguments.out is not None:
        arguments.out.write_text(table, encoding="utf-8")
    return 0


if __name__ == "__main__":
    with telling("bench_vllm_precompute"):
        sys.exit(main())
