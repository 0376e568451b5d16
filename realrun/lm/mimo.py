"""MiMo targets (Xiaomi), which transformers does not have: a Qwen2 model with MTP modules.

References: vLLM's model_executor/models/mimo.py.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    """config.json of a MiMo checkpoint."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The target without its MTP modules, which `realrun.drafters.mtp` reads."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"model\.mtp_layers\..*"]


AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
