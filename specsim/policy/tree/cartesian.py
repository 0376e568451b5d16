"""Cartesian tree: as many children at each depth, whatever their parent."""

from __future__ import annotations

from dataclasses import dataclass

from specsim.policy.base import Variant, setting
from specsim.policy.static_tree import shape as tree_shapes
from specsim.policy.tree.static import StaticTree, check_shape


@dataclass(frozen=True)
class Cartesian(StaticTree):
    """MEDUSA's dense tree, the Cartesian product of each depth's candidates; a size of 0 ends it."""

    s1: int = setting(2, 1, 32, tune=(1, 6), doc="children of the root")
    s2: int = setting(3, 0, 32, tune=(0, 4), doc="children of each node at depth 1")
    s3: int = setting(0, 0, 32, tune=(0, 2), doc="children of each node at depth 2")
    s4: int = setting(0, 0, 32, tune=(0, 2), doc="children of each node at depth 3")

    name = "cartesian"
    source = "MEDUSA, section 3.1.2; figure 2 is 2 x 3"
    variants = (Variant("tuned"), Variant("2 x 3", {"s1": 2, "s2": 3, "s3": 0, "s4": 0}, tuned=False))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shape(self.name, self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tree_shapes.cartesian((self.s1, self.s2, self.s3, self.s4))
