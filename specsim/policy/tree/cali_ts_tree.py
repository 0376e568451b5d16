"""Cali-TS on trees: a predictor's score, calibrated by the acceptance seen so far, decides about another level."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.cost.model import CostModel
from specsim.cost.profile import with_scores
from specsim.policy.base import setting
from specsim.policy.chain.base import Step
from specsim.policy.chain.cali_ts import initial_state, keep_drafting, update
from specsim.policy.estimates.counts import COUNTING, THETA
from specsim.policy.tree.base import MAX_DRAFTED
from specsim.policy.tree.beam import BeamTree
from specsim.policy.tree.expansion import expand_beam


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    if first > 0:
        depth = tree.depth[first]
        step = Step(0.0, 0.0, 0.0, tree.score[depth - 1], 0.0)
        another, state = keep_drafting(state, params, step, depth, u)
        if not another:
            return state
    expand_beam(tree, first, end, int(params.beam), int(params.width), widths)
    return state


@dataclass(frozen=True)
class CaliTSTree(BeamTree):
    """Draft another level if chi = 1, chi as `specsim.policy.chain.cali_ts` draws it with levels for tokens.

    theta_M of a level is the predictor's score along the first candidates' chain, in which each node is the likeliest
    child of its parent: the score of the level's own pass while that chain is expanded, and that of the last such
    pass from where the beam has left it. Levels are counted, nodes grown and chosen as in Beta-TS on trees
    (`specsim.policy.tree.beta_ts_tree`); with a beam and a width of 1 the rounds are those of Cali-TS.

    The paper prints a speedup of Cali-TS with tree attention and says no more of it than that several candidates are
    drafted: which node's score decides, what a level counts, and the shape of trees are this project's.
    """

    theta0: float = setting(0.5, 0.0, 1.0, tune=(0.0, 1.0), doc="acceptance at the start, with the weight of one level")
    sigma_m: float = setting(0.1, 1e-6, 100.0, tune=(0.005, 1.0), log=True, doc="error of the predictor's score")
    sigma_s: float = setting(0.25, 1e-6, 1e4, tune=(0.02, 20.0), log=True, doc="spread of a round's mean acceptance")
    counting: str = setting(
        "exact", choices=COUNTING, doc="levels counted as verified: min(a+1, d), or with printed min(a+2, d)"
    )
    theta: str = setting("per_token", choices=THETA, doc="how often theta is drawn; for every level, per_token")
    carry: bool = setting(False, 0, 1, doc="keep the counts from sequence to sequence")
    beam: int = setting(2, 1, 31, tune=(1, 8), doc="nodes of a level that are expanded")
    width: int = setting(3, 1, 31, tune=(1, 8), bounds="width", doc="children of an expanded node")
    nodes: int = setting(64, 1, MAX_DRAFTED, tune=(4, 64), bounds="nodes", doc="drafted nodes verified, at most")
    max_depth: int = setting(10, 1, 64, tune=(1, 16), bounds="depth", doc="most levels of the tree")

    name = "cali_ts_tree"
    source = "Liu et al. 2024 (EESD), table 7 with Algorithm 3; trees grown as in EAGLE-2"
    features = (*BeamTree.features, "score")
    initial_state = staticmethod(initial_state)
    expand = staticmethod(expand)
    update = staticmethod(update)

    def cost(self, model: CostModel) -> CostModel:
        return with_scores(model)

    @property
    def carries_state(self) -> bool:
        return self.carry
