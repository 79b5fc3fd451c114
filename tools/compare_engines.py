"""Measure one head's acceptance three ways (estimate, reference decoder, vLLM) and name the stage at which engines part.

python tools/compare_engines.py --target smollm2_135m --checkpoint runs/demo/checkpoint/mtp --dtype float32
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from mtp_train.faults import telling
from mtp_train.opening import add_target_option, head_loader, open_named_target


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_option(parser)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a head's folder: RUN/checkpoint/NAME")
    parser.add_argument("--prompts", default="project_heldout", help="a prompt set of conf/benchmark")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--num-traced", type=int, default=6, help="prompts whose draft forwards are all compared (held in memory)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft-sampling", choices=("greedy", "probabilistic"), default="greedy")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="let vLLM compile (minutes); off: enforce_eager")
    parser.add_argument("--threads", type=int, default=None, help="vLLM's threads on a CPU")
    parser.add_argument("--served", type=Path, default=None, help="keep the export that vLLM loads there; off: in a temporary folder")
    parser.add_argument("--out", type=Path, default=None, help="also write the report there")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> str:
    """The report."""
    import torch

    from mtp_train.decoding.chain import Chain
    from mtp_train.engine.base import Sampling, SpeculateSettings
    from mtp_train.engine.hf import HfEngine
    from mtp_train.engine.measure import requests_of
    from mtp_train.engine.parity import measure_parity, parity_report
    from mtp_train.engine.vllm import VllmEngine
    from mtp_train.exporter.vllm import VllmExporter
    from mtp_train.prompt.load import load_prompts
    from mtp_train.stage import build, load_word

    target = open_named_target(arguments.target)
    prompts, _ = load_prompts(**{**load_word("benchmark", arguments.prompts), "limit": arguments.num_prompts})
    longest = target.length_limit(4096)
    requests, _ = requests_of(prompts, target.template, max_length_tokens=longest, max_new_tokens=arguments.max_new_tokens)
    changed = {"dtype": arguments.dtype, "batch_size": arguments.batch_size}
    common = {"target_path": target.path, "trust_remote_code": target.trust_remote_code}
    hf: HfEngine = build({**load_word("engine", "hf"), **changed}, **common, load_head=head_loader(target))
    own = {"enforce_eager": not arguments.compile, "cpu_threads": arguments.threads, "max_length_tokens": longest}
    vllm: VllmEngine = build({**load_word("engine", "vllm"), **changed, **own}, **common, load_head=None)
    head = hf.load_head(arguments.checkpoint, hf.target.shared_weights()).to(device=hf.target.device, dtype=getattr(torch, arguments.dtype))
    settings = SpeculateSettings(
        decoding=Chain(num_speculative_tokens=arguments.num_speculative_tokens, refresh=True),
        draft_sampling=arguments.draft_sampling,
        sampling=Sampling(temperature=arguments.temperature, top_p=1.0, max_new_tokens=arguments.max_new_tokens, seed=0),
        batch_size=arguments.batch_size,
        ignore_eos=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        exporter = VllmExporter(dtype="float32", allow_plugin=True, trust_remote_code=target.trust_remote_code, overwrite=False)
        served = exporter.export(arguments.checkpoint, target.path, arguments.served or Path(folder) / "served").path
        parity = measure_parity(
            hf=hf,
            vllm=vllm,
            head=head.eval(),
            checkpoint=arguments.checkpoint,
            served=served,
            requests=requests,
            settings=settings,
            num_traced=arguments.num_traced,
        )
    return parity_report(parity)


def main() -> int:
    arguments = parse()
    try:
        report = run(arguments)
    except ValueError as error:
        print(f"compare_engines: {error}", file=sys.stderr)
        return 2
    print(report)
    if arguments.out is not None:
        arguments.out.write_text(report, encoding="utf-8")
    return 0


if __name__ == "__main__":
    with telling("compare_engines"):
        sys.exit(main())
