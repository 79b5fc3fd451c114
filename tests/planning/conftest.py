"""Targets of real size from conf/target, and heads over them on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mtp_train.head.base import Head
from mtp_train.nn.layer import read_config
from mtp_train.planning.sizes import HeadSizes, TargetSizes, chosen_share, head_sizes, meta_head, read_target_sizes, target_folder
from mtp_train.stage import build, load_word
from mtp_train.target.weights import SharedWeights


class Planned(NamedTuple):
    """A target of real size and a head over it."""

    target: TargetSizes
    head: HeadSizes
    make_head: Callable[[SharedWeights], Head]


@pytest.fixture(scope="session")
def planned() -> Iterator[Callable[..., Planned]]:
    """Sizes by words: ``planned("llama3_70b", "mtp")``, and the head's settings; each is built once."""
    known: dict[tuple[str, str, str], Planned] = {}
    with ExitStack() as folders:

        def make(target: str | Path, head: str = "mtp", **settings: Any) -> Planned:
            key = (str(target), head, repr(settings))
            if key not in known:
                node: dict[str, Any] = load_word("target", target) if isinstance(target, str) else {"kind": "path", "path": str(target)}
                folder = folders.enter_context(target_folder(node))

                def make_head(shared: SharedWeights) -> Head:
                    made: Head = build(load_word("head", head) | settings, target_path=folder, shared=shared, trust_remote_code=False)
                    return made

                sizes = read_target_sizes(folder, name=str(target))
                chosen = chosen_share(read_config(folder, trust_remote_code=False))
                counted = head_sizes(meta_head(make_head, sizes), word=head, chosen=chosen)
                known[key] = Planned(sizes, counted, make_head)
            return known[key]

        yield make
