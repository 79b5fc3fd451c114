"""Certify that decoding with drafts changes nothing: sampled texts follow the target's own law, greedy texts are the same.

python tools/certify.py --out runs/demo/report --checkpoint runs/demo/checkpoint/mtp
python tools/certify.py --out FOLDER --schemes chain dynamic_tree --temperatures 1.0
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="where to write; a run's report/ shows it (certificate.json, certificate.md)"
    )
    parser.add_argument("--schemes", nargs="+", default=None, metavar="WORD", help="of conf/decoding (default: all)")
    parser.add_argument(
        "--temperatures", nargs="*", type=float, default=[0.5, 1.0, 1.5], help="of the sampled cases; none: no sampled cases"
    )
    parser.add_argument("--num-draws", type=int, default=40_000, help="texts drawn in each sampled case")
    parser.add_argument("--vocabulary", type=int, default=4, help="tokens of the small target; cells are its cube")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint",
        nargs="*",
        type=Path,
        default=[],
        help="heads whose greedy texts are compared, and those of schemes without a head: RUN/checkpoint/NAME",
    )
    parser.add_argument("--target-word", default="smollm2_135m", help="the heads' target, of conf/target")
    parser.add_argument("--prompts", default="project_heldout", help="of conf/benchmark, for the greedy texts")
    parser.add_argument("--num-prompts", type=int, default=None, help="default: all of the set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    return parser.parse_args()


def sampled(arguments: argparse.Namespace, target: Any, unfinished: Any) -> list[Any]:
    """Every scheme at every temperature on the small target."""
    from mtp_train.acceptance.certificate import SampledCase
    from mtp_train.engine.certificate import cases, draw_case

    asked = [case for case in cases(arguments.temperatures) if arguments.schemes is None or case.decoding.word in arguments.schemes]
    found = []
    for number, case in enumerate(asked, 1):
        print(f"sampled case {number} of {len(asked)}: {case.key}", file=sys.stderr, flush=True)

        def draw(case: Any = case) -> SampledCase:
            return draw_case(target, case, num_draws=arguments.num_draws, seed=arguments.seed)

        found.append(unfinished.get(case.key, SampledCase, draw))
        distance = found[-1].distances
        print(
            f"  KL {distance.kl_nats:.5f} nats (bias {distance.bias_nats:.5f}), p-value {distance.p_value:.3f}",
            file=sys.stderr,
            flush=True,
        )
    return found


def greedy(arguments: argparse.Namespace, unfinished: Any) -> list[Any]:
    """Every scheme that a head can draft with, and once those that need none, on the prompts, in float32."""
    from omegaconf import OmegaConf

    from mtp_train.acceptance.certificate import GreedyCase
    from mtp_train.checkpoint import read_head_config
    from mtp_train.engine.certificate import compare_texts
    from mtp_train.engine.hf import HfEngine
    from mtp_train.engine.measure import requests_of
    from mtp_train.prompt.load import load_prompts
    from mtp_train.stage import build, conf_dir, head_loader, load_word, open_target

    target = open_target(OmegaConf.create(load_word("target", arguments.target_word)))
    prompts, _ = load_prompts(**{**load_word("benchmark", arguments.prompts), "limit": arguments.num_prompts})
    requests, _ = requests_of(prompts, target.template, max_length_tokens=4096)
    node = {**load_word("engine", "hf"), "dtype": "float32", "batch_size": arguments.batch_size}
    engine: HfEngine = build(node, target_path=target.path, trust_remote_code=target.trust_remote_code, load_head=head_loader(target))
    words = arguments.schemes or sorted(path.stem for path in (conf_dir() / "decoding").glob("*.yaml"))
    found = []
    for decoding in (build(load_word("decoding", word)) for word in words):
        for checkpoint in arguments.checkpoint if decoding.needs_head else [None]:
            method = None if checkpoint is None else read_head_config(checkpoint)["method"]
            if decoding.word in (("eagle_tree", "dynamic_tree") if method == "medusa" else ("medusa_tree",)):
                continue  # parallel heads draft the product of what they say, or one token each, and no other head does so

            def compare(decoding: Any = decoding, checkpoint: Path | None = checkpoint) -> GreedyCase:
                return compare_texts(
                    engine,
                    head="none" if checkpoint is None else checkpoint.name,
                    draft=checkpoint,
                    decoding=decoding,
                    prompt_set=arguments.prompts,
                    requests=requests,
                    max_new_tokens=arguments.max_new_tokens,
                )

            found.append(unfinished.get(f"greedy texts, {decoding.word}, {checkpoint}", GreedyCase, compare))
    return found


def main() -> int:
    arguments = parse()

    from mtp_train.acceptance.certificate import Certificate
    from mtp_train.acceptance.report import write_certificate
    from mtp_train.engine.certificate import SmallTarget, Unfinished
    from mtp_train.runtime import provenance

    made_by = provenance()
    code = {"git_commit": made_by["git_commit"], "packages": made_by["packages"]}
    settings = {name: str(value) for name, value in vars(arguments).items()}
    unfinished = Unfinished(path=arguments.out / "certificate.unfinished.json", identity={"settings": settings, "code": code})
    try:
        with tempfile.TemporaryDirectory() as folder:
            target = SmallTarget(Path(folder), vocabulary=arguments.vocabulary, seed=arguments.seed)
            certificate = Certificate(
                sampled=tuple(sampled(arguments, target, unfinished)),
                greedy=tuple(greedy(arguments, unfinished) if arguments.checkpoint else ()),
                engine=f"hf ({target.engine.version}, float32)",
                target=target.description,
                provenance={"settings": settings, **made_by},
            )
    except ValueError as error:
        print(f"certify: {error}", file=sys.stderr)
        return 2
    path = write_certificate(certificate, arguments.out)
    unfinished.path.unlink(missing_ok=True)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    print(f"certificate: {path}")
    return 0 if certificate.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
