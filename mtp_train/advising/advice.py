"""The answer: which way of decoding for a workload, or none, what it is expected to be worth, why, and when to fall back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtp_train.acceptance.costs import CostTable
from mtp_train.acceptance.expected import FasterRange, best_of
from mtp_train.acceptance.interval import Interval
from mtp_train.acceptance.report_costs import Rows, verify_text
from mtp_train.acceptance.report_pairs import MIN_PROMPTS
from mtp_train.acceptance.report_summary import interval_text
from mtp_train.advising.flags import Flags
from mtp_train.advising.options import CHAINS, Found, Option, faster_ranges_of, lengths_at
from mtp_train.advising.workload import Workload

# Of a plain pass' time: less than this for more tokens is no rounding of a clock.
_LEAST_RATIO = 0.95


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``recommended`` None: plain decoding. ``best`` is the option that is expected to be the fastest of those that the engine serves,
    recommended or not (None where it serves none); ``faster`` the numbers of sequences at which its family is expected to be faster
    with the best draft length for each, ``faster_as_is`` with its own (None: none); ``by_batch`` what to do at other numbers of
    them, ``by_length`` what each draft length is worth."""

    workload: Workload
    target: str
    hardware: str
    recommended: Option | None
    best: Option | None
    found: Found
    faster: FasterRange | None
    faster_as_is: FasterRange | None
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
    """The recommended option and the best one: the fastest of those served whose whole interval is above 1; where there is none such,
    nothing is recommended, and the best is the fastest served."""
    served = [option for option in found.options if option.served]
    recommended = next((option for option in served if option.is_established), None)
    return recommended, recommended or next(iter(served), None)


def advise(found: Found, workload: Workload, *, target: str, hardware: str, flags: Sequence[Flags]) -> Advice:
    """Put the answer together."""
    recommended, best = choose(found)
    shown = best or found.options[0]
    faster, faster_as_is = faster_ranges_of(shown, workload)
    return Advice(
        workload=workload,
        target=target,
        hardware=hardware,
        recommended=recommended,
        best=best,
        found=found,
        faster=faster,
        faster_as_is=faster_as_is,
        by_batch=_by_batch(shown, workload),
        by_length=_by_length(shown, workload),
        reasons=(*_reasons(found, workload, recommended, best), *_range_texts(shown, faster, faster_as_is), *_limits(shown, workload)),
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
        word = "K =" if option.family.decoding in CHAINS else "depth"
        what = "plain decoding" if chosen is None else f"{word} {chosen.num_speculative_tokens}"
        verify = option.table.verify_s(batch, option.shape.num_verified) / option.table.verify_s(batch, 1)
        rows.append([str(batch), what, "1" if chosen is None else f"{interval_text(chosen.speedup)}×", f"{verify:.2f}"])
    judged = option.shape.num_verified - 1
    columns = [
        "sequences at once",
        "best",
        "expected speed-up",
        f"plain passes that judging {judged} drafted token{'s' * (judged > 1)} costs",
    ]
    return Rows(f"{option.family.head}, {option.family.decoding}", columns, rows)


def _reasons(found: Found, workload: Workload, recommended: Option | None, best: Option | None) -> list[str]:
    """What the choice follows from."""
    said = []
    shown = best or found.options[0]
    gain, at = shown.speedup.value, lengths_at(shown, workload, shown.batch_size)
    same = next(item for item in at if item.num_speculative_tokens == shown.num_speculative_tokens)
    over = "" if workload.goal == "latency" else " plain decoding at the number of sequences that is best for it"
    said.append(
        f"{shown.text}: a pass of the target gives {interval_text(shown.tokens)} tokens (over {shown.num_prompts} prompts of the "
        f"workload's kind, counted by {_engines(shown)}), and a step costs {same.tokens.value / same.speedup.value:.2f} plain passes with "
        f"{_sequences(shown.batch_size)} ({shown.table.label}): {interval_text(shown.speedup)}×{over}."
    )
    if best is None:
        said.append(f"{workload.serve} serves none of what was measured.")
    elif recommended is None:
        state = "is below 1: it would be slower" if gain <= 1 else "has an interval that reaches 1 or is none: faster is not established"
        if gain > 1 and best.num_prompts < MIN_PROMPTS:
            state = f"rests on {best.num_prompts} prompts, of {MIN_PROMPTS} at least: faster is not established"
        said.append(f"The best that {workload.serve} serves {state}; decode plainly.")
    if (first := next((option for option in found.options if option.served), None)) is not None and first is not shown:
        said.append(
            f"{first.text} is expected at {interval_text(first.speedup)}×, but that it is faster than plain decoding is not established."
        )
    fastest = found.options[0]
    if not fastest.served and fastest.speedup.value > 1:
        said.append(f"{fastest.text} is expected at {interval_text(fastest.speedup)}×, but {workload.serve} does not serve it.")
    said.append(verify_text(shown.table))
    return said


def _range_texts(option: Option, faster: FasterRange | None, as_is: FasterRange | None) -> list[str]:
    """From how many sequences on, and up to how many, drafts pay."""
    most = f"(timed up to {option.table.batch_sizes[-1]})"
    if faster is None:
        return [f"It is expected to be slower than plain decoding at every number of sequences that was timed {most}."]
    begins = f"from {faster.first} sequences at once on, " if faster.first > option.table.batch_sizes[0] else ""
    if faster.until is None:
        said = [
            f"With the best draft length for each it is expected to be faster than plain decoding {begins}as far as was timed {most}, "
            "by the middle of each interval."
        ]
    else:
        said = [
            f"Break-even: {faster.until:.1f} sequences at once, with the best draft length for each ({begins}timed as below); with more, "
            f"plain decoding is expected to be faster {most}."
        ]
    if as_is is not None and as_is.until is not None and as_is.until != faster.until:
        said.append(f"With {_length(option)} alone the break-even is {as_is.until:.1f}: under more load take a shorter draft, as below.")
    return said


def _limits(option: Option, workload: Workload) -> list[str]:
    """What the figures do not say."""
    said = []
    if len(option.measured) > 1:
        low, high = (figures.measurement.acceptance.temperature for figures in option.measured)
        said.append(
            f"Temperature {workload.temperature:g} was not measured: the value lies on the line between {low:g} and {high:g}, the interval "
            "covers both."
        )
    if option.table.source == "measured" and option.table.engine != workload.serve:
        said.append(f"Costs are those of {option.table.engine}; {workload.serve}'s are others, and decide: measure them where it runs.")
    if option.table.source == "modelled":
        said.append(
            "Costs are modelled from the machine's data sheet and assumed shares of its rates; measure them before you rely on this."
        )
    if impossible := _impossible(option.table):
        said.append(
            f"{impossible}, more work in less time: either other work ran beside, or the kernels for one row are slower here (torch's are, "
            "in bfloat16 on a CPU); time again where nothing else runs, and measure what is recommended."
        )
    return said


def _impossible(table: CostTable) -> str | None:
    """The cell that says the most clearly that the times are noise: more tokens read in less time than one. None: there is none."""
    cells = {(batch, n): table.verify_s(batch, n) / table.verify_s(batch, 1) for batch in table.batch_sizes for n in table.verified_tokens}
    (batch, n), ratio = min(cells.items(), key=lambda item: item[1])
    return f"{n} tokens of {_sequences(batch)} took {ratio:.2f} of a plain pass" if ratio < _LEAST_RATIO else None


def _length(option: Option) -> str:
    """``K = 3``, or a tree's ``depth 5``."""
    return f"{'K =' if option.family.decoding in CHAINS else 'depth'} {option.num_speculative_tokens}"


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
        "faster_from_sequences": None if advice.faster is None else advice.faster.first,
        "break_even_sequences": 0.0 if advice.faster is None else advice.faster.until,
        "break_even_sequences_as_is": 0.0 if advice.faster_as_is is None else advice.faster_as_is.until,
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
        "num_prompts": option.num_prompts,
        "served": option.served,
        "established": option.is_established,
        "costs": option.table.label,
    }


def _interval(found: Interval) -> dict[str, float | None]:
    return dict(found._asdict())
