"""The number types that models are loaded in, by name, and logits that are no numbers in them.

A type's name says that of the weights, and whether logits have more digits. Float16 overflows in models that were
trained in bfloat16, and damaged weights hold NaN: found in what is read back anyway, and traced to where it begins.
Logits of -inf are legal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from realrun.lm.cached import CachedLM
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


class TargetPeaks:
    """The largest logit of every row that a target gave in a sequence; NaN where a row holds one.

    One operation a pass that nothing waits for; read once a sequence.
    """

    def __init__(self, target: CachedLM) -> None:
        self.target = target
        self._peaks: list[torch.Tensor] = []

    def note(self, logits: torch.Tensor | None, tokens: Sequence[int], before: int) -> None:
        """Take up logits [n, V] of a pass; InputError if it added no token to the `before`, as with kernels."""
        if logits is not None:
            self._peaks.append(logits.amax(-1))
        if len(tokens) == before or min(tokens[before:]) < 0:
            raise refuse_logits(self.target, tokens[:before], "target")

    def check(self, tokens: Sequence[int]) -> None:
        """InputError unless all logits of this sequence were numbers; waits for the device."""
        if self._peaks and not all(map(math.isfinite, torch.cat(self._peaks).tolist())):
            raise refuse_logits(self.target, tokens, "target")


def refuse_logits(lm: CachedLM, tokens: Sequence[int], role: str) -> InputError:
    """The error to raise where a model's logits after these tokens are no numbers. role : "target" or "drafter" """
    model: Any = lm.model
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    wider = "" if model.dtype in (torch.float32, torch.float64) else ", or compute in float32 (--dtype float32)"
    return InputError(
        f"the {role} {name} gives logits that are no finite numbers in {number_type(model)}, first "
        f"{_where(model, tokens)}; check its weights{wider}"
    )


class NotFinite(ValueError):
    """Drafts come from logits that are no numbers."""


def check_drafted(drafted: torch.Tensor) -> None:
    """Raise NotFinite for statistics [n, c] on the host, tokens first; kernels choose -1 where no logit is a number."""
    if drafted.isnan().any() or (drafted[:, 0] < 0).any():
        raise NotFinite


def check_columns(columns: Mapping[str, Any]) -> None:
    """Raise NotFinite for columns of a trace that hold a value that is no number."""
    if any(column.dtype.kind == "f" and np.isnan(column).any() for column in columns.values()):
        raise NotFinite


@torch.inference_mode()
def _where(model: Any, tokens: Sequence[int]) -> str:
    """The part of a model whose output is the first that is not finite, found by a pass of its own."""
    found: list[str] = []
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None

    def look(name: str, module: torch.nn.Module, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if found or not isinstance(first, torch.Tensor) or not first.is_floating_point():
            return
        bad = first.isnan() | first.isposinf() if module is head else ~first.isfinite()
        if bad.any():
            found.append("in its logits" if module is head else f"in layer {name}")

    hooks = [
        module.register_forward_hook(lambda module, _, output, name=name: look(name, module, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        model(input_ids=torch.tensor([[*tokens]], device=model.device), use_cache=False)
    except Exception:  # a drafter's part that is no model of its own, or a device that failed
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "in its logits"
