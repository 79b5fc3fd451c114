"""Every way of decoding that the reports measured, at every draft length, with what it is expected to be worth for a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mtp_train.acceptance.costs import CostTable, NotTimed, Shape
from mtp_train.acceptance.expected import Expected, FasterRange, expected_lengths, faster_range
from mtp_train.acceptance.interval import Interval
from mtp_train.acceptance.report_data import ReportData
from mtp_train.acceptance.report_pairs import MIN_PROMPTS
from mtp_train.acceptance.report_summary import Figures, summarise
from mtp_train.acceptance.report_way import NO_HEAD
from mtp_train.advising.missing import costs_command_like, evaluate_command
from mtp_train.advising.workload import Serve, Workload

# What each engine can be told to do; SGLang's trees are EAGLE-2's.
_SERVES: Mapping[Serve, tuple[str, ...]] = {
    "vllm": ("chain", "prompt_lookup"),
    "sglang": ("chain", "dynamic_tree", "prompt_lookup"),
    "hf": ("chain", "eagle_tree", "dynamic_tree", "medusa_tree", "prompt_lookup", "lookahead"),
}
# Schemes whose drafts are chains of tokens, each behind the one before.
CHAINS = ("chain", "prompt_lookup")
TableOf = Callable[[str, str | None], CostTable]


class Family(NamedTuple):
    """What is the same for all draft lengths of an option; ``word``: the head's architecture."""

    run: str
    head: str
    word: str
    decoding: str
    drafted: str
    draft_sampling: str

    @property
    def text(self) -> str:
        return f"{self.head}, {self.drafted}, {self.draft_sampling} drafts ({self.run})"

    def is_served(self, engine: Serve) -> bool:
        """Whether the engine drafts so. vLLM takes each Medusa head's argmax; SGLang knows no such heads, and judges drafts as chosen
        by a rule."""
        if self.decoding not in _SERVES[engine]:
            return False
        if engine == "vllm":
            return not (self.word == "medusa" and self.draft_sampling == "probabilistic")
        return engine == "hf" or not (self.word == "medusa" or self.draft_sampling == "probabilistic")


@dataclass(frozen=True, kw_only=True)
class Option:
    """A family cut at a draft length. ``measured`` are what it was counted on, one measurement or the two around the workload's
    temperature; ``batch_size`` the sequences at which ``speedup`` (over plain decoding, at its own best number of sequences
    where throughput is the goal) is expected, over ``num_prompts`` of the workload's kind."""

    family: Family
    num_speculative_tokens: int
    shape: Shape
    tokens: Interval
    speedup: Interval
    batch_size: int
    num_prompts: int
    served: bool
    measured: tuple[Figures, ...] = field(repr=False)
    table: CostTable = field(repr=False)

    @property
    def is_established(self) -> bool:
        """Whether it is expected to be faster with its whole interval, over prompts enough to say so."""
        return self.num_prompts >= MIN_PROMPTS and self.speedup.low is not None and self.speedup.low > 1

    @property
    def text(self) -> str:
        """``mtp, chain, K = 3, greedy drafts``."""
        family, k = self.family, self.num_speculative_tokens
        drafts = "" if family.decoding in NO_HEAD else f", {family.draft_sampling} drafts"
        if family.decoding in CHAINS:
            return f"{family.head}, {family.decoding.replace('_', ' ')}, K = {k}{drafts}"
        return f"{family.head}, {family.decoding}, depth {k}, {self.shape.num_verified - 1} nodes{drafts}"


class Found(NamedTuple):
    """All options, the fastest first, why each family that is none of them is not, and whether any that was measured drafts trees."""

    options: list[Option]
    left_out: list[str]
    has_trees: bool


def find_options(reports: Mapping[str, ReportData], workload: Workload, *, table_of: TableOf) -> Found:
    """``table_of(run, head)`` gives the costs for a head (None: a scheme without one), or raises what is missing.

    Errors: ValueError where nothing that was measured fits the workload; it says of each all that it lacks.
    """
    options: list[Option] = []
    measured = _families(reports, workload)
    families, left_out = _on_the_same(measured, workload)
    for family, by_temperature in families.items():
        try:
            options += _options(family, by_temperature, workload, table_of=table_of)
        except ValueError as fault:
            left_out.append(f"{family.text}: {fault}")
    if not options:
        raise ValueError(
            "runs: expected something measured that fits the workload, found nothing:\n" + "\n".join(f"  {text}" for text in left_out)
        )
    has_trees = any(family.decoding not in CHAINS for family in measured)
    return Found(sorted(options, key=lambda option: -option.speedup.value), left_out, has_trees)


def _families(reports: Mapping[str, ReportData], workload: Workload) -> dict[Family, dict[float, Figures]]:
    """What was measured, by family and temperature; of several engines the one that serves."""
    found: dict[Family, dict[float, Figures]] = {}
    for run, data in reports.items():
        name = workload.prompt_set or data.prompt_sets[0].name
        if name not in [prompt_set.name for prompt_set in data.prompt_sets]:
            raise ValueError(
                f"workload.prompt_set: expected one that {run} measured ({', '.join(s.name for s in data.prompt_sets)}), found {name!r}"
            )
        words = {head.name: head.word for head in data.heads}
        for section in summarise(data).sections:
            if section.prompt_set.name != name:
                continue
            for figures in section.measured:
                way = section.way
                family = Family(run, figures.head, words[figures.head], way.decoding, way.drafted, way.draft_sampling)
                here = found.setdefault(family, {})
                if way.temperature not in here or figures.measurement.acceptance.measured_by == workload.serve:
                    here[way.temperature] = figures
    # At temperature 0 drafts that are drawn are the most probable ones: what greedy drafts measured there holds for both.
    for family, by_temperature in found.items():
        greedy = found.get(family._replace(draft_sampling="greedy"), {})
        if family.draft_sampling == "probabilistic" and 0.0 in greedy:
            by_temperature.setdefault(0.0, greedy[0.0])
    return found


def _on_the_same(
    families: Mapping[Family, Mapping[float, Figures]], workload: Workload
) -> tuple[dict[Family, dict[float, Figures]], list[str]]:
    """Of each run what was measured on the most prompts of the workload's kind, and a sentence for all else: the one with the easier
    prompts would win. ValueError where two runs measured other ones."""
    most: dict[str, frozenset[tuple[str, int]]] = {}
    for family, by_temperature in families.items():
        for figures in by_temperature.values():
            here = workload.among(figures.measurement.acceptance.prompts)
            most[family.run] = max(most.get(family.run, here), here, key=len)
    (first, expected), *others = most.items()
    for run, here in others:
        if here != expected:
            raise ValueError(
                f"runs: expected heads measured on the same prompts, found {len(expected)} of the workload's kind in {first} and "
                f"{len(here)} in {run}, {len(expected ^ here)} of them in one only; name a prompt set that both measured "
                "(workload.prompt_set=), or evaluate both on the same"
            )
    kept: dict[Family, dict[float, Figures]] = {}
    left_out = []
    for family, by_temperature in families.items():
        for temperature, figures in by_temperature.items():
            if (here := workload.among(figures.measurement.acceptance.prompts)) == expected:
                kept.setdefault(family, {})[temperature] = figures
            else:
                left_out.append(
                    f"{family.text} at temperature {temperature:g}: measured on {len(here)} prompts of the workload's kind, where others "
                    f"were on {len(expected)}; evaluate it on the same"
                )
    return kept, left_out


def _options(family: Family, by_temperature: Mapping[float, Figures], workload: Workload, *, table_of: TableOf) -> list[Option]:
    if workload.temperature == 0 and family.draft_sampling == "probabilistic":
        raise ValueError("at temperature 0 they are greedy drafts")
    around = _around(sorted(by_temperature), workload.temperature)
    lacks = [] if around else [_temperature_lack(family, by_temperature, workload.temperature)]
    head, table, options = None if family.decoding in NO_HEAD else family.head, None, []
    try:
        table = table_of(family.run, head)
        temperatures = around or (min(by_temperature),)  # where none was measured, any shows what else is missing
        options = _at_best(family, by_temperature, temperatures, workload, table)
    except NotTimed as fault:
        assert table is not None
        lacks.append(f"{fault}: {costs_command_like(table, family.run, widened=fault.words)}" if table.source == "measured" else str(fault))
    except ValueError as fault:
        lacks.append(str(fault))
    if lacks:
        raise ValueError("; and ".join(lacks))
    return options


class _Best(NamedTuple):
    """A draft length at some number of sequences. ``share``: the throughput of plain decoding there, of its own best (1 where the
    number of sequences is given)."""

    item: Expected
    batch_size: int
    share: float

    @property
    def gain(self) -> float:
        """Over plain decoding at the number of sequences that is best for it."""
        return self.item.speedup.value * self.share


def _at_best(
    family: Family, by_temperature: Mapping[float, Figures], around: tuple[float, ...], workload: Workload, table: CostTable
) -> list[Option]:
    """Every draft length, at the number of sequences that is best for it."""
    measured = tuple(by_temperature[temperature] for temperature in around)
    num_prompts = min(len(workload.of(figures.measurement.acceptance.prompts)) for figures in measured)
    at = _batch_sizes(table, workload)
    best: dict[int, _Best] = {}
    plain = max(batch / table.verify_s(batch, 1) for batch in at)
    for batch in at:
        share = batch / table.verify_s(batch, 1) / plain
        for item in _between(measured, around, workload, table, batch):
            k, found = item.num_speculative_tokens, _Best(item, batch, share)
            if k not in best or found.gain > best[k].gain:
                best[k] = found
    return [
        Option(
            family=family,
            num_speculative_tokens=k,
            shape=item.shape,
            tokens=item.tokens,
            speedup=Interval(*(None if value is None else value * share for value in item.speedup)),  # type: ignore[arg-type]
            batch_size=batch,
            num_prompts=num_prompts,
            served=family.is_served(workload.serve),
            measured=measured,
            table=table,
        )
        for k, (item, batch, share) in best.items()
    ]


def _around(temperatures: Sequence[float], wanted: float) -> tuple[float, ...]:
    """The temperature itself where it was measured, else the two next to it; none where it is not reached."""
    if wanted in temperatures:
        return (wanted,)
    below, above = [t for t in temperatures if t < wanted], [t for t in temperatures if t > wanted]
    return (max(below), min(above)) if below and above else ()


def _temperature_lack(family: Family, by_temperature: Mapping[float, Figures], wanted: float) -> str:
    said = ", ".join(f"{t:g}" for t in sorted(by_temperature))
    like = next(iter(by_temperature.values())).measurement
    head = None if family.decoding in NO_HEAD else family.head
    command = evaluate_command(family.run, like, head=head, temperature=wanted, draft_sampling=family.draft_sampling)
    return (
        f"measured at temperature {said}, which does not reach {wanted:g}; run {command} with the target's settings and the experiment's, "
        f"where it was one, or with failure_mode=[{like.prompt_set}], up to 1.5"
    )


def _batch_sizes(table: CostTable, workload: Workload) -> list[int]:
    """The number of sequences, or all up to it that were timed where their number is free to choose."""
    if workload.goal == "latency":
        return [workload.concurrency]
    return sorted({*(batch for batch in table.batch_sizes if batch <= workload.concurrency), workload.concurrency})


def _between(
    measured: Sequence[Figures], around: Sequence[float], workload: Workload, table: CostTable, batch_size: int
) -> Iterable[Expected]:
    """Expected at the workload's temperature: between two that were measured a straight line, within both their intervals."""
    found = [
        expected_lengths(
            figures.measurement.acceptance,
            table=table,
            batch_size=batch_size,
            prompts=workload.of(figures.measurement.acceptance.prompts),
        )
        for figures in measured
    ]
    if len(found) == 1:
        return found[0]
    part = (workload.temperature - around[0]) / (around[1] - around[0])
    return [
        cold._replace(tokens=_mixed(cold.tokens, hot.tokens, part), speedup=_mixed(cold.speedup, hot.speedup, part))
        for cold, hot in zip(*found, strict=False)
        if cold.shape == hot.shape
    ]


def _mixed(first: Interval, second: Interval, part: float) -> Interval:
    lows, highs = (first.low, second.low), (first.high, second.high)
    return Interval(
        first.value * (1 - part) + second.value * part,
        None if None in lows else min(low for low in lows if low is not None),
        None if None in highs else max(high for high in highs if high is not None),
    )


def faster_ranges_of(option: Option, workload: Workload) -> tuple[FasterRange | None, FasterRange | None]:
    """Numbers of sequences around the option's own at which its family, with the best draft length for each, is expected to be faster
    than plain decoding of as many; and those at which the option's own length is. Numbers at which a tree's rows were not timed are
    left out."""
    best: list[tuple[int, float]] = []
    own: list[tuple[int, float]] = []
    for batch_size in option.table.batch_sizes:
        try:
            found = lengths_at(option, workload, batch_size)
        except ValueError:
            continue
        best.append((batch_size, max(item.speedup.value for item in found)))
        own += [(batch_size, item.speedup.value) for item in found if item.num_speculative_tokens == option.num_speculative_tokens]
    return faster_range(best, around=option.batch_size), faster_range(own, around=option.batch_size)


def lengths_at(option: Option, workload: Workload, batch_size: int) -> list[Expected]:
    """The option's family at every draft length with so many sequences. ValueError where that was not timed."""
    around = [figures.measurement.acceptance.temperature for figures in option.measured]
    return list(_between(option.measured, around, workload, option.table, batch_size))
