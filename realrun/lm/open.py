"""Which pass runs a model: the library's, the fused one, or the one over a static cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from realrun.lm import kernels
from realrun.lm.cached import CachedLM
from realrun.lm.llama import FusedLlama, supported
from realrun.lm.static_llama import StaticLlama


def make_lm(model: PreTrainedModel) -> CachedLM:
    """The fastest CachedLM for this model on its device.

    On a GPU, or where kernels were named, the static cache with its kernels and graphs.
    """
    if not supported(model):
        return CachedLM(model)
    if model.device.type == "cuda" or kernels.named():
        return StaticLlama(model)
    return FusedLlama(model)
