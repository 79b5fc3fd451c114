"""What the loader delivers against what the training eats, both measured in one run on one cache.

python tools/bench_loader.py                                   # random hidden states of SmolLM2-135M's sizes, on what device there is
python tools/bench_loader.py --like llama3_8b --num-tokens 400000
python tools/bench_loader.py --out tools/results/loader.md     # also appends the table to a file

The cache is made of random numbers, written as precompute writes it, into a temporary folder (--folder for another disk). The loader is
the training's own, alone: shards mapped, samples packed, rows aligned. ``first``: each shard is hashed before its first sample, as in the
first epoch; ``later``: it was. ``over a URL``: fetched through fsspec from the same disk, hashed on arrival, each shard as it is needed.
The training is the forward and backward of head ``mtp`` with EAGLE-1's losses (hidden_l1, topk_kl) over those packs, without optimizer and
validation, so that the real one eats less. Passes are interleaved; each figure is the median of the repeats, with the smallest and the
largest. Files are in the page cache: what a disk delivers is another measurement.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp_train.faults import telling

# hidden, intermediate, query heads, key heads, vocabulary of published configs.
SIZES = {"smollm2_135m": (576, 1536, 9, 3, 49152), "llama3_8b": (4096, 14336, 32, 8, 128256)}
TOP_K, MAX_PREFETCH = 64, 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", choices=sorted(SIZES), default="smollm2_135m")
    parser.add_argument("--num-tokens", type=int, default=120_000, help="of the cache; half of them count")
    parser.add_argument("--tokens-per-pack", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4, help="steps of training per repeat, one pack each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the cache is made; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="a file that the table is appended to")
    return parser.parse_args()


def write_cache(path: Path, arguments: argparse.Namespace) -> None:
    """Samples of 50 to about 1800 tokens, 430 in the median, as the demo's answers have."""
    import torch

    from mtp_train.batch.shift import teacher_rows
    from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
    from mtp_train.cache.plan import PlannedSample, content_hash
    from mtp_train.cache.writer import CacheWriter
    from mtp_train.records import Sample, Teacher

    hidden_size, _, _, _, vocab_size = SIZES[arguments.like]
    draw = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < arguments.num_tokens:
        lengths.append(int((430 * torch.randn(1, generator=draw).mul(0.7).exp()).clamp(50, 1800)))

    def sample(number: int) -> Sample:
        length, own = lengths[number], torch.Generator().manual_seed(number)
        mask_T = torch.arange(length) >= length // 2
        row_M = teacher_rows(mask_T)
        log_probs_MC = torch.randn(len(row_M), TOP_K, generator=own).sort(descending=True).values.log_softmax(-1) - 0.05
        first_M = torch.randint(0, vocab_size - TOP_K, (len(row_M), 1), generator=own)
        return Sample(
            sample_id=f"s{number}",
            token_ids_T=torch.randint(0, vocab_size, (length,), generator=own),
            loss_mask_T=mask_T,
            hidden_TD=torch.randn(length, hidden_size, generator=own).bfloat16(),
            teacher=Teacher(
                row_M=row_M, ids_MC=first_M + torch.arange(TOP_K), log_probs_MC=log_probs_MC, log_sum_exp_M=torch.zeros(len(row_M))
            ),
        )

    identity = CacheIdentity(
        format_version=FORMAT_VERSION,
        target_name=f"random, like {arguments.like}",
        **dict.fromkeys(("target_fingerprint", "tokenizer_hash", "template_hash", "engine", "engine_version"), "none"),
        hidden_state="post_norm",
        target_layer_ids=(),
        dtype="bfloat16",
        codec="bf16",
        top_k=TOP_K,
        quantization=None,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        git_commit=None,
    )
    planned = []
    for number in range(len(lengths)):
        made = sample(number)
        planned.append(PlannedSample(made.sample_id, made.num_tokens, content_hash(made.token_ids_T.tolist(), made.loss_mask_T.tolist())))
    writer = CacheWriter(path=path, identity=identity, samples=planned, shard_tokens=16384)
    for index, sample_ids in writer.missing_shards():
        writer.write_shard(index, (sample(int(sample_id[1:])) for sample_id in sample_ids))
    writer.finish()


class Bench:
    """The passes over one cache; each gives (tokens, samples, seconds)."""

    def __init__(self, cache: Path, arguments: argparse.Namespace) -> None:
        import torch

        from mtp_train.loss.hidden_l1 import HiddenL1
        from mtp_train.loss.topk_kl import TopkKl
        from mtp_train.trainer.module import TrainingModule
        from mtp_train.trainer.objective import Objective, Term
        from mtp_train.trainer.random_step import StepSizes, random_head

        self.path, self.arguments = cache, arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        hidden, intermediate, heads, kv_heads, vocab_size = SIZES[arguments.like]
        sizes = StepSizes(
            num_tokens=arguments.tokens_per_pack,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_heads=heads,
            num_kv_heads=kv_heads,
            counts_every=2,
            counts_from=0,
            draft_steps=1,
            chunk_rows=512,
            precision="bf16",
            recompute=False,
        )
        terms = {"hidden_l1": Term(1.0, HiddenL1()), "topk_kl": Term(0.1, TopkKl())}
        objective = Objective(terms=terms, draft_steps=1, decay=0.8, chunk_rows=512)
        self.module = TrainingModule(head=random_head(sizes, device=self.device), objective=objective, precision="bf16").to(self.device)

    def passes(
        self, cache: Any, *, stop_step: int | None, use: Callable[[Any], None] | None, times: int = 1
    ) -> list[tuple[int, int, float]]:
        """Go through the cache ``times`` times with the training's loader; ``use`` is given each aligned pack."""
        from mtp_train.batch.loader import StepLoader
        from mtp_train.batch.plan import DataPlan
        from mtp_train.trainer.data import split
        from mtp_train.trainer.rows import align
        from mtp_train.trainer.supply import Supply, make_order

        train, _ = split(cache, fraction=0.0, seed=0)
        window = None if cache.is_local else 2
        plan = DataPlan(
            lengths=train.lengths,
            sample_ids=train.sample_ids,
            seed=0,
            tokens_per_pack=self.arguments.tokens_per_pack,
            packs_per_step=1,
            order=make_order(train, window=window, shares=None, seed=0),
        )
        last = plan.steps_of(1) if stop_step is None else stop_step
        supply = None if cache.is_local else Supply(train=train, plan=plan, first_step=0, num_steps=last, max_prefetch=MAX_PREFETCH)
        found = []
        for _ in range(times):
            tokens = samples = 0
            began_s = time.perf_counter()
            with StepLoader(
                reader=train,
                plan=plan,
                rank=0,
                world_size=1,
                start_step=0,
                stop_step=last,
                max_prefetch=MAX_PREFETCH,
                before_read=None if supply is None else supply.before_read,
            ) as loader:
                for step in loader:
                    for batch in step.batches:
                        pack = align(batch, draft_steps=1, need_top=True)
                        tokens, samples = tokens + batch.num_tokens, samples + len(batch.sample_ids)
                        if use is not None:
                            use(pack)
            found.append((tokens, samples, time.perf_counter() - began_s))
        return found

    def train(self, pack: Any) -> None:
        import torch

        moved = pack.to(self.device)
        result = self.module(moved, (1.0 / pack.counts_K.float()).to(self.device), measure=True)
        result.loss.backward()
        self.module.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def once(self, folder: Path) -> dict[str, tuple[int, int, float]]:
        from mtp_train.cache.reader import CacheReader
        from mtp_train.cache.remote import RemoteCache

        first, later = self.passes(CacheReader(self.path, verify="first_read"), stop_step=None, use=None, times=2)
        size = sum(path.stat().st_size for path in self.path.glob("*.safetensors"))
        remote = RemoteCache(f"local://{self.path}", folder=folder, max_bytes=size)
        (fetched,) = self.passes(remote, stop_step=None, use=None)
        remote.done()
        reader = CacheReader(self.path, verify="none")
        (trained,) = self.passes(reader, stop_step=self.arguments.steps, use=self.train)
        return {"loader, first": first, "loader, later": later, "loader, over a URL": fetched, "training": trained}


def main() -> None:
    arguments = parse()
    import torch

    from mtp_train.runtime import provenance

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        cache = Path(folder) / "cache"
        write_cache(cache, arguments)
        bench = Bench(cache, arguments)
        bench.passes(_reader(cache), stop_step=1, use=bench.train)  # kernels are loaded and chosen
        repeats = [bench.once(Path(folder) / f"fetched-{number}") for number in range(arguments.repeats)]
        num_bytes = sum(path.stat().st_size for path in cache.glob("*.safetensors"))
    made = provenance()
    where = torch.cuda.get_device_name() if bench.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    tokens = repeats[0]["loader, first"][0]
    lines = [
        f"\n## {arguments.like}: {tokens} tokens, {num_bytes / tokens:.0f} bytes each, packs of {arguments.tokens_per_pack}\n",
        f"{made['machine']}, {where}, torch {made['packages']['torch']}, commit {made['git_commit']}; median of {arguments.repeats} "
        "(smallest, largest)\n",
        "| pass | tokens/s | samples/s | MB/s | times what training eats |\n|---|---|---|---|---|",
    ]
    eats = statistics.median(counts / seconds for counts, _, seconds in (repeat["training"] for repeat in repeats))
    for name in repeats[0]:
        rates = [repeat[name][0] / repeat[name][2] for repeat in repeats]
        samples = statistics.median(repeat[name][1] / repeat[name][2] for repeat in repeats)
        middle = statistics.median(rates)
        lines.append(
            f"| {name} | {middle:,.0f} ({min(rates):,.0f}, {max(rates):,.0f}) | {samples:,.0f} | {middle * num_bytes / tokens / 1e6:,.0f} "
            f"| {middle / eats:.1f} |"
        )
    table = "\n".join(lines)
    print(table)
    if arguments.out is not None:
        with open(arguments.out, "a", encoding="utf-8") as file:
            file.write(table + "\n")


def _reader(cache: Path) -> Any:
    from mtp_train.cache.reader import CacheReader

    return CacheReader(cache, verify="none")


if __name__ == "__main__":
    with telling("bench_loader"):
        main()
