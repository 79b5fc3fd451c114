"""What is each RMSNorm of the head worth? Train every mixture alike, on the target and on one with outlier channels, and measure.

python -m mtp_train.regenerate run=runs/held prompt=file sampling.max_new_tokens=96 \\
    prompt.source=[data/manifests/project_heldout.yaml,data/manifests/project_long_heldout.yaml]   # greedy answers to prompts that were
python -m mtp_train.precompute run=runs/held                                                      # not trained on
python tools/ablate_norms.py --run runs/demo --heldout runs/held --max-new-tokens 96 --out runs/norms -- \\
    head.init=random optimizer.rule=adamw optimizer.lr=1e-3 num_steps=40 tokens_per_pack=2048

Behind ``--``: settings of mtp_train.train, the same for all heads. The target with outlier channels is the same model, exactly
compensated (its logits and texts are the same to the last bit), so that the cache is scaled and not computed again. An interrupted
call is continued by calling it again. Writes norms.html, norms.md and what they rest on into --out.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtp_train.opening import add_target_option, target_apart


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run whose cache/ is trained on")
    parser.add_argument("--heldout", type=Path, required=True, help="a run whose cache/ holds greedy answers to held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, required=True, help="the limit under which the held-out answers were generated")
    parser.add_argument("--out", type=Path, required=True)
    add_target_option(parser)
    parser.add_argument("--mixtures", nargs="+", default=None, help="default: none, each norm alone, all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--num-channels", type=int, default=4, help="outlier channels; 0: leave that target out")
    parser.add_argument("--factor", type=float, default=256.0, help="how many times larger they are: a power of two")
    parser.add_argument("--long-tokens", type=int, default=1000, help="prompts of so many tokens are long")
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--side-by-side", type=int, default=2, help="trainings at a time")
    parser.add_argument("settings", nargs="*", help="of mtp_train.train")
    return parser.parse_args(target_apart(sys.argv[1:]))


def main() -> int:
    arguments = parse()

    from mtp_train.faults import telling

    with telling("ablate_norms"):
        path = ablate(arguments)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    print(f"page: {path}")
    return 0


def ablate(arguments: argparse.Namespace) -> Path:
    """Make what is missing, train, measure, write the page; its path."""
    from mtp_train.ablation.grid import MIXTURES, Place, cells, keep_settings, train_all, trained_in
    from mtp_train.ablation.measure import measure
    from mtp_train.ablation.page import write_page
    from mtp_train.cache.reader import CacheReader
    from mtp_train.engine.hf_model import choose_device
    from mtp_train.opening import as_settings, head_loader, open_named_target
    from mtp_train.target.weights import read_shared

    stated = ("run", "heldout", "target", "max_new_tokens", "num_channels", "factor", "num_speculative_tokens", "settings")
    own = CacheReader(arguments.heldout / "cache", verify="first_read")
    # What is done already is not done again, and this machine may choose otherwise than the one that did it.
    rounded = {"precision": trained_in(arguments.settings), "measured_in": str(own[0].hidden_TD.dtype).removeprefix("torch.")}
    keep_settings(arguments.out, {key: json.loads(json.dumps(getattr(arguments, key), default=str)) for key in stated} | rounded)
    target = open_named_target(arguments.target)
    places = {"real": Place(words=tuple(as_settings(arguments.target)), cache=arguments.run / "cache")}
    opened, heldout = {"real": target}, {"real": own}
    if arguments.num_channels:
        opened["outliers"], places["outliers"], heldout["outliers"] = with_outliers(arguments, target)
    wanted = cells(list(places), arguments.mixtures or list(MIXTURES), arguments.seeds)
    folder = arguments.out / "heads"
    train_all(wanted, places, out=folder, settings=arguments.settings, side_by_side=arguments.side_by_side)
    device = choose_device("auto")
    shared = {name: read_shared(one.path).to(device=device, dtype=heldout[name][0].hidden_TD.dtype) for name, one in opened.items()}

    def loader(name: str) -> Any:
        return lambda path: head_loader(opened[name])(path, shared[name]).to(device)

    found = [
        measure(
            cell,
            folder / cell.name,
            load=loader(cell.target),
            heldout=heldout[cell.target],
            num_speculative_tokens=arguments.num_speculative_tokens,
            max_new_tokens=arguments.max_new_tokens,
            device=device,
        )
        for cell in wanted
    ]
    about = {
        "target": f"{target.spec.name}, hidden size {target.spec.hidden_size}, {target.spec.num_layers} layers",
        "settings": " ".join(arguments.settings) or "as conf/train.yaml has them",
        "precision": f"trained in {rounded['precision']}, measured in {rounded['measured_in']}",
        "seeds": ", ".join(map(str, arguments.seeds)),
        "held-out prompts": str(len(heldout["real"])),
    }
    if arguments.num_channels:
        about["outliers"] = f"{arguments.num_channels} channels {arguments.factor:g} times as large, lm_head compensated"
    path, _ = write_page(
        found, out=arguments.out, about=about, long_tokens=arguments.long_tokens, num_speculative_tokens=arguments.num_speculative_tokens
    )
    return path


def with_outliers(arguments: argparse.Namespace, target: Any) -> tuple[Any, Any, Any]:
    """The scaled target, opened; where to train on it; its held-out cache."""
    from mtp_train.ablation.grid import Place
    from mtp_train.cache.reader import CacheReader
    from mtp_train.cache.recode import rewrite
    from mtp_train.opening import as_settings, open_target
    from mtp_train.target.outliers import Outliers, spread_channels, write_outlier_target

    channels = spread_channels(target.spec.hidden_size, count=arguments.num_channels)
    outliers = Outliers(channels=channels, factor=arguments.factor)
    path = write_outlier_target(target.path, arguments.out / "target", outliers=outliers)
    node = {"name": f"{target.spec.name}_outliers", "kind": "path", "path": str(path), "trust_remote_code": target.trust_remote_code}
    opened = open_target(node)
    for source, name in ((arguments.run, "cache"), (arguments.heldout, "heldout")):
        reader = CacheReader(source / "cache", verify="first_read")
        identity = replace(reader.identity, **opened.identity())
        rewrite(reader, identity=identity, change=outliers.scale_sample, out=arguments.out / name)
    words = tuple(as_settings(["local", f"path={path}", f"name={opened.spec.name}"]))
    return opened, Place(words=words, cache=arguments.out / "cache"), CacheReader(arguments.out / "heldout", verify="first_read")


if __name__ == "__main__":
    raise SystemExit(main())
