"""Synthetic measurements for the tests of intervals and reports."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mtp_train.acceptance.costs import CostTable, Timing
from mtp_train.acceptance.identity import Difference, Identity
from mtp_train.acceptance.report_data import Aim, MarkedAnswer, Measurement, Plain, PromptSet, ReportData, TrainedHead
from mtp_train.records import Acceptance, PromptAcceptance

NASTY = '<script>alert("x")</script> & "quoted" $x$ | `code` <img src=x onerror=alert(1)>'
CATEGORIES = ("code", "writing", "reasoning", NASTY)


def make_prompt(generator: random.Random, *, index: int, rate: float, depths: int, category: str) -> PromptAcceptance:
    """One prompt whose drafts are taken with ``rate`` at each position, given the one before."""
    accepted, flags = [0] * depths, [False]
    num_drafts = generator.randint(10, 40)
    for _ in range(num_drafts):
        taken = 0
        while taken < depths and generator.random() < rate:
            accepted[taken] += 1
            taken += 1
        flags += [True] * taken + [False]
    return PromptAcceptance(
        prompt_id=f"prompt-{index}",
        category=category,
        num_prompt_tokens=random.Random(index).choice([40, 90, 300, 700, 1500, 3000, 6000]),
        token_ids=tuple(range(len(flags))),
        accepted=tuple(flags),
        num_drafts=num_drafts,
        num_drafted_per_position=(num_drafts,) * depths,
        num_accepted_per_position=tuple(accepted),
    )


def make_acceptance(*, rate: float, num_prompts: int, temperature: float, measured_by: str, seed: int, depths: int = 5) -> Acceptance:
    generator = random.Random(seed)
    prompts = [
        make_prompt(generator, index=i, rate=rate, depths=depths, category=CATEGORIES[i % len(CATEGORIES)]) for i in range(num_prompts)
    ]
    return Acceptance(
        prompts=tuple(prompts),
        scheme="chain",
        num_speculative_tokens=depths,
        temperature=temperature,
        draft_sampling="greedy",
        measured_by=measured_by,
        engine_version="transformers 5.19.0",
        dtype="float32",
        wall_s=None if measured_by == "estimate" else 12.5,
        notes={"batch_size": 8, "flags": NASTY},
    )


def make_report() -> ReportData:
    """Two heads, two prompt sets, greedy and sampled, estimates, a difference that is a tie, and hostile text everywhere."""
    sets = (
        PromptSet(name="heldout", label="project, held out", description="Prompts written for this project, never trained on."),
        PromptSet(name="gsm8k", label=f"GSM8K {NASTY}", description=f"School mathematics. {NASTY}"),
    )
    tie = Difference(prompt_id=NASTY, index=7, plain_token=11, speculated_token=None, logit_gap=3e-5)
    measurements, answers = [], []
    for name, rate in (("mtp", 0.34), ("eagle", 0.26)):
        for index, prompt_set in enumerate(sets):
            for temperature, measured_by in ((0.0, "hf"), (0.0, "estimate"), (1.0, "hf")):
                seed = index + (100 if measured_by == "estimate" else 0)
                acceptance = make_acceptance(rate=rate, num_prompts=40, temperature=temperature, measured_by=measured_by, seed=seed)
                greedy = temperature == 0 and measured_by == "hf"
                measurements.append(
                    Measurement(
                        head=name,
                        prompt_set=prompt_set.name,
                        acceptance=acceptance,
                        plain=Plain(num_tokens=1000, wall_s=11.0) if measured_by == "hf" else None,
                        identity=Identity(num_prompts=40, num_identical=39, num_tokens=1000, differences=(tie,)) if greedy else None,
                    )
                )
        words = f"The answer is a list:\n1. {NASTY}\n2. nothing  else. Each of these is a word that the head may or may not draft.".split(
            " "
        )
        answers.append(
            MarkedAnswer(
                head=name,
                prompt_set="heldout",
                prompt_id="prompt-3",
                category=NASTY,
                question=f"What is {NASTY}?\nSay it in two lines.",
                token_texts=tuple(f" {word}" for word in words),
                accepted=tuple(i % 3 == 1 for i in range(len(words))),
            )
        )
    heads = tuple(
        TrainedHead(
            name=name,
            word=name,
            facts={"parameters": "4.2M", "steps": 600, "norms": "all" if name == "mtp" else "none"},
            metrics=tuple(make_metrics(slope)),
        )
        for name, slope in (("mtp", 0.006), ("eagle", 0.004))
    )
    return ReportData(
        title="Acceptance of two heads for SmolLM2-135M-Instruct",
        target={"name": "SmolLM2-135M-Instruct", "layers": 30, "hidden": 576, "dtype": "float16"},
        heads=heads,
        prompt_sets=sets,
        measurements=tuple(measurements),
        answers=tuple(answers),
        aims=(
            Aim(head="mtp", prompt_set="heldout", quantity="first_position", at_least=0.30),
            Aim(head="eagle", prompt_set="heldout", quantity="first_position", at_least=0.30),
        ),
        provenance={"train": {"git_commit": "abc-dirty", "packages": {"torch": "2.13.0"}, "settings": {"note": NASTY}}},
        notes=(f"A note with {NASTY}",),
    )


def make_metrics(slope: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {"step": step, "split": "train", "loss": 6.0 * 0.99 ** (step * slope * 40) + 2} for step in range(1, 600)
    ]
    rows += [
        {"step": step, "split": "validation", "loss": 6.1 * 0.99 ** (step * slope * 40) + 2, "agreement": [step * slope / 12, None]}
        for step in range(50, 601, 50)
    ]
    return rows


@pytest.fixture(scope="session")
def report_data() -> ReportData:
    return make_report()


@pytest.fixture
def nasty() -> str:
    return NASTY


@pytest.fixture
def acceptance_of() -> Callable[..., Acceptance]:
    return make_acceptance


def make_timing(batch_size: int, num_tokens: int, seconds: float) -> Timing:
    return Timing(batch_size=batch_size, num_tokens=num_tokens, seconds=seconds, low_s=0.9 * seconds, high_s=1.2 * seconds, num_repeats=7)


def make_table(
    *,
    verify: Callable[[int, int], float] = lambda b, n: b * (2.0 + n),
    drafting: Callable[[int, int], float] | tuple[()] = lambda b, k: b * (1 + 0.5 * k) / 10,
    head: str | None = "mtp",
    engine: str = "hf",
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8),
    num_tokens: tuple[int, ...] = (1, 2, 4, 6),
) -> CostTable:
    """A table whose cells are these functions of the batch size and the number of tokens."""
    cells = () if isinstance(drafting, tuple) else tuple(make_timing(b, k, drafting(b, k)) for b in batch_sizes for k in (1, 5))
    return CostTable(
        source="measured",
        engine=engine,
        engine_version="transformers 5.19.0",
        dtype="float32",
        device="cpu",
        target_name="tiny",
        target_fingerprint="f" * 64,
        head=head,
        context_tokens=64,
        verify=tuple(make_timing(b, n, verify(b, n)) for b in batch_sizes for n in num_tokens),
        drafting=cells,
        notes={"threads": 1},
    )


@pytest.fixture
def make_cost_table() -> Callable[..., CostTable]:
    return make_table


@pytest.fixture
def cost_table() -> CostTable:
    return make_table()


@pytest.fixture
def cheap_table() -> CostTable:
    """One sequence's further tokens cost nothing to verify, eight sequences' nearly as much as the first."""
    return make_table(verify=lambda b, n: 1.0 + 0.05 * (b - 1) * (n - 1), drafting=lambda b, k: 0.01 + 0.05 * k)
