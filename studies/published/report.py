"""The report on published measurements: how far predictions from shapes, data sheets and a preset are off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from specsim.cost.roofline.cost import Overheads
from specsim.cost.roofline.published import SMALL, ClassError, batch_class
from specsim.io.arrays import Floats, Seconds
from specsim.io.files import write_json
from specsim.report.table import Column
from studies.figures import dots, point
from studies.published.cases import (
    BY_BATCH,
    CONTEXT,
    INFERENCEX_LENGTH,
    LIKE,
    Case,
    Speculation,
    serving,
    speculation,
    steps,
)
from studies.published.errors import (
    OVERHEADS,
    Rounds,
    each,
    groups,
    halves,
    held_out,
    on_two_points,
    speedups_on_two,
    summary,
)
from studies.published.fit import Cells, Parameters, fitted
from studies.report import TENTH, Report

GRAPHS = ("vllm", "sglang", "tensorrt-llm", "gpt-fast", "exllamav2")  # engines that run a step as a CUDA graph
PACKED = ("int8", "int4")
STEP, SERVED, SPEEDUP = "decoding step", "TPOT", "speedup"
NAMES = SHEET, HELD_OUT, HALVES, TWO_RUNS = (
    "roofline without an engine",
    "preset, held-out",
    "preset, half held-out",
    "interpolated between two of its runs",
)
DEPLOYMENT = ("target", "gpu", "engine", "version", "precision", "isl", "osl", "batch", "source")
NEAR = 0.99  # of the best that was measured: a choice that loses no more is right
MS, US = 1e3, 1e6
WORST = 3  # systems that are named
DIGITS = 2  # of a preset's numbers
BATCH_CLASSES = tuple(batch_class(size) for size in (1, SMALL, SMALL + 1))
KINDS = "dense models", "experts"
FEWEST = 5  # runs of a class whose errors are named
STEP_DENSE, STEP_PACKED, SERVED_DENSE, SERVED_EXPERTS, CHAINS_DENSE, BATCHES_DENSE, TREES_DENSE, SPEEDUP_EXPERTS = (
    "decoding step, dense",
    "decoding step, int8 or int4",
    "TPOT of a server, dense",
    "TPOT of a server, experts",
    "speedup of chains, batch 1, dense",
    "speedup of chains, larger batch, dense",
    "speedup of trees, dense",
    "speedup, experts",
)


@dataclass(frozen=True)
class Prediction:
    """A measured time or speedup, and the predictions of it by their names; NaN where there is none.

    packed : whether the weights are integers, which are unpacked as they are read
    """

    what: str
    system: str
    experts: bool
    packed: bool
    batch: int
    tree: bool
    measured: float
    predicted: Mapping[str, float]

    def error(self, name: str) -> float:
        """Return the error in percent."""
        return 100 * (self.predicted[name] / self.measured - 1)


@dataclass(frozen=True)
class Study:
    """Published runs, and the preset that fits all of them but `packed`.

    plain, packed, runs : without speculation, the same with integer weights, and with speculation
    rounds : of the latter, under the preset's parameters
    left_out : why, of each published run that is not predicted
    """

    plain: list[Case]
    packed: list[Case]
    runs: list[Speculation]
    rounds: Rounds
    parameters: Parameters
    overheads_s: Floats
    left_out: list[str]

    @classmethod
    def of_data(cls) -> Study:
        """Read the published rows and fit them."""
        served, left_out = serving()
        graphs = [case for case in steps() if case.about["engine"] in GRAPHS]
        left_out += ["steps outside CUDA graphs"] * (len(steps()) - len(graphs))
        packed = [case for case in graphs if case.about["dtype"] in PACKED]
        plain = [case for case in graphs if case not in packed] + served
        runs, parameters = speculation(), fitted(plain)
        rounds = Rounds.of(runs, parameters)
        everything = np.ones(len(runs), dtype=np.bool_)
        return cls(plain, packed, runs, rounds, parameters, rounds.fitted(everything), left_out)

    @cached_property
    def held_out_s(self) -> Seconds:
        """Predict the runs without speculation by what fits all other systems."""
        return held_out(self.plain, each)

    @cached_property
    def predictions(self) -> list[Prediction]:
        """Predict every run."""
        others, cases, rounds = self.held_out_s, self.plain, self.rounds
        bare, none = Parameters.without_engine(), np.zeros(len(OVERHEADS))
        sheet_s = Cells.of(cases).seconds(bare)
        times = np.array([sheet_s, others, held_out(cases, halves), on_two_points(cases, others)]).T
        sheet = Rounds.of(self.runs, bare).speedups(none)
        on_two = speedups_on_two(rounds, self.runs)
        speedups = np.array([sheet, self.held_out_speedups, rounds.held_out(halves), on_two]).T
        seconds = Cells.of(self.packed)
        packed_s = [seconds.seconds(parameters) for parameters in (bare, self.parameters, self.parameters)]
        packed = np.array([*packed_s, np.full(len(self.packed), np.nan)]).T
        of_cases = [
            Prediction(
                SERVED if "tpot_ms" in case.about else STEP, case.system, case.experts, case in self.packed,
                case.sequences, False, case.measured_s, dict(zip(NAMES, row, strict=True)),
            )
            for case, row in zip(cases + self.packed, np.concatenate([times, packed]).tolist(), strict=True)
        ]  # fmt: skip
        return of_cases + [
            Prediction(
                SPEEDUP, run.system, run.cost.target.model.experts is not None, False, run.cost.batch, run.tree,
                run.measured, dict(zip(NAMES, row, strict=True)),
            )
            for run, row in zip(self.runs, speedups.tolist(), strict=True)
        ]  # fmt: skip

    @cached_property
    def held_out_speedups(self) -> Floats:
        """Predict the runs with speculation by what fits all other sources."""
        return self.rounds.held_out(each)

    def overhead_ranges_s(self) -> Floats:
        """Return the least and the largest of each overhead [2, 3] where one source is left out of the fit."""
        systems = np.array(self.rounds.systems)
        fits = np.array([self.rounds.fitted(systems != system) for system in sorted(set(systems))])
        return np.array([fits.min(axis=0), fits.max(axis=0)])

    def fastest_parallelism(self) -> tuple[int, int, int]:
        """Count deployments of several tensor parallelisms, and where the predicted or the largest is fastest."""
        times, several, right, largest = self.held_out_s, 0, 0, 0
        for group in groups(self.plain, DEPLOYMENT):
            if "tpot_ms" in self.plain[group[0]].about and len({self.plain[n].about["tp"] for n in group}) > 1:
                best_s = min(self.plain[n].measured_s for n in group)
                chosen = min(group, key=times.__getitem__), max(group, key=lambda n: int(self.plain[n].about["tp"]))
                near = [NEAR * self.plain[n].measured_s <= best_s for n in chosen]
                several, right, largest = several + 1, right + near[0], largest + near[1]
        return several, right, largest

    def repeats(self) -> list[float]:
        """Return by how many percent the times of runs of the same deployment differ."""
        of_deployment = groups([case for case in self.plain if "tpot_ms" in case.about], (*DEPLOYMENT, "tp"))
        served = [case.measured_s for case in self.plain if "tpot_ms" in case.about]
        times = [[served[n] for n in group] for group in of_deployment if len(group) > 1]
        return [100 * (max(group) / min(group) - 1) for group in times]

    def best_lengths(self, *, experts: bool) -> tuple[int, int]:
        """Count tasks measured with chains of three or more lengths, and those for which a best length is predicted."""
        predicted, of_task = self.held_out_speedups, dict[tuple[str, str], list[int]]()
        for number, run in enumerate(self.runs):
            if not run.tree and (run.cost.target.model.experts is not None) == experts:
                of_task.setdefault((run.deployment, run.about["task"]), []).append(number)
        several = [group for group in of_task.values() if len({self.runs[n].draft_tokens for n in group}) > 2]
        chosen = [(max(group, key=predicted.__getitem__), group) for group in several]
        right = [self.runs[n].measured >= NEAR * max(self.runs[i].measured for i in group) for n, group in chosen]
        return len(several), sum(right)

    def by_batch(self) -> Iterator[tuple[str, list[int], Floats, Floats]]:
        """Yield EAGLE-3's tables by batch: name, batches, published and predicted speedups."""
        of_deployment: dict[str, list[int]] = {}
        for number, run in enumerate(self.runs):
            if run.about["task"] == BY_BATCH:
                of_deployment.setdefault(f"{run.about['drafter']} on {run.about['gpu']}", []).append(number)
        for name, own in of_deployment.items():
            batches = [self.runs[n].cost.batch for n in own]
            yield name, batches, self.rounds.measured[own], self.held_out_speedups[own]

    @cached_property
    def preset(self) -> dict[str, Any]:
        """Return the preset as specsim/cost/roofline/engines.json has it."""
        overheads = Overheads(
            sequence_s=self.parameters.sequence_s, **dict(zip(OVERHEADS, self.overheads_s.tolist(), strict=True))
        )
        parts = {"derating": asdict(self.parameters.derating), "overheads": asdict(overheads)}
        return {
            name: {key: float(f"{value:.{DIGITS}g}") for key, value in part.items() if value}
            for name, part in parts.items()
        }

    @cached_property
    def classes(self) -> list[dict[str, Any]]:
        """Return the errors of classes, as specsim/cost/roofline/published_errors.json has them."""
        rows = []
        for what, experts, size in product((STEP, SERVED, SPEEDUP), (False, True), BATCH_CLASSES):
            own = [
                p
                for p in self.predictions
                if (p.what, p.experts, p.packed, batch_class(p.batch)) == (what, experts, False, size)
            ]
            if len(own) < FEWEST:
                continue
            errors = np.array([p.error(HELD_OUT) for p in own])
            ends = np.quantile(1 / (1 + errors / 100), [0.05, 0.95])
            numbers = np.median(abs(errors)), np.quantile(abs(errors), 0.9), np.median(errors)
            rounded = [*(round(float(x), 1) for x in numbers), *(round(float(x), 3) for x in ends)]
            rows.append(ClassError(what, experts, size, len({p.system for p in own}), len(own), *rounded))
        return [row._asdict() for row in rows]

    def write(self, out: Path) -> None:
        """Write the preset and the errors of classes."""
        write_json(self.preset, out / "preset.json")
        write_json({"classes": self.classes}, out / "errors.json")

    def report(self) -> Report:
        """Return the report."""
        rows = [{"class": name, **errors_row(chosen)} for name, chosen in self.rows()]
        of, two = ({row["class"]: row[name] for row in rows} for name in (HELD_OUT, TWO_RUNS))
        table = [system_row(*group) for group in by_system(self.predictions)]
        worst = sorted(table, key=lambda row: -float(row[HELD_OUT]))[:WORST]
        several, right, largest = self.fastest_parallelism()
        lengths = [self.best_lengths(experts=experts) for experts in (False, True)]
        fixed, repeats = (self.preset["derating"], self.preset["overheads"]), self.repeats()
        ranges = MS * self.overhead_ranges_s()
        return Report(
            question="How far are predicted times and speedups from what others published?",
            answer="With one preset for all engines, fitted to other systems, a decoding step of a "
            f"dense model is off by a median of {of[STEP_DENSE]:.1f} %, the time per output token (TPOT) by "
            f"{of[SERVED_DENSE]:.1f} %, and the speedup of a chain at batch 1 by {of[CHAINS_DENSE]:.1f} %. Calibrated "
            f"on two runs of a deployment, its other speedups are off by {two[CHAINS_DENSE]:.1f} %.",
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
                Column("what is predicted", "class"),
                Column("runs", "runs"),
                Column("systems", "systems"),
                *(Column(f"{name}: median error, %", name, TENTH) for name in (SHEET, HELD_OUT)),
                Column("the same, systems weighing alike", "median_percent", TENTH),
                Column("90th percentile, systems weighing alike", "p90_percent", TENTH),
            ],
            shown=rows,
            table=table,
            trust=[
                f"Measurements: {len(self.predictions)} published runs (data/), none from here. A system is a "
                "GPU and an engine, or with speculation a GPU and a source; fits weigh systems alike. Not in data/: "
                "disaggregated deployments, copies of runs, speedups without acceptance length. Left out: "
                + "; ".join(f"{count} ({why})" for why, count in Counter(self.left_out).most_common())
                + ".",
                "Held out: a system is predicted by what fits all others; table.csv also has half of the systems, by "
                "what fits the other half. Speedups share the ceilings of all other runs. The worst: "
                + ", ".join(f"{row[HELD_OUT]:.0f} % ({row['what']}, {row['models']}, {row['system']})" for row in worst)
                + ".",
                "Calibrated on two runs of a deployment, those between them are off by medians of "
                + ", ".join(
                    f"{row[TWO_RUNS]:.1f} % ({row['class']}, {row['interpolated_runs']} runs)"
                    for row in rows
                    if row["interpolated_runs"]
                )
                + ".",
                f"Assumed: InferenceX's mean lengths are {INFERENCEX_LENGTH:g} of those that it names; with "
                f"speculation {CONTEXT} tokens of context and the least tensor parallelism that fits, where the source "
                f"does not say; {LIKE} ran on an H100, and EAGLE-3's tables have its acceptance.",
                f"The preset: {fixed[0]['memory']:g} of the memory bandwidth, {US * fixed[0]['launch_s']:g} us a "
                f"launch, {US * fixed[0]['all_reduce_s']:g} us an all-reduce, {US * fixed[1]['sequence_s']:g} us a "
                "sequence, "
                f"{US * fixed[1]['verified_sequence_s']:g} us more with drafts, {MS * fixed[1]['round_s']:g} ms a "
                "round, "
                f"{MS * fixed[1]['draft_step_s']:g} ms a draft step; with a source left out the last two "
                f"are {ranges[0][0]:.2f} to {ranges[1][0]:.2f} and {ranges[0][1]:.2f} to {ranges[1][1]:.2f} ms.",
                f"Choices: a best tensor parallelism (within 1 %) is predicted for {right} of {several} deployments "
                f"(the largest is one for {largest}), a best chain length for "
                + " and ".join(
                    f"{good} of {count} tasks ({kind})" for (count, good), kind in zip(lengths, KINDS, strict=True)
                )
                + ". Over the batches of EAGLE-3's tables the speedup falls: "
                + "; ".join(batch_text(*table) for table in self.by_batch())
                + ".",
                "Prompts, load: seldom named by the sources. Noise floor: "
                f"{len(repeats)} deployments were measured again at another date, and differ by a median of "
                f"{np.median(repeats):.1f} %.",
            ],
        )

    def rows(self) -> Iterator[tuple[str, list[Prediction]]]:
        """Yield the rows of the report: a class, and its predictions."""

        def of(what: str, *, experts: bool) -> list[Prediction]:
            return [p for p in self.predictions if (p.what, p.experts, p.packed) == (what, experts, False)]

        yield STEP_DENSE, of(STEP, experts=False)
        yield STEP_PACKED, [p for p in self.predictions if p.packed and not p.experts]
        yield SERVED_DENSE, of(SERVED, experts=False)
        yield SERVED_EXPERTS, of(SERVED, experts=True)
        chains = [p for p in of(SPEEDUP, experts=False) if not p.tree]
        yield CHAINS_DENSE, [p for p in chains if p.batch == 1]
        yield BATCHES_DENSE, [p for p in chains if p.batch > 1]
        yield TREES_DENSE, [p for p in of(SPEEDUP, experts=False) if p.tree]
        yield SPEEDUP_EXPERTS, of(SPEEDUP, experts=True)


def errors_row(predictions: Sequence[Prediction]) -> dict[str, Any]:
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
    """Yield what is predicted, of which models, the system, and its predictions."""
    of: dict[tuple[str, str, str], list[Prediction]] = {}
    for p in predictions:
        parts = ["experts" if p.experts else "dense", *(["tree"] * p.tree), *(["integer weights"] * p.packed)]
        kind = ", ".join(parts)
        of.setdefault((p.what, kind, p.system), []).append(p)
    for (what, kind, system), group in sorted(of.items()):
        yield what, kind, system, group


def system_row(what: str, kind: str, system: str, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return what table.csv has of a system."""
    return {"what": what, "models": kind, "system": system, **errors_row(predictions)}


def batch_text(name: str, batches: Sequence[int], published: Floats, predicted: Floats) -> str:
    """Write how a speedup falls with the batch, and at which batches it is below 1, as published and as predicted."""
    both = published, predicted
    fall = [100 * (1 - float(values[-1] / values[0])) for values in both]
    below = [next((f"{b}" for b, v in zip(batches, values, strict=True) if v < 1), "") for values in both]
    loses = f", below 1 from {below[0] or 'none'} (predicted {below[1] or 'none'})" if any(below) else ""
    return f"{name} {fall[0]:.0f} % (predicted {fall[1]:.0f}){loses}"
