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
from specsim.report.table import Column, plain
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

GRAPHS = ("vllm", "sglang", "tensorrt-llm", "gpt-fast")  # engines that run a step as a CUDA graph
STEP, SERVED, SPEEDUP = "decoding step", "served token", "speedup"
NAMES = SHEET, HELD_OUT, HALVES, TWO_POINTS = (
    "data sheet alone",
    "preset of other systems",
    "preset of half of the systems",
    "two runs of its own",
)
DEPLOYMENT = ("target", "gpu", "engine", "version", "precision", "isl", "osl", "batch", "source")
NEAR = 0.99  # of the best that was measured: a choice that loses no more is right
DIGITS = 2  # of a preset's numbers
BATCH_CLASSES = tuple(batch_class(size) for size in (1, SMALL, SMALL + 1))
TARGET_BY_BATCH = "Llama-3.1-8B-Instruct with "
KINDS = "dense models", "experts"
FEWEST = 5  # runs of a class whose errors are named
STEP_DENSE, SERVED_DENSE, SERVED_EXPERTS, CHAINS_DENSE, BATCHES_DENSE, TREES_DENSE, SPEEDUP_EXPERTS = (
    "decoding step, dense models",
    "time per token of a server, dense models",
    "time per token of a server, experts",
    "speedup of chains at batch 1, dense models",
    "speedup of chains at larger batches, dense models",
    "speedup of trees, dense models",
    "speedup, experts",
)


@dataclass(frozen=True)
class Prediction:
    """A measured time or speedup, and the predictions of it by their names; NaN where there is none."""

    what: str
    system: str
    experts: bool
    batch: int
    tree: bool
    measured: float
    predicted: Mapping[str, float]

    def error(self, name: str) -> float:
        """Return the error in percent."""
        return 100 * (self.predicted[name] / self.measured - 1)


@dataclass(frozen=True)
class Study:
    """Published runs, and the preset that fits all of them.

    plain, runs : without and with speculation; rounds : of the latter, under the preset's parameters
    left_out : why, of each published run that is not predicted
    """

    plain: list[Case]
    runs: list[Speculation]
    rounds: Rounds
    parameters: Parameters
    overheads_s: Floats
    left_out: list[str]

    @classmethod
    def of_data(cls) -> Study:
        """Read the published rows and fit them."""
        served, left_out = serving()
        plain = [case for case in steps() if case.about["engine"] in GRAPHS and case.about["dtype"] == "bf16"] + served
        runs = speculation()
        parameters = fitted(plain)
        rounds = Rounds.of(runs, parameters)
        return cls(plain, runs, rounds, parameters, rounds.fitted(np.ones(len(runs), dtype=np.bool_)), left_out)

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
        speedups = np.array([sheet, rounds.held_out(each), rounds.held_out(halves), on_two]).T
        found = [
            Prediction(
                SERVED if "tpot_ms" in case.about else STEP, case.system, case.experts, case.sequences, False,
                case.measured_s, dict(zip(NAMES, row, strict=True)),
            )
            for case, row in zip(self.plain, times.tolist(), strict=True)
        ]  # fmt: skip
        return found + [
            Prediction(
                SPEEDUP, run.system, run.cost.target.model.experts is not None, run.cost.batch, run.tree, run.measured,
                dict(zip(NAMES, row, strict=True)),
            )
            for run, row in zip(self.runs, speedups.tolist(), strict=True)
        ]  # fmt: skip

    def fastest_parallelism(self) -> tuple[int, int]:
        """Count deployments measured at several tensor parallelisms, and those whose fastest is predicted."""
        times = self.held_out_s
        several = right = 0
        for group in groups(self.plain, DEPLOYMENT):
            if "tpot_ms" in self.plain[group[0]].about and len({self.plain[n].about["tp"] for n in group}) > 1:
                chosen = min(group, key=times.__getitem__)
                several += 1
                right += NEAR * self.plain[chosen].measured_s <= min(self.plain[n].measured_s for n in group)
        return several, right

    def repeats(self) -> list[float]:
        """Return by how many percent the times of runs of the same deployment differ."""
        of_deployment = groups([case for case in self.plain if "tpot_ms" in case.about], (*DEPLOYMENT, "tp"))
        served = [case.measured_s for case in self.plain if "tpot_ms" in case.about]
        times = [[served[n] for n in group] for group in of_deployment if len(group) > 1]
        return [100 * (max(group) / min(group) - 1) for group in times]

    def best_lengths(self, *, experts: bool) -> tuple[int, int]:
        """Count tasks measured with chains of three or more lengths, and those for which a best length is predicted."""
        predicted, of_task = self.rounds.held_out(each), dict[tuple[str, str], list[int]]()
        for number, run in enumerate(self.runs):
            if not run.tree and (run.cost.target.model.experts is not None) == experts:
                of_task.setdefault((run.system, run.about["task"]), []).append(number)
        several = [group for group in of_task.values() if len({self.runs[n].draft_tokens for n in group}) > 2]
        chosen = [(max(group, key=predicted.__getitem__), group) for group in several]
        right = [self.runs[n].measured >= NEAR * max(self.runs[i].measured for i in group) for n, group in chosen]
        return len(several), sum(right)

    def by_batch(self) -> Iterator[tuple[str, list[int], Floats, Floats]]:
        """Yield EAGLE-3's tables by batch: name, batches, published and predicted speedups."""
        predicted = self.rounds.held_out(each)
        for system in sorted({run.system for run in self.runs if run.about["task"] == BY_BATCH}):
            own = [number for number, run in enumerate(self.runs) if run.system == system]
            name = system.removeprefix(TARGET_BY_BATCH).removesuffix(f", {self.runs[own[0]].about['source']}")
            yield name, [self.runs[n].cost.batch for n in own], self.rounds.measured[own], predicted[own]

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
            own = [p for p in self.predictions if (p.what, p.experts, batch_class(p.batch)) == (what, experts, size)]
            errors = summary(np.array([p.error(HELD_OUT) for p in own]))
            if errors["runs"] >= FEWEST:
                rounded = {name: round(value, 1) for name, value in errors.items()}
                systems = len({p.system for p in own})
                rows.append(ClassError(what, experts, size, systems, **rounded)._asdict())
        return rows

    def write(self, out: Path) -> None:
        """Write the preset and the errors of classes."""
        write_json(self.preset, out / "preset.json")
        write_json({"classes": self.classes}, out / "errors.json")

    def report(self) -> Report:
        """Return the report."""
        rows = [{"class": name, **errors_row(chosen)} for name, chosen in self.rows()]
        of = {row["class"]: row for row in rows}
        parallel = self.fastest_parallelism()
        lengths = [self.best_lengths(experts=experts) for experts in (False, True)]
        tables = [*self.by_batch()]
        kinds = Counter(self.left_out)
        fixed, repeats = (self.preset["derating"], self.preset["overheads"]), self.repeats()
        return Report(
            question="How far are predicted times and speedups from what others published?",
            answer="With one preset for all engines, fitted to other systems, predictions for dense models are off by "
            f"a median of {of[STEP_DENSE][HELD_OUT]:.1f} % (decoding steps), {of[SERVED_DENSE][HELD_OUT]:.1f} % (time "
            f"per token of a loaded server) and {of[CHAINS_DENSE][HELD_OUT]:.1f} % (speedup of chains at batch 1). For "
            f"mixtures of experts they are off by {of[SERVED_EXPERTS][HELD_OUT]:.1f} % (time) and "
            f"{of[SPEEDUP_EXPERTS][HELD_OUT]:.1f} % (speedup, one in ten by more than "
            f"{of[SPEEDUP_EXPERTS]['p90_percent']:.0f} %).",
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
                Column("90th percentile, %", "p90_percent", TENTH),
                Column(f"{TWO_POINTS}, %", TWO_POINTS, plain(lambda value: "" if value is None else f"{value:.1f}")),
            ],
            shown=rows,
            table=[system_row(*group) for group in by_system(self.predictions)],
            trust=[
                f"Measurements: {len(self.predictions)} published runs of "
                f"{len({p.system for p in self.predictions})} systems (GPU and engine; with speculation also models "
                "and source), see data/; none was measured here. Left out: "
                + "; ".join(f"{count} ({why})" for why, count in kinds.most_common())
                + ".",
                "Held out: each system is predicted by what fits all others. Where half of the systems (every other "
                "one in alphabetical order) are predicted by what fits the other half, the medians are "
                + ", ".join(f"{row[HALVES]:.1f}" for row in rows)
                + " %. Speedups are predicted at the acceptance that was measured, so their errors are those of costs "
                "alone.",
                f"Prompts: a server's prompts are read in the steps of the others. InferenceX draws lengths from 80 to "
                f"100 % of those that it names, so {INFERENCEX_LENGTH:g} times these are taken. Runs with speculation "
                f"seldom name contexts: {CONTEXT} tokens are taken; where they name no tensor parallelism, the least "
                "that fits.",
                f"The preset: {fixed[0]['memory']:g} of the memory bandwidth, {1e6 * fixed[0]['launch_s']:g} us a "
                f"launch, {1e6 * fixed[0]['all_reduce_s']:g} us an all-reduce, {1e6 * fixed[1]['sequence_s']:g} us a "
                f"sequence, {1e6 * fixed[1]['verified_sequence_s']:g} us more if it is verified; "
                f"{1e3 * fixed[1]['round_s']:g} ms a round and {1e3 * fixed[1]['draft_step_s']:g} ms a draft step.",
                f"Choices: the fastest tensor parallelism, or one within 1 % of it, is predicted for {parallel[1]} of "
                f"{parallel[0]} deployments, a best chain length for "
                + " and ".join(
                    f"{right} of {several} tasks of {kind}"
                    for (several, right), kind in zip(lengths, KINDS, strict=True)
                )
                + f", where three or more were measured. EAGLE-3's tables by batch, at the acceptance of {LIKE}: "
                + "; ".join(batch_text(*table) for table in tables)
                + ".",
                f"Noise floor: {len(repeats)} deployments were measured again, at another date; the times of such runs "
                f"differ by a median of {np.median(repeats):.1f} %. Load: the sources do not name it.",
            ],
        )

    def rows(self) -> Iterator[tuple[str, list[Prediction]]]:
        """Yield the rows of the report: a class, and its predictions."""

        def of(what: str, *, experts: bool) -> list[Prediction]:
            return [p for p in self.predictions if (p.what, p.experts) == (what, experts)]

        yield STEP_DENSE, of(STEP, experts=False)
        yield SERVED_DENSE, of(SERVED, experts=False)
        yield SERVED_EXPERTS, of(SERVED, experts=True)
        chains = [p for p in of(SPEEDUP, experts=False) if not p.tree]
        yield CHAINS_DENSE, [p for p in chains if p.batch == 1]
        yield BATCHES_DENSE, [p for p in chains if p.batch > 1]
        yield TREES_DENSE, [p for p in of(SPEEDUP, experts=False) if p.tree]
        yield SPEEDUP_EXPERTS, of(SPEEDUP, experts=True)


def errors_row(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the errors of a class."""
    errors = {name: summary(np.array([p.error(name) for p in predictions])) for name in NAMES}
    held = errors[HELD_OUT]
    return {
        "runs": held["runs"],
        "systems": len({p.system for p in predictions}),
        **{name: error["median_percent"] if error["runs"] else None for name, error in errors.items()},
        "p90_percent": held["p90_percent"],
        "bias_percent": held["bias_percent"],
    }


def by_system(predictions: Sequence[Prediction]) -> Iterator[tuple[str, str, str, list[Prediction]]]:
    """Yield what is predicted, of which models, the system, and its predictions."""
    of: dict[tuple[str, str, str], list[Prediction]] = {}
    for p in predictions:
        kind = f"{'experts' if p.experts else 'dense'}{', tree' if p.tree else ''}"
        of.setdefault((p.what, kind, p.system), []).append(p)
    for (what, kind, system), group in sorted(of.items()):
        yield what, kind, system, group


def system_row(what: str, kind: str, system: str, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return what table.csv has of a system."""
    return {"what": what, "models": kind, "system": system, **errors_row(predictions)}


def batch_text(name: str, batches: Sequence[int], published: Floats, predicted: Floats) -> str:
    """Write how a speedup falls with the batch, and from which batch on it is below 1, as published and predicted."""
    both = published, predicted
    fall = [100 * (1 - float(values[-1] / values[0])) for values in both]
    loses = [next((b for b, value in zip(batches, values, strict=True) if value < 1), "none") for values in both]
    return (
        f"{name}, batch {batches[0]} to {batches[-1]}: falls by {fall[0]:.0f} % (predicted {fall[1]:.0f}), loses from "
        f"{loses[0]} (predicted {loses[1]})"
    )
