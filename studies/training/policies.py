"""A policy that an ablation alone has: PCT without its estimate of a gain."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.tree.pct import PCT, select


@nb.njit
def expand_sure(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    """Expand what the drafter is sure of, whatever the chance that its parents are accepted.

    Not what is to be dropped as a leaf, for its children would be dropped with it.
    """
    width, expanded = int(params.width), 0
    for i in range(first, end):
        sure = (tree.prob[i] >= params.cost_ratio) & (tree.path[i] >= params.leaf_threshold)
        likely = ((i == 0) | sure) & (expanded < int(params.max_nodes))
        widths[i] = width * likely
        expanded += likely
    return state


@nb.njit
def select_sure(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    """Keep what PCT keeps, the likeliest; nodes are expanded from the leaves' threshold on."""
    select(state, params, tree, count, keep)
    return params.leaf_threshold


@dataclass(frozen=True)
class SureTree(PCT):
    """PCT without its estimate of a gain (table 3): a node's own confidence against a threshold."""

    name = "sure_tree"
    variants = PCT.variants
    expand = staticmethod(expand_sure)
    select = staticmethod(select_sure)

    @property
    def max_expanded(self) -> int:
        return self.max_nodes
