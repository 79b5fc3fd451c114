"""Print what a cache holds: python tools/inspect_cache.py CACHE [--verify]."""

from __future__ import annotations

import argparse
from pathlib import Path

from mtp_train.cache.describe import describe, verify
from mtp_train.faults import telling


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a cache's identity, sizes and shards.")
    parser.add_argument("cache", type=Path, help="the folder that precompute wrote")
    parser.add_argument("--verify", action="store_true", help="hash every shard again and compare with the manifest")
    arguments = parser.parse_args()
    print(describe(arguments.cache))
    if arguments.verify:
        print(f"\nverified: {verify(arguments.cache)} shards hold what the manifest says")


if __name__ == "__main__":
    with telling("inspect_cache"):
        main()
