"""The tree of one SPACE step: candidates to verify, and mask tokens that draft the next ones."""

from __future__ import annotations

from typing import NamedTuple

import torch

from speckernels.runtime.dispatch import register

MAX_CANDIDATES = 31  # 1024 nodes


class SpaceLayout(NamedTuple):
    """n = 1 + k(k + 2) nodes: the pending token, k candidates, k + 1 groups of k mask tokens.

    Attributes
    ----------
    parents : int32 [n]. Node 0 is the pending token, nodes 1 to k are the candidates, a chain
        below it; group g is a chain of mask tokens below node g, nodes 1 + k + gk and on
    is_mask : bool [n], whether a node is a mask token
    group : int32 [n], the group of a mask token; -1 for the others
    """

    parents: torch.Tensor
    is_mask: torch.Tensor
    group: torch.Tensor


def space_layout(candidates: int, device: torch.device | str) -> SpaceLayout:
    """Compute the positions of SPACE's candidates and mask tokens in the tree.

    `tree_metadata` of the parents gives the paper's attention mask and positions. If a
    candidates are accepted, group a drafts the next ones. Two departures: masks follow all
    candidates instead of being put between them (Eq. 5), so that what is accepted lies in a
    row and no cache entry has to move; and masks of different groups never see each other,
    as the paper's text has it, where Eq. 6 would let them for k > 2.

    Parameters
    ----------
    candidates : k, candidates and mask tokens per group, 0 to 31
    device : device of the result

    Returns
    -------
    SpaceLayout
        Parents, masks and groups of 1 + k(k + 2) nodes.

    Raises
    ------
    ValueError
        If candidates is outside 0 to 31.

    References
    ----------
    Yi et al. 2024, arXiv:2402.11809, Eqs. 5-7.
    """
    if not 0 <= candidates <= MAX_CANDIDATES:
        raise ValueError(f"candidates is {candidates}; give 0 to {MAX_CANDIDATES}")
    like = torch.empty(0, dtype=torch.int32, device=device)
    return SpaceLayout(*torch.ops.speckernels.space_layout(like, candidates))


def empty_results(like: torch.Tensor, candidates: int) -> SpaceLayout:
    """Uninitialised results of the right shapes and types."""
    nodes = 1 + candidates * (candidates + 2)
    parents = like.new_empty(nodes, dtype=torch.int32)
    return SpaceLayout(parents, torch.empty_like(parents, dtype=torch.bool), torch.empty_like(parents))


register(
    "space_layout",
    "(Tensor like, int candidates) -> (Tensor, Tensor, Tensor)",
    lambda like, candidates: tuple(empty_results(like, candidates)),
)
