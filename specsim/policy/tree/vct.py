"""VCT: the vanilla candidate tree, in which every node has the same number of children."""

from __future__ import annotations

from dataclasses import dataclass

from specsim.policy.base import Variant, setting
from specsim.policy.static_tree import shape as tree_shapes
from specsim.policy.tree.static import StaticTree, check_shape


@dataclass(frozen=True)
class VCT(StaticTree):
    """Fixed width and depth, the baseline of EDD + PCT's table 2.

    Width 3 and depth 5 is 363 nodes, which its printed speedups rule out; so a level may be capped
    to the nodes of least rank sum (`tree_shapes.vct`). 243 nodes leave the default full.
    """

    width: int = setting(3, 1, 16, tune=(1, 8), doc="children of every node")
    depth: int = setting(5, 1, 32, tune=(1, 8), bounds="depth", doc="deepest nodes, in tokens")
    level_nodes: int = setting(243, 1, 1022, tune=(1, 32), log=True, doc="most nodes of a level")

    name = "vct"
    source = "EDD + PCT, section 4.1 and appendix, width 3 and depth 5; per-level cap of our own"
    variants = (
        Variant("tuned"),
        Variant("3 wide, 5 deep, full", {"width": 3, "depth": 5, "level_nodes": 243}, tuned=False),
        Variant("3 wide, 5 deep, 10 a level", {"width": 3, "depth": 5, "level_nodes": 10}, tuned=False),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shape(self.name, self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tree_shapes.vct(self.width, self.depth, self.level_nodes)
