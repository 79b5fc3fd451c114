"""Heads measured at different times come together in one report, which says where they cannot be compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.acceptance.certificate import Certificate, GreedyCase, SampledCase, distances
from mtp_train.acceptance.costs import CostTable, Timing, write_costs
from mtp_train.acceptance.identity import Identity
from mtp_train.acceptance.report import CERTIFICATE_JSON, write_certificate
from mtp_train.acceptance.report_data import Measurement, PromptSet, ReportData
from mtp_train.checkpoint import read_head_config, save_head
from mtp_train.decoding.base import Decoding
from mtp_train.decoding.chain import Chain
from mtp_train.decoding.dynamic_tree import DynamicTree
from mtp_train.decoding.prompt_lookup import PromptLookup
from mtp_train.engine.base import SpeculateRequest
from mtp_train.engine.comparison import check_target, collect, marked_answers, write_head
from mtp_train.records import Acceptance, PromptAcceptance
from mtp_train.runtime import SEAL, atomic_write_json, seal

TARGET = {"target_name": "tiny", "target_fingerprint": "f" * 64, "tokenizer_hash": "t" * 64, "template_hash": "c" * 64}
CHAIN = Chain(num_speculative_tokens=2, refresh=True)


def prompt(name: str, category: str = "a") -> PromptAcceptance:
    return PromptAcceptance(
        prompt_id=name,
        category=category,
        num_prompt_tokens=3,
        token_ids=(10, 11, 12),
        accepted=(False, True, False),
        num_drafts=2,
        num_drafted_per_position=(2, 2),
        num_accepted_per_position=(1, 0),
    )


def measurement(head: str, *, names: tuple[str, ...] = ("x", "y"), dtype: str = "float32", by: str = "hf", **notes: Any) -> Measurement:
    acceptance = Acceptance(
        prompts=tuple(prompt(name) for name in names),
        scheme="chain",
        num_speculative_tokens=2,
        temperature=0.0,
        draft_sampling="greedy",
        measured_by=by,
        engine_version="1",
        dtype=dtype,
        wall_s=1.0,
        notes={"max_new_tokens": 8, "batch_size": 4, "num_target_forwards": 3} | notes,
    )
    return Measurement(head=head, prompt_set="p", acceptance=acceptance, plain=None, identity=None)


def keep(
    out: Path,
    name: str,
    *measured: Measurement,
    target: dict[str, str] = TARGET,
    decoding: Decoding = CHAIN,
    weight: float = 0.0,
    prompt_sets: tuple[PromptSet, ...] = (PromptSet(name="p", label="P", description="prompts of P"),),
) -> None:
    checkpoint = out.parent / "checkpoint" / name
    save_head(
        checkpoint,
        {"w": torch.full((3, 5), weight), "b": torch.zeros(7)},
        config={"head": "mtp", "method": "mtp", "hidden_state": "post_norm", "settings": {"norms": {"embed": True, "output": False}}},
        target=target,
        made_by={"settings": {"losses": {"topk_kl": 1.0}}},
    )
    (checkpoint / "metrics.jsonl").write_text('{"split": "train", "step": 1, "tokens": 5}\n\n{"split": "train", "step": 2, "tokens": 10}\n')
    write_head(
        out / "pieces" / name,
        name=name,
        checkpoint=checkpoint,
        decoding=decoding,
        measured=measured,
        answers=(),
        prompt_sets=prompt_sets,
        target=target,
        provenance={"engine": name},
    )


def notes_of(out: Path) -> tuple[str, ...]:
    return collect(out, target={"name": "tiny"}, run_folder=out.parent, aims=[]).notes


def test_all_heads_of_the_folder_are_in_the_report(tmp_path: Path) -> None:
    out = tmp_path / "report"
    keep(out, "one", measurement("one"), measurement("one", by="estimate"))
    keep(out, "two", measurement("two"))
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses" / "settings.regenerate.json").write_text('{"settings": 1}')
    aims = [{"prompt_set": "p", "quantity": "first_position", "at_least": 0.3}, {"prompt_set": "q", "quantity": "speedup", "at_least": 1}]
    data = collect(out, target={"name": "tiny"}, run_folder=tmp_path, aims=aims)
    assert [head.name for head in data.heads] == ["one", "two"] and data.title == "Acceptance of one and two on tiny"
    assert data.measurements == (measurement("one"), measurement("one", by="estimate"), measurement("two"))
    facts = data.heads[0].facts
    assert facts["norms on"] == "embed" and facts["steps"] == 2 and facts["tokens trained on"] == 10
    assert facts["parameters"] == "0.00 M" and len(data.heads[0].metrics) == 2
    assert [(aim.head, aim.prompt_set) for aim in data.aims] == [("one", "p"), ("two", "p")], (
        "an aim on a set that was not measured is none"
    )
    assert set(data.provenance) == {"regenerate", "train one", "evaluate one", "train two", "evaluate two"}
    assert data.notes == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens: one 8; two 9."),
        ({"top_p": 0.9}, "top_p: one None; two 0.9."),
        ({"decoding": {"refresh": False}}, "decoding: one None; two {'refresh': False}."),
        ({"dtype": "bfloat16"}, "engine: one hf (1, float32); two hf (1, bfloat16)."),
        ({"names": ("x", "z")}, "prompts: not the same."),
    ],
)
def test_heads_that_were_not_measured_alike_are_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    out = tmp_path / "report"
    keep(out, "one", measurement("one"))
    keep(out, "two", measurement("two", **changes), measurement("two", by="estimate", names=("q",)))
    (note,) = notes_of(out)
    assert note.startswith("p, chain, K = 2") and "cannot be compared" in note and note.endswith(said)
    keep(out, "two", measurement("two", batch_size=64, num_target_forwards=9))
    assert not any("alike" in note for note in notes_of(out)), "what does not decide acceptance may differ"


def test_another_target_s_heads_are_refused_with_both_values(tmp_path: Path) -> None:
    out = tmp_path / "report"
    check_target(out, TARGET, name="two")
    keep(out, "one", measurement("one"))
    check_target(out, TARGET | {"target_name": "renamed"}, name="two")
    for key in ("target_fingerprint", "tokenizer_hash", "template_hash"):
        with pytest.raises(ValueError, match=rf"expected measurements on other \({key} 0{{16}}\), found head one measured on tiny .*out="):
            check_target(out, TARGET | {"target_name": "other", key: "0" * 64}, name="one")


def test_a_changed_figure_of_another_head_is_told_and_one_s_own_is_written_again(tmp_path: Path) -> None:
    out = tmp_path / "report"
    keep(out, "one", measurement("one"))
    keep(out, "two", measurement("two"))
    path = out / "pieces" / "one" / "head.json"
    whole = path.read_bytes()
    for damaged in (whole.replace(b'"temperature": 0.0', b'"temperature": 1.0'), whole[: len(whole) // 2], b"[1]"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"head\.json: .*; delete it, and evaluate name=one again: what was measured is kept"):
            check_target(out, TARGET, name="two")
        with pytest.raises(ValueError, match="delete it, and evaluate name=one again"):
            notes_of(out)
        check_target(out, TARGET, name="one")
        keep(out, "one", measurement("one"))
        assert path.read_bytes() == whole


class Letters:
    """Stands for a template: token 10 is k."""

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def test_answers_are_shown_by_category_with_their_tokens_marked() -> None:
    names = [("x", "a"), ("y", "a"), ("z", "b"), ("not asked", "c"), ("v", "d")]
    found = measurement("one")
    prompts = tuple(prompt(name, category) for name, category in names)
    found = dataclasses.replace(found, acceptance=dataclasses.replace(found.acceptance, prompts=prompts))
    requests = [SpeculateRequest(prompt_id=name, category="a", token_ids=(0,) * (5 if name == "x" else 900)) for name in "xyzv"]
    shown = marked_answers("one", found, requests, Letters(), num_shown=2)  # type: ignore[arg-type]
    assert [(answer.prompt_id, answer.category) for answer in shown] == [("x", "a"), ("z", "b")]
    assert shown[0].token_texts == ("k", "l", "m") and shown[0].accepted == (False, True, False)
    assert shown[0].question == "aaaaa" and shown[1].question == "[...] " + "a" * 600


def test_one_head_with_several_schemes_stands_in_the_report_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    tree = DynamicTree(max_depth=2, width=2, max_nodes=4, min_confidence=0.0, refresh=True)
    found = measurement("one")
    as_tree = dataclasses.replace(
        found, acceptance=dataclasses.replace(found.acceptance, scheme="tree", decoding="dynamic_tree", num_nodes=4)
    )
    keep(out, "one", as_tree, decoding=tree)
    keep(out, "one", found)
    write_head(
        out / "pieces" / "prompt_lookup",
        name="prompt_lookup",
        checkpoint=None,
        decoding=PromptLookup(num_speculative_tokens=2, max_ngram=3, min_ngram=1),
        measured=[measurement("prompt_lookup")],
        answers=(),
        prompt_sets=(),
        target=TARGET,
        provenance={},
    )
    data = collect(out, target={"name": "tiny"}, run_folder=out.parent, aims=[])
    assert [head.name for head in data.heads] == ["one", "prompt_lookup"]
    assert data.heads[1].word == "no head" and data.heads[1].facts == {
        "trained": "nothing",
        "num_speculative_tokens": "2",
        "max_ngram": "3",
        "min_ngram": "1",
    }
    assert [(item.head, item.acceptance.scheme) for item in data.measurements] == [
        ("one", "chain"),
        ("one", "tree"),
        ("prompt_lookup", "chain"),
    ]
    assert {"evaluate one", "evaluate one.dynamic_tree", "evaluate prompt_lookup"} <= set(data.provenance)

    capsys.readouterr()
    keep(out, "one", found, weight=1.0)
    assert "head.dynamic_tree.json was measured with other weights of one and leaves the report" in capsys.readouterr().err
    data = collect(out, target={"name": "tiny"}, run_folder=out.parent, aims=[])
    assert [item.acceptance.scheme for item in data.measurements if item.head == "one"] == ["chain"]


def certify(out: Path, *heads: str | None, fingerprint: str | None = TARGET["target_fingerprint"], sampled: bool = False) -> Path:
    """A certificate as the tool writes it, of heads as they lie in the run now (None: a scheme without one)."""
    identity = Identity(num_prompts=3, num_identical=3, num_tokens=24, differences=())
    greedy = [
        GreedyCase(
            head=head or "none",
            decoding="chain" if head else "prompt_lookup",
            drafted="chain, K = 2",
            prompt_set="p",
            identity=identity,
            weights_sha256=read_head_config(out.parent / "checkpoint" / head)["weights_sha256"] if head else None,
        )
        for head in heads
    ]
    drawn = SampledCase(
        decoding="chain",
        drafted="chain, K = 2",
        draft_sampling="greedy",
        temperature=1.0,
        num_tokens=3,
        acceptance_length=1.5,
        distances=distances([510, 490], [0.5, 0.5]),
    )
    certificate = Certificate(
        sampled=(drawn,) if sampled else (),
        greedy=tuple(greedy),
        engine="hf",
        target="small",
        provenance={},
        target_fingerprint=fingerprint,
    )
    return write_certificate(certificate, out)


def collected(out: Path) -> ReportData:
    return collect(out, target={"name": "tiny", "fingerprint": TARGET["target_fingerprint"]}, run_folder=out.parent, aims=[])


def certified(data: ReportData) -> list[str]:
    return [] if data.certificate is None else [case.head for case in data.certificate.greedy]


def test_a_certificate_is_of_the_heads_that_were_measured(tmp_path: Path) -> None:
    """A head that was trained again under its name was never certified; one that was not measured is not taken for one that was."""
    out = tmp_path / "report"
    keep(out, "one", measurement("one"))
    keep(out, "two", measurement("two"))
    certify(out, "one", "two", None)
    assert certified(collected(out)) == ["one", "two", "none"] and collected(out).notes == ()

    keep(out, "one", measurement("one"), weight=1.0)
    data = collected(out)
    assert certified(data) == ["two", "none"] and data.certificate is not None and data.certificate.text.endswith("6 of 6.")
    (note,) = [note for note in data.notes if "certificate" in note]
    assert "greedy texts of one (chain, K = 2) are left out: expected the weights that were measured (" in note
    assert "run tools/certify.py again, or evaluate" in note
    (out / "pieces" / "two" / "head.json").unlink()
    assert certified(collected(out)) == ["two (not in this report)", "none"]

    certify(out, "one")
    assert certified(collected(out)) == ["one"] and not any("certificate" in note for note in collected(out).notes)
    keep(out, "one", measurement("one"), weight=2.0)
    assert collected(out).certificate is None, "nothing of it is left"


def test_a_certificate_of_another_target_or_of_before_it_said_whose_it_is_leaves_the_report(tmp_path: Path) -> None:
    out = tmp_path / "report"
    keep(out, "one", measurement("one"))
    path = certify(out, "one", None, fingerprint="0" * 64)
    (note,) = collected(out).notes
    assert certified(collected(out)) == [] and "expected those of tiny (ffffffffffffffff), found those of another target (00000" in note

    certify(out, "one", None, sampled=True)
    document = json.loads(path.read_text(encoding="utf-8"))["certificate"]
    del document["target_fingerprint"]
    for case in document["greedy"]:
        del case["weights_sha256"]
    atomic_write_json(out / CERTIFICATE_JSON, {"certificate": document, SEAL: seal({"certificate": document})})
    data = collected(out)
    assert certified(data) == [] and data.certificate is not None and len(data.certificate.sampled) == 1, "those are of no head"
    (note,) = data.notes
    assert "written before it stated the heads' weights; run tools/certify.py again" in note


def test_costs_are_of_the_heads_that_were_measured(tmp_path: Path) -> None:
    """Times of an earlier head of one's name leave the report, which says so; those of the target alone, or of a head that it does not
    hold, are set against nobody's figures."""
    out = tmp_path / "report"
    for name in ("one", "two"):
        keep(out, name, measurement(name))
    cells = tuple(Timing(batch_size=1, num_tokens=n, seconds=1.0, low_s=1.0, high_s=1.0, num_repeats=3) for n in (1, 2))
    for head in ("one", "two", None):
        table = CostTable(
            source="measured",
            engine="hf",
            engine_version="1",
            dtype="float32",
            device="cpu",
            target_name="tiny",
            target_fingerprint=TARGET["target_fingerprint"],
            head=head,
            context_tokens=8,
            verify=cells,
            drafting=cells if head else (),
            notes={"head_sha256": read_head_config(tmp_path / "checkpoint" / head)["weights_sha256"] if head else None},
        )
        write_costs(table, out)
    assert [table.head for table in collected(out).costs] == ["one", None, "two"] and collected(out).notes == ()

    keep(out, "one", measurement("one"), weight=1.0)
    (out / "pieces" / "two" / "head.json").unlink()
    data = collected(out)
    assert [table.head for table in data.costs] == [None, "two"]
    (note,) = [note for note in data.notes if "costs" in note]
    assert note.startswith("The costs of one in hf are left out: expected the weights that were measured (")
    assert "run tools/measure_costs.py --name one --engine hf again, or evaluate" in note
