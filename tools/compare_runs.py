"""Compare the heads of several runs on the same prompts, as one report: python tools/compare_runs.py runs/a runs/b --out runs/comparison

Each RUN is a run's folder, or a report's folder in it. What was measured on other prompts of a set than all runs share, or with another
max_new_tokens, is left out and named in the notes; runs on other targets, or that share nothing, are refused. The page begins with a table
of all heads and schemes, the fastest first; differences are paired over the same prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="a run's folder (its report/ is read), or a report's folder")
    parser.add_argument("--out", type=Path, required=True, help="where to write report.json, report.md and index.html")
    arguments = parser.parse_args()

    from mtp_train.acceptance.report import JSON, print_summary, read_report, write_report
    from mtp_train.acceptance.report_merge import merge_reports
    from mtp_train.faults import telling

    folders = [run if (run / JSON).is_file() else run / "report" for run in arguments.runs]
    names = [(folder.resolve().parent if folder.resolve().name == "report" else folder.resolve()).name for folder in folders]
    with telling("compare_runs"):
        if len(set(names)) < len(names):
            raise ValueError(f"runs: expected folders with names of their own, by which heads are told apart, found {names}")
        if arguments.out.resolve() in [folder.resolve() for folder in folders]:
            raise ValueError(f"--out: expected a folder of its own, found that of a run's report, {arguments.out}")
        data = merge_reports({name: read_report(folder) for name, folder in zip(names, folders, strict=True)})
        write_report(data, arguments.out)
    print_summary(data, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
