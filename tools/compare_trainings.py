"""What a setting of train costs in acceptance: trains with and without it, over several seeds, and compares by the acceptance estimate.

python tools/compare_trainings.py --run RUN 'exact: losses.topk_kl=0 +losses.forward_kl=0.1' 'top-64: losses.topk_kl=0.1' \\
    'drawn: losses.topk_kl=0 +losses.sampled_kl=0.1'

Every argument is a name and, behind a colon, settings of ``python -m mtp_train.train`` (quoted as in a shell); the first one is what the
others are held against. Per seed all variants train on the same samples and are estimated on the same held-out ones of RUN/cache, which is
never the recoded one: at inference a head reads the target's own states. Differences are paired by prompt. What is trained already is
found again and not trained anew, so that the same command continues.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mtp_train.acceptance.interval import Interval, paired_difference, rates_and_length
from mtp_train.cache.reader import CacheReader
from mtp_train.checkpoint import read_head_config
from mtp_train.commandline import quoted
from mtp_train.engine.base import Sampling
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.engine.hf_model import DTYPES, choose_dtype
from mtp_train.faults import telling
from mtp_train.opening import add_target_option, as_settings, head_loader, open_named_target, target_apart
from mtp_train.records import PromptAcceptance
from mtp_train.results import positive
from mtp_train.run import check_name
from mtp_train.runtime import atomic_write_json, atomic_write_text, provenance
from mtp_train.target.weights import read_shared
from mtp_train.trainer.data import split


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", help="name: settings")
    parser.add_argument("--run", type=Path, required=True, help="a run with a finished cache of the target's own greedy answers")
    add_target_option(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fraction", type=float, default=0.2, help="share of the prompts that each seed holds out")
    parser.add_argument("--common", default="", help="settings of train for all variants")
    parser.add_argument("--num-speculative-tokens", type=positive, default=5)
    parser.add_argument("--out", type=Path, help="report.{json,md} go there; none: RUN/compare")
    return parser.parse_args(target_apart(sys.argv[1:]))


def train(words: argparse.Namespace, name: str, settings: str, seed: int) -> Path:
    """The folder of the head, trained unless it is there."""
    out = words.run / "compare" / f"{name}-{seed}"
    command = [
        sys.executable,
        "-m",
        "mtp_train.train",
        f"run={quoted(words.run)}",
        *as_settings(words.target),
        f"name={name}-{seed}",
        f"out={quoted(out)}",
    ]
    command += [
        f"seed={seed}",
        f"head.seed={seed}",
        f"validation.fraction={words.fraction}",
        *shlex.split(words.common),
        *shlex.split(settings),
    ]
    if (done := subprocess.run(command, check=False)).returncode:
        raise ValueError(f"{name}: expected a training that ends with status 0, found {done.returncode}; above it says why")
    return out


def check_precisions(trained: Mapping[str, Sequence[Path]], variants: Mapping[str, str]) -> dict[str, str]:
    """The precision that each variant was trained in, as its heads state it. ValueError where trainings differ whose variants do not
    name it: ``auto`` came to another on the machine that did one of them, and their difference would be that of precisions too."""
    found = {
        folder: str(read_head_config(folder)["made_by"]["settings"]["precision"]) for folders in trained.values() for folder in folders
    }
    naming = {
        name for name, settings in variants.items() if any(word.lstrip("+").startswith("precision=") for word in shlex.split(settings))
    }
    of = {found[folder]: folder.name for name, folders in trained.items() for folder in folders if name not in naming}
    if len(of) > 1:
        said = ", ".join(f"{precision} ({name})" for precision, name in sorted(of.items()))
        raise ValueError(
            f"precision: expected trainings in one, found {said}; delete those in the other and train them anew with "
            "--common precision=..., or name it in a variant's own settings, where it is what is compared"
        )
    return {name: found[folders[0]] for name, folders in trained.items()}


@torch.inference_mode()
def measure(words: argparse.Namespace, folder: Path, seed: int, *, dtype: torch.dtype) -> list[PromptAcceptance]:
    """The estimate on what ``seed`` held out, computed in ``dtype``."""
    target, device = open_named_target(words.target), torch.device("cpu")
    head = head_loader(target)(folder, read_shared(target.path).to(device=device, dtype=dtype))
    held_out = split(CacheReader(words.run / "cache", verify="none"), fraction=words.fraction, seed=seed)[1].with_taps(
        head.target_layer_ids
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = estimate(
            head,
            (held_out[number] for number in range(len(held_out))),
            num_speculative_tokens=words.num_speculative_tokens,
            draft_sampling="greedy",
            sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=1 << 30, seed=0),
            max_batch_tokens=8192,
            device=device,
        )
    return [replace(prompt, prompt_id=f"{seed}/{prompt.prompt_id}") for prompt in found.prompts]


def shown(interval: Interval) -> str:
    return f"{interval.value:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]" if interval.low is not None else f"{interval.value:+.4f}"


def report(
    names: Sequence[str],
    found: dict[str, list[list[PromptAcceptance]]],
    words: argparse.Namespace,
    *,
    precisions: Mapping[str, str],
    dtype: str,
) -> tuple[str, list[dict[str, Any]]]:
    depth, first, rows = words.num_speculative_tokens, names[0], []
    positions = sum(sum(len(prompt.token_ids) for prompt in prompts) for prompts in found[first])
    lines = [f"{len(words.seeds)} seeds, {positions} held-out answer tokens in all; chain of {depth}, greedy."]
    once = len(set(precisions.values())) == 1
    said = precisions[first] if once else ", ".join(f"{precisions[name]} ({name})" for name in names)
    lines += [f"Trained in {said}; estimated in {dtype}.", ""]
    lines += [
        "| variant | position 1 | length | position 1, less the first's [95%] | length, likewise | position 1 per seed |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        pooled = [prompt for prompts in found[name] for prompt in prompts]
        rates, length = rates_and_length(pooled, depth)
        row: dict[str, Any] = {"variant": name, "position_1": rates[0].value, "length": length.value}
        cells = ["", "", ""]
        if name != first:
            at_one, in_length = paired_difference(pooled, [prompt for prompts in found[first] for prompt in prompts], depth)
            seeds = [paired_difference(ours, base, depth)[0][0].value for ours, base in zip(found[name], found[first], strict=True)]
            row |= {"position_1_difference": at_one[0]._asdict(), "length_difference": in_length._asdict(), "per_seed": seeds}
            cells = [shown(at_one[0]), shown(in_length), ", ".join(f"{value:+.4f}" for value in seeds)]
        rows.append(row)
        lines.append(f"| {name} | {rates[0].value:.4f} | {length.value:.4f} | {cells[0]} | {cells[1]} | {cells[2]} |")
    return "\n".join(lines) + "\n", rows


def main() -> None:
    words = parse()
    with telling("compare_trainings"):
        compare(words)


def named(variants: Sequence[str]) -> dict[str, str]:
    """The settings by their variant's name. ValueError for one without a name, or with another's."""
    found: dict[str, str] = {}
    for variant in variants:
        name, colon, settings = variant.partition(":")
        if not colon or name.strip() in found:
            said = f"{name.strip()!r} again" if colon else f"{variant!r}, without a colon"
            raise ValueError(f"variants: expected 'name: settings' with names of their own (settings may be empty), found {said}")
        found[check_name(name.strip(), key="variants")] = settings.strip()
    return found


# What ``train`` below sets for every variant and seed; the last word of a command would win.
_OURS = ("run", "target", "name", "out", "seed", "head.seed", "validation.fraction")


def check(words: argparse.Namespace, variants: Mapping[str, str]) -> None:
    """ValueError for settings of train that would part what is trained from what is measured, for a seed that counts twice, and for
    what could not be measured after all trainings."""
    if not 0 < words.fraction < 1:
        raise ValueError(f"fraction: expected a share of the prompts between 0 and 1 to hold out, found {words.fraction}")
    for said in (words.common, *variants.values()):
        for word in shlex.split(said):
            if word.partition("=")[0].lstrip("+~") in _OURS:
                raise ValueError(f"variants: expected none of {', '.join(_OURS)}, which this tool sets itself, found {word}")
    if len(set(words.seeds)) < len(words.seeds):
        raise ValueError(f"seeds: expected each once, since prompts would count twice, found {words.seeds}")


def compare(words: argparse.Namespace) -> None:
    variants = named(words.variants)
    check(words, variants)
    trained = {name: [train(words, name, settings, seed) for seed in words.seeds] for name, settings in variants.items()}
    precisions, dtype = check_precisions(trained, variants), choose_dtype("auto", torch.device("cpu"))
    found = {
        name: [measure(words, folder, seed, dtype=DTYPES[dtype]) for folder, seed in zip(folders, words.seeds, strict=True)]
        for name, folders in trained.items()
    }
    text, rows = report(list(variants), found, words, precisions=precisions, dtype=dtype)
    out = words.out or words.run / "compare"
    stated = {"variants": variants, "common": words.common, "precision": precisions, "estimated_in": dtype}
    atomic_write_json(out / "report.json", {**provenance(), **stated, "rows": rows})
    atomic_write_text(out / "report.md", text)
    print(text)


if __name__ == "__main__":
    main()
