"""The number types that models are loaded in, by name: that of the weights, and whether logits have more digits."""

from __future__ import annotations

from typing import Any

import torch

from realrun.lm.head import gives_float32, with_float32_logits
from specsim.errors import InputError

FLOAT32_LOGITS = "-float32-logits"
WEIGHTS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NUMBER_TYPES = {
    **WEIGHTS,
    **{name + FLOAT32_LOGITS: dtype for name, dtype in WEIGHTS.items() if dtype.itemsize < 4},
}


def find_dtype(name: str) -> torch.dtype:
    """The type of the weights of models in that number type; InputError names the known ones."""
    if name not in NUMBER_TYPES:
        raise InputError(f"dtype {name!r} is unknown; known: {', '.join(NUMBER_TYPES)}")
    return NUMBER_TYPES[name]


def in_number_type(model: Any, name: str) -> Any:
    """The model itself, whose weights are of this number type already, with its logits in it, too."""
    return with_float32_logits(model) if name.endswith(FLOAT32_LOGITS) else model


def number_type(model: Any) -> str:
    """The name of the number type that a model is in."""
    weights = str(model.dtype).removeprefix("torch.")
    return weights + FLOAT32_LOGITS if gives_float32(model) else weights
