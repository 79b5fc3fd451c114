"""The acceptance estimate against real speculative decoding: seconds of both on the same prompts, and whether they agree.

python tools/bench_estimate.py --run runs/demo --name mtp

The prompts are those that training held out; decoding is ``engine=hf``'s, in batches and one prompt at a time, and the estimate one
pass over the cached answers to the same prompts. What making the cache took is not counted: it is there anyway. Seconds are this
process' CPU time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from mtp_train.acceptance.estimate import answers
from mtp_train.acceptance.interval import Interval, paired_difference, rates_and_length
from mtp_train.cache.reader import CacheReader
from mtp_train.decoding.chain import Chain
from mtp_train.engine.base import Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.faults import telling
from mtp_train.opening import add_target_option, head_loader, open_named_target
from mtp_train.records import Sample
from mtp_train.results import add_results_option, keep, positive
from mtp_train.runtime import provenance
from mtp_train.stage import build, load_word
from mtp_train.trainer.data import split


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run with a cache of greedy answers and a trained head")
    parser.add_argument("--name", default="mtp", help="the head's folder in RUN/checkpoint")
    add_target_option(parser)
    parser.add_argument("--fraction", type=float, default=0.05, help="validation.fraction of the training")
    parser.add_argument("--samples", type=positive, default=16, help="held-out answers of one turn each")
    parser.add_argument("--num-speculative-tokens", type=positive, default=5)
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--singly", type=int, default=4, help="of the answers, decoded one at a time too")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32 (default: auto, as conf/engine/hf.yaml says)")
    parser.add_argument("--repeats", type=positive, default=3, help="of the estimate; decoding is done once")
    add_results_option(parser)
    return parser.parse_args()


def held_out(words: argparse.Namespace) -> list[Sample]:
    found = split(CacheReader(words.run / "cache", verify="none"), fraction=words.fraction, seed=0)[1]
    chosen = (found[number] for number in range(len(found)))
    return [sample for sample in chosen if len(answers(sample.loss_mask_T.tolist())) == 1][: words.samples]


def shown(interval: Interval) -> str:
    return f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]" if interval.low is not None else f"{interval.value:.4f}"


def measure(words: argparse.Namespace) -> dict[str, Any]:
    target = open_named_target(words.target)
    engine = build(
        {**load_word("engine", "hf"), "dtype": words.dtype},
        target_path=target.path,
        trust_remote_code=target.trust_remote_code,
        load_head=head_loader(target),
    )
    words.dtype = engine.dtype
    checkpoint, samples = words.run / "checkpoint" / words.name, held_out(words)
    longest = max(int(sample.loss_mask_T.sum()) for sample in samples)
    sampling = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=longest, seed=0)
    requests = [
        SpeculateRequest(
            prompt_id=sample.sample_id,
            category=sample.category,
            token_ids=tuple(sample.token_ids_T[: answers(sample.loss_mask_T.tolist())[0].first].tolist()),
        )
        for sample in samples
    ]
    head = engine.load_head(checkpoint, engine.target.shared_weights()).to(device=engine.target.device, dtype=getattr(torch, words.dtype))
    estimated, estimate_s = None, []
    for _ in range(words.repeats):
        begun = time.process_time()
        estimated = estimate(
            head,
            samples,
            num_speculative_tokens=words.num_speculative_tokens,
            draft_sampling="greedy",
            sampling=sampling,
            max_batch_tokens=8192,
            device=engine.target.device,
        )
        estimate_s.append(time.process_time() - begun)
    assert estimated is not None
    depth = words.num_speculative_tokens
    decode_s = {}
    for asked, batch_size in ((requests[: words.singly], 1), (requests, words.batch_size)):
        settings = SpeculateSettings(
            decoding=Chain(num_speculative_tokens=depth, refresh=True),
            draft_sampling="greedy",
            sampling=sampling,
            batch_size=batch_size,
            ignore_eos=False,
        )
        begun = time.process_time()
        decoded = engine.speculate(asked, checkpoint, settings)
        decode_s[batch_size] = time.process_time() - begun
    num_tokens = [int(sample.loss_mask_T.sum()) for sample in samples]
    difference = paired_difference(estimated.prompts, decoded.prompts, depth)
    return {
        "prompts": len(samples),
        "answer_tokens": sum(num_tokens),
        "decode_s": decode_s[words.batch_size],
        "decode_singly_s": decode_s[1] * sum(num_tokens) / sum(num_tokens[: words.singly]),
        "estimate_s": sorted(estimate_s)[len(estimate_s) // 2],
        "estimated": [shown(rates_and_length(estimated.prompts, depth)[0][0]), shown(rates_and_length(estimated.prompts, depth)[1])],
        "decoded": [shown(rates_and_length(decoded.prompts, depth)[0][0]), shown(rates_and_length(decoded.prompts, depth)[1])],
        "difference": [shown(difference[0][0]), shown(difference[1])],
    }


def main() -> None:
    words = parse()
    torch.set_num_threads(1)
    row, about = measure(words), provenance()
    text = f"""# The acceptance estimate against decoding

`python tools/bench_estimate.py --run RUN --name {words.name} --samples {words.samples} --singly {words.singly}`

{row["prompts"]} held-out prompts, {row["answer_tokens"]} answer tokens; chain of {words.num_speculative_tokens}, greedy, {words.dtype},
torch {about["packages"]["torch"]}, {about["machine"]}; CPU time of one process, one thread.

| | seconds | position 1 | acceptance length |
|---|---|---|---|
| estimate | {row["estimate_s"]:.2f} | {row["estimated"][0]} | {row["estimated"][1]} |
| decoding (`engine=hf`), batches of {words.batch_size} | {row["decode_s"]:.2f} | {row["decoded"][0]} | {row["decoded"][1]} |
| estimate against it | {row["decode_s"] / row["estimate_s"]:.0f} times | {row["difference"][0]} | {row["difference"][1]} |
| decoding one prompt at a time (by {words.singly} of them) | {row["decode_singly_s"]:.2f} | | |
| estimate against it | {row["decode_singly_s"] / row["estimate_s"]:.0f} times | | |
"""
    keep(text, {**about, **row}, name="bench_estimate", folder=words.results)


if __name__ == "__main__":
    with telling("bench_estimate"):
        main()
