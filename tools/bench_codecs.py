"""What each cache codec costs: bytes per token, write and read rate, and how far the target's own logits move.

python tools/bench_codecs.py                                             # rates only, on random states of SmolLM2-135M's sizes
python tools/bench_codecs.py --cache RUN/cache --out RUN/codecs          # a cache of real states; keeps one per codec in --out

With --cache (bf16 or float32) the caches in --out serve to measure what a codec costs in acceptance, three seeds, paired:

python tools/compare_trainings.py --run RUN 'bf16: cache=RUN/codecs/bf16' 'int8: cache=RUN/codecs/int8' 'fp8: cache=RUN/codecs/fp8'

Rates are per second of this process' CPU time, one thread, files in the page cache: writing is encoding, hashing and the file itself;
reading is the loader's packs of 4096 tokens. ``moved`` and ``KL`` compare the teacher's distribution of the states as read with that of
the states as they were, over answer positions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mtp_train.batch.packing import pack
from mtp_train.batch.plan import DataPlan
from mtp_train.cache.codec import CODECS
from mtp_train.cache.describe import expected_bytes_per_token
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.recode import recode
from mtp_train.engine.conformance import Gap
from mtp_train.faults import telling
from mtp_train.opening import add_target_option, open_named_target
from mtp_train.results import add_results_option, command_of, keep, positive
from mtp_train.runtime import provenance
from mtp_train.trainer.random_cache import RandomTarget, RandomText, write_random_cache

_ROWS = 256
_LINES = "\n"


def random_cache(folder: Path, *, num_samples: int) -> tuple[CacheReader, torch.Tensor]:
    target = RandomTarget(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, num_layers=30)
    text = RandomText(num_samples=num_samples, median=427, spread=0.77, shortest=51, longest=1828, answer_share=0.386)
    write_random_cache(folder, target=target, text=text, num_taps=0, top_k=64, codec="bf16", shard_tokens=1 << 14, seed=0)
    return CacheReader(folder, verify="none"), target.shared(seed=0).lm_head_VD


def real_cache(folder: Path, target: Sequence[str]) -> tuple[CacheReader, torch.Tensor]:
    from mtp_train.target.weights import read_shared

    return CacheReader(folder, verify="none"), read_shared(open_named_target(target).path).lm_head_VD


def read_all(reader: CacheReader) -> float:
    """CPU seconds for one epoch of packs."""
    plan = DataPlan(
        lengths=reader.lengths, sample_ids=reader.sample_ids, seed=0, tokens_per_pack=max(4096, *reader.lengths), packs_per_step=1
    )
    begun = time.process_time()
    for numbers in plan.epoch_packs(0):
        pack([reader[number] for number in numbers])
    return time.process_time() - begun


def moved(exact: CacheReader, coded: CacheReader, lm_head_VD: torch.Tensor, *, num_rows: int) -> tuple[Gap, Gap]:
    """How far states, and logits at answer positions, are from those of ``exact``."""
    states, logits, wide = Gap(stage="hidden"), Gap(stage="logits"), lm_head_VD.float()
    for number in range(len(exact)):
        ours, theirs = exact[number], coded[number]
        where = ["" for _ in range(ours.num_tokens)]
        states.add(ours.hidden_TD, theirs.hidden_TD, where=where)
        rows = ours.loss_mask_T[1:].nonzero(as_tuple=True)[0][: max(0, num_rows - logits.num_rows)]
        for part in rows.split(_ROWS):
            logits.add_logits(ours.hidden_TD[part].float() @ wide.T, theirs.hidden_TD[part].float() @ wide.T, where=where[: len(part)])
    return states, logits


def measure(exact: CacheReader, lm_head_VD: torch.Tensor, out: Path, words: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per codec; the repeats of the readings are interleaved."""
    rows: dict[str, dict[str, Any]] = {}
    for codec in words.codecs:
        begun = time.process_time()
        manifest = recode(exact, codec=codec, out=out / codec)
        rows[codec] = {"codec": codec, "write_s": time.process_time() - begun, "read_s": []}
        share = manifest.num_teacher_rows / manifest.num_tokens
        identity = manifest.identity
        allowed = identity.hidden_size * 17 / 16 + 8 + share * (4 * (identity.top_k or 0) + 4)
        rows[codec] |= {"tokens": manifest.num_tokens, "answer_share": share, "bound_bytes": allowed}
        rows[codec] |= {"bytes_per_token": manifest.num_bytes / manifest.num_tokens, "formula": expected_bytes_per_token(manifest)}
    readers = {codec: CacheReader(out / codec, verify="none") for codec in words.codecs}
    for _ in range(words.repeats):
        for codec, reader in readers.items():
            rows[codec]["read_s"].append(read_all(reader))
    for codec, reader in readers.items():
        states, logits = moved(exact, reader, lm_head_VD, num_rows=words.rows)
        rows[codec] |= {"rms_error": states.rms_error, "moved": 1 - logits.argmax_agreement, "kl_nats": logits.mean_kl_nats}
        rows[codec] |= {"rows": logits.num_rows}
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| codec | bytes per token | allowed | written tokens/s | read tokens/s | rms error | moved argmax | KL, nats |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        bound = "" if row["codec"] in ("bf16", "float32") else f"{row['bound_bytes']:.0f}"
        read, written = row["tokens"] / statistics.median(row["read_s"]), row["tokens"] / row["write_s"]
        lines.append(
            f"| {row['codec']} | {row['bytes_per_token']:.0f} | {bound} | {written:,.0f} | {read:,.0f} "
            f"| {row['rms_error']:.5f} | {row['moved']:.2%} | {row['kl_nats']:.5f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="a finished cache in bf16 or float32; none: random states")
    add_target_option(parser)
    parser.add_argument("--out", type=Path, help="where the caches are kept, one folder per codec; none: not kept")
    parser.add_argument("--codecs", nargs="+", default=["bf16", "int8", "fp8"], choices=sorted(CODECS))
    parser.add_argument("--samples", type=positive, default=64, help="random samples, without --cache")
    parser.add_argument("--rows", type=positive, default=2048, help="answer positions whose logits are compared")
    parser.add_argument("--repeats", type=positive, default=5)
    add_results_option(parser)
    words = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        exact, lm_head_VD = (
            real_cache(words.cache, words.target) if words.cache else random_cache(where / "random", num_samples=words.samples)
        )
        rows = measure(exact, lm_head_VD, words.out or where / "coded", words)
        about = provenance()
        identity, share = exact.identity, rows[0]["answer_share"]
        held = f"{exact.manifest.num_tokens:,} tokens of {identity.target_name}, hidden {identity.hidden_size}, {identity.codec}"
        text = f"""# Cache codecs

`{command_of(parser, words)}`

{held}; {share:.1%} of them answers with {identity.top_k} candidates each; {rows[0]["rows"]} answer positions compared.
torch {about["packages"]["torch"]}, {about["machine"]}; per second of one thread's CPU time, medians of {words.repeats} readings.

{_LINES.join(table(rows))}

`allowed`: H + H/16 + 8 + share of answers x (4C + 4) bytes. bf16 states that are read as one sample per pack are not copied at all.
"""
    name = "bench_codecs" if words.cache else "bench_codecs_random"
    keep(text, {**about, "rows": rows}, name=name, folder=words.results)


if __name__ == "__main__":
    with telling("bench_codecs"):
        main()
