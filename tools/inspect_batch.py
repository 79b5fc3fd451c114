"""Print one sample of a responses folder or a cache as aligned columns.

python tools/inspect_batch.py runs/demo/responses --tokenizer FOLDER --index 3
python tools/inspect_batch.py runs/demo/cache --tokenizer FOLDER --id math/12 --begin 40 --end 90
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mtp_train.faults import telling


def main() -> None:
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

    shown = read_shown(arguments.directory, index=arguments.index, sample_id=arguments.sample_id)
    print(format_shown(shown, load_tokenizer(arguments.tokenizer), begin=arguments.begin, end=arguments.end))


if __name__ == "__main__":
    with telling("inspect_batch"):
        main()
