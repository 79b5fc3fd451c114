"""A run is of one target: whichever of its files says so, and what a command for another one is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtp_train.run import check_target

MINE = {"target_name": "mine", "target_fingerprint": "a" * 64, "tokenizer_hash": "b" * 64, "template_hash": "c" * 64}
OTHER = {**MINE, "target_name": "smollm2_135m", "target_fingerprint": "d" * 64}


def write(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("responses/meta.json", "identity"),
        ("checkpoint/mtp/head.json", "target"),
        ("cache/manifest.json", "identity"),
        ("cache/plan.json", "identity"),
        ("report/pieces/prompt_lookup/head.json", "target"),
    ],
)
def test_whatever_states_the_target_counts(tmp_path: Path, name: str, key: str) -> None:
    out = tmp_path / "report"
    check_target(tmp_path, out, OTHER)  # an empty run takes any
    write(tmp_path / name, {key: {**MINE, "top_k": 64}})
    with pytest.raises(ValueError, match=f"expected that of .*mine .{name}: target_fingerprint aaa.*found smollm2_135m .*ddd") as refused:
        check_target(tmp_path, out, OTHER)
    assert "add target=local target.path=... target.name=mine, or choose another run" in str(refused.value).replace("'", "")
    check_target(tmp_path, out, {**MINE, "target_name": "renamed"})
    check_target(tmp_path, tmp_path.parent / "elsewhere", OTHER)
    with pytest.raises(ValueError, match="template_hash"):
        check_target(tmp_path, out, {**MINE, "template_hash": "e" * 64})


def test_the_words_are_those_that_the_run_was_made_with(tmp_path: Path) -> None:
    write(tmp_path / "responses/meta.json", {"identity": MINE})
    write(
        tmp_path / "responses/settings.regenerate.json", {"settings": {"target": {"name": "mine", "kind": "path", "path": "/my models/m"}}}
    )
    with pytest.raises(ValueError, match=r"add target=local 'target.path=/my models/m' target.name=mine,"):
        check_target(tmp_path, tmp_path / "report", OTHER)
    with pytest.raises(ValueError, match="add --target local 'path=/my models/m' name=mine,"):
        check_target(tmp_path, tmp_path / "report", OTHER, tool=True)
    write(tmp_path / "responses/meta.json", {"identity": OTHER})
    with pytest.raises(ValueError, match="add target=smollm2_135m, or"):
        check_target(tmp_path, tmp_path / "report", MINE)


def test_a_damaged_file_is_left_to_its_reader(tmp_path: Path) -> None:
    write(tmp_path / "responses/meta.json", [])
    check_target(tmp_path, tmp_path / "cache", MINE)
    write(tmp_path / "checkpoint/mtp/head.json", {"target": OTHER})
    with pytest.raises(ValueError, match=r"checkpoint/mtp/head\.json"):
        check_target(tmp_path, tmp_path / "cache", MINE)
