"""Certify that decoding with drafts changes nothing: sampled texts follow the target's own law, greedy texts are the same.

python tools/certify.py --out runs/demo/report --checkpoint runs/demo/checkpoint/mtp
python tools/certify.py --out runs/mine/report --checkpoint runs/mine/checkpoint/mtp --target local path=/models/mine name=mine
python tools/certify.py --out FOLDER --schemes chain dynamic_tree --temperatures 1.0
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from mtp_train.opening import add_target_option


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="where to write; a run's report/ shows it (certificate.json, certificate.md)"
    )
    parser.add_argument("--schemes", nargs="+", default=None, metavar="WORD", help="of conf/decoding (default: all)")
    parser.add_argument(
        "--temperatures",
        nargs="*",
        type=float,
        default=[0.5, 1.0, 1.5],
        help="of the sampled cases; none: no sampled cases (default: %(default)s)",
    )
    parser.add_argument(
        "--num-draws",
        type=int,
        default=40_000,
        help="texts drawn in each sampled case, at least 200 for each cell but one (default: %(default)s)",
    )
    parser.add_argument(
        "--vocabulary", type=int, default=4, help="tokens of the small target, at least 2; cells are its cube (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--checkpoint",
        nargs="*",
        type=Path,
        default=[],
        help="heads whose greedy texts are compared, and those of schemes without a head: RUN/checkpoint/NAME",
    )
    add_target_option(parser)
    parser.add_argument("--prompts", default="project_heldout", help="of conf/benchmark, for the greedy texts (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=None, help="default: all of the set")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each greedy text (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts decoded together (default: %(default)s)")
    return parser.parse_args()


def check_schemes(arguments: argparse.Namespace) -> None:
    """ValueError where a scheme is none, or nothing would be certified."""
    from mtp_train.stage import known_words

    if unknown := sorted(set(arguments.schemes or ()) - set(known_words("decoding"))):
        raise ValueError(f"schemes: expected some of {known_words('decoding')}, found {unknown}")
    if not arguments.temperatures and not arguments.checkpoint:
        raise ValueError("temperatures: expected some, or --checkpoint with heads whose greedy texts are compared, found neither")


def sampled(arguments: argparse.Namespace, target: Any, unfinished: Any) -> list[Any]:
    """Every scheme at every temperature on the small target. ValueError, before anything is drawn, where too little would be."""
    from mtp_train.acceptance.certificate import SampledCase, check_num_draws
    from mtp_train.engine.certificate import DEPTH, cases, draw_case

    check_num_draws(arguments.num_draws, num_cells=target.vocabulary ** (DEPTH + 1))
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


class Compared(NamedTuple):
    """The heads' target, opened, its prompts, and what is compared on them: every scheme with every head that can draft with it, and
    once those that need none. ``weights``: the sha256 of each head's weights, by checkpoint."""

    target: Any
    requests: list[Any]
    ways: list[tuple[Any, Path | None]]
    weights: dict[Path, str]

    def identity(self) -> dict[str, Any]:
        """Whose texts they are: a head that was trained again under its name is another one."""
        return {"target": self.target.identity(), "weights": {str(checkpoint): sha256 for checkpoint, sha256 in self.weights.items()}}


def comparisons(arguments: argparse.Namespace) -> Compared:
    """What is compared. ValueError, before anything is drawn, for a head that is not there, not whole, of another target, or for none of
    the schemes."""
    from mtp_train.checkpoint import check_head, read_head_config, read_head_tensors
    from mtp_train.engine.measure import requests_of
    from mtp_train.opening import open_named_target
    from mtp_train.prompt.load import load_prompts
    from mtp_train.run import check_target
    from mtp_train.stage import build, known_words, load_word

    heads = {checkpoint: read_head_config(checkpoint) for checkpoint in arguments.checkpoint}  # before the target, which takes seconds
    target = open_named_target(arguments.target)
    check_target(arguments.out.parent, arguments.out, target.identity(), tool=True)
    for checkpoint, head in heads.items():
        check_head(head, target.identity(), where=checkpoint)
        read_head_tensors(checkpoint)
    words = arguments.schemes or known_words("decoding")
    decodings = [build(load_word("decoding", word)) for word in words]
    found: list[tuple[Any, Path | None]] = []
    for decoding in decodings:
        for checkpoint in arguments.checkpoint if decoding.needs_head else [None]:
            method = None if checkpoint is None else heads[checkpoint]["method"]
            if decoding.word in (("eagle_tree", "dynamic_tree") if method == "medusa" else ("medusa_tree",)):
                continue  # parallel heads draft the product of what they say, or one token each, and no other head does so
            found.append((decoding, checkpoint))
    if any(decoding.needs_head for decoding in decodings) and (idle := heads.keys() - {checkpoint for _, checkpoint in found}):
        raise ValueError(
            f"schemes: expected one that each head can draft with, found {words} for {', '.join(sorted(map(str, idle)))}; medusa_tree is "
            "Medusa's, the others' trees are not"
        )
    prompts, _ = load_prompts(**{**load_word("benchmark", arguments.prompts), "limit": arguments.num_prompts})
    limit = target.length_limit(4096)
    requests, _ = requests_of(prompts, target.template, max_length_tokens=limit, max_new_tokens=arguments.max_new_tokens)
    return Compared(target, requests, found, {checkpoint: head["weights_sha256"] for checkpoint, head in heads.items()})


def greedy(arguments: argparse.Namespace, compared: Compared, unfinished: Any) -> list[Any]:
    """The texts of each scheme and head on the prompts, in float32."""
    from mtp_train.acceptance.certificate import GreedyCase
    from mtp_train.engine.certificate import GreedyTexts
    from mtp_train.engine.hf import HfEngine
    from mtp_train.opening import head_loader
    from mtp_train.stage import build, load_word

    target = compared.target
    node = {**load_word("engine", "hf"), "dtype": "float32", "batch_size": arguments.batch_size}
    engine: HfEngine = build(node, target_path=target.path, trust_remote_code=target.trust_remote_code, load_head=head_loader(target))
    texts = GreedyTexts(engine=engine, prompt_set=arguments.prompts, requests=compared.requests, max_new_tokens=arguments.max_new_tokens)
    found = []
    for decoding, checkpoint in compared.ways:

        def compare(decoding: Any = decoding, checkpoint: Path | None = checkpoint) -> GreedyCase:
            if checkpoint is None:
                return texts.compare(decoding, head="none", draft=None, weights_sha256=None)
            return texts.compare(decoding, head=checkpoint.name, draft=checkpoint, weights_sha256=compared.weights[checkpoint])

        found.append(unfinished.get(f"greedy texts, {decoding.word}, {checkpoint}", GreedyCase, compare))
    return found


def main() -> int:
    arguments = parse()

    from mtp_train.acceptance.certificate import Certificate
    from mtp_train.acceptance.report import write_certificate
    from mtp_train.engine.certificate import SmallTarget, Unfinished
    from mtp_train.faults import telling
    from mtp_train.runtime import provenance

    made_by = provenance()
    code = {"git_commit": made_by["git_commit"], "packages": made_by["packages"]}
    settings = {name: str(value) for name, value in vars(arguments).items()}
    with telling("certify"):
        check_schemes(arguments)
        opened = comparisons(arguments) if arguments.checkpoint else None
        identity = {"settings": settings, "code": code, "heads": None if opened is None else opened.identity()}
        unfinished = Unfinished(path=arguments.out / "certificate.unfinished.json", identity=identity)
        with tempfile.TemporaryDirectory() as folder:
            target = SmallTarget(Path(folder), vocabulary=arguments.vocabulary, seed=arguments.seed)
            certificate = Certificate(
                sampled=tuple(sampled(arguments, target, unfinished)),
                greedy=tuple(greedy(arguments, opened, unfinished) if opened is not None else ()),
                engine=f"hf ({target.engine.version}, float32)",
                target=target.description,
                provenance={"settings": settings, **made_by},
                target_fingerprint=None if opened is None else opened.target.spec.fingerprint,
            )
        path = write_certificate(certificate, arguments.out)
        unfinished.path.unlink(missing_ok=True)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    print(f"certificate: {path}")
    return 0 if certificate.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
