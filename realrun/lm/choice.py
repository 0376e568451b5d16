"""Choice of the pass that runs a model: the library's, the fused pass, or the pass over a static cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from realrun.lm import kernels
from realrun.lm.cached import CachedLM
from realrun.lm.llama import FusedLlama, supported
from realrun.lm.static.llama import StaticLlama


def static_serves(model: PreTrainedModel) -> bool:
    """Decide whether a model runs over a static cache, with kernels and graphs: on a GPU, or if kernels were named."""
    return supported(model) and (model.device.type == "cuda" or kernels.named())


def make_lm(model: PreTrainedModel) -> CachedLM:
    """Make the fastest CachedLM for this model on its device."""
    if not supported(model):
        return CachedLM(model)
    return StaticLlama(model) if static_serves(model) else FusedLlama(model)
