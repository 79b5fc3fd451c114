"""The commands that measure what an answer lacks, ready to paste but for the target's settings and those of the run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mtp_train.acceptance.alike import limit_of
from mtp_train.acceptance.costs import CostTable
from mtp_train.acceptance.report import JSON
from mtp_train.acceptance.report_data import Measurement


def report_folder(given: str) -> Path:
    """The report that ``runs`` names: by its own folder or its run's."""
    return Path(given) if (Path(given) / JSON).is_file() else Path(given) / "report"


def evaluate_command(run: str, like: Measurement, *, head: str | None, temperature: float, draft_sampling: str) -> str:
    """``evaluate`` into the same report, of what was measured in ``like`` at another temperature: a way of its own, which replaces
    none; ``head`` None: a scheme without one."""
    report, counted = report_folder(run), like.acceptance
    name = f"t{temperature:g}_{draft_sampling}".replace(".", "_")
    drawn = f"temperature: {temperature:g}, top_p: 1.0, draft_sampling: {draft_sampling}"
    settings = [] if counted.measured_by == "hf" else [f"engine={counted.measured_by}"]
    settings += [] if counted.decoding == "chain" else [f"decoding={counted.decoding}"]
    settings += [] if counted.scheme != "chain" else [f"decoding.num_speculative_tokens={counted.num_speculative_tokens}"]
    settings += [] if head is None else [f"name={head}"]
    settings += [f"+ways.{name}={{{drawn}, prompt_sets: [{like.prompt_set}], plain: false, estimate: false}}"]
    settings += ["ways.greedy.prompt_sets=[]", "ways.sampled.prompt_sets=[]", "identity.num_prompts=0"]
    settings += [] if (most := limit_of(counted)) is None else [f"max_new_tokens={most}"]
    out = [] if report.name == "report" else [f"out={report}"]
    return shlex.join(["python", "-m", "mtp_train.evaluate", f"run={report.parent}", *out, *settings])


def costs_command(run: str, *, head: str | None, engine: str, more: Sequence[str] = ()) -> str:
    """``tools/measure_costs.py`` into the same report; ``head`` None: the target alone."""
    report = report_folder(run)
    out = [] if report.name == "report" else ["--out", str(report)]
    words = ["--run", str(report.parent), *out, "--name", head or "none", "--engine", engine, *more]
    return shlex.join(["python", "tools/measure_costs.py", *words])


def costs_command_like(table: CostTable, run: str, *, widened: Sequence[str]) -> str:
    """The command that times again what is in ``table``, which it replaces, with one of its axes ``widened`` (a flag and its values)."""
    lengths = sorted({cell.num_tokens for cell in table.drafting})
    axes = {"--batch-sizes": table.batch_sizes, "--num-tokens": table.verified_tokens, "--draft-lengths": lengths}
    axes["--context-tokens"] = [table.context_tokens]
    kept = [word for flag, values in axes.items() if values and flag not in widened for word in (flag, *map(str, values))]
    return costs_command(run, head=table.head, engine=table.engine, more=[*widened, *kept])
