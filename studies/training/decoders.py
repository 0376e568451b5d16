"""EDD taken apart: its table 3 and figure 5, every decoder trained with every seed and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numba as nb

from specsim.cost.model import CostModel
from specsim.io.progress import Progress
from specsim.policy.base import Variant
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.tree.pct import PCT, select
from studies.common import Config, Document
from studies.paper_costs import MEASURED, paper_costs
from studies.training.replays import Traces, by_seed, priced_deep, recorded_all
from studies.training.seeds import Seeds
from studies.training.trainings import NO_KL, NO_STATES, ONE_BLOCK, WHOLE, decoders, trained


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


NO_GAIN, NO_LEAVES = "without expected time gain", "leaves kept"
PAPER_SPEEDUPS = {WHOLE: 3.04, NO_STATES: 2.58, NO_KL: 2.86, ONE_BLOCK: 2.95, NO_GAIN: 2.73, NO_LEAVES: 2.95}
OF_COSTS, TUNED = Variant("s_d / s_t of the costs", tuned=False), Variant("tuned")
KEPT, PAPER_K = Variant("leaves kept", {"leaf_threshold": 0.0}, tuned=False), Variant("K = 5", {"k": 5}, tuned=False)
SWEPT = {"K = 5": (FixedK, PAPER_K), "PCT": (PCT, OF_COSTS)}

Rows = Mapping[str, Seeds]


def costs(out: Path, traces: Traces, folder: Path, config: Config, report: Progress) -> dict[str, CostModel]:
    """Return the costs of every decoder: a profile of the full one, whose shape all share, and the paper's costs."""
    first = next(iter(traces[WHOLE].values()))
    return {MEASURED: priced_deep(out, folder, first, config, report, trees=True), **paper_costs(config)}


def measure(out: Path, config: Config, report: Progress) -> Document:
    """Train, record, price and replay: the ablation, and PCT tuned, by costs, and the sweep at measured costs."""
    folders = trained(out, decoders(config), config["decoders"]["tokens"], config, report)
    traces = recorded_all(out, folders, config["runs"][0], config, report, trees=True)
    priced = costs(out, traces, next(iter(folders[WHOLE].values())), config, report)
    return {
        "ablation": {name: ablation(traces, cost, config) for name, cost in priced.items()},
        "tuned": {name: tuned(traces, cost, config) for name, cost in priced.items()},
        "sweep": sweep(traces, priced[MEASURED], config),
    }


def ablation(traces: Traces, cost: CostModel, config: Config) -> Rows:
    """Replay table 3 at a cost, on all prompts because nothing is tuned."""
    trained = {name: (PCT, OF_COSTS, traces[name]) for name in (WHOLE, NO_STATES, NO_KL, ONE_BLOCK)}
    whole = traces[WHOLE]
    forms = {**trained, NO_GAIN: (SureTree, OF_COSTS, whole), NO_LEAVES: (PCT, KEPT, whole)}
    return {name: by_seed(kind, form, of, cost, config, tuned=False) for name, (kind, form, of) in forms.items()}


def tuned(traces: Traces, cost: CostModel, config: Config) -> Rows:
    """The estimate of a gain and the tree without it, both tuned, on held-out prompts."""
    kinds = {WHOLE: PCT, NO_GAIN: SureTree}
    return {name: by_seed(kind, TUNED, traces[WHOLE], cost, config, tuned=True) for name, kind in kinds.items()}


def sweep(traces: Traces, cost: CostModel, config: Config) -> dict[int, Rows]:
    """Figure 5: layers below the states -> what -> replays, on all prompts."""
    asked = config["decoders"]
    names = {n: WHOLE if n == asked["usual"] else f"states {n}" for n in asked["states_after"]}
    return {
        n: {what: by_seed(kind, form, traces[name], cost, config, tuned=False) for what, (kind, form) in SWEPT.items()}
        for n, name in names.items()
    }
