"""Which way of decoding to serve for a workload: a method, a draft length or a tree, or plain decoding, from what was measured.

Reads reports (evaluate) and the costs of a step that lie in them (tools/measure_costs.py); runs nothing. Prints the answer with the
expected speed-up and its interval, the reasons, the number of sequences at which plain decoding takes over, and the engines' flags.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.runtime import atomic_write_json, atomic_write_text, log
from mtp_train.stage import call, plain, stage

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mtp_train.acceptance.costs import CostTable
    from mtp_train.acceptance.report_data import ReportData
    from mtp_train.advising.options import TableOf
    from mtp_train.advising.workload import Workload
    from mtp_train.planning.hardware import Hardware


def _reports(cfg: DictConfig) -> tuple[dict[str, ReportData], dict[str, Path]]:
    """The reports, and the folders that they lie in, by what ``runs`` calls them. ValueError where there is none, one is named twice, or
    their targets differ."""
    from mtp_train.acceptance.report import read_report
    from mtp_train.advising.missing import report_folder

    if not cfg.runs:
        raise ValueError("runs: expected the folders of one run or more that evaluate has measured, found none; add runs=[runs/mine]")
    reports: dict[str, ReportData] = {}
    folders: dict[str, Path] = {}
    for given in plain(cfg.runs):
        folder = report_folder(str(given))
        if folder.resolve() in [known.resolve() for known in folders.values()]:
            raise ValueError(f"runs: expected each run once, found {given} again; leave one out")
        reports[str(given)], folders[str(given)] = read_report(folder), folder
    stated = {run: (data.target.get("name"), data.target.get("fingerprint")) for run, data in reports.items()}
    if len({fingerprint for _, fingerprint in stated.values()}) > 1:
        said = "; ".join(f"{run}: {name} ({str(fingerprint)[:16]})" for run, (name, fingerprint) in stated.items())
        raise ValueError(f"runs: expected reports on one target, found {said}")
    return reports, folders


def _measured_tables(reports: Mapping[str, ReportData], folders: Mapping[str, Path], *, engine: str, hardware: Hardware) -> TableOf:
    """Finds what was timed: a head's own table, of the weights that the report measured; for schemes without a head any of the engine.
    Tables that lie in a report's folder and not in the report yet (evaluate takes them up) count too."""
    from mtp_train.acceptance.belonging import same_weights, short
    from mtp_train.acceptance.costs import read_costs
    from mtp_train.acceptance.report_data import WEIGHTS_FACT
    from mtp_train.advising.missing import costs_command

    weights = {(run, found.name): found.facts.get(WEIGHTS_FACT) for run, data in reports.items() for found in data.heads}
    tables: dict[str, tuple[CostTable, ...]] = {}
    for run, data in reports.items():
        beside = read_costs(folders[run])
        names = {(table.engine, table.head) for table in beside}
        tables[run] = (*beside, *(table for table in data.costs if (table.engine, table.head) not in names))

    def table_of(run: str, head: str | None) -> CostTable:
        here = [table for table in tables[run] if table.engine == engine and head in (None, table.head)]
        if not here:
            others = sorted({table.engine for table in tables[run] if head in (None, table.head)})
            there = "".join(f" those of {other}, which are there (costs={other}), or" for other in others)
            raise ValueError(
                f"costs: expected times of {engine} for {head or 'the target'}, found none in {run}; run "
                f"{costs_command(run, head=head, engine=engine)}, or take{there} modelled ones (costs=modelled)"
            )
        found = min(here, key=lambda table: table.head is not None)  # without a head, the target's own table first
        if found.target_fingerprint != reports[run].target.get("fingerprint"):
            raise ValueError(f"costs: expected times of {reports[run].target['name']}, found those of {found.target_name} in {run}")
        if head is not None and not same_weights(found.head_sha256, weights[run, head]):
            raise ValueError(
                f"costs: expected times of the {head} that was measured (sha256 {short(weights[run, head])}), found those of other weights "
                f"({short(found.head_sha256)}) in {run}; run {costs_command(run, head=head, engine=engine)}, and before it evaluate where "
                "the head was trained again since"
            )
        kind = "cpu" if found.device.startswith("cpu") else "gpu"
        if kind != hardware.kind:
            raise ValueError(
                f"costs: expected times taken on a {hardware.kind} (hardware={hardware.name}), found {found.device}; measure there, name "
                "the machine that was measured (hardware=), or set costs=modelled"
            )
        return found

    return table_of


# Heads that a modelled table knows the cost of: a decoder layer of the target and its lm_head.
_MODELLED = ("mtp", "eagle", "eagle3")


def _modelled_tables(cfg: DictConfig, reports: Mapping[str, ReportData], workload: Workload, *, hardware: Hardware) -> TableOf:
    from mtp_train.advising.modelled import Rates, modelled_costs
    from mtp_train.planning.sizes import read_target_sizes, target_folder

    data = next(iter(reports.values()))
    with target_folder(plain(cfg.target)) as folder:
        target = read_target_sizes(folder, name=cfg.target.name)
    stated = {key: data.target.get(key) for key in ("hidden_size", "num_layers", "vocab_size")}
    if stated != {key: getattr(target, key) for key in stated}:
        raise ValueError(f"target: expected the reports' {data.target.get('name')} ({stated}), found {target.name}; choose target=")
    rates = call(Rates, cfg.assume, where="assume")

    words = {(run, found.name): found.word for run, data in reports.items() for found in data.heads}

    def table_of(run: str, head: str | None) -> CostTable:
        if head is not None and words[run, head] not in _MODELLED:
            raise ValueError(
                f"costs=modelled: expected a head of one decoder layer of the target ({', '.join(_MODELLED)}), found {words[run, head]}; "
                "measure its costs (tools/measure_costs.py)"
            )
        return modelled_costs(
            target=target,
            fingerprint=str(data.target.get("fingerprint")),
            hardware=hardware,
            rates=rates,
            head=head,
            context_tokens=cfg.context_tokens,
            most_sequences=workload.concurrency,
        )

    return table_of


_KINDS: dict[str, Any] = {
    "runs": list[str],
    "out": str | None,
    "workload.prompt_set": str | None,
    "workload.categories": list[str] | None,
    "workload.max_prompt_tokens": int | None,
    "hardware.usd_per_hour": float | None,
}


@stage("advise", kinds=_KINDS)
def main(cfg: DictConfig) -> None:
    from rich.console import Console

    from mtp_train.acceptance.report_data import WEIGHTS_FACT
    from mtp_train.advising.advice import advise, choose, to_json
    from mtp_train.advising.flags import flags, plain_flags
    from mtp_train.advising.options import find_options
    from mtp_train.advising.page import markdown, print_advice
    from mtp_train.advising.workload import Workload
    from mtp_train.planning.hardware import Hardware

    workload: Workload = call(Workload, cfg.workload, where="workload")
    hardware = Hardware.read(plain(cfg.hardware))
    if cfg.costs not in ("hf", "vllm", "modelled"):
        raise ValueError(
            f"costs: expected hf, vllm (measured there) or modelled, found {cfg.costs} (its default is workload.serve), which is not run "
            "here; add costs=modelled, or another engine's"
        )
    reports, folders = _reports(cfg)
    table_of: Callable[[str, str | None], CostTable]
    if cfg.costs == "modelled":
        table_of = _modelled_tables(cfg, reports, workload, hardware=hardware)
    else:
        table_of = _measured_tables(reports, folders, engine=cfg.costs, hardware=hardware)
    found = find_options(reports, workload, table_of=table_of)
    recommended, _ = choose(found)
    name = str(next(iter(reports.values())).target["name"])
    if recommended is None:
        pasted = plain_flags(name)
    else:
        family = recommended.family
        (head,) = (head for head in reports[family.run].heads if head.name == family.head)
        pasted = flags(recommended, run=folders[family.run].parent, target=name, weights=head.facts.get(WEIGHTS_FACT))
    # Times that were measured are those of the machine that they were taken on, whatever was asked for.
    measured_on = ", ".join(dict.fromkeys(option.table.device for option in found.options if option.table.source == "measured"))
    machine = measured_on or f"{hardware.num_devices} x {hardware.device}"
    advice = advise(found, workload, target=name, hardware=machine, flags=pasted)
    print_advice(advice, Console(width=None if sys.stdout.isatty() else 160))
    if cfg.out is not None:
        out = Path(cfg.out)
        atomic_write_json(out / "advice.json", to_json(advice))
        atomic_write_text(out / "advice.md", markdown(advice))
        log(f"advise: {out / 'advice.md'}")


if __name__ == "__main__":
    main()
