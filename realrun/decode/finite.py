"""Logits that are no numbers: found in what is read back anyway, and traced to where they begin.

Float16 overflows in models that were trained in bfloat16, and damaged weights hold NaN. Logits of -inf are legal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from realrun.lm.cached import CachedLM
from specsim.errors import InputError


class TargetPeaks:
    """The largest logit of every row that a target gave in a sequence; NaN where a row holds one.

    One operation a pass that nothing waits for; read once a sequence.
    """

    def __init__(self, target: CachedLM) -> None:
        self.target = target
        self._peaks: list[torch.Tensor] = []

    def note(self, logits: torch.Tensor, emitted: Sequence[int], tokens: Sequence[int]) -> None:
        """Take up logits [n, V] of a pass after `tokens`; InputError where they led to no token, as kernels say."""
        self._peaks.append(logits.amax(-1))
        if not emitted or min(emitted) < 0:
            raise refuse_logits(self.target, tokens, "target")

    def check(self, tokens: Sequence[int]) -> None:
        """InputError unless all logits of this sequence were numbers; waits for the device."""
        if not torch.cat(self._peaks).isfinite().all():
            raise refuse_logits(self.target, tokens, "target")


def refuse_logits(lm: CachedLM, tokens: Sequence[int], role: str) -> InputError:
    """The error to raise where a model's logits after these tokens are no numbers. role : "target" or "drafter" """
    model: Any = lm.model
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    dtype = str(model.dtype).removeprefix("torch.")
    wider = "" if model.dtype in (torch.float32, torch.float64) else ", or compute in float32 (--dtype float32)"
    return InputError(
        f"the {role} {name} gives logits that are no finite numbers in {dtype}, first {_where(model, tokens)}; "
        f"check its weights{wider}"
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
