"""The number types that models are loaded in, by name, and checks for NaN and infinite logits.

A type's name gives the type of the weights, and whether logits are in float32. Float16 overflows in models that were
trained in bfloat16, and damaged weights hold NaN. Both are found in values that are copied to the host anyway, and
traced to the layer where they begin. Logits of -inf are legal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from realrun.lm.cached import CachedLM
from realrun.lm.head import gives_float32, with_float32_logits
from specsim.io.arrays import Array
from specsim.io.errors import InputError

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
    """Look up the type of the weights in this number type; InputError for an unknown name."""
    if name not in NUMBER_TYPES:
        raise InputError(f"dtype {name!r} is unknown; known: {', '.join(NUMBER_TYPES)}")
    return NUMBER_TYPES[name]


def in_number_type(model: Any, name: str) -> Any:
    """Give a model, whose weights are of this number type already, logits of it; returns the model itself."""
    return with_float32_logits(model) if name.endswith(FLOAT32_LOGITS) else model


def cast_like(model: Any, target: Any) -> Any:
    """Give a new model of the target's kind the target's device and type; buffers that both have are the target's.

    The frequencies of rotary positions are such a buffer, float32 in a loaded model of any type.
    """
    model = model.to(target.device, target.dtype)
    buffers = dict(target.named_buffers())
    for name in [name for name, _ in model.named_buffers() if name in buffers]:
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, buffers[name].clone())
    return model


def number_type(model: Any) -> str:
    """Name the number type that a model is in."""
    weights = str(model.dtype).removeprefix("torch.")
    return weights + FLOAT32_LOGITS if gives_float32(model) else weights


class TargetPeaks:
    """The largest logit of every row of the target's in a sequence; NaN if the row holds NaN.

    Each pass adds an operation that nothing waits for; the results are read once per sequence.
    """

    def __init__(self, target: CachedLM) -> None:
        self.target = target
        self._peaks: list[torch.Tensor] = []

    def note(self, logits: torch.Tensor | None, tokens: Sequence[int], before: int) -> None:
        """Note a pass's logits [n, V]; InputError if it added no valid token to the `before` earlier tokens."""
        if logits is not None:
            self._peaks.append(logits.amax(-1))
        if len(tokens) == before or min(tokens[before:]) < 0:
            raise refuse_logits(self.target, tokens[:before], "target")

    def check(self, tokens: Sequence[int]) -> None:
        """Raise InputError if a logit of this sequence was NaN or +inf; waits for the device."""
        if self._peaks and not all(map(math.isfinite, torch.cat(self._peaks).tolist())):
            raise refuse_logits(self.target, tokens, "target")


def refuse_logits(lm: CachedLM, tokens: Sequence[int], role: str) -> InputError:
    """Make the error for a model whose logits after these tokens are not finite. role : "target" or "drafter" """
    model: Any = lm.model
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    wider = "" if model.dtype in (torch.float32, torch.float64) else ", or compute in float32 (--dtype float32)"
    return InputError(
        f"the {role} {name} gives logits that are not finite in {number_type(model)}, first "
        f"{_where(model, tokens)}; check its weights{wider}"
    )


class NotFinite(ValueError):
    """Drafted tokens come from logits that are not finite."""


def check_drafted(drafted: torch.Tensor) -> None:
    """Raise NotFinite for such statistics [n, c] on the host; kernels choose token -1 where all logits are NaN."""
    if drafted.isnan().any() or (drafted[:, 0] < 0).any():
        raise NotFinite


def check_columns(columns: Mapping[str, Array]) -> None:
    """Raise NotFinite for columns of a trace that hold NaN."""
    if any(column.dtype.kind == "f" and np.isnan(column).any() for column in columns.values()):
        raise NotFinite


@torch.inference_mode()
def _where(model: Any, tokens: Sequence[int]) -> str:
    """Find the part of a model whose output is the first that is not finite, by another pass."""
    places: list[str] = []
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None

    def look(name: str, module: torch.nn.Module, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if places or not isinstance(first, torch.Tensor) or not first.is_floating_point():
            return
        bad = first.isnan() | first.isposinf() if module is head else ~first.isfinite()
        if bad.any():
            places.append("in its logits" if module is head else f"in layer {name}")

    hooks = [
        module.register_forward_hook(lambda module, _, output, name=name: look(name, module, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        model(input_ids=torch.tensor([[*tokens]], device=model.device), use_cache=False)
    except Exception:  # a drafter's part that is not a whole model, or a device that failed
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return places[0] if places else "in its logits"
