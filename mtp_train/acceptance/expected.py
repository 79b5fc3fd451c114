"""What speculation should be worth: measured acceptance, cut at each draft length, over the measured costs of a step.

Intervals hold the acceptance's (bootstrap over prompts) and how sure the timed medians are, which are independent of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mtp_train.acceptance.costs import CostTable, Shape, chain_shape
from mtp_train.acceptance.interval import Interval, rates_and_length
from mtp_train.acceptance.speedup import Costs, best_draft_length, expected_tokens_per_pass, single_token_schedule, speedup
from mtp_train.acceptance.tally import num_passes_without_drafts
from mtp_train.records import Acceptance, PromptAcceptance

# Schemes whose first levels do not hang on how deep they go.
_CUT_ANYWHERE = ("chain", "prompt_lookup", "eagle_tree")


class Expected(NamedTuple):
    """At a draft length: tokens per pass of the target, passes without drafts counted, and the speed-up that follows."""

    num_speculative_tokens: int
    shape: Shape
    tokens: Interval
    speedup: Interval


def expected(prompts: Sequence[PromptAcceptance], *, shape: Shape, depth: int, table: CostTable, batch_size: float) -> Expected:
    """If drafting were cut at ``depth``, with steps of this shape: the measured rates up to there, as if where drafts start
    stayed the same. Passes in which nothing was drafted cost a plain pass and give one token.

    Errors: ValueError where the shape or batch size lies beyond what was timed, or nothing was drafted.
    """
    _, length = rates_and_length(prompts, depth)
    num_drafts = sum(prompt.num_drafts for prompt in prompts)
    share = num_drafts / (num_drafts + num_passes_without_drafts(prompts))
    costs = table.costs(batch_size, shape)
    tokens = _scaled(length, share, 1.0 - share)
    # speedup() of a step that is drafted with that share: both its tokens and its time are means over all passes.
    step = shape.num_draft_steps * costs.draft_step + costs.verify + costs.overhead
    mean = Costs(plain=costs.plain, draft_step=0.0, verify=share * step + (1.0 - share) * costs.plain, overhead=0.0)
    per_token = speedup(tokens=1.0, num_draft_steps=0, costs=mean)
    return Expected(depth, shape, tokens, _widened(_scaled(tokens, per_token, 0.0), table.unsureness(batch_size, shape)))


def shape_of(acceptance: Acceptance, depth: int) -> Shape:
    """What a step of the scheme runs that this acceptance was counted under, its drafts cut at ``depth``.

    Errors: ValueError for a scheme that is not known, and for a depth at which it cannot be cut.
    """
    word, settings = acceptance.decoding, acceptance.notes.get("decoding", {})
    if depth not in cuts(acceptance):
        raise ValueError(f"decoding={word}: expected a depth in {list(cuts(acceptance))}, found {depth}")
    num_nodes = depth if acceptance.num_nodes is None else acceptance.num_nodes
    if word == "chain":
        return chain_shape(depth)
    if word == "prompt_lookup":
        return Shape(0, 0, depth + 1)
    if word == "lookahead":  # it reads the places that it guesses ahead beside the n-grams that it judges
        return Shape(0, 0, (settings["max_candidates"] + settings["window"]) * (settings["ngram"] - 1))
    if word == "eagle_tree":
        levels = settings["nodes_per_depth"][:depth]
        return Shape(depth, max(levels[:-1], default=1), sum(levels) + 1)
    if word == "dynamic_tree":
        return Shape(depth, settings["width"], num_nodes + 1)
    if word == "medusa_tree":  # its heads speak in one forward
        return Shape(1, 1, num_nodes + 1)
    raise ValueError(f"decoding={word}: expected a scheme whose cost is known, found another; add it to shape_of")


def cuts(acceptance: Acceptance) -> range:
    """Depths at which a scheme's drafts could have been cut without changing what was drafted before."""
    depth = acceptance.num_speculative_tokens
    return range(1 if acceptance.decoding in _CUT_ANYWHERE else depth, depth + 1)


def expected_lengths(
    acceptance: Acceptance, *, table: CostTable, batch_size: float, prompts: Sequence[PromptAcceptance] | None = None
) -> list[Expected]:
    """``expected`` at every depth at which the scheme can be cut, as far as was timed; over ``prompts``, some of the
    acceptance's own (None: all of them).

    Errors: ValueError where none was timed, which says what is missing.
    """
    found: list[Expected] = []
    for depth in cuts(acceptance):
        shape = shape_of(acceptance, depth)
        try:
            found.append(
                expected(acceptance.prompts if prompts is None else prompts, shape=shape, depth=depth, table=table, batch_size=batch_size)
            )
        except ValueError:
            if not found:
                raise
            break
    return found


class Best(NamedTuple):
    """The draft length with the greatest speed-up, 0 where plain decoding is the fastest."""

    num_speculative_tokens: int
    speedup: float

    @property
    def text(self) -> str:
        k, gain = self
        return f"K = {k}: {gain:.2f}×" if k else "plain"


def best_for_acceptance(acceptance: float, *, table: CostTable, batch_size: float) -> Best:
    """With each drafted token accepted with the same probability, given those before it."""
    lengths = range(1, table.longest + 1)
    tokens = [expected_tokens_per_pass(acceptance, k) for k in lengths]
    return Best(*best_draft_length(tokens=tokens, costs=[table.costs(batch_size, chain_shape(k)) for k in lengths]))


def best_of(found: Sequence[Expected]) -> Best:
    """Of the draft lengths worked out for one head."""
    gains = {item.num_speculative_tokens: item.speedup.value for item in found}
    best = max(gains, key=lambda k: gains[k], default=0)
    return Best(best, gains[best]) if best and gains[best] > 1 else Best(0, 1.0)


def single_token(first_rate: Interval, *, table: CostTable, batch_size: float) -> Interval:
    """The speed-up of one drafted token under the schedule that runs the head over all 2 x D rows and waits for nothing.

    Errors: ValueError where twice the batch size was not timed.
    """
    costs = table.costs(batch_size, chain_shape(1))
    both = single_token_schedule(costs, draft_both=table.draft_step_s(2 * batch_size))
    per_token = speedup(tokens=1.0, num_draft_steps=1, costs=both)
    return _scaled(first_rate, per_token, per_token)


class FasterRange(NamedTuple):
    """Numbers of sequences at which something is faster than plain decoding: from ``first``, a number that was timed, up to ``until``
    (None: the most that were timed), which is interpolated."""

    first: int
    until: float | None


def faster_range(gains: Sequence[tuple[int, float]], *, around: float) -> FasterRange | None:
    """The range that holds ``around``, or else the first one; None where there is none. ``gains``: number of sequences and speed-up,
    ascending."""
    found: list[FasterRange] = []
    before: tuple[int, float] | None = None
    for batch_size, gain in gains:
        if gain > 1 and (not found or found[-1].until is not None):
            found.append(FasterRange(batch_size, None))
        elif gain <= 1 and found and found[-1].until is None and before is not None:
            until = before[0] + (batch_size - before[0]) * (before[1] - 1) / (before[1] - gain)
            found[-1] = found[-1]._replace(until=until)
        before = batch_size, gain
    holding = [item for item in found if item.first <= around and (item.until is None or around <= item.until)]
    return next(iter([*holding, *found]), None)


def _widened(found: Interval, share: float) -> Interval:
    """An interval that holds an independent unsureness of its factor too, given as a share of it: half-widths add as squares."""
    if found.low is None or found.high is None:
        return found
    low, high = (math.hypot(edge - found.value, share * found.value) for edge in (found.low, found.high))
    return Interval(found.value, found.value - low, found.value + high)


def _scaled(found: Interval, factor: float, shift: float) -> Interval:
    """An interval times a positive factor, plus a shift."""
    return Interval(*(None if value is None else factor * value + shift for value in found))  # type: ignore[arg-type]
