"""PCT, the pruned candidate tree: expand what is likelier to be accepted than a draft pass costs, in target passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numba as nb

from specsim.policy.base import Settings, Variant, build_policy, setting
from specsim.policy.memoryless import initial_state, update
from specsim.policy.tree.base import TreePolicy
from specsim.policy.tree.expansion import mark_best

if TYPE_CHECKING:
    from specsim.cost.table import CostTable
    from specsim.trace.trace import Trace

TESTS = ("node", "level")
LEVEL = TESTS.index("level")
ROUNDING = 1e-4  # by how much the probabilities of a distribution, in float32, may sum to more than 1


@nb.njit
def least_expanded(params):  # type: ignore[no-untyped-def]
    """A node of a smaller path probability is never expanded."""
    return params.leaf_threshold if params.test == LEVEL else params.cost_ratio


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    # Without branches in the loop: numba then drops the reference counting, which would take most of the time.
    width, least, most = int(params.width), least_expanded(params), int(params.max_nodes)
    expanded, reached = 0, 0.0
    for i in range(first, end):
        likely = ((i == 0) | (tree.path[i] >= least)) & (expanded < most)
        widths[i] = width * likely
        expanded += likely
        reached += tree.path[i] * likely
    if (params.test == LEVEL) & (first > 0) & (reached < params.cost_ratio):
        widths[first:end] = 0
    return state


@nb.njit
def select(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    floor, most = params.leaf_threshold, int(params.max_nodes)
    kept = 0
    for i in range(1, count):
        if tree.path[i] >= floor:
            keep[i] = True
            kept += 1
    if kept > most:
        keep[1:count] = False
        floor = mark_best(tree.path, 1, count, most, True, keep, tree.value)
    # A node below the floor is not kept; expanding it would have changed the cost of drafting.
    return min(floor, least_expanded(params))


@dataclass(frozen=True)
class PCT(TreePolicy):
    """Expand a node while its probability of acceptance, c_1 ... c_j along its path, is at least s_d / s_t (Eq. 5).

    The expected extra time of a draft step is s_d - p_j s_t; the probability of a node bounds that of
    its children. The root is always expanded. Drafted nodes of a probability below leaf_threshold
    are then dropped, in a single pass, for no path's probability rises. `fit` reads s_d / s_t from the
    costs unless it is given. Not the paper's: a bound on the verified nodes, of which the
    likeliest are kept, and on those of a level that are expanded, the first being taken, which
    matters only where s_d / s_t is below 1 / max_nodes; and the level test, which sets the probability that
    any expanded node of a level is accepted against the cost of the pass that expands them all.
    """

    cost_ratio: float = setting(0.1, 0.0, 10.0, tune=(0.003, 1.0), log=True, doc="s_d / s_t, from the costs if absent")
    leaf_threshold: float = setting(
        0.01, 0.0, 1.0, tune=(0.001, 0.3), log=True, doc="least probability of a verified node"
    )
    width: int = setting(5, 1, 32, tune=(1, 8), bounds="width", doc="children of an expanded node")
    max_depth: int = setting(10, 1, 64, tune=(1, 16), bounds="depth", doc="most levels of the tree")
    max_nodes: int = setting(
        64, 1, 255, tune=(4, 64), bounds="nodes", doc="most nodes verified, and expanded of a level"
    )
    test: str = setting("node", choices=TESTS, doc="expand single nodes, or all likely ones of a level or none")

    name = "pct"
    source = "EDD + PCT, Eq. 5 and section 3.2"
    variants = (Variant("s_d / s_t of the costs", tuned=False), Variant("tuned"))
    initial_state = staticmethod(initial_state)
    expand = staticmethod(expand)
    select = staticmethod(select)
    update = staticmethod(update)

    @classmethod
    def fit(cls, settings: Settings, train: Trace, table: CostTable) -> Self:
        return build_policy(cls, {"cost_ratio": table.step_ratio, **settings})

    @property
    def max_expanded(self) -> int:
        """At most 1/c nodes of a level have a probability of at least c, because at most one of them is accepted."""
        least = self.leaf_threshold if self.test == "level" else self.cost_ratio
        return max(1, int(min(self.max_nodes, (1 + ROUNDING) / max(least, 1e-9))))

    @property
    def max_width(self) -> int:
        return self.width
