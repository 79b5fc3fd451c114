"""How the reference engine's speculation scales: with the context it decodes in, and with the prompts it decodes together.

python tools/bench_decode.py --run runs/demo --name mtp

Context: one sequence, verified round by round behind prompts of 1k to 16k tokens. The prompts' keys, values and states are drawn, not
computed, since what a round costs does not hang on what they are; all that follows is the engine's own: verification, the head's reading
of the prompt (which is not counted), drafting. A fit to a straight line over the context says what of a round is attention and its
memory; the lengths themselves say whether anything grows faster. Positions beyond those that the target was trained for are only
larger angles. Batch: prompts of the run decoded together and one by one, with drafts and without, against what the target's own matrix
products over that many rows gain. CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mtp_train.decoding.chain import Chain
from mtp_train.engine.base import Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.hf_speculate import Speculation, _Piece
from mtp_train.faults import telling
from mtp_train.opening import add_target_option, head_loader, open_named_target
from mtp_train.prompt.responses import read_responses
from mtp_train.results import add_results_option, command_of, keep, positive
from mtp_train.runtime import provenance
from mtp_train.stage import build, load_word


class DrawnPrompt(Speculation):
    """Speculation whose target does not read the prompt: what it would have kept is drawn. ``rounds_s`` are the CPU seconds of each
    verification with the drafting behind it, ``rows`` what the target read in each."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.began_s: list[float] = []
        self.rows: list[int] = []

    @property
    def rounds_s(self) -> list[float]:
        """All but the first, which meets memory not yet touched, and the last, behind which nothing is drafted."""
        return [after - before for before, after in zip(self.began_s[1:], self.began_s[2:], strict=False)]

    def _forward(self) -> list[_Piece]:
        ((slot, sequence),) = self.running.items()
        share = len(sequence.pending)
        if share == 1:
            self.began_s.append(time.process_time())
            self.rows.append(1 + len(sequence.drafted.token_ids))
            return super()._forward()
        config, dtype = self.target.model.config, self.target.model.dtype
        draw = torch.Generator().manual_seed(0)
        kv_NTH = torch.randn(config.num_key_value_heads, share, config.head_dim, generator=draw).to(dtype)
        self.cache.reserve(share)
        for index in range(self.target.num_layers):
            for held in self.cache.layer(index, kv_NTH, kv_NTH):
                held[slot, :, :share] = kv_NTH
        self.cache.lengths[slot] = share
        hidden_TD = torch.randn(share, config.hidden_size, generator=draw).to(dtype)
        return [_Piece(slot, sequence, share, hidden_TD, hidden_TD)]


def settings(words: argparse.Namespace, *, new_tokens: int, batch_size: int, ignore_eos: bool) -> SpeculateSettings:
    return SpeculateSettings(
        decoding=Chain(num_speculative_tokens=words.num_speculative_tokens, refresh=True),
        draft_sampling="greedy",
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=new_tokens, seed=0),
        batch_size=batch_size,
        ignore_eos=ignore_eos,
    )


def by_context(words: argparse.Namespace, engine: HfEngine, checkpoint: Path) -> list[dict[str, float]]:
    head, rows = engine._head(checkpoint), []
    for num_tokens in words.contexts:
        run = DrawnPrompt(
            target=engine.target,
            head=head,
            settings=settings(words, new_tokens=words.context_new_tokens, batch_size=1, ignore_eos=True),
            max_prefill_tokens=engine.max_prefill_tokens,
            num_slots=1,
        )
        token_ids = tuple(index % engine.target.num_rows for index in range(num_tokens))
        request = SpeculateRequest(prompt_id="drawn", category="drawn", token_ids=token_ids)
        (found,) = run.run([request], lambda *counts: None).prompts
        rows.append(
            {
                "context": num_tokens,
                "round_ms": 1e3 * statistics.median(run.rounds_s),
                "rounds": len(run.rounds_s),
                "tokens_per_round": len(found.token_ids) / max(found.num_drafts, 1),
                "most_rows": max(run.rows),
            }
        )
        print(rows[-1], flush=True)
    return rows


def line(rows: list[dict[str, float]]) -> tuple[float, float]:
    """Least squares of the relative error: a round's ms without context, and ms for each 1,000 tokens of it."""
    x, y = (torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in ("context", "round_ms"))
    a, b = torch.linalg.lstsq(torch.stack([1 / y, x / 1e3 / y], 1), torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0].tolist()
    return a, b


def cpu_s(run: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    found = run()
    return time.process_time() - begun, found


@torch.inference_mode()
def products_s(engine: HfEngine, *, rows: int) -> float:
    """CPU seconds of the target's matrix products over so many rows, nothing else."""
    target = engine.target
    linear = [module for module in target.decoder.modules() if isinstance(module, nn.Linear)] + [target.lm_head]
    inputs = {size: torch.randn(rows, size).to(target.model.dtype) for size in {module.in_features for module in linear}}

    def run() -> None:
        for module in linear:
            functional.linear(inputs[module.in_features], module.weight)

    run()
    return min(cpu_s(run)[0] for _ in range(3))


def by_batch(words: argparse.Namespace, engine: HfEngine, checkpoint: Path) -> list[dict[str, Any]]:
    responses = [response for response in read_responses(words.run / "responses") if response.num_prompt_tokens < len(response.token_ids)]
    together = sorted(responses[: words.prompts], key=lambda response: response.num_prompt_tokens)
    requests = [
        SpeculateRequest(prompt_id=one.prompt_id, category=one.category, token_ids=one.token_ids[: one.num_prompt_tokens])
        for one in together
    ]
    some = requests[len(requests) // (2 * words.singly) :: len(requests) // words.singly][: words.singly]
    rows = []
    for scheme, verified in (("with drafts", words.num_speculative_tokens + 1), ("without", 1)):
        per_token = []
        for asked, batch_size in ((some, 1), (requests, len(requests))):
            chosen = settings(words, new_tokens=words.new_tokens, batch_size=batch_size, ignore_eos=False)
            if scheme == "with drafts":
                taken_s, found = cpu_s(lambda asked=asked, chosen=chosen: engine.speculate(asked, checkpoint, chosen))
                num_tokens = sum(len(prompt.token_ids) for prompt in found.prompts)
            else:
                taken_s, found = cpu_s(lambda asked=asked, chosen=chosen: engine.baseline(asked, chosen))
                num_tokens = sum(len(token_ids) for token_ids in found.token_ids.values())
            per_token.append(1e3 * taken_s / num_tokens)
        bound = len(requests) * products_s(engine, rows=verified) / products_s(engine, rows=verified * len(requests))
        rows.append({"scheme": scheme, "one_ms": per_token[0], "together_ms": per_token[1], "bound": bound})
        print(rows[-1], flush=True)
    return rows


def written(
    words: argparse.Namespace, command: str, contexts: list[dict[str, float]], batches: list[dict[str, Any]], about: dict[str, Any]
) -> str:
    """The page."""
    a, b = line(contexts)
    lines = []
    for before, row in zip([None, *contexts[:-1]], contexts, strict=True):
        more = "" if before is None else f"{1e3 * (row['round_ms'] - before['round_ms']) / (row['context'] - before['context']):.2f}"
        fitted = a + b * row["context"] / 1e3
        lines.append(
            f"| {row['context']} | {row['round_ms']:.1f} | {row['round_ms'] / row['tokens_per_round']:.1f} | {more} "
            f"| {row['round_ms'] / fitted - 1:+.0%} | {1 - a / fitted:.0%} | {row['most_rows']:.0f} |"
        )
    grown, longer = contexts[-1]["round_ms"] / contexts[0]["round_ms"], contexts[-1]["context"] / contexts[0]["context"]
    batch_lines = [
        "| {scheme} | {one_ms:.1f} | {together_ms:.1f} | {times:.1f} | {bound:.1f} |".format(
            **row, times=row["one_ms"] / row["together_ms"]
        )
        for row in batches
    ]
    return f"""# Decoding: what grows with the context, and what a batch saves

`{command}`

Chain of {words.num_speculative_tokens}, greedy, {words.dtype}; torch {about["packages"]["torch"]}, {about["machine"]}; CPU time of one
process, one thread.

| context | ms per round | ms per verified token | ms for each 1,000 tokens more | off the line | attention and its memory | rows read |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}

A round (a verification and its draft) takes {a:.1f} ms + {b:.2f} ms for each 1,000 tokens of context: {grown:.1f} times as much
in {longer:.0f} times the context. Medians of {min(row["rounds"] for row in contexts):.0f} rounds and more.

| {words.prompts} prompts | one at a time, ms per token | together | times | of which the target's matrix products alone gain |
|---|---|---|---|---|
{chr(10).join(batch_lines)}

One at a time: {words.singly} of them, of all lengths; reading the prompt is counted in both.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run with responses and a trained head")
    parser.add_argument("--name", default="mtp", help="the head's folder in RUN/checkpoint")
    add_target_option(parser)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32 (default: auto, as conf/engine/hf.yaml says)")
    parser.add_argument("--num-speculative-tokens", type=positive, default=5)
    parser.add_argument("--contexts", type=positive, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--context-new-tokens", type=positive, default=24)
    parser.add_argument("--prompts", type=positive, default=64)
    parser.add_argument("--singly", type=int, default=8, help="of the prompts, decoded one at a time")
    parser.add_argument("--new-tokens", type=positive, default=48)
    add_results_option(parser)
    words = parser.parse_args()
    torch.set_num_threads(1)
    target = open_named_target(words.target)
    engine = build(
        {**load_word("engine", "hf"), "dtype": words.dtype, "max_cache_tokens": 64 * 16384},
        target_path=target.path,
        trust_remote_code=target.trust_remote_code,
        load_head=head_loader(target),
    )
    words.dtype, checkpoint = engine.dtype, words.run / "checkpoint" / words.name
    contexts, batches, about = by_context(words, engine, checkpoint), by_batch(words, engine, checkpoint), provenance()
    text = written(words, command_of(parser, words), contexts, batches, about)
    keep(text, {**about, "contexts": contexts, "batches": batches}, name="bench_decode", folder=words.results)


if __name__ == "__main__":
    with telling("bench_decode"):
        main()
