"""An advice as a Markdown page that teaches the choice for its workload, and as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtp_train.acceptance.report_costs import Rows, rows_markdown
from mtp_train.acceptance.report_markdown import escape
from mtp_train.acceptance.report_summary import interval_text
from mtp_train.advising.advice import Advice
from mtp_train.advising.options import CHAINS, Found, Option

if TYPE_CHECKING:
    from rich.console import Console

_DRAFT = (
    "A draft pays when what it adds to a pass of the target is worth more than what it adds to the pass's time. What it adds are the "
    "tokens accepted, which a report counts; what it costs are the head's forwards and the target's reading of more than one token per "
    "sequence, which is nearly free where the target waits for memory and costs by the token where it is busy."
)
_LENGTH = (
    "Each further token is accepted only where all before it were, so that it adds less than the one before, and its draft costs the same. "
    "The best K is the last one that still adds more than it costs."
)
_TREE = (
    "A tree judges several tokens for a place: more is accepted per pass, and each pass reads all its nodes. It wins where the draft is "
    "often nearly right and verifying is still free; under load a chain, or a narrower tree, takes its place."
)
_TEMPERATURE = (
    "A greedy draft is accepted with the probability that the target gives its token, which falls as the temperature rises; one drawn from "
    "the head at the same temperature is accepted with the sum of min(p, q), which falls more slowly where the head's distribution follows "
    "the target's. The output's distribution is the target's in either case."
)
_FALL_BACK = (
    "Verification stops being free as more sequences are decoded together, and free writing is drafted worse than code or answers that "
    "repeat their prompt. Fall back to plain decoding beyond the break-even, and measure again when prompts, temperature or machine change."
)


def markdown(advice: Advice) -> str:
    """The page."""
    lines = [
        f"# How to decode: {escape(advice.target)}",
        "",
        f"Workload: {escape(advice.workload.text)}. Machine: {escape(advice.hardware)}.",
        "",
    ]
    lines += [f"**{escape(advice.answer)}**", "", *(f"- {escape(reason)}" for reason in advice.reasons), ""]
    lines += ["## Paste", ""]
    for engine, command, notes in advice.flags:
        lines += [f"{engine}:", "", *(["```bash", command, "```"] if command else []), *(f"- {escape(note)}" for note in notes), ""]
    lines += ["## Whether to draft", "", _DRAFT, "", *rows_markdown(options_table(advice), escape), ""]
    lines += ["## How long a draft", "", _LENGTH, "", escape(advice.by_length.title), "", *rows_markdown(advice.by_length, escape), ""]
    lines += ["## A tree or a chain", "", _TREE, "", *_shapes(advice.found), ""]
    lines += ["## Temperature", "", _TEMPERATURE, "", *_samplings(advice.found.options), ""]
    lines += ["## When to fall back", "", _FALL_BACK, "", escape(advice.by_batch.title), "", *rows_markdown(advice.by_batch, escape), ""]
    if advice.found.left_out:
        lines += ["## Left out", "", *(f"- {escape(text)}" for text in advice.found.left_out), ""]
    lines += [
        "## What this rests on",
        "",
        "- Acceptance as measured, cut at shorter drafts as if they began at the same places; intervals are 95% bootstrap intervals over "
        "prompts, those of speed-ups with the unsureness of the timed medians too; prompts' reading is left out.",
        *(f"- {escape(label)}" for label in dict.fromkeys(option.table.label for option in advice.found.options)),
        "",
    ]
    return "\n".join(lines)


def options_table(advice: Advice, *, most: int = 12) -> Rows:
    """The fastest options, and the recommended one wherever it stands."""
    rows = []
    for option in [found for number, found in enumerate(advice.found.options) if number < most or found is advice.recommended]:
        mark = "recommended" if option is advice.recommended else "" if option.served else f"not in {advice.workload.serve}"
        worth = [interval_text(option.tokens), f"{interval_text(option.speedup)}×"]
        rows.append([option.text, *worth, str(option.batch_size), str(option.num_prompts), mark])
    rows.append(["plain decoding", "1", "1×", "", "", "recommended" if advice.recommended is None else ""])
    return Rows("Options, the fastest first", ["option", "tokens per pass", "expected speed-up", "sequences", "prompts", ""], rows)


def _shapes(found: Found) -> list[str]:
    """The best chain and the best tree of each head."""
    said, options = [], found.options
    for head in dict.fromkeys(option.family.head for option in options):
        best: dict[str, Option] = {}
        for option in options:
            if option.family.head == head:
                best.setdefault("chain" if option.family.decoding in CHAINS else "tree", option)
        said += [f"- {escape(option.text)}: {escape(interval_text(option.speedup))}×" for option in best.values()]
    if found.has_trees and all(option.family.decoding in CHAINS for option in options):
        said.append("- A tree was measured and is left out, for the reason below.")
    if not found.has_trees:
        said.append("- No tree was measured: evaluate with decoding=dynamic\\_tree, which stands beside the chains.")
    return said


def _samplings(options: Sequence[Option]) -> list[str]:
    """The best option of each way of drafting."""
    best: dict[str, Option] = {}
    for option in options:
        best.setdefault(option.family.draft_sampling, option)
    return [f"- {sampling} drafts: {escape(option.text)}, {escape(interval_text(option.speedup))}×" for sampling, option in best.items()]


def print_advice(advice: Advice, console: Console) -> None:
    """The answer, the options and what to do at other numbers of sequences."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"{advice.target}; {advice.workload.text}; {advice.hardware}"))
    for found in (options_table(advice), advice.by_length, advice.by_batch):
        table = Table(title=Text(found.title), title_justify="left")
        for number, column in enumerate(found.columns):
            table.add_column(Text(column), justify="left" if number == 0 else "right")
        for row in found.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for reason in advice.reasons:
        console.print(Text(f"- {reason}"))
    for text in advice.found.left_out:
        console.print(Text(f"- left out: {text}"))
    console.print()
    console.print(Text(advice.answer, style="bold"))
    for engine, command, notes in advice.flags:
        console.print(Text(f"{engine}: {command or ''}"), soft_wrap=True)
        for note in notes:
            console.print(Text(f"  {note}"))
