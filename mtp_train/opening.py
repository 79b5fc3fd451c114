"""Opens what settings name: the target, and trained heads over its weights."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.commandline import conf_dir, quoted
from mtp_train.run import check_target
from mtp_train.runtime import log
from mtp_train.stage import call, class_of, load_word, plain
from mtp_train.typed import fit

if TYPE_CHECKING:
    from mtp_train.head.base import Head
    from mtp_train.prompt.template import ChatTemplate
    from mtp_train.target.spec import TargetSpec
    from mtp_train.target.weights import SharedWeights

# Of a target's settings those that are not text.
_KINDS: dict[str, Any] = {"trust_remote_code": bool, "sizes": dict | None}


@dataclass(frozen=True, kw_only=True)
class OpenTarget:
    """The target that the settings name: its folder, what it is, and how conversations become its tokens."""

    path: Path
    spec: TargetSpec
    template: ChatTemplate
    trust_remote_code: bool

    def length_limit(self, asked: int) -> int:
        """The longest sequence in tokens: what is asked for, or what the target has positions for, which is said."""
        if asked > self.spec.max_positions:
            log(f"max_length_tokens: {asked} asked for, {self.spec.max_positions} taken: {self.spec.name} has positions for no more")
        return min(asked, self.spec.max_positions)

    def identity(self) -> dict[str, str]:
        """What an artefact made from this target states, and a consumer compares."""
        return {
            "target_name": self.spec.name,
            "target_fingerprint": self.spec.fingerprint,
            "tokenizer_hash": self.template.tokenizer_sha256,
            "template_hash": self.template.template_sha256,
        }


def open_target(node: Any) -> OpenTarget:
    """Fetch or find the target of a config node or a mapping, read its sizes and its chat template; the weights are not loaded."""
    from mtp_train.prompt.template import ChatTemplate
    from mtp_train.prompt.tokenizer import load_tokenizer
    from mtp_train.target.resolve import resolve_target
    from mtp_train.target.spec import read_spec

    settings = {key: fit(_KINDS.get(key, str), value, f"target.{key}") for key, value in plain(node).items()}
    path, code = resolve_target(settings), settings["trust_remote_code"]
    template = ChatTemplate(tokenizer=load_tokenizer(path, trust_remote_code=code))
    return OpenTarget(path=path, spec=read_spec(path, name=settings["name"]), template=template, trust_remote_code=code)


def add_target_option(parser: ArgumentParser) -> None:
    """The option ``--target`` of a tool: a word of conf/target and settings of it, for ``open_named_target`` and ``as_settings``."""
    parser.add_argument(
        "--target",
        nargs="+",
        default=["smollm2_135m"],
        metavar=("WORD", "key=value"),
        help="of conf/target, and settings of it: local path=/models/mine name=mine (default: smollm2_135m)",
    )


def target_apart(words: Sequence[str]) -> list[str]:
    """A tool's command line with the words behind ``--target`` that are no settings of it moved to the end, behind ``--``, for a tool
    that takes positionals: argparse would give them all to the option.

    Settings are ``key=value`` with a key of the word's yaml; where the word has none, any key is left for ``open_named_target`` to refuse.
    """
    end = words.index("--") if "--" in words else len(words)
    begin = words.index("--target", 0, end) + 2 if "--target" in words[:end] else end + 1
    if begin > end or words[begin - 1].startswith("-"):
        return list(words)
    stop = next((number for number in range(begin, end) if words[number].startswith("-")), end)
    path = conf_dir() / "target" / f"{words[begin - 1]}.yaml"
    keys = re.findall(r"^(\w+):", path.read_text(encoding="utf-8"), re.M) if path.is_file() else None

    def sets(word: str) -> bool:
        key, equals, _ = word.partition("=")
        return bool(equals) and (keys is None or key in keys)

    apart = next((number for number in range(begin, stop) if not sets(words[number])), stop)
    positionals = [*words[apart:stop], *words[end + 1 :]]
    return [*words[:apart], *words[stop:end], *(["--", *positionals] if positionals else [])]


def open_named_target(words: Sequence[str]) -> OpenTarget:
    """The target that ``--target`` names. Errors: ValueError for a word or a setting that is not there."""
    return open_target(load_word("target", *words))


def as_settings(words: Sequence[str]) -> list[str]:
    """The target that ``--target`` names, in the words of a stage's command line."""
    given = (setting.partition("=") for setting in words[1:])
    return [f"target={words[0]}", *(f"target.{key}={value if key in _KINDS else quoted(value)}" for key, _, value in given)]


def open_run_target(cfg: Any) -> OpenTarget:
    """The target that a stage's settings name. ValueError where it writes into a run (``cfg.run``) of another one."""
    target = open_target(cfg.target)
    check_target(Path(cfg.run), Path(cfg.out), target.identity())
    return target


def build_head(word: str, settings: dict[str, Any], *, target: OpenTarget, shared: SharedWeights) -> Head:
    """Build the head that a checkpoint or the command line names, over the target's shared weights."""
    found = class_of(load_word("head", word)["_target_"])
    head: Head = call(
        found, settings, where=f"head {word}", target_path=target.path, shared=shared, trust_remote_code=target.trust_remote_code
    )
    return head


def head_loader(target: OpenTarget) -> Callable[[Path, SharedWeights], Head]:
    """A function that rebuilds a trained head from its checkpoint; it refuses a head of another target."""

    def load(path: Path, shared: SharedWeights) -> Head:
        from mtp_train.checkpoint import check_head, check_states, read_head_config, read_head_tensors

        config = read_head_config(path)
        check_head(config, target.identity(), where=path)
        head = build_head(config["head"], config["settings"], target=target, shared=shared)
        expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
        tensors = read_head_tensors(path)
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if odd := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
            named = ", ".join(f"{name} {expected.get(name, 'absent')}, found {found.get(name, 'none')}" for name in odd[:3])
            raise ValueError(f"{path}: expected the tensors that its settings in head.json call for ({named}); train the head anew")
        head.load_state_dict(tensors)
        check_states(path, stated=config, found=head.draft_config())
        return head

    return load
