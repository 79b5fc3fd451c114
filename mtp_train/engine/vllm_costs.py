"""Times vLLM's own steps: how long each takes with so many sequences and so many tokens of each, with a head and without.

vLLM is started once per number of tokens, as a server with that many drafted tokens would be, since what it captures and compiles
goes by that number. Verification alone is timed under its method ngram with drafts of ours in place of those it would look up
(any tokens do: they are judged all the same), so that every sequence brings exactly that many; what a head adds is the time of
a whole step with it, less that. A step counts where its scheduler ran exactly the batch asked for; which was run
with how many tokens is the scheduler's own record. Times are on the wall's clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtp_train.acceptance.costs import Timing, timing
from mtp_train.decoding.chain import Chain
from mtp_train.decoding.prompt_lookup import PromptLookup
from mtp_train.engine.base import CostsAsked, Sampling, SpeculateSettings, StepTimes
from mtp_train.engine.vllm_process import VllmPool
from mtp_train.engine.vllm_settings import VllmSettings
from mtp_train.engine.vllm_speculate import served_for
from mtp_train.runtime import read_json

# Steps that a request runs beside those that are to be timed: its last ones, which may be cut, and where others still read prompts.
_MORE_STEPS = 4
_FEWEST_STEPS = 3
# Rounds over the batch sizes within one process; the first one, in which kernels are chosen and caches warm up, does not count.
_ROUNDS = 3

Message = Callable[[str, list[int], Sampling], dict[str, Any]]
OpenPool = Callable[[Mapping[str, Any]], VllmPool]


def time_steps(settings: VllmSettings, draft: Path | None, asked: CostsAsked, *, open_pool: OpenPool, message: Message) -> StepTimes:
    """All cells. ``open_pool`` starts a process that times its steps, ``message`` makes a request of an id, tokens and sampling.

    Errors: ValueError where a process ran too few steps of the batch that was asked for.
    """
    device: list[str] = []

    def run(llm: Mapping[str, Any], num_tokens: int, *, fixed: bool) -> dict[int, list[float]]:
        with open_pool(llm) as pool:
            described = pool.description
            device[:] = [described["device_name"], described["attention"]]
            if fixed:
                pool.ask({"kind": "fix_drafts", "token_ids": _tokens(settings, asked, num_tokens - 1, seed=-1)})
            return _steps(pool, settings, asked, num_tokens, message=message)

    whole: dict[int, dict[int, list[float]]] = {}
    verified: dict[int, dict[int, list[float]]] = {}
    for num_tokens in asked.num_tokens:
        planned = _planned(asked, max(num_tokens - 1, 1), lookup=True)
        if num_tokens == 1:
            llm = settings.baseline_llm(planned)
        else:
            llm = settings.speculate_llm(served_for(planned.decoding, None, target_path=settings.target_path), planned)
        verified[num_tokens] = run(llm, num_tokens, fixed=num_tokens > 1)
    for length in asked.draft_lengths if draft is not None else ():
        planned = _planned(asked, length, lookup=False)
        llm = settings.speculate_llm(served_for(planned.decoding, draft, target_path=settings.target_path), planned)
        whole[length] = run(llm, length + 1, fixed=False)
    verify = [timing(batch, n, times) for batch in asked.batch_sizes for n, times in ((n, verified[n][batch]) for n in asked.num_tokens)]
    by_place = {(cell.batch_size, cell.num_tokens): cell.seconds for cell in verify}
    drafting: list[Timing] = [
        timing(batch, length, whole[length][batch], less=by_place[batch, length + 1]) for batch in asked.batch_sizes for length in whole
    ]
    notes = {
        "attention": device[1],
        "flags": settings.llm(drawn=False),
        "rule": "greedy",
        "model runner": "V1, whose proposer can be given drafts",
        "drafting": "a whole step with the head, less verifying",
    }
    return StepTimes(tuple(verify), tuple(drafting), device[0], notes)


def _planned(asked: CostsAsked, length: int, *, lookup: bool) -> SpeculateSettings:
    decoding = (
        PromptLookup(num_speculative_tokens=length, max_ngram=1, min_ngram=1)
        if lookup
        else Chain(num_speculative_tokens=length, refresh=True)
    )
    return SpeculateSettings(
        decoding=decoding,
        draft_sampling="greedy",
        sampling=_sampling(1),
        batch_size=asked.batch_sizes[-1],
        ignore_eos=True,
    )


def _sampling(max_new_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens, seed=0)


def _tokens(settings: VllmSettings, asked: CostsAsked, count: int, *, seed: int) -> list[int]:
    """Random tokens of the target."""
    size = int(read_json(settings.target_path / "config.json")["vocab_size"])
    draw = random.Random(f"{asked.seed}.{seed}")
    return [draw.randrange(size) for _ in range(count)]


def _steps(pool: VllmPool, settings: VllmSettings, asked: CostsAsked, num_tokens: int, *, message: Message) -> dict[int, list[float]]:
    """Seconds of each step that ran all of a batch with ``num_tokens`` each, by batch size."""
    found: dict[int, list[float]] = {batch_size: [] for batch_size in asked.batch_sizes}
    per_round = -(-asked.num_repeats // (_ROUNDS - 1))
    # Where drafts are taken an answer ends after fewer steps: twice as many tokens as steps leave enough of them.
    sampling = _sampling((1 if num_tokens == 1 else 2) * (per_round + _MORE_STEPS))
    for number in range(_ROUNDS):
        for batch_size in asked.batch_sizes:
            prompts = [_tokens(settings, asked, asked.context_tokens, seed=slot) for slot in range(batch_size)]
            requests = [message(f"{number}.{batch_size}.{slot}", prompt, sampling) for slot, prompt in enumerate(prompts)]
            for _ in pool.run_apart([requests], max_batches=1):
                pass
            (taken,) = pool.ask({"kind": "take_steps"})
            if number:
                found[batch_size] += [seconds for seconds, batch, tokens in taken["steps"] if (batch, tokens) == (batch_size, num_tokens)]
    for batch_size, seconds in found.items():
        if len(seconds) < _FEWEST_STEPS:
            raise ValueError(
                f"costs: expected at least {_FEWEST_STEPS} steps of {batch_size} sequences with {num_tokens} tokens each, found "
                f"{len(seconds)}; raise num_repeats, or engine.max_prefill_tokens, so that all prompts are read at once"
            )
    return found
