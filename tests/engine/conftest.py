"""Tiny targets on disk and engines over them, shared by the tests of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

# Tests are imported by path (importmode=importlib), so a module beside them has to be loaded by hand, once.
_NAME = "vllm_for_tests"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name(f"{_NAME}.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])

V, D = 160, 48
LAYERS = 0.01
STOP_IDS = [7, 30, 60, 90, 120]


def save_tiny_target(path: Path, *, seed: int = 0, tied: bool = False, window: int | None = None, layers: float = 1.0) -> Path:
    """A random model whose logits are well apart (initializer_range 0.3), so that greedy text is varied and stable.

    ``layers`` scales what its layers add: with little of it the next token hangs mostly on the last one."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes = {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": STOP_IDS,
    }
    torch.manual_seed(seed)
    if window is None:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(layers)
            layer.mlp.down_proj.weight.mul_(layers)
    model.eval().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def stop_ids() -> list[int]:
    return STOP_IDS


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def easy_target(tmp_path_factory) -> Path:
    """A target that a head which leans on the last token agrees with about half the time."""
    return save_tiny_target(tmp_path_factory.mktemp("easy"), layers=LAYERS)


@pytest.fixture(scope="session")
def windowed_target(tmp_path_factory) -> Path:
    """Mistral with a sliding window shorter than the texts."""
    return save_tiny_target(tmp_path_factory.mktemp("windowed"), window=16)


@pytest.fixture(scope="session")
def make_engine():
    from mtp_train.engine.hf import HfEngine

    def make(path: Path, **changes):
        settings = {
            "target_path": path,
            "trust_remote_code": False,
            "load_head": None,
            "dtype": "float32",
            "device": "cpu",
            "batch_size": 4,
            "max_prefill_tokens": 64,
            "max_cache_tokens": 16384,
        }
        return HfEngine(**{**settings, **changes})

    return make


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Nine prompts of 1 to 70 tokens; the longest does not fit one prefill chunk of the test engines."""
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(8, V, (length,), generator=generator).tolist()) for length in (5, 70, 1, 12, 33, 2, 20, 9, 41)]


@pytest.fixture(scope="session")
def plain_model():
    """transformers' own model with its own attention: what the engine is compared with."""
    from transformers import AutoModelForCausalLM

    def load(path: Path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    return load


@pytest.fixture(scope="session")
def leaning_head():
    """Makes a ``load_head`` for ``easy_target``: a head that leans on the token it reads agrees about half the time; a random one never."""
    from mtp_train.head.eagle import Eagle
    from mtp_train.head.mtp import Mtp

    names = ("embed", "hidden", "input", "output", "feedback")

    def make(target: Path, word: str, *, num_blocks: int = 1):
        cls, on, order = {"mtp": (Mtp, True, "hidden_embed"), "eagle": (Eagle, False, "embed_hidden")}[word]
        settings = {
            "norms": dict.fromkeys(names, on),
            "column_order": order,
            "zero_first_embedding": on,
            "init": "target_last_layer",
            "seed": 7,
            "num_blocks": num_blocks,
        }

        def load(path, shared):
            head = cls(target_path=target, shared=shared, trust_remote_code=False, **settings)
            with torch.no_grad():
                half = head.projection.weight.shape[0]
                for block in (head, *head.later_blocks):
                    block.projection.weight[:, : 2 * half].mul_(0.05)
                    block.projection.weight[:, (half if on else 0) : (2 * half if on else half)].add_(torch.eye(half))
            return head

        return load

    return make


@pytest.fixture(scope="session")
def vllm_target(tmp_path_factory) -> Path:
    return sys.modules[_NAME].write_cyclic_llama(tmp_path_factory.mktemp("vllm") / "llama")


@pytest.fixture(scope="session")
def vllm_target_tied(tmp_path_factory) -> Path:
    return sys.modules[_NAME].write_cyclic_llama(tmp_path_factory.mktemp("vllm") / "llama-tied", tied=True)


@pytest.fixture(scope="session")
def vllm_hf(vllm_target):
    """The reference over that target; it decodes with the head that has all norms."""
    head = sys.modules[_NAME].normed_head
    return sys.modules[_NAME].make_hf(vllm_target, load_head=lambda path, shared: head(vllm_target))
