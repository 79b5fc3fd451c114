"""Long prompts made at run time from text that every Python carries: its language reference and its library's sources."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtp_train import runtime
from mtp_train.records import Prompt

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
CATEGORY = "long"
TOPIC = "pydoc_data.topics"
STDLIB = "stdlib"
_REBUILD = "python tools/make_long_recipe.py rewrites the recipe for the running Python"


@dataclass(frozen=True, kw_only=True)
class LongDocument:
    """One long prompt of a recipe: lines ``start_line`` to ``end_line`` (from 1, both included) of ``source``.

    ``source`` is ``pydoc_data.topics:<topic>`` or ``stdlib:<file below the library's folder>``. ``template`` is the
    question's text with ``{passage}``, and where it asks for them ``{title}`` (the topic or module) and ``{name}`` (what
    the question is about). ``sha256`` is that of the passage in UTF-8 under the recipe's Python version.
    """

    prompt_id: str
    split: Split
    category: str
    source: str
    start_line: int
    end_line: int
    template: str
    name: str | None
    python_version: str
    sha256: str

    @property
    def title(self) -> str:
        """What a reader calls the source: ``heapq.py``, ``json/decoder.py``, ``comparisons``."""
        return self.source.split(":", 1)[1]

    def passage(self) -> str:
        """The lines named, from this machine's Python. ValueError where the source does not reach that far."""
        lines = source_text(self.source).split("\n")
        if not 1 <= self.start_line <= self.end_line <= len(lines):
            raise ValueError(
                f"{self.prompt_id}: expected lines {self.start_line} to {self.end_line} in {self.source}, "
                f"found {len(lines)} lines in Python {platform.python_version()}; {_REBUILD}"
            )
        return "\n".join(lines[self.start_line - 1 : self.end_line])

    def question(self, passage: str) -> str:
        """The user's message. ValueError where the template asks for something else than passage, title and name."""
        try:
            return self.template.format(passage=passage, title=self.title, name=self.name)
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{self.prompt_id}: expected {{passage}}, {{title}} or {{name}} in the template, found {self.template!r} ({error!r})"
            ) from None


def source_text(source: str) -> str:
    """The whole text of a source, lines ended by ``\\n``. ValueError for an unknown kind, topic or file."""
    kind, _, name = source.partition(":")
    if kind == TOPIC:
        from pydoc_data.topics import topics

        if name not in topics:
            raise ValueError(f"{source}: expected a topic of this Python's pydoc, found none of that name; {_REBUILD}")
        return str(topics[name])
    if kind != STDLIB:
        raise ValueError(f"{source}: expected {TOPIC}:<topic> or {STDLIB}:<file>, found kind {kind!r}")
    folder = Path(sysconfig.get_path("stdlib")).resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder):
        raise ValueError(f"{source}: expected a file below the standard library's folder, found one outside of it")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{source}: expected this file in the standard library, found none; {_REBUILD}") from None


def sha256_text(text: str) -> str:
    """Hex sha256 of a text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_recipe(path: Path) -> list[LongDocument]:
    """The documents of a recipe, in its order. ValueError, naming file and entry, for one that is broken or misspelt."""
    entries = runtime.read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected a list of long documents, found {'an empty list' if entries == [] else type(entries).__name__}")
    fields = LongDocument.__dataclass_fields__
    documents = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or entry.keys() != fields.keys():
            found = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(f"{path}, entry {number}: expected exactly {', '.join(fields)}, found {found}")
        if entry["split"] not in SPLITS:
            raise ValueError(f"{path}, entry {number}: expected split among {', '.join(SPLITS)}, found {entry['split']!r}")
        for key, value in entry.items():
            wanted: type = int if key in ("start_line", "end_line") else str
            if type(value) is not wanted and not (key == "name" and value is None):
                raise ValueError(f"{path}, entry {number}: expected {key} as {wanted.__name__}, found {value!r}")
        documents.append(LongDocument(**entry))
    return documents


def materialise(recipe_path: Path, split: str) -> tuple[list[Prompt], dict[str, Any]]:
    """The prompts of one split of a recipe, and a note of what they were really made from, to be stored beside the output.

    Under the recipe's own Python version each passage must have the stated hash: ValueError names the first that has
    not. Under another patch release of the same minor version a passage may differ by a few lines: it is used as it
    is, and the note holds both versions and the actual hash. ValueError for another minor version, where the questions
    would no longer fit the passages, for a split that is unknown or empty, and for a source that is not there.
    """
    if split not in SPLITS:
        raise ValueError(f"{recipe_path}: expected split among {', '.join(SPLITS)}, found {split!r}")
    documents = [document for document in read_recipe(recipe_path) if document.split == split]
    if not documents:
        raise ValueError(f"{recipe_path}: expected long documents of split {split}, found none")
    running = platform.python_version()
    prompts, passages = [], []
    for document in documents:
        _check_version(document, running, recipe_path)
        passage = document.passage()
        found = sha256_text(passage)
        if running == document.python_version and found != document.sha256:
            raise ValueError(
                f"{recipe_path}: {document.prompt_id}: expected sha256 {document.sha256} for lines {document.start_line} to "
                f"{document.end_line} of {document.source} under Python {running}, "
                f"found {found}: this Python's text has been changed; {_REBUILD}"
            )
        messages = ({"role": "user", "content": document.question(passage)},)
        prompts.append(Prompt(prompt_id=document.prompt_id, messages=messages, category=document.category, source=document.source))
        passages.append(
            {
                "prompt_id": document.prompt_id,
                "source": document.source,
                "recipe_python_version": document.python_version,
                "sha256": found,
                "as_in_recipe": found == document.sha256,
            }
        )
    num_changed = sum(not passage["as_in_recipe"] for passage in passages)
    if num_changed:
        runtime.log(f"{recipe_path.name}: {num_changed} of {len(passages)} long passages differ from the recipe's under Python {running}")
    provenance = {
        "recipe": recipe_path.name,
        "recipe_sha256": runtime.sha256_file(recipe_path),
        "split": split,
        "python_version": running,
        "num_changed": num_changed,
        "passages": passages,
    }
    return prompts, provenance


def _check_version(document: LongDocument, running: str, recipe_path: Path) -> None:
    if running.split(".")[:2] != document.python_version.split(".")[:2]:
        raise ValueError(
            f"{recipe_path}: {document.prompt_id}: expected Python {document.python_version} or another patch release of it, "
            f"found {running}; {_REBUILD}"
        )
