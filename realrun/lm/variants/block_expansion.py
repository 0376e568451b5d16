"""A deeper target that says exactly the same: block expansion (LLaMA Pro, Wu et al. 2024, arXiv:2401.02415).

A new block is a copy of the layer below it whose two output projections are zero, so that it passes its input on and
yet takes as long as any layer. Text, states and, with them, the acceptance of every draft are the core model's, to the
last bit; what a pass costs is a deep model's.

Blocks are spread evenly: of D core layers, n and their blocks are n / D of the deep model. So a drafter that runs a
share of the core's layers, as EESD and Self-SD do, pays for that share of the deep model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import torch

from specsim.errors import InputError


def expand(core: Any, layers: int) -> Any:
    """The model with so many layers in all, the new ones spread evenly; weights are shared with the core.

    Raises InputError where the model has that many layers already.
    """
    depth = int(core.config.num_hidden_layers)
    if layers <= depth:
        raise InputError(f"{layers} layers are no more than the {depth} there are; ask for more")
    stack, origins = [], []
    for number, (start, end) in enumerate(pairwise(_starts(depth, layers))):
        layer = core.model.layers[number]
        stack += [layer, *(_identity_block(layer) for _ in range(start + 1, end))]
        origins += [number] * (end - start)
    return _with_layers(core, stack, origins, {"core_layers": depth})


def expanded_like(core: Any, other: Any) -> Any:
    """The model with as many blocks as another has; itself if that has none."""
    return core if expansion_of(other) is None else expand(core, int(other.config.num_hidden_layers))


def core_of(model: Any) -> Any:
    """The model without its identity blocks, weights shared; itself where it has none."""
    expansion = expansion_of(model)
    if expansion is None:
        return model
    places = _starts(expansion["core_layers"], int(model.config.num_hidden_layers))[:-1]
    return _with_layers(model, [model.model.layers[place] for place in places], places, None)


def expansion_of(model: Any) -> dict[str, int] | None:
    """What tells the layout in files: {"core_layers": D}; None for a model as it was trained.

    Files from before blocks were spread have {"after", "blocks"}: all blocks stood behind the layer "after".
    """
    return getattr(model.config, "block_expansion", None)


def layers_below(model: Any, layers: int) -> int:
    """How many of its layers so many of the core's are, each with its blocks."""
    expansion, depth = expansion_of(model), int(model.config.num_hidden_layers)
    return layers if expansion is None else _starts(expansion["core_layers"], depth)[layers]


def with_blocks(model: Any, layers: Collection[int]) -> frozenset[int]:
    """The numbers of its layers that these of the core's are, each with its blocks."""
    return frozenset(
        number for layer in layers for number in range(layers_below(model, layer), layers_below(model, layer + 1))
    )


def _starts(core_layers: int, layers: int) -> list[int]:
    """The place of each core layer, before its blocks, and behind the last the number of all layers."""
    return [number * layers // core_layers for number in range(core_layers + 1)]


def _identity_block(layer: Any) -> Any:
    """A copy in memory of its own whose attention and MLP add nothing to the residual stream."""
    block = copy.deepcopy(layer)
    with torch.no_grad():
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            for parameter in last.parameters():
                parameter.zero_()
    return block


def _with_layers(model: Any, layers: list[Any], origins: Sequence[int], expansion: dict[str, int] | None) -> Any:
    """A model of these layers, each numbered by its new place, with the embedding, norm and head of the given one.

    origins : the number of the given model's layer that each is or copies
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[origin] for origin in origins]
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
