"""CAPE: a chain with siblings beside it, the more of them the less confident the drafter is."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb
import numpy as np

from specsim.policy.base import Variant, setting
from specsim.policy.memoryless import initial_state, update
from specsim.policy.tree.base import UNKNOWN, TreePolicy


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    # The confidence is known only after the pass, so it drafts the most; `first` is the top-1 node of its level.
    widths[first] = int(max(params.width_30, params.width_60, params.width_80, params.width_100))
    return state


@nb.njit
def select(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    width, floor = 0, np.inf
    for i in range(1, count):
        if tree.rank[i] == 0:  # the first of its level
            confidence = tree.prob[i]
            if confidence <= 0.3:
                width = int(params.width_30)
            elif confidence <= 0.6:
                width = int(params.width_60)
            elif confidence <= 0.8:
                width = int(params.width_80)
            else:
                width = int(params.width_100)
            if confidence < 0.0:  # UNKNOWN, and the width with it
                floor = UNKNOWN
        keep[i] = tree.rank[i] < width
    return floor


@dataclass(frozen=True)
class Cape(TreePolicy):
    """Expand the top-1 node of every level; verify as many of its children as the confidence of the level asks for.

    The confidence is the probability of the first child, as every tree policy sees it: the largest of
    the draft's, and, where the drafter shares the target's noise, the probability given the noise. Only the first
    children are drafted on, so the tree is a chain with leaves beside it. A pass drafts
    the largest width, for more tokens of the same distribution cost nothing; those beyond the
    level's width are not verified. Which nodes are kept depends on the chain alone.
    """

    width_30: int = setting(7, 1, 30, tune=(1, 10), bounds="width", doc="nodes of a level, confidence up to 0.3")
    width_60: int = setting(
        5, 1, 30, tune=(1, 10), bounds="width", doc="nodes of a level, confidence above 0.3, up to 0.6"
    )
    width_80: int = setting(
        3, 1, 30, tune=(1, 10), bounds="width", doc="nodes of a level, confidence above 0.6, up to 0.8"
    )
    width_100: int = setting(1, 1, 30, tune=(1, 10), bounds="width", doc="nodes of a level, confidence above 0.8")
    depth: int = setting(5, 1, 32, tune=(1, 10), bounds="depth", doc="levels of the tree")

    name = "cape"
    source = "GLIDE (Du et al. 2024), as EDD + PCT gives it in appendix A"
    variants = (Variant("7, 5, 3, 1", tuned=False), Variant("tuned"))
    initial_state = staticmethod(initial_state)
    expand = staticmethod(expand)
    select = staticmethod(select)
    update = staticmethod(update)

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def max_nodes(self) -> int:
        return self.depth * self.max_width

    @property
    def max_expanded(self) -> int:
        return 1

    @property
    def max_width(self) -> int:
        return max(self.width_30, self.width_60, self.width_80, self.width_100)
