"""EESD taken apart: its table 4 and figures 4 and 5, every early exit trained with every seed and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from realrun.lm.variants.block_expansion import expansion_of
from realrun.pairs.pair import load_target
from specsim.cost.model import CostModel
from specsim.io.progress import Progress
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.priced import PricedTrace
from studies.common import Config, Document
from studies.training.replays import Folders, Traces, by_seed, priced_deep, recorded_all
from studies.training.seeds import Seeds
from studies.training.trainings import EESD, NO_DISTILLATION, NO_EXIT, early_exits, trained

PAPER_K = 10  # of its ablation
TUNED = Variant("tuned")
FORMS: Mapping[str, tuple[str, type[Policy], Variant]] = {  # row -> (early exit, policy, form)
    "EESD, Beta-TS": (EESD, BetaTS, TUNED),
    "without early-exit layer": (NO_EXIT, BetaTS, TUNED),
    "without self-distillation": (NO_DISTILLATION, BetaTS, TUNED),
    "without TS, best K": (EESD, FixedK, TUNED),
    f"without TS, K = {PAPER_K}": (EESD, FixedK, Variant("the paper's", {"k": PAPER_K}, tuned=False)),
}
SWEPT: Mapping[str, type[Policy]] = {"best fixed K": FixedK, "Beta-TS": BetaTS}

Rows = Mapping[str, Seeds]
Costs = Mapping[str, CostModel]  # by early exit


def measure(out: Path, config: Config, report: Progress) -> Document:
    """Train, record, price and replay: table 4, the sweeps over N and E, and s_d / s_t of what they compare."""
    folders = trained(out, early_exits(config), config["early_exits"]["tokens"], config, report)
    traces = recorded_all(out, folders, config["runs"][0], config, report, trees=False)
    priced = costs(out, traces, folders, config, report)
    return {
        "block_expansion": expansion_of(load_target(config["priced"]).target),
        "rows": rows(traces, priced, config),
        "sweeps": {what: sweep(what, traces, priced, config) for what in ("N", "E")},
        "ratios": {what: step_ratios(what, traces, priced, config) for what in ("N", "E")},
    }


def costs(out: Path, traces: Traces, folders: Folders, config: Config, report: Progress) -> dict[str, CostModel]:
    """The profile of every structure: of the first seed's drafter, used for all seeds."""
    prices = {}
    for name in folders:
        like = EESD if name == NO_DISTILLATION else name
        folder, trace = next(iter(folders[like].values())), next(iter(traces[like].values()))
        prices[name] = priced_deep(out, folder, trace, config, report, trees=False)
    return prices


def rows(traces: Traces, costs: Costs, config: Config) -> Rows:
    """Each row of table 4, tuned on some prompts and reported on the others."""
    return {
        what: by_seed(kind, form, traces[name], costs[name], config, tuned=True)
        for what, (name, kind, form) in FORMS.items()
    }


def sweep(what: str, traces: Traces, costs: Costs, config: Config) -> dict[int, Rows]:
    """Figures 4 and 5: N or E -> policy -> replays."""
    return {
        n: {
            policy: by_seed(kind, TUNED, traces[name], costs[name], config, tuned=True)
            for policy, kind in SWEPT.items()
        }
        for n, name in _names(what, config).items()
    }


def step_ratios(what: str, traces: Traces, costs: Costs, config: Config) -> dict[int, float]:
    """s_d / s_t by N or E."""
    return {
        n: float(PricedTrace(next(iter(traces[name].values())), costs[name]).table().step_ratio)
        for n, name in _names(what, config).items()
    }


def _names(what: str, config: Config) -> dict[int, str]:
    """The early exits that a sweep over N or E compares."""
    layers, exit_layers = config["early_exits"]["usual"]
    key, usual = {"N": ("layers", layers), "E": ("exit_layers", exit_layers)}[what]
    return {n: EESD if n == usual else f"{what} = {n}" for n in config["early_exits"][key]}
