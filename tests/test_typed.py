"""A value that does not fit its annotation is refused in words that say key, kind and value; one that fits comes out as it is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
import yaml

from mtp_train import stage
from mtp_train.commandline import as_text, conf_dir
from mtp_train.typed import arguments, check_like, fit, nearest

Kind = Literal["cosine", "constant"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A record with a field of each sort."""

    x: float
    name: str
    tags: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, 1e-3, 1e-3),
        (bool, False, False),
        (str, "", ""),
        (Path, "a/b", Path("a/b")),
        (Any, {1: [2]}, {1: [2]}),
        (None, None, None),
        (int | None, None, None),
        (str | Path | Sequence[str | Path], ["a", "b"], ["a", "b"]),
        (str | Sequence[str] | None, "ab", "ab"),
        (Kind, "cosine", "cosine"),
        (tuple[int, ...], [1, 2], (1, 2)),
        (list[bool], [True], [True]),
        (Mapping[str, bool], {"a": True}, {"a": True}),
        (dict[str, float | dict[str, Any]], {"a": 1, "b": {"weight": 2}}, {"a": 1.0, "b": {"weight": 2}}),
        (Point, {"x": 1, "name": "p", "tags": ["a"]}, Point(x=1.0, name="p", tags=("a",))),
        (tuple[Point, ...], [{"x": 1, "name": "p"}], (Point(x=1.0, name="p"),)),
    ],
)
def test_what_fits(kind: Any, value: Any, expected: Any) -> None:
    found = fit(kind, value, "key")
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, "abc", "key: expected a whole number, found 'abc'"),
        (int, 1.0, "key: expected a whole number, found 1.0"),
        (int, True, "key: expected a whole number, found true"),
        (int, None, "key: expected a whole number, found null"),
        (int, 2**63, "key: expected a whole number, found 9223372036854775808"),
        (float, "x", "key: expected a number, found 'x'"),
        (float, False, "key: expected a number, found false"),
        (float, 10**400, "key: expected a number, found 1000"),
        (bool, "maybe", "key: expected true or false, found 'maybe'"),
        (bool, 1, "key: expected true or false, found 1"),
        (str, 7, "key: expected text, found 7; what looks like a number stays text in quotes within quotes: '\"7\"'"),
        (int | None, "many", "key: expected a whole number or null, found 'many'"),
        (Kind, "sine", "key: expected one of cosine, constant, found 'sine'"),
        (list[int], 3, "key: expected a list (a whole number each), found 3"),
        (list[int], "12", "key: expected a list (a whole number each), found '12'"),
        (tuple[int, ...], [1, "a"], "key[1]: expected a whole number, found 'a'"),
        (Mapping[str, bool], {"a": 3}, "key.a: expected true or false, found 3"),
        (dict[str, float | dict[str, Any]], {"a": "x"}, "key.a: expected a number or a mapping, found 'x'"),
        (int | list[int], [1, "x"], "key[1]: expected a whole number, found 'x'"),
        (Point, {"x": 1}, "key: expected the fields ['name', 'tags', 'x'], found no name"),
        (Point, {"x": 1, "name": "p", "y": 2}, "key: expected the fields ['name', 'tags', 'x'], found y, which it does not know"),
        (Point, {"x": "1", "name": "p"}, "key.x: expected a number, found '1'"),
        (Point, [1], "key: expected the fields ['name', 'tags', 'x'], found [1]"),
    ],
)
def test_what_does_not_fit_is_said_in_words(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is compared
        fit(kind, value, "key")
    assert str(raised.value).startswith(message)


def test_arguments_name_all_that_is_unknown_or_missing() -> None:
    def function(*, a: int, b: str = "x", given: object) -> None: ...

    assert arguments(function, {"a": 1}, where="w", given=frozenset({"given"})) == {"a": 1}
    with pytest.raises(ValueError, match=r"^w: expected the settings \['a', 'b'\], found c, which it does not know; no a$"):
        arguments(function, {"c": 1}, where="w", given=frozenset({"given"}))
    with pytest.raises(ValueError, match=r"^w\.b: expected text"):
        arguments(function, {"a": 1, "b": None}, where="w", given=frozenset({"given"}))


DEFAULTS: dict[str, Any] = {
    "run": "runs/default",
    "steps": None,
    "limit": 4,
    "part": {"rate": 0.5, "on": True, "ids": []},
    "built": {"_target_": "x", "lr": 1.0},
    "group": {},
    "ways": {"greedy": {"plain": True}},
}
KINDS: dict[str, Any] = {"steps": int | None, "ways": dict[str, dict]}


def like(**changed: Any) -> None:
    check_like(DEFAULTS, {**DEFAULTS, **changed}, kinds=KINDS)


def test_a_setting_is_of_its_default_s_type() -> None:
    like(run="elsewhere", steps=3, limit=0, part={"rate": 1, "on": False, "ids": [1]}, built={"lr": "checked where it is built"})
    like(ways={"mine": {"anything": 1}}, group={"anything": None})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"limit": "many"}, "limit: expected a whole number, found 'many'; its default is 4"),
        ({"limit": None}, "limit: expected a whole number, found null; its default is 4"),
        ({"limit": 1.5}, "limit: expected a whole number, found 1.5; its default is 4"),
        ({"steps": 1.5}, "steps: expected a whole number or null, found 1.5"),
        ({"run": ""}, "run: expected text, found none; its default is 'runs/default'"),
        ({"part": {"rate": "x", "on": True, "ids": []}}, "part.rate: expected a number, found 'x'; its default is 0.5"),
        ({"part": {"rate": float("nan"), "on": True, "ids": []}}, "part.rate: expected a finite number, found nan"),
        ({"part": {"rate": 1, "on": "yes", "ids": []}}, "part.on: expected true or false, found 'yes'; its default is true"),
        ({"part": {"rate": 1, "on": True}}, "part.ids: expected a value, found it taken away (~part.ids)"),
        (
            {"part": {"rate": 1, "on": True, "ids": [], "rat": 2}},
            "part.rat: expected no further setting, found this one; did you mean part.rate",
        ),
        ({"part": 3}, "part: expected a mapping, found 3"),
        ({"ways": {"greedy": 1}}, "ways.greedy: expected a mapping, found 1"),
        ({"built": None}, "built: expected a mapping, found null"),
        ({"built": {"lr": float("inf")}}, "built.lr: expected a finite number, found inf"),
        ({"more": 1}, "more: expected no further setting, found this one"),
    ],
)
def test_what_is_not_like_the_defaults_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is compared
        like(**changed)
    assert str(raised.value).startswith(message)


def test_a_mistyped_key_is_guessed() -> None:
    known = ["engine.batch_size", "batch_size", "sampling.temperature", "seed"]
    assert "engine.batch_size" in nearest("engine.bacht_size", known)
    assert "sampling.temperature" in nearest("sampling.tempreature", known)
    assert nearest("completely_else", known) == ""


def test_every_setting_that_may_be_null_says_its_type() -> None:
    """A default of null says no type: the stage's ``kinds`` must, or the constructor that the node is handed to."""
    verbs = [
        verb for verb in ("regenerate", "precompute", "train", "evaluate", "export", "plan") if (conf_dir() / f"{verb}.yaml").is_file()
    ]
    for verb in verbs:
        module = __import__(f"mtp_train.{verb}", fromlist=["main"])
        kinds = inspect.getclosurevars(module.main).nonlocals["kinds"]
        settings = yaml.safe_load((conf_dir() / f"{verb}.yaml").read_text(encoding="utf-8"))
        null = [key for key, value in _own(settings) if value is None and key.partition(".")[0] not in ("hydra", "defaults")]
        assert {key for key in null if not any(key == known or key.startswith(f"{known}.") for known in kinds)} == set(), verb
        groups = {folder.name for folder in conf_dir().iterdir() if folder.is_dir()}  # a choice's own file holds their keys
        own = {key for key in kinds if key.partition(".")[0] not in groups}
        assert {key for key in own if key not in dict(_own(settings, mappings=True))} == set(), f"{verb}: kinds of no setting"


def _own(node: Any, where: str = "", *, mappings: bool = False) -> list[tuple[str, Any]]:
    """Dotted key and value; what has ``_target_`` is compared with its constructor and left out."""
    found = []
    for key, value in node.items():
        name = f"{where}.{key}" if where else key
        if isinstance(value, dict) and "_target_" not in value:
            found += [(name, value)] * mappings + _own(value, name, mappings=mappings)
        elif not isinstance(value, dict):
            found.append((name, value))
    return found


@pytest.mark.parametrize("group", ["head", "loss", "engine", "exporter"])
def test_the_annotations_of_every_class_that_a_yaml_builds_can_be_read(group: str) -> None:
    """``get_type_hints`` fails on a name that is imported for the type checker alone, and the yaml's own values must fit."""
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        made = stage.class_of(node.pop("_target_"))
        hints = get_type_hints(made.__init__)  # type: ignore[misc]
        for key, value in node.items():
            if value != "???":
                fit(hints[key], float(value) if hints[key] is float else value, f"{group}.{key}")


def test_text_that_hydra_cannot_read_is_quoted() -> None:
    def readable(word: str) -> bool:
        return not set(word) & set("ü()=,") - {"="} and word.count("=") == 1

    words = ["--cfg", "job", "run=runs/mine", "run=/x/Läufe (ü)", "a='b c'", "b=[1,2]", "~seed", r"c=it's\'é(", "d=e=f"]
    found = as_text(words, readable=lambda word: readable(word.replace("é", "ü")))
    assert found[:3] == words[:3] and found[4:7] == words[4:7]
    assert found[3] == "run='/x/Läufe (ü)'" and found[8] == "d='e=f'"
    assert as_text(["run=~/x"], readable=lambda word: True) == [f"run={Path.home()}/x"]


@pytest.mark.parametrize("text", ["/tmp/Läufe (neu)/a=b", "it's", "back\\slash", "end\\", "a\\'b", "日本", "$x {y}"])
def test_quoted_text_comes_out_of_hydra_as_it_was(text: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (word,) = as_text([f"run={text}"], readable=stage._readable)
    value = OverridesParser.create().parse_override(word).value()
    assert str(value) == text
