"""Predictions of cases that no fit has seen, and their errors by class."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize, nnls

from specsim.cost.roofline.cost import Overheads
from specsim.cost.roofline.document import in_engine
from specsim.cost.roofline.hardware import on_links
from specsim.cost.roofline.published import Runs, Spread
from specsim.io.arrays import Bools, Floats, Seconds
from studies.published.cases import AT_EARLY, MILLISECOND, Case, Speculation
from studies.published.fit import Cells, Parameters, fitted, robust

OVERHEADS = ("round_s", "draft_step_s", "verified_sequence_s", "tree_round_s")
LEAST_MS, MOST_MS, START_MS = 0.001, 20.0, 0.3  # bounds and start of each overhead
ALIKE = 0.03  # prior: a factor of 2 between engines weighs as much as an error of this share in a system's runs
LOOSE = 0.1  # weight of the prior that draws the mean overheads to `START_MS`, relative to that of `ALIKE`
PER_SEQUENCE = OVERHEADS.index("verified_sequence_s")
ENGINES = "vllm", "sglang", "tensorrt-llm"  # current releases
WITHOUT = "llamacpp", "ggml"  # engines whose overheads are not fitted to these runs
USUAL = 0.1  # prior of the standard deviations of log(measured / predicted)
FEWEST = 3  # runs of a deployment, two of which calibrate
Divide = Callable[[Iterable[str]], list[set[str]]]


def each(systems: Iterable[str]) -> list[set[str]]:
    """Return a set per system."""
    return [{system} for system in sorted(set(systems))]


def halves(systems: Iterable[str]) -> list[set[str]]:
    """Return two halves of the systems, which alternate in alphabetical order."""
    ordered = sorted(set(systems))
    return [set(ordered[::2]), set(ordered[1::2])]


def held_out(cases: Sequence[Case], divide: Divide) -> Seconds:
    """Predict the seconds of the cases of each set of systems with parameters fitted to all other systems."""
    predicted: Seconds = np.zeros(len(cases))
    for part in divide(case.system for case in cases):
        here = np.array([case.system in part for case in cases])
        parameters = fitted([case for case in cases if case.system not in part])
        predicted[here] = Cells.of([case for case in cases if case.system in part]).seconds(parameters)
    return predicted


def on_two_points(cases: Sequence[Case], predicted: Seconds) -> Seconds:
    """Predict by a + b x predicted, fitted to the runs of a deployment with the fewest and the most requests.

    NaN for these two runs, and for deployments with fewer than three.
    """
    calibrated: Seconds = np.full(len(cases), np.nan)
    for group in groups(cases, ("target", "gpu", "engine", "version", "precision", "tp")):
        of_group = sorted(group, key=lambda number: (cases[number].about["batch"], predicted[number]))
        if len(of_group) < 3 or predicted[of_group[0]] == predicted[of_group[-1]]:
            continue
        ends = [of_group[0], of_group[-1]]
        measured = np.array([cases[number].measured_s for number in ends])
        shares = nnls(np.array([np.ones(2), predicted[ends]]).T / measured[:, None], np.ones(2))[0]
        calibrated[of_group[1:-1]] = shares[0] + shares[1] * predicted[of_group[1:-1]]
    return calibrated


def groups(cases: Sequence[Case], keys: Sequence[str]) -> list[list[int]]:
    """Return the indices of cases, grouped by the values of `keys`."""
    of: dict[tuple[Any, ...], list[int]] = {}
    for number, case in enumerate(cases):
        of.setdefault(tuple(str(case.about.get(key)) for key in keys), []).append(number)
    return [*of.values()]


@dataclass(frozen=True)
class Rounds:
    """Runs with speculation under given parameters: arrays [N].

    engines : `Speculation.era` of each run
    step_s, passes_s : seconds of a decoding step, and of the passes of a round
    terms : [N, 4], how often a round incurs each of `OVERHEADS`
    """

    systems: list[str]
    engines: list[str]
    acceptance: Floats
    measured: Floats
    step_s: Seconds
    passes_s: Seconds
    terms: Floats

    @classmethod
    def of(cls, runs: Sequence[Speculation], parameters: Parameters) -> Rounds:
        own = []
        for run in runs:
            cost = replace(run.cost, overheads=Overheads(sequence_s=parameters.sequence_s))
            cost = cost.with_passes(derating=on_links(parameters.derating, cost.target.hardware))
            own.append(replace(run, cost=in_engine(run.cost, "llamacpp") if run.engine in WITHOUT else cost))
        columns = [(run.acceptance, run.measured, run.step_s, run.passes_s) for run in own]
        fitted = [run.engine not in WITHOUT for run in runs]
        terms = np.array([(1.0, run.draft_passes, run.cost.batch, run.tree) for run in runs], dtype=np.float64)
        terms *= np.array(fitted)[:, None]
        return cls([run.system for run in runs], [run.era for run in runs], *np.array(columns).T, terms)

    def speedups(self, overheads_s: Mapping[str, Floats]) -> Floats:
        """Predict the speedups [N] from the overheads [4] of each engine."""
        none = np.zeros(len(OVERHEADS))
        own = [overheads_s.get(name, none) for name in self.engines]
        other_s = (self.terms * np.array(own)).sum(axis=1)
        return np.asarray(self.acceptance * self.step_s / (self.passes_s + other_s))

    def fitted(self, seen: Bools) -> dict[str, Floats]:
        """Fit the overheads [4] of each engine, in seconds. seen : runs that the fit uses

        Every system weighs the same. Engines of the same era share a prior mean, from which the runs of an engine move
        its overheads. An engine without runs keeps the mean.
        """
        systems = [system for system, here in zip(self.systems, seen, strict=True) if here]
        names = sorted({*self.engines, *ENGINES} - {*WITHOUT})
        eras = [int(AT_EARLY in name) for name in names]
        shape = (
            2 + len(names),
            len(OVERHEADS),
        )  # logarithms: the means of both eras, and each engine's difference from its mean

        def overheads_s(x: Floats) -> dict[str, Floats]:
            means, differences = np.split(x.reshape(shape), [2])
            differences[:, -1] = 0.0  # runs with trees are published for one engine only
            means[:, PER_SEQUENCE] = means[0, PER_SEQUENCE]  # shared by both eras: runs with large batches are few
            return {
                name: np.asarray(MILLISECOND * np.exp(means[era] + difference))
                for name, era, difference in zip(names, eras, differences, strict=True)
            }

        def errors(x: Floats) -> Floats:
            own = robust(np.log(self.speedups(overheads_s(x)) / self.measured)[seen], systems)
            means, differences = np.split(x, [2 * len(OVERHEADS)])
            apart = np.concatenate([LOOSE * (means - math.log(START_MS)), differences])
            return np.concatenate([own, ALIKE / math.log(2) * apart])

        start = np.zeros(shape)
        start[:2] = math.log(START_MS)
        low, high = (math.log(end) for end in (LEAST_MS, MOST_MS))
        return overheads_s(least_squares(errors, start.ravel(), bounds=(low, high)).x)

    @property
    def everything(self) -> Bools:
        return np.ones(len(self.systems), dtype=np.bool_)

    def held_out(self, names: Sequence[str], divide: Divide) -> Floats:
        """Predict speedups with overheads fitted to the other runs. names : of the runs, which `divide` groups"""
        predicted = np.zeros(len(self.systems))
        for part in divide(names):
            here = np.array([name in part for name in names])
            predicted[here] = self.speedups(self.fitted(~here))[here]
        return predicted


def speedups_on_two(rounds: Rounds, runs: Sequence[Speculation]) -> Floats:
    """Predict speedups with overheads fitted to two runs of a deployment's task: least and most drafts, or batch.

    The two runs determine the overhead per round and that per draft step or per sequence. NaN for these two, and for
    tasks with fewer than three runs.
    """
    predicted: Floats = np.full(len(runs), np.nan)
    of: dict[tuple[str, str, bool], list[int]] = {}
    for number, run in enumerate(runs):
        of.setdefault((run.deployment, run.about["task"], run.tree), []).append(number)
    for group in of.values():
        varied = next((column for column in (1, 2) if len(set(rounds.terms[group, column])) > 1), 1)
        ordered = sorted(group, key=lambda number: float(rounds.terms[number, varied]))
        if len(group) < FEWEST or rounds.terms[ordered[0], varied] == rounds.terms[ordered[-1], varied]:
            continue
        ends = [ordered[0], ordered[-1]]
        round_s = (rounds.acceptance * rounds.step_s / rounds.measured)[ends]
        columns = rounds.terms[ends][:, [0, varied]] / round_s[:, None]
        overheads_s = np.zeros(len(OVERHEADS))
        overheads_s[[0, varied]] = nnls(columns, np.maximum(1 - rounds.passes_s[ends] / round_s, 0.0))[0]
        predicted[ordered[1:-1]] = rounds.speedups(dict.fromkeys(rounds.engines, overheads_s))[ordered[1:-1]]
    return predicted


def fitted_spread(runs: Sequence[Runs]) -> Spread:
    """Fit the standard deviations between words, systems and runs: maximum a posteriori, with priors at `USUAL`."""
    count = np.array([r.runs for r in runs])
    within = math.sqrt(sum(r.runs * r.sd**2 for r in runs) / max(count.sum() - len(runs), 1))
    means, words = np.array([r.mean for r in runs]), sorted({word for r in runs for word in r.kind})
    rows = np.array([[1.0, *(word in r.kind for word in words)] for r in runs])
    same = np.array([[one.system == other.system for other in runs] for one in runs])

    def negative_log_posterior(x: Floats) -> float:
        of_words, of_systems = np.exp(2 * x)
        between = of_words * rows @ rows.T + of_systems * same + np.diag(within**2 / count)
        likely = np.linalg.slogdet(between)[1] + means @ np.linalg.solve(between, means)
        return float(0.5 * likely + 0.5 * ((x - math.log(USUAL)) ** 2).sum())

    word, system = np.exp(minimize(negative_log_posterior, np.full(2, math.log(USUAL)), method="Nelder-Mead").x)
    return Spread(*(round(float(value), 3) for value in (word, system, within)))


def summary(errors: Floats, systems: Sequence[str]) -> Mapping[str, float]:
    """Summarise errors in percent: their number, median and 90th percentile of absolute errors, and the signed median.

    "of_runs" is the median over runs. In the other quantiles every system weighs the same.
    """
    known = np.isfinite(errors)
    if not known.any():
        return {"runs": 0, **dict.fromkeys(("of_runs", "median_percent", "p90_percent", "bias_percent"), float("nan"))}
    errors, systems = errors[known], [system for system, here in zip(systems, known, strict=True) if here]
    return {
        "runs": len(errors),
        "of_runs": float(np.median(abs(errors))),
        "median_percent": quantile(abs(errors), systems, 0.5),
        "p90_percent": quantile(abs(errors), systems, 0.9),
        "bias_percent": quantile(errors, systems, 0.5),
    }


def quantile(values: Floats, systems: Sequence[str], share: float) -> float:
    """Return the quantile of values, weighted so that every system counts the same."""
    count, order = Counter(systems), np.argsort(values, kind="stable")
    weights = np.cumsum([1 / count[systems[number]] for number in order])
    return float(values[order][np.searchsorted(weights, share * weights[-1] * (1 - 1e-12))])
