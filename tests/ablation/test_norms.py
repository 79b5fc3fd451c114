"""A norm ablation from cells to page: the command lines differ in the norms alone, counts are added up as they should be, gaps are said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_train.ablation.grid import MIXTURES, Cell, Place, cells, command, ended, keep_settings, stopped_at, train_all, trained_in
from mtp_train.ablation.measure import Counted, Line, Measured
from mtp_train.ablation.page import rows, write_page
from mtp_train.runtime import read_json
from tests.conftest import write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]


def counted(name: str, *, tokens: int, drafts: int, accepted: int) -> Counted:
    return Counted(prompt_id=name, num_prompt_tokens=tokens, num_drafts=drafts, num_accepted_per_position=(accepted, 0))


def measured(mixture: str, seed: int, accepted: tuple[int, int, int], *, stopped: str | None = None) -> Measured:
    prompts = tuple(
        counted(name, tokens=tokens, drafts=10, accepted=hits)
        for name, tokens, hits in zip(("a", "b", "c"), (50, 60, 2000), accepted, strict=True)
    )
    lines = (Line(step=10, split="train", loss=2.0 + seed, agreement=0.1, grad_norm=1.5, hidden_rms=3.0),)
    return Measured(cell=Cell(target="real", mixture=mixture, seed=seed), stopped=stopped, prompts=() if stopped else prompts, lines=lines)


def test_command_lines_differ_in_the_norms_and_the_seed_alone(tmp_path: Path) -> None:
    place = Place(words=("target=local", "target.path=x"), cache=tmp_path / "cache")
    wanted = cells(["real"], list(MIXTURES), [0, 7])
    assert len(wanted) == len({cell.name for cell in wanted}) == 12
    words = {cell.name: command(cell, place, out=tmp_path, settings=["num_steps=3"]) for cell in wanted}
    changing = {word for line in words.values() for word in line if not all(word in other for other in words.values())}
    assert {word.split("=")[0] for word in changing} == {"out", "head.norms", "head.seed", "seed"}
    assert "head.norms={embed:false,hidden:true,input:false,output:false,feedback:false}" in words["real-hidden-7"]
    with pytest.raises(ValueError, match="mixtures: expected some of"):
        cells(["real"], ["most"], [0])
    with pytest.raises(ValueError, match="different numbers"):
        cells(["real"], ["none"], [0, 0])


def test_what_is_there_is_not_shown_as_if_other_settings_had_made_it(tmp_path: Path) -> None:
    keep_settings(tmp_path, {"settings": ["num_steps=40"], "factor": 256.0})
    keep_settings(tmp_path, {"settings": ["num_steps=40"], "factor": 256.0})
    with pytest.raises(ValueError, match=r"settings: there \['num_steps=40'\], now \['num_steps=80'\]\); choose another --out"):
        keep_settings(tmp_path, {"settings": ["num_steps=80"], "factor": 256.0})


def test_seeds_are_added_up_and_prompts_paired() -> None:
    found = [
        measured("none", 0, (2, 4, 1)),
        measured("none", 1, (4, 4, 1)),
        measured("all", 0, (5, 7, 1)),
        measured("all", 1, (7, 7, 1)),
        measured("input", 0, (5, 7, 1)),
        measured("input", 1, (0, 0, 0), stopped="step 3: expected a finite loss"),
    ]
    short = {row.mixture: row for row in rows(found, long_tokens=1000, num_speculative_tokens=2) if row.prompts.startswith("short")}
    assert short["none"].rate is not None and short["none"].rate.value == pytest.approx(14 / 40)
    assert short["none"].by_seed == (0.3, 0.4) and short["none"].gain is None
    assert short["all"].gain is not None and short["all"].gain.value == pytest.approx(26 / 40 - 14 / 40)
    assert short["all"].gain.established  # every prompt gains three
    assert (short["input"].num_heads, short["input"].num_stopped, short["input"].gain) == (2, 1, None)
    long = {row.mixture: row for row in rows(found, long_tokens=1000, num_speculative_tokens=2) if row.prompts.startswith("long")}
    assert long["all"].gain is not None and long["all"].gain.value == 0 and not long["all"].gain.established


def test_the_page_shows_every_row_and_says_what_is_not_shown(tmp_path: Path) -> None:
    found = [measured("none", 0, (2, 4, 1)), measured("all", 0, (2, 4, 1)), measured("embed", 0, (0, 0, 0), stopped="step 3 <b>")]
    page, made = write_page(found, out=tmp_path, about={"target": "<tiny>"}, long_tokens=1000, num_speculative_tokens=2)
    html, markdown = page.read_text(encoding="utf-8"), (tmp_path / "norms.md").read_text(encoding="utf-8")
    assert len(made) == 6
    for text in (html, markdown):
        assert "0.300" in text and "1 seeds: expected at least three" in text and "holds 0: all (real, short" in text
        assert "<tiny>" not in text and "<b>" not in text
    assert html.count("<svg") == 3  # gradient norm, state, loss; nothing was validated
    assert "No head here fails to train" not in markdown


def test_an_ablation_is_not_continued_in_another_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun where training comes to bf16, called again where it comes to fp32: refused with both, until it is named."""
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    assert (trained_in(["device=cpu"]), trained_in(["device=cpu", "precision=fp32"])) == ("bf16", "fp32")
    keep_settings(tmp_path, {"precision": trained_in(["device=cpu"])})
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    with pytest.raises(ValueError, match="precision: there bf16, now fp32"):
        keep_settings(tmp_path, {"precision": trained_in(["device=cpu"])})
    keep_settings(tmp_path, {"precision": trained_in(["device=cpu", "precision=bf16"])})
    with pytest.raises(ValueError, match="precision: expected"):
        trained_in(["precision=bff16"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cells_are_trained_once_and_end_as_they_end(tmp_path: Path) -> None:
    """Real trainings: what is trained is not trained again, a blown-up one is a result, a wrong setting is an error."""
    target = write_tiny_llama(tmp_path / "target")
    lines = [{"prompt": f"question {n}?", "completion": f"the answer to {n} is {n * n}"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    here = ["target=local", f"target.path={target}", "target.name=tiny"]
    words = [*here, f"run={tmp_path}", "answers=given", "prompt=file", f"prompt.source=[{tmp_path}/rows.jsonl]", "engine.dtype=float32"]
    subprocess.run([sys.executable, "-m", "mtp_train.precompute", *words, "codec=float32"], check=True, cwd=ROOT)
    place = Place(words=tuple(here), cache=tmp_path / "cache")
    settings = ["num_steps=2", "tokens_per_pack=512", "validation.fraction=0", "log_every=1", "precision=fp32", "noise_scale=0"]
    wanted = cells(["real"], ["none", "all"], [0])
    train_all(wanted, {"real": place}, out=tmp_path / "heads", settings=settings, side_by_side=2)
    assert all(ended(tmp_path / "heads" / cell.name) for cell in wanted)
    norms = [read_json(tmp_path / "heads" / cell.name / "head.json")["settings"]["norms"] for cell in wanted]
    assert [sum(switches.values()) for switches in norms] == [0, 5]
    train_all(wanted, {"real": Place(words=("nonsense",), cache=Path())}, out=tmp_path / "heads", settings=[], side_by_side=1)  # done
    blown = [*settings, "optimizer.rule=adamw", "optimizer.lr=1e38", "optimizer.clip_norm=null", "schedule.warmup_steps=0", "num_steps=6"]
    train_all(cells(["real"], ["none"], [0]), {"real": place}, out=tmp_path / "blown", settings=blown, side_by_side=1)
    assert "expected a finite loss and gradient" in (stopped_at(tmp_path / "blown" / "real-none-0") or "")
    with pytest.raises(ValueError, match="expected exit status 0"):
        train_all(wanted, {"real": place}, out=tmp_path / "wrong", settings=["no_such_key=1"], side_by_side=2)
