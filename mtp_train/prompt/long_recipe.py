"""Chooses the passages and questions of the long prompts, so that what is held out shares no source and no run of words."""

from __future__ import annotations

import ast
import math
import platform
import random
import re
from collections import Counter
from dataclasses import asdict, dataclass

from mtp_train.prompt.long_documents import CATEGORY, SPLITS, STDLIB, TOPIC, LongDocument, Split, sha256_text, source_text
from mtp_train.prompt.long_sources import (
    CHAPTERS,
    CODE_TEMPLATES,
    MODULES,
    NEEDS_CALLED,
    NEEDS_DOCUMENTED,
    NEEDS_FUNCTION,
    NEEDS_NOTHING,
    NEEDS_QUOTED,
    PROSE_TEMPLATES,
)
from mtp_train.prompt.overlap import shared_ngrams

# 1k to 4k tokens at 3.2 to 4.5 characters a token (code and English under SmolLM2's tokenizer), room left for the question.
MIN_CHARS, MAX_CHARS = 4600, 12400
# A long topic gives several prompts (to one split), one for each stretch of so many characters.
_CHARS_PER_CUT = 14000
_MIN_FUNCTION_LINES = 6
# How far a passage's length may be off the one aimed at, as a share.
_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class _Cut:
    source: str
    start_line: int
    end_line: int
    text: str


def build_recipe(*, seed: int, num_train: int, num_heldout: int, prose_share: float) -> list[dict[str, object]]:
    """A recipe for the running Python: ``num_train`` and ``num_heldout`` documents, ``prose_share`` of them from topics.

    Topics of one chapter, and topics that have runs of words in common, go to one split together; a module goes to one
    split whole; no two passages share a run of 13 words. Lengths are spread evenly on a logarithmic scale. The same
    seed and Python give the same recipe. ValueError where the sources do not suffice.
    """
    rng = random.Random(seed)
    code = [[f"{STDLIB}:{module}"] for module in MODULES]
    rng.shuffle(code)
    families = {"prose": _topic_families(), "code": code}
    accepted: list[_Cut] = []
    documents: list[LongDocument] = []
    totals: dict[Split, int] = {"heldout": num_heldout, "train": num_train}
    for split, total in totals.items():
        num_prose = round(total * prose_share)
        for kind, count in (("prose", num_prose), ("code", total - num_prose)):
            chosen = _choose(families[kind], count, accepted, rng)
            if len(chosen) < count:
                raise ValueError(f"long recipe: expected {count} {kind} passages for {split}, found sources for {len(chosen)} only")
            accepted += chosen
            documents += _ask(chosen, split, first_number=1 if kind == "prose" else 1 + num_prose, code=kind == "code", rng=rng)
    return [asdict(document) for document in sorted(documents, key=lambda d: (SPLITS.index(d.split), d.prompt_id))]


def _topic_families() -> list[list[str]]:
    """The topics by chapter, chapters that share a run of words (at any remove) together; the longest family first."""
    chapter_of = {f"{TOPIC}:{topic}": chapter for chapter, topics in CHAPTERS.items() for topic in topics}
    sources = list(chapter_of)
    texts = [source_text(source) for source in sources]
    for shared in shared_ngrams(texts, None):
        old, new = chapter_of[sources[shared.index_b]], chapter_of[sources[shared.index_a]]
        chapter_of = {source: new if chapter == old else chapter for source, chapter in chapter_of.items()}
    families = [[source for source in sources if chapter_of[source] == chapter] for chapter in dict.fromkeys(chapter_of.values())]
    return sorted(families, key=lambda family: -sum(len(source_text(source)) for source in family))


def _choose(families: list[list[str]], count: int, accepted: list[_Cut], rng: random.Random) -> list[_Cut]:
    """Up to ``count`` passages, their families taken off the end of ``families``; none shares words with another or ``accepted``."""
    step = math.log(MAX_CHARS / MIN_CHARS) / max(1, count)
    targets = [round(MIN_CHARS * math.exp(step * (i + 0.5))) for i in range(count)]
    chosen: list[_Cut] = []
    while targets and families:
        for source in families.pop():
            taken: list[_Cut] = []
            for _ in range(max(1, len(source_text(source)) // _CHARS_PER_CUT) if source.startswith(TOPIC) else 1):
                for target in rng.sample(targets, len(targets)):
                    cut = _cut(source, target, taken, rng)
                    if cut is not None and not shared_ngrams([other.text for other in (*accepted, *chosen)], [cut.text]):
                        targets.remove(target)
                        taken.append(cut)
                        chosen.append(cut)
                        break
    return chosen


def _cut(source: str, target: int, taken: list[_Cut], rng: random.Random) -> _Cut | None:
    """A passage between two bounds, off the ones ``taken``, of about ``target`` characters; None where there is none."""
    text = source_text(source)
    starts, ends = _code_bounds(text) if source.startswith(STDLIB) else _prose_bounds(text)
    lines = text.split("\n")
    for start in rng.sample(starts, len(starts)):
        free = [end for end in ends if end > start and not any(start <= t.end_line and t.start_line <= end for t in taken)]
        lengths = {len("\n".join(lines[start - 1 : end])): end for end in free}
        best = min(lengths, key=lambda length: abs(length - target), default=0)
        if MIN_CHARS <= best <= MAX_CHARS and abs(best - target) <= _TOLERANCE * target:
            return _Cut(source=source, start_line=start, end_line=lengths[best], text="\n".join(lines[start - 1 : lengths[best]]))
    return None


def _prose_bounds(text: str) -> tuple[list[int], list[int]]:
    """Lines (from 1) where a paragraph at the left margin begins, and those before which one does, or the text ends."""
    lines = text.split("\n")
    starts = [i + 1 for i, line in enumerate(lines) if line[:1].strip() and (i == 0 or not lines[i - 1].strip())]
    return starts, [_last_written(lines, start - 1) for start in starts[1:]] + [_last_written(lines, len(lines))]


def _code_bounds(text: str) -> tuple[list[int], list[int]]:
    """Lines (from 1) where a function or class at the top begins, and where one, or a method of one, ends."""
    starts, ends = [], []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            starts.append(min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))
            ends.append(node.end_lineno or node.lineno)
            if isinstance(node, ast.ClassDef):
                ends += [
                    inner.end_lineno or inner.lineno for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
    return starts, sorted(set(ends))


def _last_written(lines: list[str], end: int) -> int:
    while end > 1 and not lines[end - 1].strip():
        end -= 1
    return end


def _ask(cuts: list[_Cut], split: Split, *, first_number: int, code: bool, rng: random.Random) -> list[LongDocument]:
    """Give each passage a question, the kinds of question in turn; where a passage has no name to ask about, the next kind."""
    templates = CODE_TEMPLATES if code else PROSE_TEMPLATES
    documents = []
    for number, cut in enumerate(cuts):
        names = _names_in_code(cut) if code else _names_in_prose(cut.text)
        for offset in range(len(templates)):
            needs, template = templates[(number + offset) % len(templates)]
            if needs == NEEDS_NOTHING or names[needs]:
                break
        documents.append(
            LongDocument(
                prompt_id=f"{split}-{CATEGORY}-{first_number + number:03d}",
                split=split,
                category=CATEGORY,
                source=cut.source,
                start_line=cut.start_line,
                end_line=cut.end_line,
                template=template,
                name=None if needs == NEEDS_NOTHING else rng.choice(names[needs]),
                python_version=platform.python_version(),
                sha256=sha256_text(cut.text),
            )
        )
    return documents


def _names_in_code(cut: _Cut) -> dict[str, list[str]]:
    """Functions of the passage that are worth a question: any of some length, those with a docstring, those called in it."""
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = [
        node
        for node in ast.walk(ast.parse(source_text(cut.source)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and cut.start_line <= node.lineno
        and (node.end_lineno or 0) <= cut.end_line
        and not node.name.startswith("__")
    ]
    called = {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    }
    long = [function for function in functions if (function.end_lineno or 0) - function.lineno + 1 >= _MIN_FUNCTION_LINES]
    return {
        NEEDS_FUNCTION: sorted({function.name for function in long}),
        NEEDS_DOCUMENTED: sorted({function.name for function in long if ast.get_docstring(function)}),
        NEEDS_CALLED: sorted({function.name for function in functions} & called),
    }


def _names_in_prose(text: str) -> dict[str, list[str]]:
    """What the passage speaks of most: the five names that it puts in quotation marks most often, two times at least."""
    counts = Counter(re.findall(r'"([A-Za-z_][\w.]*(?:\(\))?)"', text))
    return {NEEDS_QUOTED: [name for name, count in counts.most_common(5) if count >= 2]}
