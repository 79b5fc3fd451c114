"""What an earlier evaluate measured stays in the report, is replaced or leaves, and is named; sets are known by their sources."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mtp_train.acceptance.report_data import Measurement, PromptSet, ReportData
from mtp_train.checkpoint import save_head
from mtp_train.decoding.chain import Chain
from mtp_train.engine.comparison import collect, write_head
from mtp_train.engine.measure import Pieces
from mtp_train.prompt.described import described
from mtp_train.records import Acceptance, PromptAcceptance
from mtp_train.runtime import SEAL, atomic_write_json, seal

TARGET = {"target_name": "tiny", "target_fingerprint": "f" * 64, "tokenizer_hash": "t" * 64, "template_hash": "c" * 64}
OWN = PromptSet(name="project", label="own", description="prompts of own")


def measurement(*, names: str = "xyz", temperature: float = 0.0, most: int = 24, head: str = "one", source: str = "own") -> Measurement:
    prompts = [
        PromptAcceptance(
            prompt_id=f"{source}/{name}",
            category="a",
            num_prompt_tokens=3,
            token_ids=(10, 11, 12),
            accepted=(False, True, False),
            num_drafts=2,
            num_drafted_per_position=(2, 2),
            num_accepted_per_position=(1, 0),
        )
        for name in names
    ]
    acceptance = Acceptance(
        prompts=tuple(prompts),
        scheme="chain",
        num_speculative_tokens=2,
        temperature=temperature,
        draft_sampling="greedy",
        measured_by="hf",
        engine_version="1",
        dtype="float32",
        wall_s=1.0,
        notes={"max_new_tokens": most, "top_p": 1.0, "seed": 0},
    )
    return Measurement(head=head, prompt_set="project", acceptance=acceptance, plain=None, identity=None)


def evaluate(out: Path, *, sets: tuple[PromptSet, ...] = (OWN,), weight: float = 0.0, head: str = "one", **measured: Measurement) -> None:
    """As the stage does it: pieces first, measured anew where their settings changed, then the head's document."""
    import torch

    checkpoint, folder = out / "checkpoint" / head, out / "pieces" / head
    save_head(
        checkpoint,
        {"w": torch.full((3, 5), weight)},
        config={"head": "mtp", "method": "mtp", "hidden_state": "post_norm", "settings": {"norms": {}}},
        target=TARGET,
        made_by={"settings": {}},
    )
    pieces = Pieces(folder=folder, identity={"weight": weight})
    found = [pieces.get(f"project.{way}", str(item), lambda item=item: item) for way, item in measured.items()]
    write_head(
        folder,
        name=head,
        checkpoint=checkpoint,
        decoding=Chain(num_speculative_tokens=2, refresh=True),
        measured=found,
        answers=(),
        prompt_sets=sets,
        target=TARGET,
        provenance={},
    )


def report(out: Path) -> ReportData:
    return collect(out, target={"name": "tiny"}, run_folder=out, aims=[])


def test_what_is_not_measured_again_stays_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy, sampled = measurement(), measurement(temperature=1.0)
    evaluate(tmp_path, greedy=greedy, sampled=sampled)
    assert report(tmp_path).measurements == (greedy, sampled) and report(tmp_path).notes == ()
    shorter = measurement(most=12)
    for _ in range(2):  # said again by a second one that measures nothing
        evaluate(tmp_path, greedy=shorter)
        data = report(tmp_path)
        assert data.measurements == (shorter, sampled)
        assert data.notes == (
            "one on project (chain, K = 2, greedy decoding (temperature 0), drafts greedy (the draft's argmax)) was measured anew, which "
            "replaces an earlier evaluate's; before and now: max_new_tokens 24 and 12.",
            "one on project (chain, K = 2, sampled at temperature 1, drafts greedy (the draft's argmax)) is of an earlier evaluate, with "
            "max_new_tokens 24, and was not measured again.",
        )
    said = capsys.readouterr().err
    assert "project.greedy was measured with other settings or another head (3 prompts, max_new_tokens 24), and is measured again" in said
    evaluate(tmp_path, greedy=shorter, sampled=sampled)
    assert len(report(tmp_path).notes) == 1, "the sampled one is measured again, and there already"
    evaluate(tmp_path, greedy=shorter, sampled=measurement(temperature=1.0, most=12))
    assert len(report(tmp_path).notes) == 1 and "sampled at temperature 1" in report(tmp_path).notes[0]


def test_what_was_measured_on_some_of_the_prompts_stays_and_on_others_leaves(tmp_path: Path) -> None:
    sampled = measurement(temperature=1.0)
    evaluate(tmp_path, greedy=measurement(), sampled=sampled)
    evaluate(tmp_path, greedy=measurement(names="x"))
    assert report(tmp_path).measurements == (measurement(names="x"), sampled)
    mine = measurement(source="mine")
    evaluate(tmp_path, greedy=mine, sets=(PromptSet(name="project", label="mine", description="prompts of mine"),))
    data = report(tmp_path)
    assert data.measurements == (mine,) and data.prompt_sets[0].label == "mine"
    replaced, left = data.notes
    assert replaced.endswith("before and now: prompts 1 and 3, 0 of them the same.")
    assert left.endswith("leaves the report: it was measured on other prompts (3; of the 3 of now, 0 are among them).")


def test_other_weights_and_lost_pieces_take_it_out(tmp_path: Path) -> None:
    evaluate(tmp_path, greedy=measurement(), sampled=measurement(temperature=1.0))
    evaluate(tmp_path, greedy=measurement(most=8), weight=1.0)
    assert report(tmp_path).notes == ("one: what an earlier evaluate measured with other weights is replaced, or leaves the report.",)
    evaluate(tmp_path, greedy=measurement(most=8), sampled=measurement(temperature=1.0), weight=1.0)
    (tmp_path / "pieces" / "one" / "project.sampled.json").unlink()
    evaluate(tmp_path, greedy=measurement(most=8), weight=1.0)
    assert report(tmp_path).measurements == (measurement(most=8),)
    assert report(tmp_path).notes[-1].endswith("leaves the report: what an earlier evaluate measured is no longer on disk.")


def test_heads_measured_on_sources_of_one_name_have_sets_of_their_own(tmp_path: Path) -> None:
    evaluate(tmp_path, greedy=measurement())
    mine = PromptSet(name="project", label="mine.jsonl", description="prompts of mine.jsonl")
    evaluate(tmp_path, head="two", greedy=measurement(head="two", source="mine"), sets=(mine,))
    evaluate(tmp_path, head="three", greedy=measurement(head="three", source="mine"), sets=(mine,))
    data = report(tmp_path)
    assert {item.head: item.prompt_set for item in data.measurements} == {
        "one": "project",
        "two": "project: mine.jsonl",
        "three": "project: mine.jsonl",
    }
    assert data.prompt_sets == (OWN, dataclasses.replace(mine, name="project: mine.jsonl"))


def test_a_document_of_before_is_described_by_the_source_it_records(tmp_path: Path) -> None:
    evaluate(tmp_path, greedy=measurement())
    path = tmp_path / "pieces" / "one" / "head.json"
    for source, label in (
        (["data/manifests/project_heldout.yaml"], "held-out prompts"),
        (["gone/held_out.jsonl"], "gone/held_out.jsonl"),
        (None, "project"),
    ):
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key in (SEAL, "prompt_sets", "stays", "replaced"):
            document.pop(key, None)
        document["provenance"] = {"evaluate one": {"settings": {"prompt_sets": {"project": {"source": source}}} if source else {}}}
        atomic_write_json(path, {**document, SEAL: seal(document)})
        (found,) = report(tmp_path).prompt_sets
        assert (found.name, found.label) == ("project", label)
        assert ("the project's own" in found.description) == (label == "held-out prompts")
        evaluate(tmp_path, greedy=measurement())
        assert report(tmp_path).prompt_sets == (OWN,)


def test_prompts_are_described_by_their_source(tmp_path: Path) -> None:
    label, about = described(["data/manifests/project_heldout.yaml", "data/manifests/project_long_heldout.yaml"])
    assert label == "held-out prompts" and about.count("the project's own") == 2
    mine = tmp_path / "held\tout <b>.jsonl"
    mine.touch()
    assert described([str(mine)]) == ("held out <b>.jsonl", "prompts of held out <b>.jsonl")
    assert described("owner/name") == ("owner/name", "prompts of owner/name")
    manifest = tmp_path / "m.yaml"
    manifest.write_text("name: few\nsource: x.jsonl\nlicence: mine\n", encoding="utf-8")
    assert described([manifest, mine]) == ("few, held out <b>.jsonl", "prompts of few; prompts of held out <b>.jsonl")
    manifest.write_text("name: few\nsource: x.jsonl\nlicence: mine\ntitle: A few\ndescription: few\n", encoding="utf-8")
    assert described(manifest) == ("A few", "few")
