"""The recipe of the long prompts is the same each time, honours its bounds, and says when the sources run out."""

from __future__ import annotations

import re

import pytest

from mtp_train.prompt.long_documents import STDLIB, TOPIC, LongDocument, source_text
from mtp_train.prompt.long_recipe import MAX_CHARS, MIN_CHARS, build_recipe
from mtp_train.prompt.long_sources import CHAPTERS, CODE_TEMPLATES, PROSE_TEMPLATES
from mtp_train.prompt.overlap import NGRAM_WORDS, word_ngrams


@pytest.fixture(scope="module")
def recipe() -> list[LongDocument]:
    return [LongDocument(**entry) for entry in build_recipe(seed=3, num_train=12, num_heldout=6, prose_share=0.5)]


def test_the_same_seed_gives_the_same_recipe(recipe: list[LongDocument]) -> None:
    again = [LongDocument(**entry) for entry in build_recipe(seed=3, num_train=12, num_heldout=6, prose_share=0.5)]
    other = [LongDocument(**entry) for entry in build_recipe(seed=4, num_train=12, num_heldout=6, prose_share=0.5)]
    assert again == recipe
    assert other != recipe


def test_counts_kinds_and_lengths_are_as_asked(recipe: list[LongDocument]) -> None:
    assert [document.split for document in recipe] == ["train"] * 12 + ["heldout"] * 6
    for split, count in (("train", 6), ("heldout", 3)):
        assert sum(d.source.startswith(TOPIC) for d in recipe if d.split == split) == count
        assert sum(d.source.startswith(STDLIB) for d in recipe if d.split == split) == count
    assert all(MIN_CHARS <= len(document.passage()) <= MAX_CHARS for document in recipe)


def test_a_chapter_of_the_documentation_goes_to_one_split(recipe: list[LongDocument]) -> None:
    chapter_of = {f"{TOPIC}:{topic}": chapter for chapter, topics in CHAPTERS.items() for topic in topics}
    splits: dict[str, set[str]] = {}
    for document in recipe:
        splits.setdefault(chapter_of.get(document.source, document.source), set()).add(document.split)
    assert all(len(found) == 1 for found in splits.values())


def test_the_name_asked_about_stands_in_the_passage(recipe: list[LongDocument]) -> None:
    named = [document for document in recipe if document.name is not None]
    assert named
    for document in named:
        assert document.name is not None
        assert document.name in document.passage()
        assert f"`{document.name}`" in document.question(document.passage())


def test_a_code_passage_begins_at_a_definition(recipe: list[LongDocument]) -> None:
    for document in recipe:
        if document.source.startswith(STDLIB):
            assert document.passage().startswith(("def ", "async def ", "class ", "@"))


def test_templates_alone_cannot_make_two_prompts_share_a_run_of_words() -> None:
    for _, template in CODE_TEMPLATES + PROSE_TEMPLATES:
        for fixed in re.split(r"\{\w+\}", template):
            assert word_ngrams(fixed, n=NGRAM_WORDS - 1) == [], "leave room for a first word that passages have in common, as def or class"


def test_too_few_sources_is_said() -> None:
    with pytest.raises(ValueError, match=r"found sources for [0-9]+ only"):
        build_recipe(seed=0, num_train=1, num_heldout=400, prose_share=1.0)


def test_the_sources_named_exist() -> None:
    for topics in CHAPTERS.values():
        for topic in topics:
            assert source_text(f"{TOPIC}:{topic}")
