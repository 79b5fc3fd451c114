"""Which measurements of a report are held against each other prompt by prompt, and which are not, and why."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_train.acceptance.alike import apart, engine_of
from mtp_train.acceptance.interval import Interval, paired_difference
from mtp_train.acceptance.report_data import Measurement

# The fewest prompts over which a difference is called established: an interval over fewer says little of prompts to come.
MIN_PROMPTS = 10


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """First less second, over the same prompts drawn together, both counted by one engine under the same settings."""

    first: str
    second: str
    engine: str
    rates: list[Interval]
    length: Interval
    num_prompts: int

    def establishes(self, difference: Interval) -> bool:
        """Whether one of its differences leaves out 0, over prompts enough."""
        return self.num_prompts >= MIN_PROMPTS and difference.established


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Two measurements that readers would compare and that were not made alike. ``why``: what parts them, with both values."""

    first: str
    second: str
    why: list[str]

    @property
    def text(self) -> str:
        return f"{self.first} less {self.second}: left out, since they were not measured alike: {'; '.join(self.why)}."


def pair(first: Measurement, second: Measurement, *, names: tuple[str, str], num_positions: int) -> Comparison | LeftOut:
    """The difference of two measurements over their prompts, or why there is none."""
    if why := apart(first, second):
        return LeftOut(first=names[0], second=names[1], why=why)
    prompts = first.acceptance.prompts, second.acceptance.prompts
    rates, length = paired_difference(*prompts, num_positions)
    engine = engine_of(first.acceptance)
    return Comparison(first=names[0], second=names[1], engine=engine, rates=rates, length=length, num_prompts=len(prompts[0]))
