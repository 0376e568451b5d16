"""Published measurements against predictions: `python -m studies published`.

Also writes the files that specsim ships: preset.json, which is part of specsim/cost/roofline/engines.json, errors.json,
which is published_errors.json there, and llamacpp.json.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares, minimize, nnls

from specsim.cost.roofline.cost import Overheads
from specsim.cost.roofline.document import in_engine
from specsim.cost.roofline.hardware import on_links
from specsim.cost.roofline.published import Errors, Runs, Spread, batch_class, expected_error
from specsim.io.arrays import Bools, Floats, Seconds
from specsim.io.files import write_json
from specsim.report.table import Column
from studies.common import Config
from studies.figures import dots, point
from studies.published import llamacpp
from studies.published.cases import (
    AT_EARLY,
    CONTEXT,
    INFERENCEX_LENGTH,
    LIKE,
    MILLISECOND,
    Case,
    Speculation,
    credible,
    drafting_servers,
    read_csv,
    serving,
    speculation,
    steps,
)
from studies.published.fit import SERVERS, Cells, Parameters, fitted, robust
from studies.report import TENTH, Report

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
GRAPHS = ("vllm", "sglang", "tensorrt-llm", "gpt-fast", "exllamav2")  # engines that run a step as a CUDA graph
PACKED = ("int8", "int4")
STEP, SERVED, SPEEDUP = "decoding step", "TPOT", "speedup"
NAMES = SHEET, HELD_OUT, HALVES, MODEL, TWO_RUNS = (
    "roofline without an engine",
    "preset, held-out",
    "preset, half held-out",
    "preset, the deployment alone held-out",
    "interpolated between two of its runs",
)
BEFORE = "before"  # errors of the previous preset on the same runs, from before.csv
DEPLOYMENT = ("target", "gpu", "engine", "version", "precision", "isl", "osl", "concurrency", "source")
NEAR = 0.99  # a choice is right if it reaches this share of the best measured value
MS, US = 1e3, 1e6
FARTHEST = 0.4  # largest absolute log(measured / predicted) that counts in the mean of a system
WORST = 3  # systems that the report names
WORSE = 1.0  # increase of a median error in percentage points from which on the report names a system
DIGITS = 2  # significant digits of the preset
LEAST = 1e-6  # seconds below which the preset leaves out an overhead
KINDS = "dense models", "experts"
STEP_DENSE, STEP_PACKED, SERVED_DENSE, SERVED_EXPERTS, SERVED_DRAFTS, CHAINS, CHAINS_DENSE, BATCHES_DENSE = (
    "decoding step, dense",
    "decoding step, int8 or int4",
    "TPOT of a server, dense",
    "TPOT of a server, experts",
    "TPOT of a server that drafts, experts",
    "speedup of chains",
    "speedup of chains, batch 1, dense",
    "speedup of chains, larger batch, dense",
)
CHAINS_EXPERTS, TREES, PACKED_SPEEDUPS = (
    "speedup of chains, experts",
    "speedup of trees",
    "speedup, integer weights (llama.cpp and its like)",
)
BY_SYSTEM = (STEP_PACKED, TREES, PACKED_SPEEDUPS)  # classes that the table of the report leaves out
RECORDED: tuple[str, ...] = ()


def main(out: Path, config: Config) -> None:
    """Predict everything and write the report."""
    study = Study.of_data()
    study.report().write(out)
    study.write(out)
    write_json(llamacpp.document(), out / "llamacpp.json")


@dataclass(frozen=True)
class Prediction:
    """A measured time or speedup and its predictions by name; NaN if there is none.

    kind : features that decide its error, see `RooflineCost.kind`
    """

    what: str
    system: str
    kind: tuple[str, ...]
    tree: bool
    measured: float
    predicted: Mapping[str, float]

    @property
    def experts(self) -> bool:
        return "experts" in self.kind

    @property
    def packed(self) -> bool:
        """Whether the weights are integers, which kernels unpack as they read them."""
        return "integer weights" in self.kind

    def error(self, name: str) -> float:
        """Return the error in percent."""
        return 100 * (self.predicted[name] / self.measured - 1)


class FittedPreset(NamedTuple):
    """Shares of the ceilings, overheads in seconds by engine, and shares of prompts by engine, all rounded."""

    derating: dict[str, float]
    overheads: dict[str, dict[str, float]]
    prompt_shares: dict[str, float]


@dataclass(frozen=True)
class Study:
    """Published runs, and the preset that is fitted to all of them but `packed`.

    plain, packed : runs without speculation; packed : with integer weights
    runs : runs with speculation
    rounds : arrays of `runs` under the preset's parameters
    parameters : fitted to `plain`
    overheads_s : seconds of each of `OVERHEADS`, by engine
    left_out : the reason for each published run that is not predicted
    """

    plain: list[Case]
    packed: list[Case]
    runs: list[Speculation]
    rounds: Rounds
    parameters: Parameters
    overheads_s: Mapping[str, Floats]
    left_out: list[str]

    @classmethod
    def of_data(cls) -> Study:
        """Read the published rows and fit them."""
        served, left_out = serving()
        graphs = [case for case in steps() if case.about["engine"] in GRAPHS]
        left_out += ["steps outside CUDA graphs"] * (len(steps()) - len(graphs))
        packed = [case for case in graphs if case.about["dtype"] in PACKED]
        plain = [case for case in graphs if case not in packed] + served
        published, parameters = speculation(), fitted(plain)
        runs = credible(published)
        left_out += ["targets with speedups above their acceptance length"] * (len(published) - len(runs))
        rounds = Rounds.of(runs, parameters)
        return cls(plain, packed, runs, rounds, parameters, rounds.fitted(rounds.everything), left_out)

    @cached_property
    def held_out_s(self) -> Seconds:
        """Predict each system's runs without speculation with parameters fitted to all other systems."""
        return held_out(self.plain, each)

    @cached_property
    def predictions(self) -> list[Prediction]:
        """Predict every run."""
        others, cases, rounds = self.held_out_s, self.plain, self.rounds
        bare = Parameters.without_engine()
        unknown = np.full(len(cases), np.nan)
        sheet_s = Cells.of(cases).seconds(bare)
        times = np.array([sheet_s, others, held_out(cases, halves), unknown, on_two_points(cases, others)]).T
        deployments = [run.deployment for run in self.runs]
        speedups = np.array(
            [
                Rounds.of(self.runs, bare).speedups({}),
                self.held_out_speedups,
                rounds.held_out(rounds.systems, halves),
                rounds.held_out(deployments, each),
                speedups_on_two(rounds, self.runs),
            ]
        ).T
        cells, unknown = Cells.of(self.packed), np.full(len(self.packed), np.nan)
        shipped_s = cells.seconds(self.parameters)
        packed = np.array([cells.seconds(bare), shipped_s, shipped_s, unknown, unknown]).T
        of_cases = [
            Prediction(
                SERVED if "tpot_ms" in case.about else STEP, case.system, case.kind, False, case.measured_s,
                dict(zip(NAMES, row, strict=True)),
            )
            for case, row in zip(cases + self.packed, np.concatenate([times, packed]).tolist(), strict=True)
        ]  # fmt: skip
        of_servers = [
            Prediction(
                SERVED, server.system, server.cost.kind(), False, server.measured_s,
                dict.fromkeys(NAMES, np.nan)
                | {SHEET: server.predicted_s(server.bare), HELD_OUT: server.predicted_s(server.cost)},
            )
            for server in drafting_servers()
        ]  # fmt: skip
        return [*of_cases, *of_servers] + [
            Prediction(SPEEDUP, run.system, run.cost.kind(), run.tree, run.measured, dict(zip(NAMES, row, strict=True)))
            for run, row in zip(self.runs, speedups.tolist(), strict=True)
        ]

    @cached_property
    def held_out_speedups(self) -> Floats:
        """Predict each system's speedups with overheads fitted to all other systems."""
        return self.rounds.held_out(self.rounds.systems, each)

    def fastest_parallelism(self) -> tuple[int, int, int]:
        """Count deployments with several tensor parallelisms, and those where the predicted or largest is fastest."""
        times, several, right, largest = self.held_out_s, 0, 0, 0
        for group in groups(self.plain, DEPLOYMENT):
            if "tpot_ms" in self.plain[group[0]].about and len({self.plain[n].about["tp"] for n in group}) > 1:
                best_s = min(self.plain[n].measured_s for n in group)
                chosen = min(group, key=times.__getitem__), max(group, key=lambda n: int(self.plain[n].about["tp"]))
                near = [NEAR * self.plain[n].measured_s <= best_s for n in chosen]
                several, right, largest = several + 1, right + near[0], largest + near[1]
        return several, right, largest

    def repeats(self) -> list[float]:
        """Return the difference between repeated runs of the same deployment in percent."""
        of_deployment = groups([case for case in self.plain if "tpot_ms" in case.about], (*DEPLOYMENT, "tp"))
        served = [case.measured_s for case in self.plain if "tpot_ms" in case.about]
        times = [[served[n] for n in group] for group in of_deployment if len(group) > 1]
        return [100 * (max(group) / min(group) - 1) for group in times]

    def losses(self, *, experts: bool) -> Floats:
        """Return the share of speedup that the predicted K loses, by task with three or more measured K."""
        predicted, of_task = self.held_out_speedups, dict[tuple[str, str, int], list[int]]()
        for number, run in enumerate(self.runs):
            if not run.tree and ("experts" in run.cost.kind()) == experts:
                of_task.setdefault((run.deployment, run.about["task"], run.cost.batch), []).append(number)
        several = [group for group in of_task.values() if len({self.runs[n].draft_tokens for n in group}) > 2]
        chosen = [(self.runs[max(group, key=predicted.__getitem__)].measured, group) for group in several]
        return np.array([1 - own / max(self.runs[n].measured for n in group) for own, group in chosen])

    @cached_property
    def preset(self) -> FittedPreset:
        """Return the preset as specsim/cost/roofline/engines.json has it."""
        names = [name + at for at in ("", AT_EARLY) for name in ENGINES]
        overheads = {
            name: {
                "sequence_s": self.parameters.sequence_s,
                **dict(zip(OVERHEADS, self.overheads_s[name], strict=True)),
            }
            for name in names
        }
        shares = dict(zip(SERVERS, self.parameters.prompt_shares, strict=True))

        def rounded(part: Mapping[str, float]) -> dict[str, float]:
            return {key: float(f"{value:.{DIGITS}g}") for key, value in part.items() if value >= LEAST}

        return FittedPreset(
            rounded(asdict(self.parameters.derating)),
            {name: rounded(part) for name, part in overheads.items()},
            rounded(shares),
        )

    @cached_property
    def errors_document(self) -> dict[str, Any]:
        """Return the content of specsim/cost/roofline/published_errors.json."""
        by_kind: dict[tuple[str, tuple[str, ...]], list[Prediction]] = {}
        for p in self.predictions:
            by_kind.setdefault((p.what, p.kind), []).append(p)
        kinds = []
        for (what, kind), group in sorted(by_kind.items()):
            errors = abs(np.array([p.error(HELD_OUT) for p in group]))
            numbers = [round(float(value), 1) for value in (np.median(errors), np.quantile(errors, 0.9))]
            kinds.append([*Errors(what, kind, len({p.system for p in group}), len(group), *numbers)])
        runs, whats = groups_of(self.predictions), (STEP, SERVED, SPEEDUP)
        worst = {}
        for what in whats:
            ratios = [1 / (1 + p.error(SHEET) / 100) for p in self.predictions if p.what == what]
            worst[what] = [round(float(end), 2) for end in (np.nanmin(ratios), np.nanmax(ratios))]
        return {
            "spread": {what: [*fitted_spread([r for r in runs if r.what == what])] for what in whats},
            "worst": worst,
            "kinds": kinds,
            "runs": [[*r] for r in runs],
        }

    @cached_property
    def coverage(self) -> dict[str, dict[str, float]]:
        """Return the share of each system's runs inside the error band that the other systems predict, by `what`."""
        shares: dict[str, dict[str, float]] = {}
        runs = groups_of(self.predictions)
        for what in (STEP, SERVED, SPEEDUP):
            for system in sorted({r.system for r in runs if r.what == what}):
                others = [r for r in runs if r.what == what and r.system != system]
                spread, inside = fitted_spread(others), []
                for p in self.predictions:
                    if (p.what, p.system) == (what, system):
                        error = expected_error(others, p.kind, spread)
                        if error is not None:
                            low, high = error.band
                            inside.append(low <= p.measured / p.predicted[HELD_OUT] <= high)
                if inside:
                    shares.setdefault(what, {})[system] = float(np.mean(inside))
        return shares

    def write(self, out: Path) -> None:
        """Write the preset and the errors by kind."""
        write_json(self.preset._asdict(), out / "preset.json")
        write_json(self.errors_document, out / "errors.json")

    def report(self) -> Report:
        """Return the report."""
        rows = [{"class": name, **errors_row(chosen)} for name, chosen in self.rows()]
        of, two = ({row["class"]: row[name] for row in rows} for name in (HELD_OUT, TWO_RUNS))
        before = {(row["what"], row["models"], row["system"]): float(row["error"]) for row in read_csv("before.csv")}
        table = [
            {"what": what, "models": kind, "system": system, **errors_row(predictions)}
            | {BEFORE: before.get((what, kind, system), float("nan"))}
            for what, kind, system, predictions in by_system(self.predictions)
        ]
        worst = max(table, key=lambda row: float(row[HELD_OUT]))
        changes = [(f"{row['what']}, {row['models']}, {row['system']}", row[BEFORE], row[HELD_OUT]) for row in table]
        changes.sort(key=lambda change: change[1] - change[2])
        worse = [f"{name} ({was:.0f} to {now:.0f} %)" for name, was, now in changes if now > was + WORSE]
        several, right, largest = self.fastest_parallelism()
        lost = [self.losses(experts=experts) for experts in (False, True)]
        fixed, repeats = self.preset.derating, self.repeats()
        held = {what: np.mean([*shares.values()]) for what, shares in self.coverage.items()}
        return Report(
            question="How far are predicted times and speedups from what others published?",
            answer="With one preset per engine, fitted to other systems, a decoding step of a "
            f"dense model is off by a median of {of[STEP_DENSE]:.1f} %, the time per output token (TPOT) by "
            f"{of[SERVED_DENSE]:.1f} %, and the speedup of a chain at batch 1 by {of[CHAINS_DENSE]:.1f} %. The K that "
            f"is predicted to be best is {choice_text(np.concatenate(lost))}. Calibrated on two runs of a deployment, "
            f"its other speedups are off by {two[CHAINS_DENSE]:.1f} %.",
            figure=dots(
                [(row["class"], {name: point(row[name]) for name in (SHEET, HELD_OUT)}) for row in rows],
                "errors",
                "Median error of predictions of published measurements",
                "median error, %",
                level=0.0,
            ),
            figure_name="errors",
            caption="Median error of predictions, by what is predicted and for which models",
            columns=[
                Column("predicted", "class"),
                Column("runs", "runs"),
                Column("previous preset: median error, %", BEFORE, TENTH),
                Column("preset, held-out: median error, %", HELD_OUT, TENTH),
                Column("90th percentile, systems equally weighted, %", "p90_percent", TENTH),
            ],
            shown=[{**row, BEFORE: before["class", row["class"], ""]} for row in rows if row["class"] not in BY_SYSTEM],
            table=table,
            trust=[
                f"Measurements: {len(self.predictions)} published runs (data/), none measured here. A system is a "
                "GPU and an engine, or with speculation a GPU and a source. Left out: "
                + "; ".join(f"{count} ({why})" for why, count in Counter(self.left_out).most_common(WORST))
                + ".",
                "Held out: a system is predicted with parameters fitted to all others; table.csv also has "
                "each half of the systems, predicted from the other. For speedups only the overheads of rounds are "
                f"held out. The worst system is off by {worst[HELD_OUT]:.0f} % "
                f"({worst['what']}, {worst['models']}, {worst['system']}).",
                f"Assumed: InferenceX's mean lengths are {INFERENCEX_LENGTH:g} of those that it states; with "
                f"speculation {CONTEXT} tokens of context and the smallest tensor parallelism that fits, if the source "
                f"does not say; {LIKE} ran on an H100, with the acceptance of EAGLE-3's tables.",
                f"The preset: {fixed['memory']:g} of the memory bandwidth, {US * fixed['launch_s']:g} us a "
                f"launch, {US * fixed['all_reduce_s']:g} us an all-reduce. Overhead in ms per "
                "round, per draft step, and in addition per round with a tree: "
                + "; ".join(overheads_text(*item) for item in self.preset.overheads.items() if "@" not in item[0])
                + ". Releases before July 2025 have overheads of their own.",
                "Coverage: 90 % intervals that are fitted without a system contain on average so many of its runs: "
                + ", ".join(
                    f"{100 * share:.0f} % ({what}; {len(self.coverage[what])} systems)" for what, share in held.items()
                )
                + ".",
                f"Against the previous preset, also held out, {len(worse)} of {len(table)} systems got worse by more "
                f"than {WORSE:g} points, most of all {'; '.join(worse[:WORST]) or 'none'}.",
                f"Choices: a best tensor parallelism (within 1 %) is predicted for {right} of {several} deployments "
                f"(the largest is one for {largest}). A predicted best chain length is "
                + " and ".join(f"{choice_text(own)} ({kind})" for own, kind in zip(lost, KINDS, strict=True))
                + f"; by the previous preset in {before['best K', 'tasks', '']:.0f} of all tasks, with a loss of "
                f"{before['best K', 'loss', '']:.2f} %" + ".",
                f"Prompts, load: rarely stated. Noise floor: {len(repeats)} deployments, measured again, differ "
                f"by {np.median(repeats):.1f} % (median).",
            ],
        )

    def rows(self) -> Iterator[tuple[str, list[Prediction]]]:
        """Yield the rows of the report: a class, and its predictions."""

        def of(what: str, *, experts: bool) -> list[Prediction]:
            own = [p for p in self.predictions if (p.what, p.experts) == (what, experts) and "mtp" not in p.kind]
            return [p for p in own if what == SERVED or not p.packed]

        yield STEP_DENSE, of(STEP, experts=False)
        yield STEP_PACKED, [p for p in self.predictions if p.what == STEP and p.packed and not p.experts]
        yield SERVED_DENSE, of(SERVED, experts=False)
        yield SERVED_EXPERTS, of(SERVED, experts=True)
        speedups = [p for p in self.predictions if p.what == SPEEDUP and not p.packed]
        chains = [p for p in speedups if not p.tree]
        yield SERVED_DRAFTS, [p for p in self.predictions if p.what == SERVED and "mtp" in p.kind]
        yield CHAINS, chains
        yield CHAINS_DENSE, [p for p in chains if not p.experts and p.kind[-1] == batch_class(1)]
        yield BATCHES_DENSE, [p for p in chains if not p.experts and p.kind[-1] != batch_class(1)]
        yield CHAINS_EXPERTS, [p for p in chains if p.experts]
        yield TREES, [p for p in speedups if p.tree]
        yield PACKED_SPEEDUPS, [p for p in self.predictions if p.what == SPEEDUP and p.packed]


def choice_text(losses: Floats) -> str:
    """Write in how many tasks a choice is within 1 % of the best, and its average loss."""
    near = int((losses <= 1 - NEAR).sum())
    return f"within 1 % of the best in {near} of {len(losses)} tasks, and loses {100 * losses.mean():.2f} % on average"


def overheads_text(engine: str, overheads: Mapping[str, float]) -> str:
    """Write the overheads of an engine's rounds."""
    return f"{engine} " + ", ".join(
        f"{MS * overheads.get(name, 0.0):.2g}" for name in ("round_s", "draft_step_s", "tree_round_s")
    )


def groups_of(predictions: Sequence[Prediction]) -> list[Runs]:
    """Summarise the errors by `what`, system and kind; means are clipped at `FARTHEST`."""
    of: dict[tuple[str, str, tuple[str, ...]], list[float]] = {}
    for p in predictions:
        of.setdefault((p.what, p.system, p.kind), []).append(math.log(p.measured / p.predicted[HELD_OUT]))
    return [
        Runs(
            *key, len(logs), round(float(np.clip(np.mean(logs), -FARTHEST, FARTHEST)), 3), round(float(np.std(logs)), 3)
        )
        for key, logs in sorted(of.items())
    ]


def errors_row(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return the errors of a class."""
    systems = [p.system for p in predictions]
    errors = {name: summary(np.array([p.error(name) for p in predictions]), systems) for name in NAMES}
    return {
        "runs": len(predictions),
        "systems": len(set(systems)),
        **{name: error["of_runs"] for name, error in errors.items()},
        **{name: errors[HELD_OUT][name] for name in ("median_percent", "p90_percent", "bias_percent")},
        "interpolated_runs": errors[TWO_RUNS]["runs"],
    }


def by_system(predictions: Sequence[Prediction]) -> Iterator[tuple[str, str, str, list[Prediction]]]:
    """Yield `what`, the kind without the batch, the system, and its predictions."""
    of: dict[tuple[str, str, str], list[Prediction]] = {}
    for p in predictions:
        kind = ", ".join([*p.kind[:-1], *(["tree"] * p.tree)])  # without the batch
        of.setdefault((p.what, kind, p.system), []).append(p)
    for (what, kind, system), group in sorted(of.items()):
        yield what, kind, system, group


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
        of_group = sorted(group, key=lambda number: (cases[number].sequences, predicted[number]))
        if len(of_group) < 3 or predicted[of_group[0]] == predicted[of_group[-1]]:
            continue
        ends = [of_group[0], of_group[-1]]
        measured = np.array([cases[number].measured_s for number in ends])
        shares = nnls(np.array([np.ones(2), predicted[ends]]).T / measured[:, None], np.ones(2))[0]
        calibrated[of_group[1:-1]] = shares[0] + shares[1] * predicted[of_group[1:-1]]
    return calibrated


def groups(cases: Sequence[Case], keys: Sequence[str]) -> list[list[int]]:
    """Return the indices of cases, grouped by the values of `keys`."""
    of: dict[tuple[str | None, ...], list[int]] = {}
    for number, case in enumerate(cases):
        of.setdefault(tuple(case.about.get(key) for key in keys), []).append(number)
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
