"""Fixtures that every test folder shares: a tiny random target with a tokenizer, made once per session."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread keeps sums in one order, and tests side by side out of each other's way. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer without merges (256 bytes and three special tokens) with ChatML's template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    fast.save_pretrained(path)


def write_tiny_llama(
    path: Path, *, tied: bool = False, seed: int = 0, vocab_size: int = 320, spread: float = 0.2, num_heads: int = 4
) -> Path:
    """A random two-layer Llama in float32 (D = 64, 4 heads over 2 key heads, or as many as asked for) as safetensors, with a tokenizer.

    ``spread`` is the weights' standard deviation: large enough that logits differ and greedy text is not one token.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=spread,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=258, bos_token_id=256, pad_token_id=256)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``engine`` or ``gpu`` skip themselves, with the reason, where what they need is not there."""
    if item.get_closest_marker("engine") and importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: tools/setup.sh --engine")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an accelerator")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an untied tiny target."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_llama_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tied tiny target."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama-tied", tied=True)


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The folder of the demo's target, SmolLM2-135M-Instruct; fetched and converted once per machine (20 s)."""
    from omegaconf import OmegaConf

    from mtp_train.target.resolve import resolve_target

    settings = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent.parent / "conf" / "target" / "smollm2_135m.yaml"))
    assert isinstance(settings, dict)
    return resolve_target({str(key): value for key, value in settings.items()})


@pytest.fixture(scope="session")
def served_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with heads of size 32, the smallest that vLLM's CPU attention has."""
    return write_tiny_llama(tmp_path_factory.mktemp("served") / "llama", num_heads=2)
