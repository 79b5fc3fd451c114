"""Peak memory and speed of one training step against tokens in one sample and size of the vocabulary.

python tools/bench_long_context.py                                    # V = 128k, T = 32k, hidden 64, on what device there is; minutes
python tools/bench_long_context.py --tokens 2048 8192 32768 --vocabularies 4096 32768   # how it grows
python tools/bench_long_context.py --like llama3_8b --tokens 8192 32768 131072          # real sizes, on a GPU

Each line is a process of its own. ``peak`` is what the step's tensors take at their fullest beyond weights and pack;
``T x V`` is what the logits of the counted rows alone would take in float32 if they were kept, ``T x T`` what one attention
head's scores would take in bfloat16. ``bound`` is what the peak must stay within (``bound_bytes``); it holds no product of tokens and
vocabulary, nor of tokens and tokens. Beyond it the exit status is 1. The table goes to tools/results/bench_long_context.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from typing import Any

from mtp_train.faults import telling
from mtp_train.results import add_results_option, keep, positive

# hidden, intermediate, query heads, key heads of published configs; "small" has Llama's proportions but for one head, the fastest on a CPU.
SIZES = {"small": (64, 224, 1, 1), "llama3_8b": (4096, 14336, 32, 8), "llama3_70b": (8192, 28672, 64, 8)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", choices=sorted(SIZES), default="small")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[32768])
    parser.add_argument("--vocabularies", type=positive, nargs="+", default=[131072])
    parser.add_argument("--counts-every", type=positive, default=4, help="every so many tokens one counts")
    parser.add_argument("--answer-tokens", type=int, help="only so many last tokens count, behind a prompt; default: from the first on")
    parser.add_argument("--chunk-rows", type=positive, default=512)
    parser.add_argument("--draft-steps", type=positive, default=1)
    add_results_option(parser)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a line's settings, for the process that measures it
    return parser.parse_args()


def bound_bytes(settings: dict[str, int], *, device: str) -> int:
    """Tokens x depths x what a decoder layer keeps of each (16 states and 4 rows of its feed-forward part, in 4 bytes), the logits of
    one chunk, head's and teacher's (8 bytes each pair on a CPU, whose softmax takes few rows at a time; 16 on a GPU), and one float32
    copy of the lm_head."""
    kept = 4 * (16 * settings["hidden_size"] + 4 * settings["intermediate_size"])
    per_logit = 16 if device == "cuda" else 8
    return (
        settings["num_tokens"] * settings["draft_steps"] * kept
        + settings["chunk_rows"] * settings["vocab_size"] * per_logit
        + 4 * settings["vocab_size"] * settings["hidden_size"]
    )


def measure(settings: dict[str, int]) -> dict[str, float]:
    import torch

    from mtp_train.trainer.peak import peak_bytes
    from mtp_train.trainer.random_step import RandomStep, StepSizes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = RandomStep(StepSizes(**settings, precision="bf16"), device=device)
    if device.type == "cuda":
        step()  # kernels are loaded and chosen
        step.head.zero_grad()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    peak = peak_bytes(step, device=device)
    return {"peak_bytes": peak, "wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}


def lines(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each line of the table, measured in a process of its own."""
    hidden, intermediate, heads, kv_heads = SIZES[arguments.like]
    found = []
    for num_tokens in arguments.tokens:
        for vocab_size in arguments.vocabularies:
            for recompute in (False, True):
                settings = {
                    "num_tokens": num_tokens,
                    "vocab_size": vocab_size,
                    "hidden_size": hidden,
                    "intermediate_size": intermediate,
                    "num_heads": heads,
                    "num_kv_heads": kv_heads,
                    "counts_every": arguments.counts_every,
                    "counts_from": 0 if arguments.answer_tokens is None else max(0, num_tokens - arguments.answer_tokens),
                    "draft_steps": arguments.draft_steps,
                    "chunk_rows": arguments.chunk_rows,
                    "recompute": recompute,
                }
                words = [sys.executable, __file__, "--one", json.dumps(settings)]
                done = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                found.append(settings | json.loads(done.stdout.splitlines()[-1]))
                print(found[-1], file=sys.stderr, flush=True)
    return found


def row(line: dict[str, Any]) -> str:
    kept = (line["num_tokens"] - line["counts_from"]) // line["counts_every"] * line["vocab_size"] * 4
    return (
        f"| {line['num_tokens']} | {line['vocab_size']} | {'again' if line['recompute'] else 'kept'} | {line['peak_bytes'] / 1e6:.0f} "
        f"| {line['bound_bytes'] / 1e6:.0f} | {line['peak_bytes'] / 1e3 / line['num_tokens']:.2f} | {kept / 1e6:.0f} "
        f"| {2 * line['num_tokens'] ** 2 / 1e6:.0f} | {line['cpu_s']:.0f} | {line['wall_s']:.0f} |"
    )


def main() -> None:
    arguments = parse()
    if arguments.one:
        print(json.dumps(measure(json.loads(arguments.one))))
        return
    import torch

    from mtp_train.runtime import provenance

    about, on_gpu = provenance(), torch.cuda.is_available()
    where = torch.cuda.get_device_name() if on_gpu else f"{platform.processor() or platform.machine()}"
    found = lines(arguments)
    for line in found:
        line["bound_bytes"] = bound_bytes(line, device="cuda" if on_gpu else "cpu")
    words = " ".join(
        f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in vars(arguments).items()
        if name not in ("one", "results") and value is not None
    )
    text = f"""# Peak memory of one training step

`python tools/bench_long_context.py {words}`

Head `mtp`, `forward_kl`, bf16; {where}, torch {about["packages"]["torch"]}. `activations`: kept, or made again in the backward
(`checkpoint_activations`). `bound`: tokens x depths x 4 x (16 hidden + 4 intermediate) + chunk rows x vocabulary x {16 if on_gpu else 8}
+ 4 x vocabulary x hidden.

| tokens | vocabulary | activations | peak MB | bound MB | KB per token | T x V MB | T x T MB | CPU s | wall s |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(row(line) for line in found)}
"""
    keep(text, {**about, "lines": found}, name="bench_long_context", folder=arguments.results)
    if beyond := [line for line in found if line["peak_bytes"] > line["bound_bytes"]]:
        print(f"{len(beyond)} of {len(found)} lines beyond their bound", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    with telling("bench_long_context"):
        main()
