"""Training speed against EAGLE's recipe written plainly: the same samples a step, real tokens per second, loss beside each row.

python tools/bench_train.py                 # one core, about five CPU-minutes; --results FOLDER keeps the table
python tools/bench_train.py --cores 2       # also two threads, and two processes of one thread each, by the clock: wants a quiet machine

The data are random text of SmolLM2-135M's sizes (``trainer/random_cache.py``), the head is ``head=eagle`` (and ``head=eagle3``), both
sides begin from the same weights and step with AdamW. Every recipe runs in a process of its own, forked from one that has all data, so
that its peak memory is its own; the processes take their steps in turn, one at a time. Speed is real (unpadded) tokens per second of
the process' CPU time, since other work may run beside; ratios are medians over the repeats of ratios within one repeat. The bound is
what the matrix products alone would take at the rates that are measured in the same run (attention's own products left out). Two
processes share the samples of two steps, and are held against one core's two steps over the same; what the second core gives the
matrix products alone, at the same moments, is measured beside it.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtp_train.batch.packing import pack
from mtp_train.cache.reader import CacheReader
from mtp_train.faults import telling
from mtp_train.head.base import Head
from mtp_train.head.eagle import Eagle
from mtp_train.head.eagle3 import Eagle3
from mtp_train.head.pair import NORMS
from mtp_train.loss.base import Loss
from mtp_train.loss.compiled import compiled_passes
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.loss.hidden_l1 import HiddenL1
from mtp_train.loss.sampled_kl import SampledKl
from mtp_train.loss.topk_kl import TopkKl
from mtp_train.records import Sample
from mtp_train.results import add_results_option, command_of, keep, positive
from mtp_train.runtime import provenance
from mtp_train.target.draft_vocabulary import count_answer_tokens, most_frequent
from mtp_train.target.weights import SharedWeights
from mtp_train.trainer.kernel_rates import KernelRates, Way
from mtp_train.trainer.module import TrainingModule
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.pack_share import PackShare
from mtp_train.trainer.plain_eagle import PlainEagle, pad
from mtp_train.trainer.random_cache import RandomTarget, RandomText, write_random_cache

SMOLLM2 = RandomTarget(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, num_layers=30)
SMALL = RandomTarget(vocab_size=2048, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=1, num_layers=4)
DECAY, LR, CLIP, TOP_K, NUM_TOP, NUM_RANDOM = 0.8, 1e-3, 1.0, 64, 16, 2048
_LINES = "\n"
KL: dict[str, Loss] = {
    "exact": ForwardKl(),
    "exact, compiled": ForwardKl(),
    "top-64": TopkKl(),
    "sampled": SampledKl(num_top=NUM_TOP, num_random=NUM_RANDOM),
}


@dataclass(frozen=True)
class Recipe:
    """One row: ``teacher`` is ``plain`` (EAGLE's recipe) or a key of ``KL`` (``compiled``: with train's compile=true); ``head``
    eagle or eagle3."""

    teacher: str
    draft_steps: int = 1
    head: str = "eagle"

    @property
    def compiled(self) -> bool:
        return self.teacher.endswith("compiled")

    @property
    def name(self) -> str:
        return f"{self.head}, unroll {self.draft_steps}, {'recipe written plainly' if self.teacher == 'plain' else self.teacher}"


@dataclass(frozen=True, kw_only=True)
class Data:
    """What every process inherits: batches of samples, those that the loss is measured on, the target's weights."""

    target: RandomTarget
    folder: Path
    shared: SharedWeights
    batches: list[list[Sample]]
    held_out: list[Sample]
    draft_vocab_size: int
    chunk_rows: int

    def samples(self, recipe: Recipe, number: int, *, world: int = 1) -> list[Sample]:
        """Four samples; two of them where the plain recipe would keep the logits of several depths. Of ``world`` steps together."""
        num_samples = 4 if recipe.draft_steps == 1 else 2
        chosen = [sample for batch in self.batches[number : number + world] for sample in batch[:num_samples]]
        return [sample if recipe.head == "eagle3" else replace(sample, taps_TLD=None) for sample in chosen]


def shares(samples: Sequence[Sample], world: int) -> list[list[Sample]]:
    """The samples dealt to ``world`` processes, the longest first and each to whoever has fewest tokens."""
    dealt: list[list[Sample]] = [[] for _ in range(world)]
    for sample in sorted(samples, key=lambda sample: -sample.num_tokens):
        min(dealt, key=lambda share: sum(one.num_tokens for one in share)).append(sample)
    return dealt


def make_data(words: argparse.Namespace, folder: Path) -> Data:
    target = SMALL if words.small else SMOLLM2
    text = RandomText(num_samples=4 * (words.repeats + 2), median=427, spread=0.77, shortest=51, longest=1828, answer_share=0.386)
    write_random_cache(
        folder / "cache", target=target, text=text, num_taps=3, top_k=TOP_K, codec="bf16", shard_tokens=1 << 20, seed=words.seed
    )
    target.write_config(folder)
    reader = CacheReader(folder / "cache", verify="none")
    samples = [reader[number] for number in range(len(reader))]
    groups = [samples[first : first + 4] for first in range(0, len(samples), 4)]
    shared = target.shared(seed=words.seed).to(device="cpu", dtype=torch.bfloat16)
    return Data(
        target=target,
        folder=folder,
        shared=shared,
        batches=groups[1:],
        held_out=[replace(sample, taps_TLD=None) for sample in groups[0]],
        draft_vocab_size=target.vocab_size // 3,
        chunk_rows=words.chunk_rows,
    )


def make_head(data: Data, word: str) -> Head:
    common: dict[str, Any] = {"target_path": data.folder, "shared": data.shared, "init": "random", "seed": 0, "trust_remote_code": False}
    if word == "eagle":
        off = dict.fromkeys(NORMS, False)
        return Eagle(norms=off, column_order="embed_hidden", zero_first_embedding=False, **common)
    norms = {"taps": False, "feedback": False}
    head = Eagle3(target_layer_ids=[0, 1, 2], draft_vocab_size=data.draft_vocab_size, norms=norms, **common)
    counts_V = count_answer_tokens((sample for batch in data.batches for sample in batch), vocab_size=data.target.vocab_size)
    head.use_draft_ids(most_frequent(counts_V, size=data.draft_vocab_size))
    return head


class Ours:
    """The product's step: packs, rows that count, chunks."""

    def __init__(self, data: Data, recipe: Recipe) -> None:
        self.data, self.recipe, self.head = data, recipe, make_head(data, recipe.head)
        kl = Term(0.1 if recipe.head == "eagle" else 1.0, KL[recipe.teacher])
        terms = {"kl": kl} | ({"hidden_l1": Term(1.0, HiddenL1())} if recipe.head == "eagle" else {})
        self.objective = Objective(terms=terms, draft_steps=recipe.draft_steps, decay=DECAY, chunk_rows=data.chunk_rows)
        self.module = TrainingModule(head=self.head, objective=self.objective, precision="bf16")
        self.step = 0

    def loss(self, samples: Sequence[Sample]) -> torch.Tensor:
        self.step += 1
        share, vocab_size = PackShare(0, 1, None), self.data.target.vocab_size
        aligned = share.align(pack(samples), self.objective, vocab_size=vocab_size, seed=str(self.step))
        result: torch.Tensor = self.module(aligned, 1.0 / aligned.counts_K.float().clamp_min(1), measure=False).loss
        return result


class Plain:
    """EAGLE's step: padded batches, all logits."""

    def __init__(self, data: Data, recipe: Recipe) -> None:
        self.recipe = recipe
        head = make_head(data, "eagle")
        assert isinstance(head, Eagle)
        self.module = PlainEagle(head, data.shared)

    def loss(self, samples: Sequence[Sample]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.module.loss(pad(samples), draft_steps=self.recipe.draft_steps, decay=DECAY)


def held_out_kl(data: Data, trained: Ours | Plain) -> float:
    """KL to the exact teacher over the whole vocabulary at depth 0, nats: what the steps have made of the head."""
    if isinstance(trained, Ours) and trained.recipe.head == "eagle3":
        return math.nan
    head = make_head(data, "eagle")
    head.load_state_dict(trained.module.named_weights() if isinstance(trained, Plain) else trained.head.state_dict())
    objective = Objective(terms={"kl": Term(1.0, ForwardKl())}, draft_steps=1, decay=1.0, chunk_rows=data.chunk_rows)
    aligned = PackShare(0, 1, None).align(pack(data.held_out), objective, vocab_size=data.target.vocab_size, seed="")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return float(objective(head, aligned, 1.0 / aligned.counts_K.float(), measure=False).loss)


def work(data: Data, recipe: Recipe, pipe: Connection, *, threads: int, rank: int, world: int, rendezvous: str) -> None:
    """A recipe's process: takes steps when told, answers what they took."""
    torch.set_num_threads(threads)
    if world > 1:
        store = torch.distributed.FileStore(str(data.folder / rendezvous), world)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    side: Ours | Plain = Plain(data, recipe) if recipe.teacher == "plain" else Ours(data, recipe)
    parameters = [parameter for parameter in side.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)
    if recipe.compiled:
        with compiled_passes(True):
            side.loss(data.held_out)  # compiles
    while (message := pipe.recv()) is not None:
        if message == "end":
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            pipe.send({"peak_mb": peak_mb, "held_out_kl": held_out_kl(data, side)})
            continue
        samples = shares(data.samples(recipe, message, world=world), world)[rank]
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        with compiled_passes(recipe.compiled):
            loss = side.loss(samples)
        loss.backward()
        if world > 1:
            exchange(parameters, world)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        taken = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}
        pipe.send({**taken, "tokens": sum(sample.num_tokens for sample in samples), "loss": float(loss.detach())})


def exchange(parameters: Sequence[torch.Tensor], world: int) -> None:
    """The mean of all processes' gradients, in one reduction."""
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
    torch.distributed.all_reduce(flat)
    first = 0
    for parameter in parameters:
        if parameter.grad is not None:
            size = parameter.grad.numel()
            parameter.grad.copy_(flat[first : first + size].view_as(parameter.grad) / world)
            first += size


class Worker:
    """The processes of a row: one of ``threads`` threads, or ``world`` that share each step."""

    def __init__(self, data: Data, recipe: Recipe, *, threads: int = 1, world: int = 1) -> None:
        self.recipe, self.threads, self.world = recipe, threads, world
        context, self.pipes, self.processes = multiprocessing.get_context("fork"), [], []
        where = f"rendezvous-{id(self)}"
        for rank in range(world):
            near, far = context.Pipe()
            process = context.Process(
                target=work,
                args=(data, recipe, far),
                kwargs={"threads": threads, "rank": rank, "world": world, "rendezvous": where},
                daemon=True,
            )
            process.start()
            self.pipes.append(near)
            self.processes.append(process)
        self.steps: list[dict[str, float]] = []

    @property
    def way(self) -> Way:
        return "2 threads" if self.threads == 2 else "2 processes" if self.world == 2 else "one core"

    def step(self, number: int) -> None:
        for pipe in self.pipes:
            pipe.send(number)
        found = [pipe.recv() for pipe in self.pipes]
        taken = {key: sum(one[key] for one in found) for key in ("cpu_s", "tokens")}
        self.steps.append({**taken, "wall_s": max(one["wall_s"] for one in found), "loss": found[0]["loss"]})

    def end(self) -> dict[str, float]:
        for pipe in self.pipes:
            pipe.send("end")
        found = [pipe.recv() for pipe in self.pipes]
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()
        return {"peak_mb": sum(one["peak_mb"] for one in found), "held_out_kl": found[0]["held_out_kl"]}


def bound_s(data: Data, recipe: Recipe, samples: Sequence[Sample], rates: dict[str, float]) -> float:
    """Seconds that the matrix products of one step take at the measured rates, with nothing computed that nobody reads."""
    head = make_head(data, recipe.head)
    layer = sum(parameter.numel() for name, parameter in head.named_parameters() if parameter.ndim == 2 and "lm_head" not in name)
    row_wise = sum(parameter.numel() for part in head.feed_forward() for parameter in part.parameters())
    per_row, depths = 2.0 * data.target.hidden_size, recipe.draft_steps
    vocabulary = data.draft_vocab_size if recipe.head == "eagle3" else data.target.vocab_size
    if recipe.teacher == "plain":
        rows = len(samples) * max(sample.num_tokens for sample in samples)
        counted, teacher, through_layer = [rows] * depths, rows * per_row * data.target.vocab_size, depths * rows * layer
    else:
        rows = sum(sample.num_tokens for sample in samples)
        objective = Objective(terms={"kl": Term(1.0, KL[recipe.teacher])}, draft_steps=depths, decay=DECAY, chunk_rows=1)
        aligned = PackShare(0, 1, None).align(pack(samples), objective, vocab_size=data.target.vocab_size, seed="")
        assert aligned.wanted is not None
        counted, wanted = aligned.counts_K.tolist(), len(aligned.wanted.rows_M)
        through_layer = rows * (layer - row_wise) + wanted * (row_wise + (depths - 1) * layer)
        teacher = sum(counted) * per_row * data.target.vocab_size if recipe.teacher.startswith("exact") else 0.0
        if aligned.vocabulary_sample is not None:
            vocabulary = aligned.vocabulary_sample.ids_S.shape[0]
    head_s = sum(counted) * per_row * vocabulary * (1 / rates["project"] + (2 if recipe.head == "eagle3" else 1) / rates["back"])
    return head_s + teacher / rates["project"] + 6.0 * through_layer / rates["layer"]


def rows_of(data: Data, workers: Sequence[Worker], rates: KernelRates) -> list[dict[str, Any]]:
    """The figures of every worker, against the plain recipe of the same unroll on one core, and of two cores against one."""
    found = []
    alone = {worker.recipe: worker for worker in workers if worker.way == "one core"}
    for worker in workers:
        plain = alone.get(Recipe("plain", worker.recipe.draft_steps))
        clock = "cpu_s" if worker.way == "one core" else "wall_s"
        speeds = [step["tokens"] / step[clock] for step in worker.steps]
        ratios = [] if plain is None else [ours / base for ours, base in zip(speeds, spans(plain, worker, clock), strict=False)]
        own_rates = rates.per_cpu_s() if clock == "cpu_s" else rates.medians(worker.way)
        used = [data.samples(worker.recipe, number, world=worker.world) for number in range(len(worker.steps))]
        bounds = [
            step["tokens"] / bound_s(data, worker.recipe, samples, own_rates) for samples, step in zip(used, worker.steps, strict=True)
        ]
        row = {
            "recipe": worker.recipe.name,
            "cores": worker.way,
            "clock": clock,
            "tokens_per_s": statistics.median(speeds),
            "spread": [min(speeds), max(speeds)],
            "ratio": statistics.median(ratios) if ratios else None,
            "ratios": ratios,
            "bound_tokens_per_s": statistics.median(bounds),
            "fraction_of_bound": statistics.median(speed / bound for speed, bound in zip(speeds, bounds, strict=True)),
            "training_loss": worker.steps[-1]["loss"],
            "steps": len(worker.steps),
        }
        if worker.way != "one core":
            gains = [ours / base for ours, base in zip(speeds, spans(alone[worker.recipe], worker, clock), strict=True)]
            one_core = rates.medians("one core")
            kernels = [
                bound_s(data, worker.recipe, samples, one_core) / bound_s(data, worker.recipe, samples, own_rates) for samples in used
            ]
            row |= {"second_core": statistics.median(gains), "second_core_spread": [min(gains), max(gains)]}
            row |= {"second_core_kernels": statistics.median(kernels)}
        found.append(row | worker.end())
    return found


def spans(base: Worker, worker: Worker, clock: str) -> list[float]:
    """What ``base`` made of the samples of each step of ``worker``, in tokens per second."""
    groups = [base.steps[number : number + worker.world] for number in range(len(worker.steps))]
    return [sum(step["tokens"] for step in group) / sum(step[clock] for step in group) for group in groups]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| recipe | cores | tokens per s | least, most | ratio | bound | of it | training loss | held-out KL | peak MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.1f}"
        kl = "" if math.isnan(row["held_out_kl"]) else f"{row['held_out_kl']:.3f}"
        lines.append(
            f"| {row['recipe']} | {row['cores']} | {row['tokens_per_s']:.0f} | {row['spread'][0]:.0f}, {row['spread'][1]:.0f} | {ratio} "
            f"| {row['bound_tokens_per_s']:.0f} | {row['fraction_of_bound']:.2f} | {row['training_loss']:.3f} | {kl} "
            f"| {row['peak_mb']:.0f} |"
        )
    two = [row for row in rows if "second_core" in row]
    if two:
        lines += [
            "",
            "| recipe | two cores as | times one core | least, most | its matrix products alone | share of that |",
            "|---|---|---|---|---|---|",
        ]
    for row in two:
        low, high = row["second_core_spread"]
        lines.append(
            f"| {row['recipe']} | {row['cores']} | {row['second_core']:.2f} | {low:.2f}, {high:.2f} | {row['second_core_kernels']:.2f} "
            f"| {row['second_core'] / row['second_core_kernels']:.2f} |"
        )
    return lines


def report(rows: Sequence[dict[str, Any]], rates: dict[str, float], about: dict[str, Any]) -> str:
    flags, versions = _cpu_flags(), about["packages"]
    gflops = ", ".join(f"{name} {rates[name] / 1e9:.0f}" for name in ("project", "back", "layer"))
    has = f"{'AMX' if 'amx_bf16' in flags else 'no AMX'}, {'AVX512-bf16' if 'avx512_bf16' in flags else 'no AVX512-bf16'}"
    return f"""# Training against EAGLE's recipe written plainly

`{about["command"]}`

{about["data"]}. {about["cpu"]} ({has}), torch {versions["torch"]}, transformers {versions["transformers"]}, python {about["python"]}.
Load average {about["load"]:.1f} at the end: other work ran beside where that is above the cores in use. bf16 products of one thread,
GFLOP/s: {gflops} (the head's logits, their gradient, the layer); a copy {rates["copy"] / 1e9:.1f} GB/s.

{_LINES.join(table(rows))}

Tokens are real ones, per second of one process' CPU time (by the clock, with two cores). `ratio` is to the plain recipe of the same unroll
on one core; `bound` what the matrix products alone allow, at the rates of as many cores. `held-out KL` is to the exact teacher over the
whole vocabulary at depth 0, after the steps of the row: few, so that it shows equality, not quality. EAGLE-3 speaks over a third of the
vocabulary, and its ratio is to EAGLE-1's recipe.
"""


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return set(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU")


def recipes(unrolls: Sequence[int]) -> list[Recipe]:
    rows = [recipe for steps in unrolls for recipe in (Recipe(word, steps) for word in ("plain", *KL)) if steps == 1 or not recipe.compiled]
    return rows + [Recipe(teacher, steps, "eagle3") for steps in unrolls for teacher in ("exact", "top-64")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive, default=5, help="steps of each recipe at unroll 1; deeper ones take fewer")
    parser.add_argument("--unrolls", type=positive, nargs="+", default=[1, 3, 7])
    parser.add_argument("--only", help="recipes whose name holds this")
    parser.add_argument("--cores", type=int, default=1, choices=(1, 2))
    parser.add_argument("--chunk-rows", type=positive, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    add_results_option(parser)
    words = parser.parse_args()
    chosen = [recipe for recipe in recipes(words.unrolls) if words.only is None or words.only in recipe.name]
    if not chosen:
        parser.error(f"--only: expected part of a recipe's name ({', '.join(r.name for r in recipes(words.unrolls))}), found {words.only}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(words, Path(folder))
        if words.cores == 2 and words.repeats < 2:
            parser.error("--repeats: expected at least 2 with --cores 2, whose processes share two steps' samples, found 1")
        rates = KernelRates(
            data.shared.lm_head_VD,
            chunk_rows=words.chunk_rows,
            intermediate_size=data.target.intermediate_size,
            two_cores=words.cores == 2,
        )
        workers = [Worker(data, recipe) for recipe in chosen]
        if words.cores == 2:
            first = [recipe for recipe in chosen if recipe.draft_steps == 1 and recipe.head == "eagle" and not recipe.compiled]
            workers += [Worker(data, recipe, threads=2) for recipe in first]
            workers += [Worker(data, recipe, world=2) for recipe in first if recipe.teacher != "plain"]
        for number in range(words.repeats):
            rates.measure()
            for worker in workers:
                if number < -(-words.repeats // worker.recipe.draft_steps) - (worker.world - 1):
                    worker.step(number)
                    print(f"repeat {number}: {worker.recipe.name}, {worker.way}: {worker.steps[-1]}", flush=True)
        samples = [sample.num_tokens for batch in data.batches for sample in batch]
        padded = sum(4 * max(sample.num_tokens for sample in batch) for batch in data.batches)
        about = {
            **provenance(),
            "command": command_of(parser, words),
            "cpu": _cpu_name(),
            "load": os.getloadavg()[0],
            "data": f"{len(samples)} random samples of {min(samples)} to {max(samples)} tokens (median {statistics.median(samples):.0f}), "
            f"38.6% of them answers, padded to {padded / sum(samples):.2f} times in fours; vocabulary {data.target.vocab_size}, hidden "
            f"{data.target.hidden_size}; {words.chunk_rows} rows a chunk; four samples a step at unroll 1, two at more",
        }
        rows, medians = rows_of(data, workers, rates), rates.per_cpu_s()
        rates.close()
    text = report(rows, medians, about)
    keep(text, {**about, "rates": medians, "rows": rows}, name="bench_train", folder=words.results)


if __name__ == "__main__":
    with telling("bench_train"):
        main()
