"""OptimalTree: the static tree that decodes fastest, by the rates of a trace and the costs of the hardware."""

from __future__ import annotations

from dataclasses import dataclass

from specsim.policy.base import Variant, setting
from specsim.policy.tree.base import MAX_DRAFTED
from specsim.policy.tree.sparse_tree import LearnedTree


@dataclass(frozen=True)
class OptimalTree(LearnedTree):
    """Sequoia's hardware-aware tree: most expected tokens per second over all sizes and depths.

    `fit` counts the rates on a trace and prices the rounds by its costs (`specsim.policy.static_tree.optimal`).
    Nothing is left to tune.
    """

    max_nodes: int = setting(64, 1, MAX_DRAFTED, doc="most nodes of the tree that is learned")
    max_depth: int = setting(16, 1, 255, bounds="depth", doc="deepest nodes of the tree that is learned, in tokens")

    name = "optimal_tree"
    source = "Sequoia, Chen et al. 2024, arXiv:2402.12374, with widths of draft passes priced too"
    variants = (Variant("fitted", tuned=False),)
