"""Tree metadata: mask bits, positions and links of draft trees, from their parent arrays."""

from __future__ import annotations

from typing import NamedTuple

import torch

from speckernels.runtime.dispatch import register

MAX_NODES = 1024


class TreeMetadata(NamedTuple):
    """B trees of n nodes.

    Attributes
    ----------
    mask_bits : int32 [B, n, ceil(n / 32)], bit i % 32 of word i // 32 is set where node i is
        the node itself or an ancestor; padding nodes see only themselves
    positions : int64 [B, n], context + depth; the root has depth 0, padding counts as 0
    first_child, next_sibling : int32 [B, n], or -1
    """

    mask_bits: torch.Tensor
    positions: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor


def tree_metadata(parents: torch.Tensor, context_lens: torch.Tensor) -> TreeMetadata:
    """Compute the metadata of trees that attention and verification use.

    Parameters
    ----------
    parents : int32 [B, n], the parent of each node, which precedes it. Node 0 is the root
        (the pending token) with parent -1; later nodes with parent -1 are padding
    context_lens : int32 [B], cached tokens before the root

    Returns
    -------
    TreeMetadata
        Mask bits, positions and links of each tree.

    Raises
    ------
    ValueError
        For other types or shapes, or more than 1024 nodes.
    """
    if parents.dtype != torch.int32 or parents.dim() != 2 or not 1 <= parents.shape[1] <= MAX_NODES:
        raise ValueError(
            f"parents is {parents.dtype} {list(parents.shape)}; give int32 [B, n] with 1 to {MAX_NODES} nodes"
        )
    if context_lens.dtype != torch.int32 or context_lens.shape != parents.shape[:1]:
        raise ValueError(
            f"context_lens is {context_lens.dtype} {list(context_lens.shape)}; give int32 [{len(parents)}]"
        )
    return TreeMetadata(*torch.ops.speckernels.tree_metadata(parents.contiguous(), context_lens.contiguous()))


def empty_results(parents: torch.Tensor) -> TreeMetadata:
    """Uninitialised results of the right shapes and types."""
    batch, nodes = parents.shape
    return TreeMetadata(
        parents.new_empty(batch, nodes, (nodes + 31) // 32),
        parents.new_empty(batch, nodes, dtype=torch.int64),
        torch.empty_like(parents),
        torch.empty_like(parents),
    )


register(
    "tree_metadata",
    "(Tensor parents, Tensor context_lens) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda parents, context_lens: tuple(empty_results(parents)),
)
