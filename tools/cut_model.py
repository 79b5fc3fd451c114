"""Make a small draft model out of some of the target's own layers, to be distilled where no smaller sibling exists.

python tools/cut_model.py --out runs/mine/small --layers 0 1 2 3 28 29
python -m mtp_train.train run=runs/mine head=draft_model head.config=null head.checkpoint=runs/mine/small \\
    noise_scale=0 losses.hidden_l1=0 losses.topk_kl=0 +losses.forward_kl=1.0
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mtp_train.opening import add_target_option


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_option(parser)
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="which to keep, 0-based, rising")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    words = parser.parse_args()

    from mtp_train.faults import telling
    from mtp_train.stage import load_word
    from mtp_train.target.cut import write_cut_model
    from mtp_train.target.resolve import resolve_target

    with telling("cut_model"):
        source = resolve_target(load_word("target", *words.target))
        print(write_cut_model(source, words.out, layers=words.layers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
