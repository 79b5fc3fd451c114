"""Checks a value from a command line, a yaml or a JSON file against a type annotation, and says in words what was expected."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_UNIONS = (Union, types.UnionType)
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping)
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
    None: "null",
}
# The most that torch's and other languages' whole numbers hold.
_LARGEST_INT = 2**63 - 1
_SHOWN_CHARS = 200


def fit(kind: Any, value: Any, where: str) -> Any:
    """``value`` as the annotation ``kind`` says, where it is that; a record (dataclass) is made of a mapping of its fields.

    Knows Any, the plain types, Path (from text), Literal, unions, sequences, mappings and records of these. A whole number
    is a number; true is neither, and 1.0 is no whole number. Errors: ValueError that begins with ``where``.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if origin in _UNIONS:
        return _one_of(kind, value, where)
    if origin is Literal:
        if any(value == word and type(value) is type(word) for word in args):
            return value
    elif _is_sequence(kind):
        if isinstance(value, (list, tuple)):
            item = args[0] if args else Any
            alike = item in (int, str, bool) and all(type(one) is item for one in value)  # manifests list millions of them
            items = list(value) if alike else [fit(item, one, f"{where}[{number}]") for number, one in enumerate(value)]
            return tuple(items) if tuple in (kind, origin) else items
    elif _is_mapping(kind):
        if isinstance(value, Mapping):
            key, item = args or (Any, Any)
            return {fit(key, name, f"{where}, a key"): fit(item, found, f"{where}.{name}") for name, found in value.items()}
    elif _is_plain(kind, value):
        return kind(value) if kind in (float, Path) else value
    raise _refusal(kind, value, where)


def _refusal(kind: Any, value: Any, where: str) -> ValueError:
    hint = ""
    if type(value) in (int, float, bool) and (kind is str or (get_origin(kind) in _UNIONS and str in get_args(kind))):
        hint = f"; what looks like a number stays text in quotes within quotes: '\"{shown(value)}\"'"
    return ValueError(f"{where}: expected {words(kind)}, found {shown(value)}{hint}")


def _is_sequence(kind: Any) -> bool:
    return kind in (list, tuple) or get_origin(kind) in _SEQUENCES


def _is_mapping(kind: Any) -> bool:
    return kind is dict or get_origin(kind) in _MAPPINGS


def _is_plain(kind: Any, value: Any) -> bool:
    if kind in (None, type(None)):
        return value is None
    if kind is float:
        return type(value) is float or (type(value) is int and abs(value) <= _LARGEST_INT)
    if kind is int:
        return type(value) is int and abs(value) <= _LARGEST_INT
    if kind is Path:
        return isinstance(value, (str, Path))
    return type(value) is kind


def _one_of(union: Any, value: Any, where: str) -> Any:
    """The first of a union's kinds that the value is. Where a nested one can alone have been meant, its own fault is told."""
    meant = []
    for kind in get_args(union):
        try:
            return fit(kind, value, where)
        except ValueError as fault:
            nested = _is_mapping(kind) or dataclasses.is_dataclass(kind) if isinstance(value, Mapping) else _is_sequence(kind)
            if nested and isinstance(value, (Mapping, list, tuple)):
                meant.append(fault)
    if len(meant) == 1:
        raise meant[0]
    raise _refusal(union, value, where)


def _record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _refusal(kind, value, where)
    return kind(**arguments(kind, value, where=where, noun="fields"))


def arguments(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    *,
    where: str,
    given: frozenset[str] = frozenset(),
    noun: Literal["settings", "fields"] = "settings",
) -> dict[str, Any]:
    """``values`` as arguments of a function or class: none unknown, none missing, each fit for its annotation.

    ``given`` are parameters that the caller passes itself. Errors: ValueError that lists what is unknown and missing, or
    names the first value that does not fit as ``<where>.<name>``.
    """
    parameters = inspect.signature(function).parameters
    own = parameters.keys() - given
    unknown = sorted(str(name) for name in values.keys() - own)
    missing = sorted(name for name in own - values.keys() if parameters[name].default is inspect.Parameter.empty)
    if unknown or missing:
        found = [*(f"{name}, which it does not know" for name in unknown), *(f"no {name}" for name in missing)]
        raise ValueError(f"{where}: expected the {noun} {sorted(own)}, found {'; '.join(found)}")
    hints = get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    return {name: fit(hints.get(name, Any), value, f"{where}.{name}") for name, value in values.items()}


def words(kind: Any) -> str:
    """An annotation as the reader of an error message would say it."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _WORDS:
        return _WORDS[kind]
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(words(member) for member in args if member is not Path or str not in args))
    if _is_sequence(kind):
        return f"a list ({words(args[0])} each)" if args and args[0] is not Any else "a list"
    if _is_mapping(kind):
        return f"a mapping ({words(args[1])} each)" if args and args[1] is not Any else "a mapping"
    if dataclasses.is_dataclass(kind):
        return f"the fields {sorted(field.name for field in dataclasses.fields(kind))}"
    return kind.__name__ if isinstance(kind, type) else str(kind)


def shown(value: Any) -> str:
    """A value as an error message shows it: as a yaml spells it, and not at length."""
    text = {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def check_like(defaults: Mapping[str, Any], found: Mapping[str, Any], *, kinds: Mapping[str, Any]) -> None:
    """ValueError unless ``found`` has exactly the keys of ``defaults``, each value of its default's type, at any depth.

    ``kinds`` are the annotations of dotted keys whose default does not tell the type; below a mapping named there
    nothing else is compared. Anything is allowed where the default is null, still to be given (``???``), an empty mapping or
    one with ``_target_`` (what comes from elsewhere is compared with a constructor). No number may be infinite or not a
    number.
    """
    _check_node(defaults, found, "", kinds)
    for key, value in leaves(found):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}: expected a finite number, found {value}")


def _check_node(defaults: Mapping[str, Any], found: Any, prefix: str, kinds: Mapping[str, Any]) -> None:
    if unknown := sorted(str(key) for key in found.keys() - defaults.keys()):
        known = [f"{prefix}{name}" for name in defaults]
        hint = nearest(f"{prefix}{unknown[0]}", known)
        raise ValueError(f"{prefix}{unknown[0]}: expected no further setting, found this one; {hint}known: {', '.join(known)}")
    for key, default in defaults.items():
        where = f"{prefix}{key}"
        if key not in found:
            raise ValueError(f"{where}: expected a value, found it taken away (~{where}); leave it in")
        value = found[key]
        if where in kinds:
            fit(kinds[where], value, where)
        elif isinstance(default, Mapping):
            fit(dict, value, where)
            if default and "_target_" not in default:
                _check_node(default, value, f"{where}.", kinds)
        elif default not in (None, "???"):
            _check_leaf(default, value, where)


def _check_leaf(default: Any, value: Any, where: str) -> None:
    try:
        fit(type(default), value, where)
    except ValueError as fault:
        raise ValueError(f"{fault}; its default is {shown(default)}") from None
    if isinstance(value, str) and default and not value.strip():
        raise ValueError(f"{where}: expected text, found none; its default is {shown(default)}")


def leaves(node: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything below a node that is no mapping or list itself."""
    pairs = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if pairs is None:
        yield where, node
        return
    for key, value in pairs:
        yield from leaves(value, f"{where}.{key}" if where else str(key))


def nearest(word: str, known: Iterable[str]) -> str:
    """A question for one who mistyped a dotted key: those known that are spelt alike; empty where there is none."""
    names = list(known)
    last = word.rpartition(".")[2]
    ends: dict[str, list[str]] = {}
    for name in names:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    alike = difflib.get_close_matches(word, names, n=2)
    alike += [name for end in difflib.get_close_matches(last, ends, n=2, cutoff=0.8) for name in ends[end]]
    found = list(dict.fromkeys(alike))[:3]
    return f"did you mean {' or '.join(found)}? " if found else ""
