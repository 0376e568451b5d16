"""Inputs of a measurement: copies, sizes, and poisoned memory that reveals unwritten elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def copied(args: Any) -> Any:
    """Copy arguments, tensors with the same strides."""
    if isinstance(args, torch.Tensor):
        return args.clone()
    return type(args)(map(copied, args)) if isinstance(args, (tuple, list)) else args


def total_bytes(args: Any) -> int:
    """Number of bytes of all tensors."""
    if isinstance(args, torch.Tensor):
        return args.numel() * args.element_size()
    return sum(map(total_bytes, args)) if isinstance(args, (tuple, list)) else 0


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it returns the arguments that it changes."""

    def run(*args: Any) -> Any:
        function(*args)
        return args

    return run


class Poison(TorchFunctionMode):
    """Fill new tensors with NaN or the largest integer, which reveals unwritten elements."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("empty", "empty_like", "empty_strided", "new_empty"):
            if result.is_floating_point():
                result.fill_(torch.nan)
            else:
                result.fill_(True if result.dtype == torch.bool else torch.iinfo(result.dtype).max)
        return result
