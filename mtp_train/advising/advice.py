"""The answer: which way of decoding for a workload, or none, what it is expected to be worth, why, and when to fall back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtp_train.acceptance.expected import best_of
from mtp_train.acceptance.interval import Interval
from mtp_train.acceptance.report_costs import Rows, verify_text
from mtp_train.acceptance.report_summary import interval_text
from mtp_train.advising.flags import Flags
from mtp_train.advising.options import Found, Option, break_even_of, lengths_at, prompts_of
from mtp_train.advising.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``recommended`` None: plain decoding. ``best`` is the option that is expected to be the fastest of those that the engine serves,
    recommended or not (None where it serves none); ``break_even`` its number of sequences (None: faster at all that were
    timed); ``by_batch`` what to do at other numbers of them, ``by_length`` what each draft length is worth."""

    workload: Workload
    target: str
    hardware: str
    recommended: Option | None
    best: Option | None
    found: Found
    break_even: float | None
    by_batch: Rows
    by_length: Rows
    reasons: tuple[str, ...]
    flags: tuple[Flags, ...]

    @property
    def answer(self) -> str:
        """In a sentence."""
        if self.recommended is None:
            return "Plain decoding: no drafts."
        return f"{self.recommended.text}: {interval_text(self.recommended.speedup)}× plain decoding expected."


def choose(found: Found) -> tuple[Option | None, Option | None]:
    """The recommended option and the best one: the fastest that is served is recommended where its whole interval is above 1."""
    best = next((option for option in found.options if option.served), None)
    return (best if best is not None and best.is_established else None), best


def advise(found: Found, workload: Workload, *, target: str, hardware: str, flags: Sequence[Flags]) -> Advice:
    """Put the answer together."""
    recommended, best = choose(found)
    shown = best or found.options[0]
    break_even = break_even_of(shown, workload)
    return Advice(
        workload=workload,
        target=target,
        hardware=hardware,
        recommended=recommended,
        best=best,
        found=found,
        break_even=break_even,
        by_batch=_by_batch(shown, workload),
        by_length=_by_length(shown, workload),
        reasons=tuple(_reasons(found, workload, recommended, best, break_even)),
        flags=tuple(flags),
    )


def _by_length(option: Option, workload: Workload) -> Rows:
    """What each draft length is worth with the workload's number of sequences."""
    rows = [
        [str(item.num_speculative_tokens), str(item.shape.num_verified - 1), interval_text(item.tokens), f"{interval_text(item.speedup)}×"]
        for item in lengths_at(option, workload, option.batch_size)
    ]
    title = f"{option.family.head}, {option.family.decoding}, {option.batch_size} at once"
    return Rows(title, ["K or depth", "tokens judged", "tokens per pass", "expected speed-up"], rows)


def _by_batch(option: Option, workload: Workload) -> Rows:
    """The best length of the option's family at every number of sequences that was timed, over plain decoding of as many."""
    rows = []
    for batch in option.table.batch_sizes:
        try:
            lengths = lengths_at(option, workload, batch)
        except ValueError:  # a tree's rows beyond what was timed
            continue
        best = best_of(lengths)
        chosen = next((item for item in lengths if item.num_speculative_tokens == best.num_speculative_tokens), None)
        what = "plain decoding" if chosen is None else f"K = {chosen.num_speculative_tokens}"
        verify = option.table.verify_s(batch, option.shape.num_verified) / option.table.verify_s(batch, 1)
        rows.append([str(batch), what, "1" if chosen is None else f"{interval_text(chosen.speedup)}×", f"{verify:.2f}"])
    columns = [
        "sequences at once",
        "best",
        "expected speed-up",
        f"plain passes that judging {option.shape.num_verified - 1} drafted tokens costs",
    ]
    return Rows(f"{option.family.head}, {option.family.decoding}", columns, rows)


def _reasons(found: Found, workload: Workload, recommended: Option | None, best: Option | None, break_even: float | None) -> list[str]:
    said = []
    shown = best or found.options[0]
    num_prompts = min(len(prompts) for prompts in prompts_of(shown, workload))
    per_pass, gain = shown.tokens.value, shown.speedup.value
    said.append(
        f"{shown.text}: a pass of the target gives {interval_text(shown.tokens)} tokens (over {num_prompts} prompts of the workload's "
        f"kind, counted by {_engines(shown)}), and a step costs {per_pass / gain:.2f} plain passes with {_sequences(shown.batch_size)} "
        f"({shown.table.label}): {interval_text(shown.speedup)}×."
    )
    if best is None:
        said.append(f"{workload.serve} serves none of what was measured.")
    elif recommended is None:
        state = "is below 1: it would be slower" if gain <= 1 else "has an interval that reaches 1 or is none: faster is not established"
        said.append(f"The best that {workload.serve} serves {state}; decode plainly.")
    fastest = found.options[0]
    if not fastest.served and fastest.speedup.value > 1:
        said.append(f"{fastest.text} is expected at {interval_text(fastest.speedup)}×, but {workload.serve} does not serve it.")
    said.append(verify_text(shown.table))
    said.append(_break_even_text(shown, break_even))
    if len(shown.measured) > 1:
        low, high = (figures.measurement.acceptance.temperature for figures in shown.measured)
        said.append(
            f"Temperature {workload.temperature:g} was not measured: the value lies on the line between {low:g} and {high:g}, the interval "
            "covers both."
        )
    if shown.table.source == "measured" and shown.table.engine != workload.serve:
        said.append(f"Costs are those of {shown.table.engine}; {workload.serve}'s are others, and decide: measure them where it runs.")
    if shown.table.source == "modelled":
        said.append(
            "Costs are modelled from the machine's data sheet and assumed shares of its rates; measure them before you rely on this."
        )
    return said


def _break_even_text(option: Option, break_even: float | None) -> str:
    most = option.table.batch_sizes[-1]
    if break_even is None:
        return f"It is expected to stay faster than plain decoding at every number of sequences that was timed (up to {most})."
    if break_even == 0:
        return "It is expected to be slower than plain decoding even for one sequence."
    return f"Break-even: {break_even:.1f} sequences at once; with more, plain decoding is expected to be faster (timed up to {most})."


def _engines(option: Option) -> str:
    return " and ".join(dict.fromkeys(figures.engine for figures in option.measured))


def _sequences(count: int) -> str:
    return f"{count} sequence{'s' if count > 1 else ''}"


def to_json(advice: Advice) -> dict[str, Any]:
    """All of it for programs."""
    workload = advice.workload
    return {
        "workload": {name: getattr(workload, name) for name in workload.__dataclass_fields__},
        "target": advice.target,
        "hardware": advice.hardware,
        "answer": advice.answer,
        "recommended": None if advice.recommended is None else _option_json(advice.recommended),
        "break_even_sequences": advice.break_even,
        "reasons": list(advice.reasons),
        "flags": [flag._asdict() for flag in advice.flags],
        "options": [_option_json(option) for option in advice.found.options],
        "by_batch": advice.by_batch._asdict(),
        "by_length": advice.by_length._asdict(),
        "left_out": advice.found.left_out,
    }


def _option_json(option: Option) -> dict[str, Any]:
    return {
        **option.family._asdict(),
        "text": option.text,
        "num_speculative_tokens": option.num_speculative_tokens,
        "tree_width": option.shape.width,
        "num_draft_steps": option.shape.num_draft_steps,
        "num_verified": option.shape.num_verified,
        "tokens_per_pass": _interval(option.tokens),
        "speedup": _interval(option.speedup),
        "sequences": option.batch_size,
        "served": option.served,
        "established": option.is_established,
        "costs": option.table.label,
    }


def _interval(found: Interval) -> dict[str, float | None]:
    return dict(found._asdict())
