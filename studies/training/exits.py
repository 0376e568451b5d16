"""EESD taken apart: its table 4 and figures 4 and 5, every early exit trained with every seed and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from realrun.lm.variants.block_expansion import expansion_of
from realrun.pairs.pair import load_target
from specsim.cost.model import CostModel
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.progress import Progress
from specsim.replaying.priced import PricedTrace
from specsim.report.markdown import markdown_table
from studies.common import Config, Document
from studies.training.replays import Folders, Traces, by_seed, priced_deep, recorded_all
from studies.training.seeds import Seeds, difference_cells, harmonic_mean, length_cells, share
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
    found = {}
    for name in folders:
        like = EESD if name == NO_DISTILLATION else name
        folder, trace = next(iter(folders[like].values())), next(iter(traces[like].values()))
        found[name] = priced_deep(out, folder, trace, config, report, trees=False)
    return found


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


def quality_cells(runs: Seeds) -> tuple[str, ...]:
    """v_d, r_d and HM."""
    shares = (share(runs, "accepted", over) for over in ("drafted", "tokens"))
    return (*(f"{value:.3f}" for value in shares), f"{harmonic_mean(runs):.3f}")


def rows_table(found: Rows, *, priced: bool = True) -> list[str]:
    """Table 4, or a part of it: each against the first. priced : whether the costs hold"""
    whole = next(iter(found.values()))
    table = []
    for what, runs in found.items():
        against = ("", "") if runs is whole else difference_cells(runs, whole)
        table.append([what, *quality_cells(runs), *length_cells(runs), *against])
    columns = ["variant", "v_d", "r_d", "HM", "tau", "speedup", "tau less the first's", "speedup less the first's"]
    return _table(columns, table, priced)


def sweep_table(
    what: str, found: Mapping[int, Rows], usual: int, ratios: Mapping[int, float], *, priced: bool = True
) -> list[str]:
    """A sweep over N or E, each against the usual one. ratios : s_d / s_t by N or E; priced : whether the costs hold"""
    table = []
    for n, by_policy in found.items():
        for policy, runs in by_policy.items():
            against = ("", "") if n == usual else difference_cells(runs, found[usual][policy])
            cells = (f"{harmonic_mean(runs):.3f}", f"{ratios[n]:.3f}")
            table.append([str(n), policy, *cells, *length_cells(runs), *against])
    columns = [what, "policy", "HM", "s_d / s_t", "tau", "speedup"]
    return _table([*columns, f"tau less that of {usual}", f"speedup less that of {usual}"], table, priced)


def _table(columns: list[str], rows: list[list[str]], priced: bool) -> list[str]:
    """A Markdown table, without the columns that rest on costs where those do not hold."""
    shown = [at for at, name in enumerate(columns) if priced or not name.startswith(("speedup", "s_d"))]
    return markdown_table([columns[at] for at in shown], [[row[at] for at in shown] for row in rows])


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
