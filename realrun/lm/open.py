"""Which pass runs a model: the library's, the fused one, or the one over a static cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from realrun.lm import kernels
from realrun.lm.cached import CachedLM
from realrun.lm.llama import FusedLlama, supported
from realrun.lm.static.llama import StaticLlama


def static_serves(model: PreTrainedModel) -> bool:
    """Whether this model runs over a static cache, with kernels and graphs: on a GPU, or where kernels were named."""
    return supported(model) and (model.device.type == "cuda" or kernels.named())


def make_lm(model: PreTrainedModel) -> CachedLM:
    """The fastest CachedLM for this model on its device."""
    if not supported(model):
        return CachedLM(model)
    return StaticLlama(model) if static_serves(model) else FusedLlama(model)
