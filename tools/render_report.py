"""Render a report again from its report.json, in place: python tools/render_report.py runs/demo/report"""

from __future__ import annotations

import argparse
from pathlib import Path

from mtp_train.faults import telling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="a run's report/ folder, which holds report.json")
    arguments = parser.parse_args()

    from mtp_train.acceptance.report import print_summary, read_report, write_report

    data = read_report(arguments.directory)
    write_report(data, arguments.directory)
    print_summary(data, arguments.directory)


if __name__ == "__main__":
    with telling("render_report"):
        main()
