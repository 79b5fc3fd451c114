"""Fixtures that every test folder shares: a tiny random target with a tokenizer, made once per session."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shell import Shell

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
    path: Path, *, tied: bool = False, seed: int = 0, vocab_size: int = 320, spread: float = 0.2, num_heads: int = 4, num_layers: int = 2
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
        num_hidden_layers=num_layers,
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


def write_tiny_deepseek(path: Path, *, seed: int = 0, spread: float = 0.2) -> Path:
    """A random DeepSeek-V2 in float32 with the parts of V2-Lite: MLA (keys of 24 beside values of 16), YaRN, one dense layer and
    two of four experts, two of which are chosen beside a shared one."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, GenerationConfig

    config = DeepseekV2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 512,
        },
        tie_word_embeddings=False,
        initializer_range=spread,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=258, bos_token_id=256, pad_token_id=256)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def write_with_block(path: Path, target: Path, *, layout: str, num_blocks: int = 1, dtype: str = "float32", seed: int = 0) -> Path:
    """A target's folder with a random multi-token-prediction block, in three shards, the second of which holds tensors of both.

    ``layout``: ``deepseek`` (decoder layers behind the last one) or ``qwen3_next`` (mtp.*). The block's layer has the names and shapes
    of the target's own last one.
    """
    import json
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, path, ignore=shutil.ignore_patterns("*.safetensors", ".*"))
    config = json.loads((target / "config.json").read_text())
    own, size, last = load_file(target / "model.safetensors"), config["hidden_size"], config["num_hidden_layers"]
    draw, block = torch.Generator().manual_seed(seed), {}
    for number in range(num_blocks):
        prefix, names = {
            "deepseek": (f"model.layers.{last + number}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")),
            "qwen3_next": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")),
        }[layout]
        shapes = {f"{names[n]}.weight": (size, 2 * size) if n == 2 else (size,) for n in range(4)}
        inside = f"model.layers.{last - 1}."
        shapes |= {names[4] + name.removeprefix(inside): own[name].shape for name in own if name.startswith(inside)}
        for name, shape in shapes.items():
            block[prefix + name] = torch.randn(shape, generator=draw) * 0.15 + (1.0 if len(shape) == 1 else 0.0)
        if layout == "deepseek":
            block |= {
                f"{prefix}embed_tokens.weight": own["model.embed_tokens.weight"],
                f"{prefix}shared_head.head.weight": own["lm_head.weight"],
            }
    whole = {name: tensor.to(getattr(torch, dtype)).clone() for name, tensor in {**own, **block}.items()}
    names, first = list(whole), len(own) // 2
    second = len(own) + len(block) // 2
    weight_map = {}
    for number, part in enumerate((names[:first], names[first:second], names[second:]), 1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file({name: whole[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": num_blocks}))
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, those that start vLLM before all, so that workers side by side end together and not with one of
    them at the longest file (xdist keeps this order under ``--no-loadscope-reorder``)."""
    long = {item.path: 0 for item in items if item.get_closest_marker("engine")}
    for item in items:
        if item.get_closest_marker("slow"):
            long.setdefault(item.path, 1)
    items.sort(key=lambda item: long.get(item.path, 2))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``engine`` or ``gpu`` skip themselves, with the reason, where what they need is not there."""
    if item.get_closest_marker("engine") and importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: tools/setup.sh --engine")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an accelerator")


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Starts stages with the libraries loaded already."""
    found = Shell(tmp_path_factory.mktemp("shell"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an untied tiny target."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_llama_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tied tiny target."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama-tied", tied=True)


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny target with latent attention and experts."""
    return write_tiny_deepseek(tmp_path_factory.mktemp("tiny") / "deepseek")


@pytest.fixture
def with_block(tmp_path: Path) -> Callable[..., Path]:
    """``write_with_block`` into a folder of the test's own, named after the layout."""

    def make(target: Path, *, layout: str, **settings: Any) -> Path:
        return write_with_block(tmp_path / layout, target, layout=layout, **settings)

    return make


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
