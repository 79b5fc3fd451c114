"""The only bridge to Hydra: turns a function into a command line, a config node into an object, a word into its node."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.runtime import atomic_write_json, is_main, log, provenance

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mtp_train.head.base import Head
    from mtp_train.prompt.template import ChatTemplate
    from mtp_train.target.spec import TargetSpec
    from mtp_train.target.weights import SharedWeights

_WORD = re.compile(r"[a-z0-9_]+")
_CLASS = re.compile(r"mtp_train(\.[a-z0-9_]+)+\.[A-Z][A-Za-z0-9]*")

_HELP = """{purpose}

usage:
  python -m mtp_train.{name} [group=choice ...] [key=value ...]
  torchrun --nproc-per-node N -m mtp_train.{name} ...      the same on N processes

groups (choose with group=choice; `--help group=choice` shows its settings; change them with group.key=value):
{groups}

settings ({primary}):

{settings}
also: --cfg job prints all settings as they would be used and runs nothing; --info config says where each comes from;
--multirun sweeps. MTP_TRAIN_TRACEBACK=1 shows where an error was found."""


def conf_dir() -> Path:
    """The folder of yaml files: inside the installed package, or beside it in a checkout.

    Errors: ValueError where neither is there (a broken installation).
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "head").is_dir():
            return candidate
    raise ValueError(f"settings: expected the folder conf in {package} or beside it, found none; reinstall mtp-train")


def stage(name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make ``main(cfg)`` the command ``python -m mtp_train.<name>``, with its settings from ``conf/<name>.yaml``.

    A ValueError (the user's to mend) ends as one message on stderr and exit status 2; an interrupt as status 130. Anything
    else is our fault and shows its traceback.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def command() -> None:
            if {"--help", "-h"} & set(sys.argv[1:]):
                print(_help(name, purpose=(sys.modules[main.__module__].__doc__ or "").strip(), words=sys.argv[1:]))
                return
            import hydra

            try:
                sys.argv[1:] = _with_experiment(name, sys.argv[1:])
            except ValueError as error:
                print(f"mtp-train {name}: {error}", file=sys.stderr)
                sys.exit(2)

            def job(cfg: DictConfig) -> None:
                try:
                    main(cfg)
                except ValueError as error:
                    if os.environ.get("MTP_TRAIN_TRACEBACK"):
                        raise
                    print(f"\nmtp-train {name}: {error}", file=sys.stderr, flush=True)
                    sys.exit(2)
                except KeyboardInterrupt:
                    print(f"\nmtp-train {name}: interrupted; the same command continues", file=sys.stderr, flush=True)
                    sys.exit(130)

            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)(job)()

        return command

    return decorate


def _help(name: str, *, purpose: str, words: list[str]) -> str:
    """The stage's help: its purpose, its groups, and its yaml as it stands, since the comments there explain each key."""
    conf = conf_dir()
    text = (conf / f"{name}.yaml").read_text(encoding="utf-8")
    groups = [
        group for group in sorted(p.name for p in conf.iterdir() if p.is_dir()) if re.search(rf"^ *- (override )?/?{group}: ", text, re.M)
    ]
    groups.append("experiment")
    choices = {group: sorted(p.stem for p in (conf / group).glob("*.yaml")) for group in groups}
    shown = [(f"{name}.yaml", text)]
    for word in words:
        group, _, choice = word.partition("=")
        if choice in choices.get(group, ()):
            shown.append((f"{group}/{choice}.yaml", (conf / group / f"{choice}.yaml").read_text(encoding="utf-8")))
    body = "\n".join(f"# --- {title}\n{content}" for title, content in shown)
    listed = "\n".join(f"  {group}: {', '.join(found)}" for group, found in choices.items()) or "  none"
    return _HELP.format(purpose=purpose, name=name, groups=listed, primary=f"{name}.yaml", settings=body)


def _with_experiment(name: str, words: list[str]) -> list[str]:
    """Put the settings that ``experiment=<word>`` holds for this stage in front of those typed, which win; options stay where they are.

    ``conf/experiment/<word>.yaml`` maps each stage to a list of settings as one would type them, so that one word carries
    a run through all stages and an unknown key is an error as always. Errors: ValueError for an unknown experiment.
    """
    chosen = [word for word in words if word.startswith("experiment=")]
    if not chosen:
        return words
    settings = load_word("experiment", chosen[-1].partition("=")[2]).get(name, [])
    typed = {word.partition("=")[0].lstrip("+~") for word in words}
    kept = [setting for setting in settings if setting.partition("=")[0].lstrip("+~") not in typed]
    first = next(index for index, word in enumerate(words) if word.startswith("~") or ("=" in word and not word.startswith("-")))
    return words[:first] + kept + [word for word in words[first:] if word not in chosen]


def plain(node: Any) -> Any:
    """A config node as plain dicts, lists and numbers, interpolations resolved. Errors: ValueError where a value is still to be given."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue

    try:
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except MissingMandatoryValue as error:
        key = error.full_key or "settings"
        raise ValueError(f"{key}: expected a value, found none; add {key}=... to the command") from None


def build(node: Any, **extra: Any) -> Any:
    """Make what ``node._target_`` names from the node's keys and ``extra``: a class that a module of this package defines.

    Errors: ValueError where the node names no such class, or its keys are not those of the class.
    """
    settings = plain(node)
    target = settings.get("_target_") if isinstance(settings, dict) else None
    return call(_class(target), {key: value for key, value in settings.items() if key != "_target_"}, where=str(target), **extra)


def _class(target: Any) -> type:
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

    Errors: ValueError for a key that it does not know or lacks, and for one that names code (_target_) at any depth: a node
    may hold what was read from a checkpoint.
    """
    settings = plain(node)
    if _names_code(settings):
        raise ValueError(f"{where}: expected settings, found one that names code (_target_); this was not written by us")
    parameters = inspect.signature(function).parameters
    own = parameters.keys() - extra.keys()
    unknown = sorted(settings.keys() - own)
    missing = sorted(name for name in own - settings.keys() if parameters[name].default is inspect.Parameter.empty)
    if unknown or missing:
        found = [*(f"{name}, which it does not know" for name in unknown), *(f"no {name}" for name in missing)]
        raise ValueError(f"{where}: expected the settings {sorted(own)}, found {'; '.join(found)}")
    return function(**settings, **extra)


def _names_code(value: Any) -> bool:
    if isinstance(value, dict):
        return "_target_" in value or any(_names_code(item) for item in value.values())
    return isinstance(value, list) and any(_names_code(item) for item in value)


def load_word(group: str, word: str) -> dict[str, Any]:
    """The node that a word on disk stands for: ``conf/<group>/<word>.yaml``.

    Errors: ValueError where the word is no plain word or has no yaml; it lists those that exist.
    """
    from omegaconf import OmegaConf

    path = conf_dir() / group / f"{word}.yaml"
    if not _WORD.fullmatch(word) or not path.is_file():
        known = sorted(p.stem for p in (conf_dir() / group).glob("*.yaml"))
        raise ValueError(f"{group}: expected one of {known}, found {word!r}")
    node = plain(OmegaConf.load(path))
    assert isinstance(node, dict), path
    return node


@dataclass(frozen=True, kw_only=True)
class OpenTarget:
    """The target that the settings name: its folder, what it is, and how conversations become its tokens."""

    path: Path
    spec: TargetSpec
    template: ChatTemplate
    trust_remote_code: bool

    def identity(self) -> dict[str, str]:
        """What an artefact made from this target states, and a consumer compares."""
        return {
            "target_name": self.spec.name,
            "target_fingerprint": self.spec.fingerprint,
            "tokenizer_hash": self.template.tokenizer_sha256,
            "template_hash": self.template.template_sha256,
        }


def open_target(node: DictConfig) -> OpenTarget:
    """Fetch or find the target, read its sizes and its chat template; the weights are not loaded."""
    from mtp_train.prompt.template import ChatTemplate
    from mtp_train.prompt.tokenizer import load_tokenizer
    from mtp_train.target.resolve import resolve_target
    from mtp_train.target.spec import read_spec

    path = resolve_target(plain(node))
    template = ChatTemplate(tokenizer=load_tokenizer(path))
    return OpenTarget(path=path, spec=read_spec(path, name=node.name), template=template, trust_remote_code=node.trust_remote_code)


def build_head(word: str, settings: dict[str, Any], *, target: OpenTarget, shared: SharedWeights) -> Head:
    """Build the head that a checkpoint or the command line names, over the target's shared weights."""
    found = _class(load_word("head", word)["_target_"])
    head: Head = call(
        found, settings, where=f"head {word}", target_path=target.path, shared=shared, trust_remote_code=target.trust_remote_code
    )
    return head


def head_loader(target: OpenTarget) -> Callable[[Path, SharedWeights], Head]:
    """A function that rebuilds a trained head from its checkpoint; it refuses a head of another target."""

    def load(path: Path, shared: SharedWeights) -> Head:
        from mtp_train.checkpoint import check_states, read_head_config, read_head_tensors

        config = read_head_config(path)
        stated = config["target"]
        for key, expected in target.identity().items():
            found = stated.get(key, "not stated")
            if key != "target_name" and found != expected:
                raise ValueError(
                    f"{path}: expected a head of this target ({target.spec.name}, {key} {expected[:16]}), found one trained on "
                    f"{stated['target_name']} ({key} {found[:16]}); choose that target, or train a head for this one"
                )
        head = build_head(config["head"], config["settings"], target=target, shared=shared)
        head.load_state_dict(read_head_tensors(path))
        check_states(path, stated=config, found=head.draft_config())
        return head

    return load


@dataclass(frozen=True, kw_only=True)
class Run:
    """One stage's run: where it writes, what it was told, what machine and code it is."""

    out: Path
    settings: dict[str, Any]
    provenance: dict[str, Any]


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(name: str) -> str:
    """A head's name, which becomes a folder of the run: ValueError unless it is one plain word."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name: expected letters, digits, '.', '_' or '-' (it becomes a folder of the run), found {name!r}; out= writes elsewhere"
        )
    return name


def start(cfg: DictConfig, *, stage_name: str, record_now: bool = True) -> Run:
    """Open the stage's output folder (``cfg.out``) and write ``settings.<stage>.json`` into it.

    ``record_now=False`` leaves the writing to ``record``, for stages that may yet refuse to continue what is there.
    """
    if "name" in cfg:
        check_name(cfg.name)
    out = Path(cfg.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, found a file at {out}; choose another run= or out=")
    run = Run(out=out, settings=plain(cfg), provenance=provenance())
    if record_now:
        record(run, stage_name=stage_name)
    log(f"{stage_name}: writing to {out}")
    return run


def record(run: Run, *, stage_name: str) -> None:
    """Write the settings and what produced them beside a stage's output."""
    if is_main():
        run.out.mkdir(parents=True, exist_ok=True)
        atomic_write_json(run.out / f"settings.{stage_name}.json", {"settings": run.settings, "provenance": run.provenance})
