"""Inputs of a measurement: copies of them, their size, and fresh memory that shows what was not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def copied(args: Any) -> Any:
    """Arguments whose tensors are copies with the same strides."""
    if isinstance(args, torch.Tensor):
        return args.clone()
    return type(args)(map(copied, args)) if isinstance(args, (tuple, list)) else args


def total_bytes(args: Any) -> int:
    """Bytes of all tensors."""
    if isinstance(args, torch.Tensor):
        return args.numel() * args.element_size()
    return sum(map(total_bytes, args)) if isinstance(args, (tuple, list)) else 0


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, giving the arguments that it has changed."""

    def run(*args: Any) -> Any:
        function(*args)
        return args

    return run


class Poison(TorchFunctionMode):
    """Fills fresh tensors with NaN or the largest integer, so that an unwritten element is seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("empty", "empty_like", "empty_strided", "new_empty"):
            if result.is_floating_point():
                result.fill_(torch.nan)
            else:
                result.fill_(True if result.dtype == torch.bool else torch.iinfo(result.dtype).max)
        return result
