"""SparseTree: the static tree of a given size that gets most tokens accepted."""

from __future__ import annotations

from dataclasses import dataclass

from specsim.io.errors import InputError
from specsim.policy.base import setting
from specsim.policy.static_tree.shape import cut
from specsim.policy.tree.base import MAX_DRAFTED
from specsim.policy.tree.static import StaticTree, check_shape

NODES = 63  # with the root 64, and 4 deep, as the tree that MEDUSA shows
# The best tree of NODES nodes where the candidate of rank r is right at depth d with 0.9^d x 0.6 x 0.3^r.
ROUGH_TREE = (
    5.0, 5.0, 4.0, 3.0, 2.0, 1.0, 4.0, 3.0, 2.0, 1.0, 0.0, 3.0, 2.0, 1.0, 0.0, 2.0, 1.0, 0.0, 1.0, 0.0, 0.0, 3.0,
    3.0, 1.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 3.0, 2.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0,
    0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
)  # fmt: skip


@dataclass(frozen=True)
class LearnedTree(StaticTree):
    """Base of static trees that `fit` learns, unless they are given. The default comes from no fit."""

    children: tuple[float, ...] = setting(
        ROUGH_TREE, 0, MAX_DRAFTED, doc="learned: children of every node in level order, the root first"
    )

    max_depth: int = setting(16, 1, 255, tune=(1, 16), bounds="depth", doc="deepest nodes of the tree, in tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(count != int(count) for count in self.children):
            raise InputError(f"policy {self.name}: children has a count that is no whole number; give whole ones")
        check_shape(self.name, tuple(map(int, self.children)))

    @property
    def shape(self) -> tuple[int, ...]:
        return cut(tuple(map(int, self.children)), self.max_depth)


@dataclass(frozen=True)
class SparseTree(LearnedTree):
    """MEDUSA's sparse tree: the likeliest nodes, by how often each rank is right at each depth.

    `fit` counts the rates on a trace and takes the best tree of `nodes` nodes (`specsim.policy.static_tree.search`).
    """

    nodes: int = setting(NODES, 1, MAX_DRAFTED, tune=(1, 64), log=True, doc="nodes of the tree that is learned")

    name = "sparse_tree"
    source = "MEDUSA, section 3.3.3; rates by depth given the path so far, as Sequoia (arXiv:2402.12374)"
