"""PCT without its estimate of a time gain, for table 3 of EDD + PCT."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import Variant
from specsim.policy.tree.pct import PCT
from specsim.policy.tree.pct import select as select_likely


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    width, expanded = int(params.width), 0
    for i in range(first, end):
        # A node below the leaf threshold would be pruned together with its children.
        sure = (tree.prob[i] >= params.cost_ratio) & (tree.path[i] >= params.leaf_threshold)
        likely = ((i == 0) | sure) & (expanded < int(params.max_nodes))
        widths[i] = width * likely
        expanded += likely
    return state


@nb.njit
def select(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    select_likely(state, params, tree, count, keep)
    return params.leaf_threshold


@dataclass(frozen=True)
class SureTree(PCT):
    """Expand every node that is confident enough itself, regardless of the probability of its path."""

    name = "sure_tree"
    source = "EDD + PCT, table 3, without expected time gain"
    variants = (Variant("s_d / s_t of the costs", tuned=False),)
    expand = staticmethod(expand)
    select = staticmethod(select)

    @property
    def max_expanded(self) -> int:
        return self.max_nodes
