"""The verb over made-up reports: an answer on the terminal, as JSON and as a page; what is missing is named with the remedy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_train.acceptance.costs import write_costs
from mtp_train.acceptance.report import write_report
from tests.shell import Done, Shell

Make = Callable[..., Any]

pytestmark = pytest.mark.timeout(900)  # on a machine that may be busy

Advise = Callable[..., Done]


@pytest.fixture
def run(shell: Shell) -> Advise:
    """The verb as a process of its own."""
    return lambda *words: shell.wait(shell.start("mtp_train.advise", words))


def test_an_answer_from_two_runs(acceptance: Make, report: Make, table: Make, tmp_path: Path, run: Advise) -> None:
    for name, rate in (("good", 0.8), ("poor", 0.2)):
        write_report(report(acceptance(rate)), tmp_path / name / "report")
        write_costs(table(), tmp_path / name / "report")
    out, runs = tmp_path / "advice", f"runs=[{tmp_path}/poor,{tmp_path}/good/report]"
    done = run(runs, "costs=hf", f"out={out}", "workload.categories=[coding]")
    assert done.code == 0, done.stderr
    found = json.loads((out / "advice.json").read_text(encoding="utf-8"))
    assert found["recommended"]["run"] == f"{tmp_path}/good/report" and found["recommended"]["num_speculative_tokens"] == 4
    assert found["answer"] in " ".join(done.stdout.split())
    assert found["flags"][0]["engine"] == "vllm" and f"run={tmp_path}/good name=mtp exporter=vllm" in found["flags"][0]["notes"][0]
    assert (out / "advice.md").read_text(encoding="utf-8").startswith("# How to decode: tiny")

    crowd = run(runs, "costs=hf", "workload.concurrency=16", "workload.categories=[writing]")
    assert crowd.code == 0 and "Plain decoding: no drafts." in crowd.stdout and "vllm serve tiny" in crowd.stdout


@pytest.mark.slow
def test_what_is_missing_or_does_not_fit_is_said(acceptance: Make, report: Make, table: Make, tmp_path: Path, run: Advise) -> None:
    data = report(acceptance(0.8))
    write_report(data, tmp_path / "one" / "report")
    one = f"runs=[{tmp_path}/one]"
    write_report(dataclasses.replace(data, target={**data.target, "fingerprint": "0" * 64}), tmp_path / "two" / "report")
    write_costs(table(device="NVIDIA H200"), tmp_path / "two" / "report")
    cases = {
        (): "runs: expected the folders of one run or more",
        (one,): "costs: expected times of vllm for mtp, found none",
        (f"runs=[{tmp_path}/one,{tmp_path}/two]",): "runs: expected reports on one target",
        (f"runs=[{tmp_path}/two]", "costs=hf"): "found those of tiny",
        (one, "costs=guessed"): "costs: expected hf, vllm (measured there) or modelled, found guessed",
        (f"runs=[{tmp_path}/none]",): "expected a file, found nothing there",
    }
    for words, said in cases.items():
        done = run(*words)
        assert done.code == 2 and said in done.stderr and "Traceback" not in done.stderr, (words, done.stderr)
    none = run(one, "costs=hf").stderr.strip()
    command = f"run python tools/measure_costs.py --run {tmp_path}/one --name mtp --engine hf"
    assert none.endswith(f"{command}, or take modelled ones (costs=modelled)"), "not the very engine that was asked for"
    write_costs(table(device="NVIDIA H200"), tmp_path / "one" / "report")
    assert "or take those of hf, which are there (costs=hf), or modelled ones" in run(one).stderr
    done = run(one, "costs=hf")
    assert done.code == 2 and "expected times taken on a cpu (hardware=2cpu), found NVIDIA H200" in done.stderr


def test_costs_of_other_weights_are_refused(acceptance: Make, report: Make, table: Make, tmp_path: Path) -> None:
    """A head that was trained again under its name was not timed; the target alone was, whatever head was timed beside it."""
    from mtp_train import advise
    from mtp_train.planning.hardware import Hardware
    from mtp_train.stage import load_word

    data, hardware = report(acceptance(0.8)), Hardware.read(load_word("hardware", "2cpu"))

    def found(**changes: Any) -> Callable[[str, str | None], Any]:
        write_costs(table(**changes), tmp_path / "report")
        return advise._measured_tables({str(tmp_path): data}, {str(tmp_path): tmp_path / "report"}, engine="hf", hardware=hardware)

    assert found()(str(tmp_path), "mtp") == table()
    for notes in ({"head_sha256": "cd" * 32}, {}):
        other = found(notes=notes)
        with pytest.raises(ValueError, match=r"expected times of the mtp that was measured \(sha256 (ab){8}\), found") as refused:
            other(str(tmp_path), "mtp")
        assert f"run python tools/measure_costs.py --run {tmp_path} --name mtp --engine hf" in str(refused.value)
        assert other(str(tmp_path), None).head == "mtp"


def test_modelled_costs_are_those_of_the_reports_target(acceptance: Make, report: Make, workload: Make) -> None:
    from omegaconf import OmegaConf

    from mtp_train import advise
    from mtp_train.planning.hardware import Hardware
    from mtp_train.stage import conf_dir, load_word

    conf = OmegaConf.load(conf_dir() / "advise.yaml")
    cfg = OmegaConf.create({**{key: conf[key] for key in ("assume", "context_tokens")}, "target": load_word("target", "smollm2_135m")})
    hardware = Hardware.read(load_word("hardware", "1xh200"))
    data = report(acceptance(0.8))
    with pytest.raises(ValueError, match=r"target: expected the reports' tiny \(.*'hidden_size': 64"):
        advise._modelled_tables(cfg, {"run": data}, workload(), hardware=hardware)
    sizes = {"hidden_size": 576, "num_layers": 30, "vocab_size": 49152}
    known = dataclasses.replace(data, target={**data.target, **sizes})
    table = advise._modelled_tables(cfg, {"run": known}, workload(concurrency=4), hardware=hardware)("run", "mtp")
    assert table.source == "modelled" and table.batch_sizes == [1, 2, 4, 8, 16, 32] and table.head == "mtp"
    assert table.verify_s(1, 4) == table.verify_s(1, 1), "one sequence's few tokens wait for memory"
