"""Print one sample of a responses folder or a cache as aligned columns.

python tools/inspect_batch.py runs/demo/responses --tokenizer FOLDER --index 3
python tools/inspect_batch.py runs/demo/cache --tokenizer FOLDER --id math/12 --begin 40 --end 90
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a run's responses/ or cache/")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the target's folder (tokenizer.json)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--index", type=int, help="the sample's number, from 0 (default: the first)")
    which.add_argument("--id", dest="sample_id", help="the sample's id")
    parser.add_argument("--begin", type=int, default=0, help="first position shown")
    parser.add_argument("--end", type=int, help="position to stop before")
    arguments = parser.parse_args()

    from mtp_train.prompt.inspect import format_shown, read_shown
    from mtp_train.prompt.tokenizer import load_tokenizer

    try:
        shown = read_shown(arguments.directory, index=arguments.index, sample_id=arguments.sample_id)
        print(format_shown(shown, load_tokenizer(arguments.tokenizer), begin=arguments.begin, end=arguments.end))
    except ValueError as error:
        print(f"inspect_batch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
