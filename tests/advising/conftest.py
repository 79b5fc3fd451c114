"""Made-up reports of one run with costs, small enough to work out by hand what should be recommended."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from mtp_train.acceptance.costs import CostTable, Timing
from mtp_train.acceptance.report_data import WEIGHTS_FACT, Measurement, PromptSet, ReportData, TrainedHead
from mtp_train.advising.advice import Advice, advise
from mtp_train.advising.options import find_options
from mtp_train.advising.workload import Workload
from mtp_train.records import Acceptance, PromptAcceptance

TARGET = {"name": "tiny", "hidden_size": 64, "num_layers": 2, "vocab_size": 320, "fingerprint": "f" * 64}
CATEGORIES = ("coding", "writing")
WEIGHTS = "ab" * 32  # the hash of those of every head


def make_acceptance(rate: float, *, temperature: float = 0.0, sampling: str = "greedy", depth: int = 4, **changes: Any) -> Acceptance:
    """40 prompts, 100 drafts each; a token is taken with ``rate`` given those before it, on writing with half of that."""
    generator, prompts = random.Random(7), []
    for index in range(40):
        category = CATEGORIES[index % 2]
        accepted, flags = [0] * depth, [False]
        for _ in range(100):
            taken = 0
            while taken < depth and generator.random() < (rate if category == "coding" else rate / 2):
                accepted[taken] += 1
                taken += 1
            flags += [True] * taken + [False]
        prompts.append(
            PromptAcceptance(
                prompt_id=f"p{index}",
                category=category,
                num_prompt_tokens=10 * (index + 1),
                token_ids=tuple(range(len(flags))),
                accepted=tuple(flags),
                num_drafts=100,
                num_drafted_per_position=(100,) * depth,
                num_accepted_per_position=tuple(accepted),
            )
        )
    found = Acceptance(
        prompts=tuple(prompts),
        scheme="chain",
        num_speculative_tokens=depth,
        temperature=temperature,
        draft_sampling=sampling,  # type: ignore[arg-type]
        measured_by="hf",
        engine_version="transformers 5.19.0",
        dtype="float32",
        wall_s=None,
        notes={"batch_size": 4, "decoding": {"num_speculative_tokens": depth, "refresh": True}},
    )
    return dataclasses.replace(found, **changes)


def make_report(*acceptances: Acceptance, heads: tuple[str, ...] = (), costs: tuple[CostTable, ...] = ()) -> ReportData:
    """A report of these, each of the head beside it (one name: of all)."""
    names = heads if len(heads) == len(acceptances) else (heads or ("mtp",)) * len(acceptances)
    return ReportData(
        title="made up",
        target=TARGET,
        heads=tuple(TrainedHead(name=name, word=name, facts={WEIGHTS_FACT: WEIGHTS[:16]}, metrics=()) for name in dict.fromkeys(names)),
        prompt_sets=(PromptSet(name="project", label="held-out prompts", description=""),),
        measurements=tuple(
            Measurement(head=name, prompt_set="project", acceptance=acceptance, plain=None, identity=None)
            for name, acceptance in zip(names, acceptances, strict=True)
        ),
        answers=(),
        aims=(),
        provenance={},
        notes=(),
        costs=costs,
    )


def make_table(head: str | None = "mtp", **changes: Any) -> CostTable:
    """Verifying is free for one sequence; for b of them each further token costs a twentieth of b - 1 passes. A draft step: 0.05."""

    def cell(batch: int, tokens: int, seconds: float) -> Timing:
        return Timing(batch_size=batch, num_tokens=tokens, seconds=seconds, low_s=seconds, high_s=seconds, num_repeats=5)

    sizes = (1, 2, 4, 8, 16)
    found = CostTable(
        source="measured",
        engine="hf",
        engine_version="transformers 5.19.0",
        dtype="float32",
        device="cpu, 1 thread",
        target_name="tiny",
        target_fingerprint=TARGET["fingerprint"],  # type: ignore[arg-type]
        head=head,
        context_tokens=64,
        verify=tuple(cell(b, n, 1.0 + 0.05 * (b - 1) * (n - 1)) for b in sizes for n in (1, 2, 5, 9)),
        drafting=() if head is None else tuple(cell(b, k, 0.05 * k) for b in sizes for k in (1, 4)),
        notes={"head_sha256": None if head is None else WEIGHTS},
    )
    return dataclasses.replace(found, **changes)


def make_workload(**changes: Any) -> Workload:
    plain = Workload(
        prompt_set=None,
        categories=None,
        min_prompt_tokens=0,
        max_prompt_tokens=None,
        temperature=0.0,
        concurrency=1,
        goal="latency",
        serve="vllm",
    )
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def acceptance() -> Callable[..., Acceptance]:
    return make_acceptance


@pytest.fixture
def report() -> Callable[..., ReportData]:
    return make_report


@pytest.fixture
def table() -> Callable[..., CostTable]:
    return make_table


@pytest.fixture
def workload() -> Callable[..., Workload]:
    return make_workload


@pytest.fixture
def ask() -> Callable[..., Advice]:
    """The advice on one run that measured these."""

    def make(*acceptances: Any, costs: CostTable | None = None, heads: tuple[str, ...] = (), **asked: Any) -> Advice:
        found_for: Workload = make_workload(**asked)
        found = find_options({"run": make_report(*acceptances, heads=heads)}, found_for, table_of=lambda run, head: costs or make_table())
        return advise(found, found_for, target="tiny", hardware="2 x core", flags=[])

    return make
