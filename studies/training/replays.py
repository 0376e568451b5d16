"""Traces of trained drafters, what they cost on the deepened target, and their replays; read where they are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from realrun.measure.profile import TREE_TOKENS
from specsim.compare.replays import replay_seeds
from specsim.cost.contexts import context_range
from specsim.cost.model import CostModel
from specsim.io.arrays import Floats
from specsim.io.progress import Progress
from specsim.learn.settings import SearchSettings
from specsim.learn.variants import fit_variant
from specsim.policy.base import Policy, Variant
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from studies.common import Config, load, named, parts, profiled, recorded
from studies.training.seeds import Replayed, Seeds

Folders = Mapping[str, Mapping[int, Path]]  # drafters by name and seed
Traces = dict[str, dict[int, Trace]]  # likewise

DRAWS = 5


def recorded_all(out: Path, folders: Folders, run: Config, config: Config, report: Progress, *, trees: bool) -> Traces:
    """Record all of these drafters in a way of decoding, or read their traces."""
    traces: Traces = {}
    for name, by_seed in folders.items():
        for seed, folder in by_seed.items():
            trace, progress = out / run["name"] / folder.name, named(report, f"{name}, seed {seed}")
            pair = load(config, folder)
            traces.setdefault(name, {})[seed] = recorded(trace, pair, run, config, progress, trees=trees)
    return traces


def priced_deep(out: Path, folder: Path, trace: Trace, config: Config, report: Progress, *, trees: bool) -> CostModel:
    """What a drafter of this structure costs on the deepened target, at the ends of what the trace's rounds meet."""
    return profiled(
        out / "profiles" / f"{folder.name}.json",
        lambda: load({**config, "target": config["priced"]}, folder),
        trace,
        named(report, folder.name),
        contexts=context_range(trace),
        tree_tokens=TREE_TOKENS if trees else 0,
    )


def form(kind: type[Policy], variant: Variant, train: PricedTrace, report: PricedTrace, config: Config) -> Replayed:
    """Tune a policy in this form, or read its settings from the costs, on `train`, and replay it on `report`.

    A policy that draws is replayed DRAWS times, and its counts and seconds are summed.
    """
    search = SearchSettings(trials=config["trials"], seed=config["seed"], jobs=1)
    policy = fit_variant(kind, variant, train, search)
    runs = replay_seeds(report, policy, range(config["seed"], config["seed"] + DRAWS))

    def total(column: str) -> Floats:
        return np.sum([getattr(run, column) for run in runs], axis=0, dtype=np.float64)

    return Replayed(
        baseline_s=total("autoregressive_s"),
        seconds=total("speculative_s"),
        tokens=total("output_tokens"),
        rounds=total("num_rounds"),
        drafted=total("drafted"),
        accepted=total("accepted"),
        truncated=np.zeros(report.trace.sequences) if runs[0].truncated is None else total("truncated"),
    )


def halves(trace: Trace, cost: CostModel, config: Config) -> tuple[PricedTrace, PricedTrace]:
    """The prompts to tune on and those to report on."""
    train, holdout = (PricedTrace(part, cost) for part in parts(trace, config))
    return train, holdout


def by_seed(
    kind: type[Policy], variant: Variant, traces: Mapping[int, Trace], cost: CostModel, config: Config, *, tuned: bool
) -> Seeds:
    """`form` of every seed's trace; on all prompts, or tuned on some and reported on the others."""
    runs = {}
    for seed, trace in traces.items():
        train, report = halves(trace, cost, config) if tuned else (PricedTrace(trace, cost),) * 2
        runs[seed] = form(kind, variant, train, report, config)
    return runs
