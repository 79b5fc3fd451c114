"""Writes what a serving engine loads: checkpoint/<name>/ -> served/<name>-<exporter>/, proven equal to the trained head.

The folder appears whole or not at all; the same command again checks it and does nothing.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_train.opening import open_run_target
from mtp_train.runtime import is_main, log
from mtp_train.stage import build, check_name, stage

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mtp_train.exporter.base import Exporter, ExportResult


def describe(result: ExportResult, *, run: Path) -> str:
    """What was written, what was proven of it, and how to load it from where the reader stands."""
    from mtp_train.exporter.served import SERVE, read_served

    proof = result.proof
    lines = [
        f"{'already there, checksums right' if result.reused else 'written'}: {result.path} ({', '.join(result.files)})",
        f"equal to the trained head on {proof['num_rows']} rows at {proof['num_depths']} depths: logits within "
        f"{proof['largest_difference']['logits']:.1e} of their largest (allowed {proof['tolerance']:.0e}); every tensor counts",
    ]
    if not (result.path / SERVE).is_file():
        return "\n".join([*lines, f"load: {result.serve}"])
    served = read_served(result.path)
    advise = shlex.join(["python", "-m", "mtp_train.advise", f"runs=[{run}]"])
    lines += [
        f"load: {served.command}",
        f"num_speculative_tokens={served.first_speculative_tokens} is where to start; what pays, of all that was measured, says {advise}",
    ]
    return "\n".join(lines)


@stage("export", kinds={})
def main(cfg: DictConfig) -> None:
    check_name(cfg.name)
    if not is_main():
        return
    log(f"{cfg.checkpoint}, to be written to {cfg.out}; opening target {cfg.target.name}")  # before the imports, which take seconds
    from mtp_train.checkpoint import check_head, read_head_config

    checkpoint, out = Path(cfg.checkpoint), Path(cfg.out)
    head = read_head_config(checkpoint)
    target = open_run_target(cfg)
    check_head(head, target.identity(), where=checkpoint)
    exporter: Exporter = build(cfg.exporter, trust_remote_code=target.trust_remote_code)
    log(f"export: {checkpoint} for {exporter.word}")
    print(describe(exporter.export(checkpoint, target.path, out), run=Path(cfg.run)))


if __name__ == "__main__":
    main()
