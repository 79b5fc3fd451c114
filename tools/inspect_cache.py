"""Print what a cache holds: python tools/inspect_cache.py CACHE [--verify]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mtp_train.cache.describe import describe, verify


def main() -> int:
    parser = argparse.ArgumentParser(description="Print a cache's identity, sizes and shards.")
    parser.add_argument("cache", type=Path, help="the folder that precompute wrote")
    parser.add_argument("--verify", action="store_true", help="hash every shard again and compare with the manifest")
    arguments = parser.parse_args()
    try:
        print(describe(arguments.cache))
        if arguments.verify:
            print(f"\nverified: {verify(arguments.cache)} shards hold what the manifest says")
    except ValueError as error:
        print(f"inspect_cache: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
