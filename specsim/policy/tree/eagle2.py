"""EAGLE-2: grow the likeliest few nodes of every level, then verify the likeliest of all."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.io.errors import InputError
from specsim.policy.base import Variant, setting
from specsim.policy.memoryless import initial_state, update
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy
from specsim.policy.tree.expansion import expand_beam, mark_best


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    top_k = int(params.top_k)
    expand_beam(tree, first, end, top_k, top_k, widths)
    return state


@nb.njit
def select(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    # Why no node of a path below the floor f, the n-th best path, can change what is kept, although the beam
    # chooses among all nodes. Call a node of path >= f heavy. By induction over the levels the heavy nodes
    # drafted are the same, in the same order, whatever lighter nodes there are: their parents are heavy, for
    # paths only shrink; a heavy node is in the beam if fewer than top_k heavy ones of its level are likelier, or
    # as likely and before it, for light nodes rank behind all heavy ones; and siblings are drafted by rank. The
    # n best of all nodes are heavy, ties go by that order, so the kept are the same as well.
    return mark_best(tree.path, 1, count, int(params.nodes), True, keep, tree.value)


@dataclass(frozen=True)
class Eagle2(TreePolicy):
    """Draft top_k children of the top_k likeliest nodes of each level; verify the `nodes` likeliest of all.

    How likely a node is, is the product of the draft probabilities along its path. All levels
    are drafted, whatever the probabilities: a depth of 6 always costs 6 passes. Ties go to the node drafted first.
    """

    nodes: int = setting(50, 1, MAX_DRAFTED, tune=(4, 64), bounds="nodes", doc="drafted nodes that are verified")
    depth: int = setting(6, 1, 32, tune=(1, 10), bounds="depth", doc="levels of the tree")
    top_k: int = setting(
        10, 1, 31, tune=(1, 10), bounds="width", doc="nodes of a level that are expanded, and children of each"
    )

    name = "eagle2"
    source = "EAGLE-2 (Li et al. 2024a), as EDD + PCT gives it in appendix A"
    variants = (Variant("50 nodes, depth 6", {"nodes": 50, "depth": 6, "top_k": 10}, tuned=False), Variant("tuned"))
    initial_state = staticmethod(initial_state)
    expand = staticmethod(expand)
    select = staticmethod(select)
    update = staticmethod(update)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_drafted > MAX_DRAFTED:
            raise InputError(
                f"policy {self.name}: depth={self.depth} and top_k={self.top_k} draft {self.max_drafted} nodes, more "
                f"than {MAX_DRAFTED}; lower either"
            )

    @property
    def max_drafted(self) -> int:
        """Nodes of a tree of all levels."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @property
    def max_expanded(self) -> int:
        return self.top_k

    @property
    def max_width(self) -> int:
        return self.top_k
