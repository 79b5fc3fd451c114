"""Real tiny targets run over random and over determined text, and trainers over the caches they make.

Also loaded by the processes of ``child.py``, through the path of this file.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.batch.plan import DataPlan
from mtp_train.batch.shift import teacher_rows
from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
from mtp_train.cache.plan import PlannedSample, content_hash
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.writer import CacheWriter
from mtp_train.head.eagle3 import Eagle3
from mtp_train.head.mtp import Mtp
from mtp_train.loss.base import Loss
from mtp_train.loss.hidden_l1 import HiddenL1
from mtp_train.loss.topk_kl import TopkKl
from mtp_train.records import Sample, Teacher
from mtp_train.target.weights import read_shared
from mtp_train.trainer.data import split
from mtp_train.trainer.loop import OnValidate, Trainer
from mtp_train.trainer.metrics import WandbSettings
from mtp_train.trainer.module import make_accelerator
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.parallel import ParallelSettings
from mtp_train.trainer.settings import LoopSettings, OptimizerSettings, Schedule
from mtp_train.trainer.state import HeadFile

NORMS_ON = {"embed": True, "hidden": True, "input": True, "output": True, "feedback": True}
COPY_VOCABULARY = 48

# Tests are imported by path (importmode=importlib), so a module beside them has to be loaded by hand, once.
_NAME = "processes"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name(f"{_NAME}.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])


def write_copy_target(path: Path) -> torch.Tensor:
    """A Llama that says pi(x) after x whatever came before, and pi as int64 (V,).

    Its layers add nothing to the residual stream, so the final state is the normed embedding of x; row pi(x) of its
    lm_head points there, all other rows elsewhere.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=COPY_VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    draw = torch.Generator().manual_seed(5)
    model = LlamaForCausalLM(config)
    follows_V = torch.randperm(COPY_VOCABULARY, generator=draw)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = torch.linalg.qr(torch.randn(64, 64, generator=draw)).Q[:COPY_VOCABULARY] * 8
        model.model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight[follows_V] = rows / 4
    model.save_pretrained(path)
    return follows_V


def write_odd_target(path: Path) -> Path:
    """A random Llama whose layer no even number of processes shares evenly: 67 rows in two of its matrices."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 67, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        LlamaForCausalLM(LlamaConfig(vocab_size=320, initializer_range=0.2, tie_word_embeddings=False, **sizes)).save_pretrained(path)
    return path


def write_cache(
    path: Path, *, target: Path, texts: Sequence[torch.Tensor], answer_from: int, top_k: int | None, silent: Sequence[int] = ()
) -> Path:
    """Run a target over texts as transformers does, in float32, and keep what precompute keeps. Texts numbered in ``silent``
    have no token of the target's own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    samples = []
    for number, text_T in enumerate(texts):
        with torch.no_grad():
            hidden_TD = model.model(text_T[None]).last_hidden_state[0]
            logits_TV = model.lm_head(hidden_TD)
        mask_T = (torch.arange(len(text_T)) >= answer_from) & (number not in silent)
        teacher = None
        if top_k is not None:
            rows = teacher_rows(mask_T)
            log_probs, ids = logits_TV[rows].log_softmax(-1).topk(top_k)
            teacher = Teacher(row_M=rows, ids_MC=ids, log_probs_MC=log_probs, log_sum_exp_M=logits_TV[rows].logsumexp(-1))
        samples.append(Sample(sample_id=f"s{number}", token_ids_T=text_T, loss_mask_T=mask_T, hidden_TD=hidden_TD, teacher=teacher))
    identity = CacheIdentity(
        format_version=FORMAT_VERSION,
        target_name="tiny",
        target_fingerprint="a",
        tokenizer_hash="b",
        template_hash="c",
        hidden_state="post_norm",
        target_layer_ids=(),
        dtype="float32",
        codec="float32",
        top_k=top_k,
        engine="hf",
        engine_version="transformers 5",
        quantization=None,
        hidden_size=64,
        vocab_size=logits_TV.shape[1],
        git_commit=None,
    )
    planned = [PlannedSample(s.sample_id, s.num_tokens, content_hash(s.token_ids_T.tolist(), s.loss_mask_T.tolist())) for s in samples]
    writer = CacheWriter(path=path, identity=identity, samples=planned, shard_tokens=400)
    for index, ids in writer.missing_shards():
        writer.write_shard(index, [sample for sample in samples if sample.sample_id in ids])
    writer.finish()
    return path


def random_texts(*, num_texts: int, vocab_size: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(11)
    lengths = torch.randint(8, 30, (num_texts,), generator=draw).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=draw) for length in lengths]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run in few words; what is not named here is the same in all tests."""

    target: Path
    cache: Path
    num_steps: int = 10
    draft_steps: int = 2
    tokens_per_pack: int = 64
    packs_per_step: int = 4
    chunk_rows: int = 16
    precision: str = "fp32"
    lr: float = 1e-2
    warmup_steps: int = 3
    noise_scale: float = 0.05
    log_every: int = 2
    validate_every: int | None = 5
    save_every: int | None = 5
    keep_last: int = 2
    final: str = "last"
    best_by: str = "agreement"
    validation_fraction: float = 0.2
    wandb_mode: str = "disabled"
    word: str = "mtp"
    parallel: str = "ddp"
    context: int = 1
    rule: str = "adamw"
    clip_norm: float | None = 1.0
    recompute: bool = False
    profile: bool = False
    losses: tuple[tuple[str, float, Loss], ...] = (("topk_kl", 1.0, TopkKl()), ("hidden_l1", 0.5, HiddenL1()))

    def head(self) -> Mtp | Eagle3:
        if self.word == "eagle3":
            return Eagle3(
                target_path=self.target,
                shared=read_shared(self.target),
                target_layer_ids=[],
                draft_vocab_size=101,
                norms={"taps": False, "feedback": True},
                init="random",
                seed=0,
                trust_remote_code=False,
            )
        return Mtp(
            target_path=self.target,
            shared=read_shared(self.target),
            norms=NORMS_ON,
            column_order="hidden_embed",
            zero_first_embedding=True,
            init="random",
            seed=0,
            trust_remote_code=False,
        )

    def trainer(self, out: Path, *, head: Mtp | Eagle3 | None = None, on_validate: OnValidate | None = None) -> Trainer:
        head = head or self.head()
        if self.recompute:
            head.recompute_activations(depths=self.draft_steps > 1)
        train, held_out = split(CacheReader(self.cache, verify="first_read"), fraction=self.validation_fraction, seed=0)
        plan = DataPlan(
            lengths=train.lengths,
            sample_ids=train.sample_ids,
            seed=0,
            tokens_per_pack=self.tokens_per_pack,
            packs_per_step=self.packs_per_step,
        )
        identity: dict[str, Any] = {"optimizer": {"lr": self.lr}, "data": train.fingerprint()}
        return Trainer(
            accelerator=make_accelerator("cpu"),
            head=head,
            objective=Objective(
                terms={word: Term(weight, loss) for word, weight, loss in self.losses},
                draft_steps=self.draft_steps,
                decay=0.8,
                chunk_rows=self.chunk_rows,
            ),
            train=train,
            plan=plan,
            validation=held_out if len(held_out) else None,
            settings=LoopSettings(
                num_steps=self.num_steps,
                precision=self.precision,
                noise_scale=self.noise_scale,
                seed=0,
                log_every=self.log_every,
                validate_every=self.validate_every,
                measure_every=None if on_validate is None else self.validate_every,
                save_every=self.save_every,
                keep_last=self.keep_last,
                best_by=self.best_by,
                final=self.final,
                max_prefetch=2,
                profile=self.profile,
            ),
            parallel=ParallelSettings(mode=self.parallel, context=self.context),
            optimizer=OptimizerSettings(
                rule=self.rule, lr=self.lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, clip_norm=self.clip_norm
            ),
            schedule=Schedule(kind="cosine", warmup_steps=self.warmup_steps, min_ratio=0.1),
            out=out,
            head_file=HeadFile(config=head.draft_config(), target={"name": "tiny"}, made_by={"test": True}),
            identity=identity,
            wandb=WandbSettings(mode=self.wandb_mode, project="mtp-train-tests", name=None),
            on_validate=on_validate,
        )


def stop_after(step: int, number: int = signal.SIGTERM) -> OnValidate:
    """An on_validate that asks the run to end, as a scheduler would."""

    def hook(done: int, folder: Path) -> None:
        if done == step:
            os.kill(os.getpid(), number)

    return hook


@pytest.fixture(scope="session")
def recipe(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Random text through a random target: nothing to learn but to resemble it."""
    cache = write_cache(
        tmp_path_factory.mktemp("random") / "cache",
        target=tiny_llama,
        texts=random_texts(num_texts=40, vocab_size=250),
        answer_from=4,
        top_k=8,
    )
    return Recipe(target=tiny_llama, cache=cache)


@pytest.fixture(scope="session")
def copy_recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Text in which each token determines the next, through a target that knows how."""
    folder = tmp_path_factory.mktemp("copy")
    follows_V = write_copy_target(folder / "target")
    draw = torch.Generator().manual_seed(1)
    texts = []
    for _ in range(60):
        text = [int(torch.randint(0, COPY_VOCABULARY, (1,), generator=draw))]
        while len(text) < 12:
            text.append(int(follows_V[text[-1]]))
        texts.append(torch.tensor(text))
    cache = write_cache(folder / "cache", target=folder / "target", texts=texts, answer_from=1, top_k=8)
    return Recipe(target=folder / "target", cache=cache)


@pytest.fixture(scope="session")
def recipes() -> Any:
    """This module, for tests that make recipes of their own."""
    return sys.modules[__name__]
