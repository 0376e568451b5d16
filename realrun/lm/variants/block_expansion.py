"""A deeper target that says exactly the same: block expansion (LLaMA Pro, Wu et al. 2024, arXiv:2401.02415).

A new block is a copy of the layer below it whose two output projections are zero, so that it passes its input on and
yet takes as long as any layer. Text, states and, with them, the acceptance of every draft are the core model's, to the
last bit; what a pass costs is a deep model's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from specsim.errors import InputError


def expand(core: Any, layers: int, after: int) -> Any:
    """The model with so many layers in all, the new ones behind the first `after`; weights are shared with the core.

    Raises InputError where the model has that many layers already.
    """
    depth = int(core.config.num_hidden_layers)
    if layers <= depth:
        raise InputError(f"{layers} layers are no more than the {depth} there are; ask for more")
    blocks = layers - depth
    below = core.model.layers[after - 1]
    added = [_identity_block(below) for _ in range(blocks)]
    stack = [*core.model.layers[:after], *added, *core.model.layers[after:]]
    return _with_layers(core, stack, {"after": after, "blocks": blocks})


def expanded_like(core: Any, other: Any) -> Any:
    """The model with as many blocks, in the same place, as another has; itself if that has none."""
    expansion = expansion_of(other)
    return core if expansion is None else expand(core, int(core.config.num_hidden_layers) + expansion[1], expansion[0])


def core_of(model: Any) -> Any:
    """The model without its identity blocks, weights shared; itself where it has none."""
    expansion = expansion_of(model)
    if expansion is None:
        return model
    after, blocks = expansion
    return _with_layers(model, [*model.model.layers[:after], *model.model.layers[after + blocks :]], None)


def expansion_of(model: Any) -> tuple[int, int] | None:
    """Layers below the identity blocks, and how many blocks there are; None for a model as it was trained."""
    facts = getattr(model.config, "block_expansion", None)
    return None if facts is None else (int(facts["after"]), int(facts["blocks"]))


def layers_below(model: Any, layers: int) -> int:
    """How many of its layers lie below the states that so many of the core's layers give."""
    after, blocks = expansion_of(model) or (layers, 0)
    return layers if layers <= after else layers + blocks


def _identity_block(layer: Any) -> Any:
    """A copy in memory of its own whose attention and MLP add nothing to the residual stream."""
    block = copy.deepcopy(layer)
    with torch.no_grad():
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            for parameter in last.parameters():
                parameter.zero_()
    return block


def _with_layers(model: Any, layers: list[Any], expansion: dict[str, int] | None) -> Any:
    """A model of these layers, each numbered by its new place, with the embedding, norm and head of the given one."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[-1]] * len(layers)
    config.block_expansion = expansion
    whole, inner = shallow(model), shallow(model.model)
    inner.layers = torch.nn.ModuleList([_numbered(layer, place) for place, layer in enumerate(layers)])
    inner.config = whole.config = config
    whole.model = inner
    return whole


def _numbered(layer: Any, place: int) -> Any:
    """The layer with the cache slot of its place, on the same parameters."""
    own, attention = shallow(layer), shallow(layer.self_attn)
    attention.layer_idx = place
    own.self_attn = attention
    return own


def shallow(module: Any) -> Any:
    """A module of its own, hooks and all, with the same parameters and children."""
    own = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            setattr(own, name, copy.copy(value))
    return own
