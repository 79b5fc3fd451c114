"""Whether products of bfloat16 are worth their rounding on a device: without instructions for them float32 is several times as fast."""

from __future__ import annotations

import torch

# torch's words (``torch.cpu.get_capabilities``) for a processor that multiplies bfloat16: x86's two ways, and Arm's.
_CPU_WORDS = ("avx512_bf16", "amx_bf16", "bf16")


def multiplies_bf16(device: torch.device) -> bool:
    """Whether ``device`` has instructions for it; of devices that are neither CPUs nor CUDA's that is assumed."""
    if device.type == "cpu":
        found = torch.cpu.get_capabilities()
        return any(found.get(word) for word in _CPU_WORDS)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return True


def why_float32(setting: str) -> str:
    """What is said where ``setting`` left the choice, and it fell on float32."""
    return f"{setting}=auto: float32, since the device here has no instructions for products of bfloat16, which would take far longer"
