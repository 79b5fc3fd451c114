"""The data that ships: enough, balanced, disjoint, as its manifests say, and long where it says long."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mtp_train.prompt.load import load_prompts
from mtp_train.prompt.long_documents import SPLITS, materialise, read_recipe
from mtp_train.prompt.manifest import read_manifest
from mtp_train.prompt.overlap import shared_ngrams

DATA = Path(__file__).resolve().parents[2] / "data"
RECIPE = DATA / "prompts" / "long.json"
CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
LOCAL = ("project_train", "project_heldout", "project_long_train", "project_long_heldout", "gsm8k", "humaneval")
HUB = ("sharegpt", "ultrachat_200k", "mt_bench")
# SmolLM2's tokenizer makes a token of 3.2 to 4.5 characters of code or English.
FEWEST_CHARS_A_TOKEN, MOST_CHARS_A_TOKEN = 3.2, 4.5


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def texts(name: str) -> list[str]:
    return ["\n".join(row["turns"]) for row in rows(name)]


def entries() -> list[dict[str, Any]]:
    return json.loads(RECIPE.read_text(encoding="utf-8"))


def write_recipe(path: Path, changed: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(changed), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def long_prompts() -> dict[str, list[str]]:
    return {split: [prompt.messages[0]["content"] for prompt in materialise(RECIPE, split)[0]] for split in SPLITS}


@pytest.mark.parametrize(("name", "least", "most"), [("train", 240, None), ("heldout", 64, 64)])
def test_enough_prompts_equally_many_of_each_category(name: str, least: int, most: int | None) -> None:
    found = rows(f"prompts/{name}.jsonl")
    assert len(found) >= least
    assert most is None or len(found) <= most
    per_category = Counter(row["category"] for row in found)
    assert per_category.keys() == CATEGORIES
    assert len(set(per_category.values())) == 1
    assert {row["category"] for row in found[: len(CATEGORIES)]} == CATEGORIES, "the first lines of the file must be balanced too"


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_rows_are_well_formed_and_some_have_several_turns(name: str) -> None:
    found = rows(f"prompts/{name}.jsonl")
    for row in found:
        assert row.keys() == {"prompt_id", "category", "turns"}
        assert row["prompt_id"].startswith(f"{name}-{row['category']}-")
        assert row["turns"]
        assert all(isinstance(turn, str) and turn == turn.strip() != "" for turn in row["turns"])
    assert 0.10 <= sum(len(row["turns"]) > 1 for row in found) / len(found) <= 0.15


def test_ids_are_unique_over_everything_that_ships() -> None:
    prompts, counts = load_prompts(source=[DATA / "manifests" / f"{name}.yaml" for name in LOCAL], on_bad_row="error", deduplicate=True)
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts) == counts.num_rows


def test_no_thirteen_words_in_common_between_training_and_evaluation() -> None:
    train = texts("prompts/train.jsonl")
    evaluation = [text for name in ("prompts/heldout.jsonl", "bench/gsm8k.jsonl", "bench/humaneval.jsonl") for text in texts(name)]
    assert shared_ngrams(train, evaluation) == []
    assert not {text.lower() for text in train} & {text.lower() for text in evaluation}


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_no_near_duplicates_within_a_split(name: str) -> None:
    found = texts(f"prompts/{name}.jsonl")
    assert shared_ngrams(found, None) == []
    assert len({text.lower() for text in found}) == len(found)


def test_a_planted_near_duplicate_is_found() -> None:
    train = texts("prompts/train.jsonl")
    longest = max(train, key=len)
    assert [shared.index_a for shared in shared_ngrams(train, [f"Please: {longest.upper()}"])] == [train.index(longest)]


@pytest.mark.parametrize("name", LOCAL)
def test_manifests_of_what_ships_match_their_files(name: str) -> None:
    manifest = read_manifest(DATA / "manifests" / f"{name}.yaml")
    path = DATA / "manifests" / manifest.source
    assert manifest.name == name
    assert manifest.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    prompts, counts = load_prompts(source=DATA / "manifests" / f"{name}.yaml", on_bad_row="error", deduplicate=False)
    assert len(prompts) == counts.num_rows == manifest.count


@pytest.mark.parametrize("name", HUB)
def test_manifests_of_the_hub_pin_a_commit_and_say_why_nothing_is_counted(name: str) -> None:
    path = DATA / "manifests" / f"{name}.yaml"
    manifest = read_manifest(path)
    assert manifest.name == name
    assert manifest.source.count("/") == 1
    assert manifest.revision is not None
    assert len(manifest.revision) == 40
    assert int(manifest.revision, 16)
    assert manifest.licence
    for key in ("count", "sha256"):
        line = next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(f"{key}:"))
        assert getattr(manifest, key) is not None or "#" in line


def test_every_manifest_is_listed_here() -> None:
    assert {path.stem for path in (DATA / "manifests").glob("*.yaml")} == {*LOCAL, *HUB}


def test_long_recipe_has_no_source_in_both_splits() -> None:
    documents = read_recipe(RECIPE)
    sources = {split: {document.source for document in documents if document.split == split} for split in SPLITS}
    assert not sources["train"] & sources["heldout"]
    assert sum(document.split == "train" for document in documents) >= 48
    assert sum(document.split == "heldout" for document in documents) >= 16


def test_long_prompts_are_between_one_and_four_thousand_tokens(long_prompts: dict[str, list[str]]) -> None:
    for prompts in long_prompts.values():
        for text in prompts:
            assert len(text) / MOST_CHARS_A_TOKEN >= 1000
            assert len(text) / FEWEST_CHARS_A_TOKEN <= 4000


def test_long_prompts_of_the_two_splits_share_no_thirteen_words(long_prompts: dict[str, list[str]]) -> None:
    assert shared_ngrams(long_prompts["train"], long_prompts["heldout"]) == []
    assert shared_ngrams(long_prompts["train"], None) == []
    assert shared_ngrams(long_prompts["heldout"], None) == []


def test_long_prompts_share_nothing_with_the_short_ones(long_prompts: dict[str, list[str]]) -> None:
    short = {split: texts(f"prompts/{split}.jsonl") for split in SPLITS}
    assert shared_ngrams(short["train"], long_prompts["heldout"]) == []
    assert shared_ngrams(long_prompts["train"], short["heldout"]) == []


def test_the_note_says_what_the_long_prompts_were_made_from() -> None:
    prompts, note = materialise(RECIPE, "heldout")
    assert [passage["prompt_id"] for passage in note["passages"]] == [prompt.prompt_id for prompt in prompts]
    assert note["python_version"] == platform.python_version()
    assert note["recipe_sha256"] == hashlib.sha256(RECIPE.read_bytes()).hexdigest()
    for prompt, passage in zip(prompts, note["passages"], strict=True):
        assert passage["source"] == prompt.source
        assert passage["as_in_recipe"] == (passage["sha256"] == next(e["sha256"] for e in entries() if e["prompt_id"] == prompt.prompt_id))
    assert note["num_changed"] == sum(not passage["as_in_recipe"] for passage in note["passages"])


def test_a_changed_passage_is_refused_under_the_recipes_own_python(tmp_path: Path) -> None:
    changed = entries()
    for entry in changed:
        entry["python_version"] = platform.python_version()
    changed[0]["sha256"] = "0" * 64
    with pytest.raises(ValueError, match=rf"{changed[0]['prompt_id']}: expected sha256 0000.*found [0-9a-f]{{64}}"):
        materialise(write_recipe(tmp_path / "long.json", changed), changed[0]["split"])


def test_another_patch_release_is_used_and_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = entries()[:1]
    major, minor, patch = platform.python_version_tuple()
    changed[0] |= {"python_version": f"{major}.{minor}.{patch}9", "sha256": "0" * 64}
    prompts, note = materialise(write_recipe(tmp_path / "long.json", changed), changed[0]["split"])
    assert len(prompts) == note["num_changed"] == 1
    assert note["passages"][0]["recipe_python_version"] == changed[0]["python_version"]
    assert note["passages"][0]["sha256"] != "0" * 64
    assert "1 of 1 long passages differ" in capsys.readouterr().err


def test_another_minor_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    changed = entries()[:1]
    changed[0]["python_version"] = "2.7.18"
    with pytest.raises(ValueError, match=r"expected Python 2\.7\.18.*tools/make_long_recipe\.py"):
        materialise(write_recipe(tmp_path / "long.json", changed), changed[0]["split"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "stdlib:../../../etc/passwd"}, "below the standard library"),
        ({"source": "stdlib:no_such_module.py"}, "found none"),
        ({"source": "pydoc_data.topics:no-such-topic"}, "expected a topic"),
        ({"source": "web:page"}, "found kind 'web'"),
        ({"end_line": 10**6}, "found [0-9]+ lines"),
        ({"template": "{passage} {mood}"}, "mood"),
        ({"split": "test"}, "expected split among train, heldout"),
        ({"extra": 1}, "expected exactly"),
        ({"start_line": "1"}, "expected start_line as int, found '1'"),
        ({"template": "{name.mood} {passage}"}, "mood"),
    ],
)
def test_a_broken_entry_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    changed = entries()[:1]
    split = changed[0]["split"]
    major, minor, patch = platform.python_version_tuple()
    changed[0] |= {"python_version": f"{major}.{minor}.{patch}9"} | change
    with pytest.raises(ValueError, match=message):
        materialise(write_recipe(tmp_path / "long.json", changed), split)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="found 'test'"):
        materialise(RECIPE, "test")
