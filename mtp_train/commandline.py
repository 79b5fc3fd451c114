"""What stands behind ``python -m mtp_train.<stage>``: the help, an experiment's settings put among those typed, text as typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

_HELP = """{purpose}

usage:
  python -m mtp_train.{name} [group=choice ...] [key=value ...]
{shared}
groups (choose with group=choice; `--help group=choice` shows its settings; change them with group.key=value):
{groups}

settings ({primary}):

{settings}
also: --cfg job prints all settings as they would be used and runs nothing; --info config says where each comes from;
--multirun sweeps. MTP_TRAIN_TRACEBACK=1 shows where an error was found."""


# Stages whose work several processes share; the others are one process.
_SHARED = ("regenerate", "precompute", "train")
_TORCHRUN = "  torchrun --nproc-per-node N -m mtp_train.{name} ...      the same on N processes\n"

# The words that this process' stage was started with, as they were typed.
_typed: list[str] = []


def conf_dir() -> Path:
    """The folder of yaml files: inside the installed package, or beside it in a checkout.

    Errors: ValueError where neither is there (a broken installation).
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "head").is_dir():
            return candidate
    raise ValueError(f"settings: expected the folder conf in {package} or beside it, found none; reinstall mtp-train")


def help_text(name: str, *, purpose: str, words: Sequence[str]) -> str:
    """The stage's help: its purpose, its groups, and its yaml as it stands, since the comments there explain each key."""
    conf = conf_dir()
    text = (conf / f"{name}.yaml").read_text(encoding="utf-8")
    groups = [
        group
        for group in sorted(p.name for p in conf.iterdir() if p.is_dir())
        if re.search(rf"^ *- (override )?/?{group}(@[\w.]+)?: ", text, re.M)
    ]
    groups.append("experiment")
    choices = {group: sorted(p.stem for p in (conf / group).glob("*.yaml")) for group in groups}
    shown = [(f"{name}.yaml", text)]
    for word in words:
        group, _, choice = word.partition("=")
        group = group.partition("@")[0]
        if choice in choices.get(group, ()):
            shown.append((f"{group}/{choice}.yaml", (conf / group / f"{choice}.yaml").read_text(encoding="utf-8")))
    body = "\n".join(f"# --- {title}\n{content}" for title, content in shown)
    listed = "\n".join(f"  {group}: {', '.join(found)}" for group, found in choices.items()) or "  none"
    shared = _TORCHRUN.format(name=name) if name in _SHARED else ""
    return _HELP.format(purpose=purpose, name=name, shared=shared, groups=listed, primary=f"{name}.yaml", settings=body)


# Hydra's own options, and those of them that take the next word.
_TAKE_WORD = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
_TAKE_WORD |= {"--experimental-rerun", "--info", "-i"}
_OPTIONS = _TAKE_WORD | {"--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc"}


def check_words(name: str, words: Sequence[str]) -> Sequence[str]:
    """The words, which are settings and Hydra's own options; ValueError for any other, with the setting that may have been meant."""
    for before, word, behind in zip(["", *words], words, [*words[1:], ""], strict=False):
        key, equals, value = word.partition("=")
        option = word.startswith("-")
        if key in _OPTIONS if option else equals or word.startswith("~") or before in _TAKE_WORD:
            continue
        apart = not equals and bool(behind) and "=" not in behind and not behind.startswith("-")
        said, value = (f"{word} {behind}", behind) if apart else (word, value)
        meant = f"{key.lstrip('-')}={value or '...'}"
        listed = f"python -m mtp_train.{name} --help lists groups, choices and settings"
        raise ValueError(f"settings are key=value: expected {meant}, found {said}; {listed}")
    return words


def group_hint(name: str, key: str) -> str:
    """What to say to one who typed a group as if it stood at the top, where the stage takes it in another place (``group@place``): the
    words that work. Empty for every other key."""
    conf = conf_dir()
    group = key.replace("@", ".").partition(".")[0]
    text = (conf / f"{name}.yaml").read_text(encoding="utf-8")
    places = re.findall(rf"^ *- {re.escape(group)}@([\w.]+): ", text, re.M)
    if not places:
        return ""
    words = sorted(path.stem for path in (conf / group).glob("*.yaml"))
    word = "file" if "file" in words else words[0]
    to_give = re.findall(r"^(\w+): \?\?\?", (conf / group / f"{word}.yaml").read_text(encoding="utf-8"), re.M)
    shown = " ".join([f"{group}@{places[0]}={word}", *(f"{places[0]}.{setting}=[...]" for setting in to_give)])
    return f"{group} is chosen for a place ({', '.join(places)}): {shown}; "


def remember(words: Sequence[str]) -> None:
    """Keep what was typed, for ``typed`` and ``next_command``."""
    _typed[:] = words


def no_run_hint(key: str, known: Collection[str]) -> str:
    """For ``run=`` given to what works on no run; else empty."""
    return "it works on no run: leave it out; " if key == "run" and "runs" not in known else ""


def typed(*keys: str) -> list[str]:
    """Of the words typed those that choose or set one of the keys, or what lies below it."""
    return [word for word in _typed if "=" in word and re.split(r"[.=@]", word.lstrip("+~"))[0] in keys]


def next_command(stage: str, *, reads: str | None, also: Sequence[str] = ()) -> str:
    """The command of the stage that follows, ready to paste: of what was typed, what names the target, the run, a checkpoint and an
    experiment, ``out`` as the setting ``reads`` of that stage (None: it reads something else), and the settings ``also``."""
    kept = []
    for word in _typed:
        key, equals, value = word.partition("=")
        if key == "out":
            kept += [] if reads is None else [f"{reads}={value}"]
        elif equals and (key in ("experiment", "target", "run", "checkpoint") or key.lstrip("+").startswith("target.")):
            kept.append(word)
    return shlex.join(["python", "-m", f"mtp_train.{stage}", *kept, *also])


def with_settings(words: Sequence[str], settings: Sequence[str]) -> list[str]:
    """An experiment's settings in front of those typed, which win; options stay where they are."""
    typed = {word.partition("=")[0].lstrip("+~") for word in words}
    kept = [setting for setting in settings if setting.partition("=")[0].lstrip("+~") not in typed]
    first = next(index for index, word in enumerate(words) if word.startswith("~") or ("=" in word and not word.startswith("-")))
    return [*words[:first], *kept, *(word for word in words[first:] if not word.startswith("experiment="))]


def as_text(words: Iterable[str], *, readable: Callable[[str], bool]) -> list[str]:
    """The words with each value that Hydra's grammar cannot read in quotes, which take it as the text that it is.

    So a path may hold brackets, an ``=`` or letters of any language; one that begins with ``~/`` is in the home folder.
    ``readable`` says whether the grammar takes a word. Lists, mappings and values quoted already are left as they are.
    """
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and not key.startswith("-"):
            value = str(Path(value).expanduser()) if value.startswith("~/") else value
            if not value.startswith(("'", '"', "[", "{")) and not readable(f"{key}={value}"):
                value = quoted(value)
            word = f"{key}={value}"
        found.append(word)
    return found


def quoted(value: Any) -> str:
    """A value as Hydra's command line reads it: text, such as a path, in quotes, so that blanks, commas and quotes in it stay."""
    if isinstance(value, bool):
        return str(value).lower()
    # Backslashes count only in front of a quote, where each is doubled.
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + (r"\'" if m[2] else ""), str(value)) + "'"
