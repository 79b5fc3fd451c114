"""Peak memory and speed of one training step against tokens in one sample and size of the vocabulary.

python tools/bench_long_context.py                                    # small sizes, on what device there is; minutes on two cores
python tools/bench_long_context.py --like llama3_8b --tokens 8192 32768 131072          # real sizes, on a GPU

Each line is a process of its own. ``peak`` is what the step's tensors take at their fullest beyond weights and pack;
``T x V`` is what the logits of the counted rows alone would take in float32 if they were kept, ``T x T`` what one attention
head's scores would take in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time

# hidden, intermediate, query heads, key heads of published configs; "small" has Llama's proportions but for one head, the fastest on a CPU.
SIZES = {"small": (64, 224, 1, 1), "llama3_8b": (4096, 14336, 32, 8), "llama3_70b": (8192, 28672, 64, 8)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", choices=sorted(SIZES), default="small")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--counts-every", type=int, default=4, help="every so many tokens one counts")
    parser.add_argument("--answer-tokens", type=int, help="only so many last tokens count, behind a prompt; default: from the first on")
    parser.add_argument("--chunk-rows", type=int, default=512)
    parser.add_argument("--draft-steps", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a line's settings, for the process that measures it
    return parser.parse_args()


def measure(settings: dict[str, int]) -> dict[str, float]:
    import torch

    from mtp_train.trainer.peak import peak_bytes
    from mtp_train.trainer.random_step import RandomStep, StepSizes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = RandomStep(StepSizes(**settings, precision="bf16"), device=device)
    if device.type == "cuda":
        step()  # kernels are loaded and chosen
        step.head.zero_grad()
    began_s = time.perf_counter()
    peak = peak_bytes(step, device=device)
    return {"peak_bytes": peak, "wall_s": time.perf_counter() - began_s}


def main() -> None:
    arguments = parse()
    if arguments.one:
        print(json.dumps(measure(json.loads(arguments.one))))
        return
    import torch

    from mtp_train.runtime import provenance

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.processor() or platform.machine()}"
    versions = provenance()["packages"]
    print(f"{arguments.like}, bf16, every {arguments.counts_every}. token of {arguments.answer_tokens or 'all'} counts, ", end="")
    print(f"{arguments.chunk_rows} rows a chunk, {arguments.draft_steps} draft steps; {where}, ", end="")
    print(f"torch {versions['torch']}, transformers {versions['transformers']}\n")
    print(
        "| tokens | vocabulary | activations | peak MB | KB per token | T x V MB | T x T MB | wall s |\n|---|---|---|---|---|---|---|---|"
    )
    hidden, intermediate, heads, kv_heads = SIZES[arguments.like]
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
                found = json.loads(done.stdout.splitlines()[-1])
                kept = (num_tokens - settings["counts_from"]) // arguments.counts_every * vocab_size * 4
                print(
                    f"| {num_tokens} | {vocab_size} | {'again' if recompute else 'kept'} | {found['peak_bytes'] / 1e6:.0f} "
                    f"| {found['peak_bytes'] / 1e3 / num_tokens:.2f} | {kept / 1e6:.0f} | {2 * num_tokens**2 / 1e6:.0f} "
                    f"| {found['wall_s']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
