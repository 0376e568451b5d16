"""Greedy verification: the longest path of a draft tree that the target would have chosen."""

from __future__ import annotations

import torch

from speckernels.ops.results import Verified, check_tensor, check_trees, empty_results
from speckernels.runtime.dispatch import register


def greedy_verify(tokens: torch.Tensor, parents: torch.Tensor, choices: torch.Tensor) -> Verified:
    """Accept each node whose token is the target's choice after its accepted parent.

    Of several deepest accepted nodes the one of lowest index ends the path. Padding and nodes
    of negative tokens are never accepted, whatever the choice.

    Parameters
    ----------
    tokens : int64 [B, n], the token of each node; that of the root is not verified
    parents : int32 [B, n], the parent of each node, which precedes it. Node 0 is the root
        (the pending token) with parent -1; later nodes with parent -1 are padding
    choices : int64 [B, n], the target's choice (argmax) after each node

    Returns
    -------
    Verified
        The accepted path of each tree.

    Raises
    ------
    ValueError
        For other types or shapes, or more than 1024 nodes.

    References
    ----------
    Stern et al. 2018, arXiv:1811.03115, section 3, for chains; Cai et al. 2024,
    arXiv:2401.10774 (MEDUSA), section 3.1.2, for trees.
    """
    check_trees(tokens, parents)
    check_tensor("choices", choices, (torch.int64,), parents.shape, parents.device)
    args = (tokens.contiguous(), parents.contiguous(), choices.contiguous())
    return Verified(*torch.ops.speckernels.greedy_verify(*args))


register(
    "greedy_verify",
    "(Tensor tokens, Tensor parents, Tensor choices) -> (Tensor, Tensor, Tensor)",
    lambda tokens, parents, choices: tuple(empty_results(parents)),
)
