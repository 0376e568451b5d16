"""Result of the verification of a draft tree, and shared checks of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MAX_NODES = 1024


class Verified(NamedTuple):
    """The accepted path in each of B trees of n nodes.

    Attributes
    ----------
    path : int32 [B, n], nodes from the root (path[0] = 0) to the last accepted one, then -1
    accepted : int32 [B], accepted draft tokens; the root is not counted
    emitted : int64 [B, n], the accepted tokens and then the target's own token, that is
        accepted + 1 tokens, then -1
    """

    path: torch.Tensor
    accepted: torch.Tensor
    emitted: torch.Tensor


def empty_results(parents: torch.Tensor) -> Verified:
    """Uninitialised results of the right shapes and types."""
    return Verified(
        parents.new_empty(parents.shape),
        parents.new_empty(parents.shape[:1]),
        parents.new_empty(parents.shape, dtype=torch.int64),
    )


def check_trees(tokens: torch.Tensor, parents: torch.Tensor) -> None:
    """Raise ValueError unless tokens is int64 [B, n] and parents int32 [B, n] on its device."""
    if parents.dtype != torch.int32 or parents.dim() != 2 or not 1 <= parents.shape[1] <= MAX_NODES:
        raise ValueError(f"parents is {describe(parents)}; give int32 [B, n] with 1 to {MAX_NODES} nodes")
    check_tensor("tokens", tokens, (torch.int64,), parents.shape, parents.device)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
) -> None:
    """Raise ValueError unless the tensor has one of these types, this shape and this device.

    shape : None stands for any size.
    """
    fits = tensor.dim() == len(shape) and all(
        expected is None or size == expected for size, expected in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype not in dtypes or not fits:
        names = " or ".join(_short(dtype) for dtype in dtypes)
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} is {describe(tensor)}; give {names} [{sizes}]")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; move it to {device}, where the others are")


def describe(tensor: torch.Tensor) -> str:
    """Type and shape of a tensor for messages: "float32 [2, 5]"."""
    return f"{_short(tensor.dtype)} {list(tensor.shape)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
