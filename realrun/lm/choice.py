"""Choice of the pass that runs a model: the library's, the fused pass, or the pass over a static cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from realrun.lm import kernels
from realrun.lm.cached import CachedLM, has_convolutions, has_recurrent_layers
from realrun.lm.llama import FusedLlama, supported
from realrun.lm.recurrent import ConvolutionLM, RecurrentLM
from realrun.lm.static.llama import StaticLlama


def static_serves(model: PreTrainedModel) -> bool:
    """Decide whether a model runs over a static cache, with kernels and graphs: on a GPU, or if kernels were named."""
    return supported(model) and (model.device.type == "cuda" or kernels.named())


def make_lm(model: PreTrainedModel, drafting: bool = False) -> CachedLM:
    """Make the fastest CachedLM for this model on its device. drafting : whether the model drafts token by token."""
    if not supported(model):
        return library_lm(model, drafting)
    return StaticLlama(model) if static_serves(model) else FusedLlama(model)


def library_lm(model: PreTrainedModel, drafting: bool = False) -> CachedLM:
    """Make the CachedLM that runs the library's own pass; drafting : as in `make_lm`."""
    if has_convolutions(model.config):
        return ConvolutionLM(model)
    return RecurrentLM(model, drafting) if has_recurrent_layers(model.config) else CachedLM(model)
