"""Models and modules of other structure on the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch


def shallow_copy(module: Any) -> Any:
    """Copy a module, hooks included, with the same parameters and children."""
    own = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            setattr(own, name, copy.copy(value))
    return own


def with_layers(model: Any, layers: Iterable[Any], config: Any = None) -> Any:
    """Make a model of these layers that shares embedding, norm and head, and the configuration unless given."""
    whole, inner = shallow_copy(model), shallow_copy(model.model)
    inner.layers = torch.nn.ModuleList(layers)
    if config is not None:
        inner.config = whole.config = config
    whole.model = inner
    return whole
