"""Render a report again from its report.json, in place: python tools/render_report.py runs/demo/report"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="a run's report/ folder, which holds report.json")
    arguments = parser.parse_args()

    from mtp_train.acceptance.report import print_summary, read_report, write_report

    try:
        data = read_report(arguments.directory)
        write_report(data, arguments.directory)
    except ValueError as error:
        print(f"render_report: {error}", file=sys.stderr)
        return 2
    print_summary(data, arguments.directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
