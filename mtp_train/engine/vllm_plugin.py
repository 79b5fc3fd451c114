"""What vLLM's plugin loader calls (entry point group ``vllm.general_plugins``): makes our draft class known to vLLM."""

from __future__ import annotations

ARCHITECTURE = "EagleMtpTrainForCausalLM"


def register() -> None:
    """Register the class by name, so that it is imported only where a served folder asks for it. Harmless when repeated."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"mtp_train.engine.vllm_plugin_model:{ARCHITECTURE}")
