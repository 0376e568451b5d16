"""Models of other structure on the same parameters: with sublayers skipped, with blocks added, tuned with a drafter.

Block expansion (LLaMA Pro, Wu et al. 2024, arXiv:2401.02415) makes a deeper target with the same output. A new block is
an identity block: a copy of the layer below it whose two output projections are zero. It takes as long as any layer.
Text, states and the acceptance of every draft are those of the core model to the last bit, while a pass costs as much
as that of a deep model. Blocks are spread evenly: n of D core layers and their blocks are n / D of the deep model. A
drafter that runs a share of the core's layers (EESD, Self-SD) therefore pays for that share of the deep model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from specsim.io.errors import InputError

ADAPTER = "adapter."  # before NAME.A [r, in] and NAME.B [out, r], the low-rank update of the linear module NAME
TUNED = "tuned."  # before the name of every parameter of a target that was tuned whole


def shallow_copy(module: Any) -> Any:
    """Copy a module, hooks included, with the same parameters and children."""
    copied = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            setattr(copied, name, copy.copy(value))
    return copied


def without_head(model: Any) -> Any:
    """Return the part of a model below its head."""
    return model.model if model.base_model is model else model.base_model


def with_layers(model: Any, layers: Iterable[Any], config: Any = None) -> Any:
    """Make a model of these layers that shares embedding, norm and head, and the configuration unless given."""
    whole, inner = shallow_copy(model), shallow_copy(model.model)
    inner.layers = torch.nn.ModuleList(layers)
    if config is not None:
        inner.config = whole.config = config
    whole.model = inner
    return whole


def config_of_layers(config: Any, numbers: Sequence[int]) -> Any:
    """Copy a configuration for a model of these layers. numbers : of the layers, in order; a number may repeat."""
    new, types = copy.deepcopy(config), getattr(config, "layer_types", None)
    new.num_hidden_layers = len(numbers)
    with suppress(AttributeError):  # some configurations compute layer_types from the number of layers
        if types:
            new.layer_types = [types[number] for number in numbers]
    if differing := getattr(config, "per_layer_attributes", None):  # such as the size of a head
        layers = config.per_layer_config
        new.per_layer_config = {
            place: {name: getattr(layers[number], name) for name in differing} for place, number in enumerate(numbers)
        }
    return new


class SkippedSublayers(NamedTuple):
    """Numbers of the layers, from 0, whose attention or MLP a draft skips (Self-SD): only the residual passes."""

    attention: frozenset[int]
    mlp: frozenset[int]

    @property
    def in_order(self) -> dict[str, list[int]]:
        """Make the JSON form, sorted."""
        return {"attention": sorted(self.attention), "mlp": sorted(self.mlp)}


NOTHING = SkippedSublayers(frozenset(), frozenset())


def expand(core: Any, layers: int) -> Any:
    """Add identity blocks, spread evenly, up to this number of layers; weights are shared with the core.

    Raises InputError if the model has that many layers already.
    """
    depth = int(core.config.num_hidden_layers)
    if layers <= depth:
        raise InputError(f"{layers} layers are no more than the {depth} there are; ask for more")
    stack, origins = [], []
    for number, (start, end) in enumerate(pairwise(_starts(depth, layers))):
        layer = core.model.layers[number]
        stack += [layer, *(_identity_block(layer) for _ in range(start + 1, end))]
        origins += [number] * (end - start)
    return _expanded(core, stack, origins, {"core_layers": depth})


def expanded_like(core: Any, other: Any) -> Any:
    """Expand the model to the depth of another; return it unchanged if that has no identity blocks."""
    return core if expansion_of(other) is None else expand(core, int(other.config.num_hidden_layers))


def core_of(model: Any) -> Any:
    """Remove the identity blocks, sharing weights; return the model itself if it has none."""
    expansion = expansion_of(model)
    if expansion is None:
        return model
    places = _starts(expansion["core_layers"], int(model.config.num_hidden_layers))[:-1]
    return _expanded(model, [model.model.layers[place] for place in places], places, None)


def expansion_of(model: Any) -> dict[str, int] | None:
    """Read the layout that files hold: {"core_layers": D}; None for a model as it was trained.

    Files from before blocks were spread have {"after", "blocks"}: all blocks stood behind the layer "after".
    """
    return getattr(model.config, "block_expansion", None)


def layers_below(model: Any, layers: int) -> int:
    """Count the layers of the expanded model that so many of the core's layers and their blocks are."""
    expansion, depth = expansion_of(model), int(model.config.num_hidden_layers)
    return layers if expansion is None else _starts(expansion["core_layers"], depth)[layers]


def with_blocks(model: Any, layers: Collection[int]) -> frozenset[int]:
    """Number the layers of the expanded model that these of the core's layers and their blocks are."""
    return frozenset(
        number for layer in layers for number in range(layers_below(model, layer), layers_below(model, layer + 1))
    )


def _starts(core_layers: int, layers: int) -> list[int]:
    """Number each core layer, which stands before its blocks, in the expanded model; then the number of all layers."""
    return [number * layers // core_layers for number in range(core_layers + 1)]


def _identity_block(layer: Any) -> Any:
    """Copy a layer so that its attention and MLP add nothing to the residual stream."""
    block = copy.deepcopy(layer)
    with torch.no_grad():
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            for parameter in last.parameters():
                parameter.zero_()
    return block


def _expanded(model: Any, layers: list[Any], origins: Sequence[int], expansion: dict[str, int] | None) -> Any:
    """Make a model of these layers, each numbered by its new place.

    origins : for each layer, the number of the model's layer that it is or copies
    """
    config = config_of_layers(model.config, origins)
    config.block_expansion = expansion
    return with_layers(model, [_numbered(layer, place) for place, layer in enumerate(layers)], config)


def _numbered(layer: Any, place: int) -> Any:
    numbered, attention = shallow_copy(layer), shallow_copy(layer.self_attn)
    attention.layer_idx = place
    numbered.self_attn = attention
    return numbered


def tuned_target(target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Any:
    """Copy the target with these low-rank updates or parameters; return the target itself if there are none.

    facts["adapter"] : {"rank", "alpha"}; W + alpha / rank B A is the tuned weight
    """
    whole = {name.removeprefix(TUNED): value for name, value in tensors.items() if name.startswith(TUNED)}
    if whole:
        tuned = copy.deepcopy(target)
        parameters = dict(tuned.named_parameters())
        if parameters.keys() != whole.keys():
            raise KeyError("parameters of other names")
        with torch.no_grad():
            for name, value in whole.items():
                parameters[name].copy_(value)
        return tuned
    names = {name.removeprefix(ADAPTER)[:-2] for name in tensors if name.startswith(ADAPTER)}
    if not names:
        return target
    scale = facts["adapter"]["alpha"] / facts["adapter"]["rank"]
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        for name in sorted(names):
            weight = tuned.get_submodule(name).weight
            low, high = (tensors[f"{ADAPTER}{name}.{part}"].to(weight.device, torch.float64) for part in "AB")
            weight.copy_((weight.double() + scale * high @ low).to(weight.dtype))
    return tuned
