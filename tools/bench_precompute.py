"""Prefill for the cache (engine=hf) against the ways of other trainers' data scripts, on the same responses.

python tools/bench_precompute.py --responses RUN/responses

Rows: padded batches of eight in random order, one sequence at a time, and packed as ``precompute`` does it, all for hidden states alone;
then packed with the teacher's top 64 at answer positions, and with the cache written. Real tokens per CPU-second of one thread; every
repeat takes other responses, the same for all rows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
from mtp_train.cache.plan import PlannedSample
from mtp_train.cache.writer import CacheWriter
from mtp_train.engine.base import PrefillSettings
from mtp_train.faults import telling
from mtp_train.opening import OpenTarget, add_target_option, open_named_target
from mtp_train.prompt.responses import read_responses
from mtp_train.records import Response
from mtp_train.results import add_results_option, keep
from mtp_train.runtime import provenance
from mtp_train.stage import build, load_word

# Sequences a padded batch.
_PADDED = 8


def batches(responses: Sequence[Response], size: int) -> list[Sequence[Response]]:
    return [responses[first : first + size] for first in range(0, len(responses), size)]


class Bench:
    """The engine, and the same target as transformers loads it."""

    def __init__(self, target: OpenTarget, *, dtype: str, top_k: int, codec: str) -> None:
        from transformers import AutoModelForCausalLM

        self.target, self.top_k, self.codec = target, top_k, codec
        common = {"target_path": target.path, "trust_remote_code": target.trust_remote_code, "load_head": None}
        self.engine = build({**load_word("engine", "hf"), "dtype": dtype}, **common)
        self.plain = AutoModelForCausalLM.from_pretrained(
            target.path, dtype=getattr(torch, self.engine.dtype), local_files_only=True
        ).eval()

    @torch.inference_mode()
    def padded(self, responses: Sequence[Response], *, size: int) -> None:
        for group in batches(responses, size):
            longest = max(len(response.token_ids) for response in group)
            ids_BT = torch.tensor([[*response.token_ids, *[0] * (longest - len(response.token_ids))] for response in group])
            mask_BT = torch.tensor([[1] * len(response.token_ids) + [0] * (longest - len(response.token_ids)) for response in group])
            self.plain.base_model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)

    def packed(self, responses: Sequence[Response], *, top_k: int | None) -> None:
        for _ in self.engine.prefill(responses, PrefillSettings(target_layer_ids=(), top_k=top_k)):
            pass

    def written(self, responses: Sequence[Response]) -> None:
        identity = CacheIdentity(
            format_version=FORMAT_VERSION,
            **self.target.identity(),
            hidden_state="post_norm",
            target_layer_ids=(),
            dtype=self.engine.dtype,
            codec=self.codec,
            top_k=self.top_k,
            engine=self.engine.word,
            engine_version=self.engine.version,
            quantization=None,
            hidden_size=self.target.spec.hidden_size,
            vocab_size=self.target.spec.vocab_size,
            git_commit=None,
        )
        by_id, settings = {response.prompt_id: response for response in responses}, PrefillSettings(target_layer_ids=(), top_k=self.top_k)
        with tempfile.TemporaryDirectory() as folder:
            planned = [PlannedSample.of(response) for response in responses]
            writer = CacheWriter(path=Path(folder), identity=identity, samples=planned, shard_tokens=1 << 14)
            for index, ids in writer.missing_shards():
                writer.write_shard(index, self.engine.prefill([by_id[i] for i in ids], settings))
            writer.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=Path, required=True, help="what regenerate wrote")
    add_target_option(parser)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32 (default: auto, as conf/engine/hf.yaml says)")
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--per-repeat", type=int, default=16, help="responses")
    add_results_option(parser)
    words = parser.parse_args()
    with telling("bench_precompute"):
        measure(words)


def measure(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if words.repeats < 1 or words.per_repeat < 1:
        raise ValueError(f"repeats and per_repeat: expected at least 1, found {words.repeats} and {words.per_repeat}")
    responses = read_responses(words.responses)
    if len(responses) < words.repeats * words.per_repeat:
        raise ValueError(
            f"{words.responses}: expected at least {words.repeats * words.per_repeat} responses, others for every repeat, found "
            f"{len(responses)}; set fewer --repeats or --per-repeat"
        )
    bench = Bench(open_named_target(words.target), dtype=words.dtype, top_k=words.top_k, codec=words.codec)
    words.dtype = bench.engine.dtype
    random.Random(0).shuffle(responses)
    ways: dict[str, Callable[[Sequence[Response]], None]] = {
        f"padded batches of {_PADDED}, random order": lambda group: bench.padded(group, size=_PADDED),
        "one sequence at a time": lambda group: bench.padded(group, size=1),
        "packed (`precompute`), hidden states": lambda group: bench.packed(group, top_k=None),
        f"packed, and top-{words.top_k} of the answers": lambda group: bench.packed(group, top_k=words.top_k),
        f"the same, and the cache written ({words.codec})": bench.written,
    }
    bench.packed(responses[:1], top_k=words.top_k)  # kernels are made and chosen
    bench.padded(responses[:1], size=1)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(words.repeats):
        group = responses[number * words.per_repeat : (number + 1) * words.per_repeat]
        num_tokens = sum(len(response.token_ids) for response in group)
        for name, run in ways.items():
            begun = time.process_time()
            run(group)
            speeds[name].append(num_tokens / (time.process_time() - begun))
            print(f"repeat {number}: {name}: {speeds[name][-1]:.0f} tokens per CPU-s", flush=True)
    report(words, speeds, responses, of=bench.target.spec.name)


def report(words: argparse.Namespace, speeds: dict[str, list[float]], responses: Sequence[Response], *, of: str) -> None:
    (first, second, packed), about = list(speeds)[:3], provenance()
    used = responses[: words.repeats * words.per_repeat]
    lengths = sorted(len(response.token_ids) for response in used)
    answers = sum(sum(response.loss_mask) for response in used) / sum(lengths)
    padded = [group for repeat in batches(used, words.per_repeat) for group in batches(repeat, _PADDED)]
    padding = sum(len(group) * max(len(response.token_ids) for response in group) for group in padded) / sum(lengths)
    rows: list[dict[str, Any]] = []
    lines = [f"| | tokens per CPU-s | times {first} |", "|---|---|---|"]
    for name, found in speeds.items():
        ratio = statistics.median(ours / base for ours, base in zip(found, speeds[first], strict=True))
        rows.append({"way": name, "tokens_per_cpu_s": found, "ratio": ratio})
        lines.append(f"| {name} | {statistics.median(found):.0f} | {ratio:.2f} |")
    chosen, written = list(speeds.values())[-2:]
    share = statistics.median(1 - after / before for before, after in zip(chosen, written, strict=True))
    beside = statistics.median(ours / base for ours, base in zip(speeds[packed], speeds[second], strict=True))
    lines += ["", f"Packed is {beside:.2f} times {second}. Writing the cache takes {share:.1%} of the stage."]
    text = "\n".join(
        [
            "# Prefill for the cache, engine=hf",
            "",
            f"`python tools/bench_precompute.py --responses RUN/responses --repeats {words.repeats} --per-repeat {words.per_repeat}`",
            "",
            f"{len(used)} responses of {of}, {lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), "
            f"{answers:.0%} of them answers, {padding:.2f} times as many when padded; {words.dtype}, one thread; "
            f"torch {about['packages']['torch']}, transformers {about['packages']['transformers']}, {about['machine']}; "
            f"medians of {words.repeats} repeats.",
            "",
            *lines,
            "",
        ]
    )
    document = {**about, "rows": rows, "writing_share": share, "times_one_at_a_time": beside}
    keep(text, document, name="bench_precompute", folder=words.results)


if __name__ == "__main__":
    main()
