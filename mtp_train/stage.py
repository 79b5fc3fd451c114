"""The only bridge to Hydra: turns a function into a command line, a config node into an object, a word into its node."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.commandline import as_text, check_words, conf_dir, group_hint, help_text, no_run_hint, remember, with_settings
from mtp_train.faults import telling
from mtp_train.orphan import end_with_parent
from mtp_train.run import Run, check_name, open_run, record
from mtp_train.runtime import log
from mtp_train.typed import arguments, check_like, fit, leaves, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

_WORD = re.compile(r"[a-z0-9_]+")
_CLASS = re.compile(r"mtp_train(\.[a-z0-9_]+)+\.[A-Z][A-Za-z0-9]*")


def stage(name: str, *, kinds: Mapping[str, Any]) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make ``main(cfg)`` the command ``python -m mtp_train.<name>``, with its settings from ``conf/<name>.yaml``.

    A setting must be of its default's type; ``kinds`` are the types of those whose default does not tell (dotted key to
    annotation, for a mapping it holds for all below). What is the user's to mend ends as one message (``faults.telling``).
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def command() -> None:
            if isinstance(sys.stdout, TextIOWrapper):  # as stderr is from the start: a terminal may know ASCII only
                sys.stdout.reconfigure(errors="backslashreplace")
            end_with_parent()  # before the imports, which take longest
            with telling(name):
                if {"--help", "-h"} & set(sys.argv[1:]):
                    print(help_text(name, purpose=(sys.modules[main.__module__].__doc__ or "").strip(), words=sys.argv[1:]))
                    return
                remember(check_words(name, sys.argv[1:]))
                sys.argv[1:] = as_text(_with_experiment(name, sys.argv[1:]), readable=_readable)
                _start_hydra(name, main, kinds)

        return command

    return decorate


def _start_hydra(name: str, main: Callable[[DictConfig], None], kinds: Mapping[str, Any]) -> None:
    """Compose the settings, check them, and run. ValueError for what Hydra refuses, in a sentence or two."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    def job(cfg: DictConfig) -> None:
        with telling(name):
            try:
                check_like(_defaults(name), plain(cfg), kinds=kinds)
                if "name" in cfg:
                    check_name(cfg.name)
                main(cfg)
            except OmegaConfBaseException as error:
                raise ValueError(" ".join(str(error).split())) from error

    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand us the error instead of printing it
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_refusal(name, error, kinds)) from error


def _refusal(name: str, error: Exception, kinds: Mapping[str, Any]) -> str:
    """What Hydra's composition refused, without its search path and with what may have been meant."""
    from omegaconf import OmegaConf

    said = re.sub(r"\nConfig search path[\s\S]*|\s*See https://hydra\.cc\S*( for (more )?details)?\.?", "", str(error)).strip()
    cause = error.__cause__
    if unknown := re.match(r"Could not override '([^']*)'", said):
        key = str(getattr(cause, "full_key", None) or unknown[1])
        mapping, _, word = key.rpartition(".")
        if mapping in kinds:  # one that may be added to
            if mapping == "losses" and word not in known_words("loss"):
                return f"{key}: expected one of {', '.join(known_words('loss'))}, found {word!r}"
            there = ", ".join(_defaults(name)[mapping] or ())
            return f"{key}: expected one that is there ({there or 'none is'}), found {word!r}; +{key}=... adds it"
        known = dict(leaves(_defaults(name))).keys() | {
            f"{path.parent.name}.{own}" for path in conf_dir().glob("*/*.yaml") for own in map(str, OmegaConf.load(path))
        }
        known |= {group for group in _groups(name) if "@" not in group}
        hint = no_run_hint(key, known) or group_hint(name, key) or nearest(key, sorted(known))
        return f"{key}: expected a setting of {name}, found none of that name; {hint}python -m mtp_train.{name} --help lists them"
    hint = "".join(nearest(word, known_words(group)) for group, word in re.findall(r"Could not find '(\w+)/([^']+)'", said))
    why = f": {str(cause).splitlines()[0]}" if cause is not None and str(cause) else ""
    return f"{hint}{said}{why}\n(python -m mtp_train.{name} --help lists groups, choices and settings)"


def _readable(word: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def _with_experiment(name: str, words: list[str]) -> list[str]:
    """Put the settings that ``experiment=<word>`` holds for this stage in front of those typed, which win.

    ``conf/experiment/<word>.yaml`` maps each stage to a list of settings as one would type them, so that one word carries
    a run through all stages and an unknown key is an error as always. Errors: ValueError for an unknown experiment.
    """
    chosen = [word for word in words if word.startswith("experiment=")]
    if not chosen:
        return words
    return with_settings(words, load_word("experiment", chosen[-1].partition("=")[2]).get(name, []))


def _defaults(name: str) -> dict[str, Any]:
    """``conf/<name>.yaml`` as it stands, with an empty mapping where a group's choice comes in."""
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / f"{name}.yaml"), resolve=False)
    del found["defaults"], found["hydra"]
    for group in _groups(name):
        node = found
        for part in (group.partition("@")[2] or group).split("."):
            node = node.setdefault(part, {})
    assert isinstance(found, dict)
    return found


def _groups(name: str) -> list[str]:
    """The groups that ``conf/<name>.yaml`` chooses from, as it spells them: ``head``, ``benchmark@prompt_sets.project``."""
    from omegaconf import OmegaConf

    entries: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / f"{name}.yaml").defaults, resolve=False)
    return [key for entry in entries if isinstance(entry, dict) for key in entry if not key.startswith("override ")]


def plain(node: Any) -> Any:
    """A config node as plain dicts, lists and numbers, interpolations resolved. Errors: ValueError where a value is still to be given."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue

    try:
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except MissingMandatoryValue as error:
        key = error.full_key or "settings"
        raise ValueError(f"{key}: expected a value, found none; add {key}=... to the command") from None


def build(node: Any, *, where: str | None = None, **extra: Any) -> Any:
    """Make what ``node._target_`` names from the node's keys and ``extra``: a class that a module of this package defines.

    ``where`` is the node's key, as errors name it; None: the folder of the class, which is its group. Errors: ValueError
    where the node names no such class, or its keys or their types are not those of the class.
    """
    settings = plain(node)
    found = class_of(settings.get("_target_") if isinstance(settings, dict) else None)
    settings = {key: value for key, value in settings.items() if key != "_target_"}
    return call(found, settings, where=where or found.__module__.split(".")[1], **extra)


def class_of(target: Any) -> type:
    """The class that a dotted path names. ValueError unless a module of this package defines it."""
    module_name, _, name = str(target).rpartition(".")
    found = None
    if _CLASS.fullmatch(str(target)):
        try:
            found = getattr(importlib.import_module(module_name), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise  # a library that the module needs
    if not isinstance(found, type) or found.__module__ != module_name:
        raise ValueError(f"settings: expected a node whose _target_ is a class in mtp_train, found {target!r}")
    return found


def call(function: Callable[..., Any], node: Any, *, where: str, **extra: Any) -> Any:
    """``function`` with the node's keys and ``extra`` as arguments.

    Errors: ValueError for a key that it does not know or lacks, for a value that does not fit its annotation, and for one
    that names code (_target_) at any depth: a node may hold what was read from a checkpoint.
    """
    settings = fit(dict, plain(node), where)
    if _names_code(settings):
        raise ValueError(f"{where}: expected settings, found one that names code (_target_); this was not written by us")
    return function(**arguments(function, settings, where=where, given=frozenset(extra)), **extra)


def _names_code(value: Any) -> bool:
    if isinstance(value, dict):
        return "_target_" in value or any(_names_code(item) for item in value.values())
    return isinstance(value, list) and any(_names_code(item) for item in value)


def known_words(group: str) -> list[str]:
    """The words of a group: the names of its yaml files."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def load_word(group: str, word: str, *changed: str) -> dict[str, Any]:
    """The node that a word on disk stands for: ``conf/<group>/<word>.yaml``, with settings of it changed (``key=value``).

    Errors: ValueError where the word has no yaml (it lists those that exist), no such setting, or still lacks a value.
    """
    import yaml
    from omegaconf import OmegaConf

    path = conf_dir() / group / f"{word}.yaml"
    if not _WORD.fullmatch(word) or not path.is_file():
        raise ValueError(f"{group}: expected one of {known_words(group)}, found {word!r}")
    known = sorted(map(str, node := OmegaConf.load(path)))
    for setting in changed:
        key, equals, value = setting.partition("=")
        if not equals or key not in known:
            raise ValueError(f"{group} {word}: expected settings among {known} as key=value, found {setting!r}")
        OmegaConf.update(node, key, yaml.safe_load(value))
    try:
        found: dict[str, Any] = fit(dict, plain(node), str(path))
    except ValueError as fault:
        raise ValueError(f"{group} {word}: {fault}") from None
    return found


def start(cfg: DictConfig, *, stage_name: str, record_now: bool = True, shared: bool = False) -> Run:
    """Open the stage's output folder (``cfg.out``), keep it for this process, and write ``settings.<stage>.json`` into it.

    ``record_now=False`` leaves the writing to ``record``, for stages that may yet refuse to continue what is there.
    ``shared``: any number of processes may write there, and agree among themselves.
    Errors: ValueError where another process of the stage writes there.
    """
    run = open_run(Path(cfg.out), lock=None if shared else stage_name, settings=plain(cfg))
    if record_now:
        record(run, stage_name=stage_name)
    log(f"{stage_name}: writing to {run.out}")
    return run
