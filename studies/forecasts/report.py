"""The report on sealed forecasts: their errors by where the costs are from and by the state of the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specsim.replaying.forecast import error_summary
from specsim.report.table import Column, plain
from studies.common import Config, Document
from studies.figures import line_panels
from studies.report import Report, machine_line

CHOICE_PERCENT = 2.0  # that a choice may be slower than the best measured policy
TEXT_KNOWN, UNPROBED = "text_known", "text_known_without_probe"
DRAWN = {"forecast": "forecast", "text known": TEXT_KNOWN, "decomposition": "predicted"}
SUMMARISED = {"forecast": "forecast", "text": TEXT_KNOWN, "unprobed": UNPROBED, "decomposition": "predicted"}
NAMES = {"forecast": "sealed forecasts", "text": "replays"}
PERCENT = plain(lambda value: f"{value:.1f}")
PERCENTS = plain(lambda values: ", ".join(f"{value:.1f}" for value in values))
Row = Mapping[str, Any]


def report(config: Config, documents: Sequence[Document]) -> Report:
    """Return the report. documents : of the runs"""
    costs = {kind["name"]: [run for run in documents if run["costs"] == kind["name"]] for kind in config["costs"]}
    states = {state["name"]: [run for run in documents if run["state"] == state["name"]] for state in config["states"]}
    groups = {"all runs": documents, **costs, **{f"beside: {name}": runs for name, runs in states.items()}}
    shown = [{"runs of": name, "runs": len(runs), **summary(runs)} for name, runs in groups.items() if runs]
    everything = shown[0]
    good = sum(lost_percent(run) <= CHOICE_PERCENT for run in documents)
    sequences = documents[0]["sequences"]
    devices = {str(run["forecast"]["costs"].get("device")) for run in documents}
    loads = [f"{load_percent(runs):.0f} % ({name})" for name, runs in states.items() if runs]
    floors = [run["noise_floor_percent"] for run in documents]
    return Report(
        question="How good are forecasts that are made before anything is decoded?",
        answer=f"Over {len(documents)} runs in changing states of the machine, {miss(everything, 'forecast')}; "
        f"{everything['inside']:.0f} % of them lie inside the 95 % intervals, and the chosen policy is within "
        f"{CHOICE_PERCENT:g} % of the best measured one in {good} runs. With the text known, which leaves the error of "
        f"the costs, {miss(everything, 'text')}.",
        figure=line_panels(
            {
                name: {
                    label: (
                        [documents.index(run) for run in runs],
                        [flat(error_summary(speedups(run, key), measured(run))["mean_percent"]) for run in runs],
                    )
                    for label, key in DRAWN.items()
                }
                for name, runs in costs.items()
                if runs
            },
            ("run", "mean error over policies, %"),
            "errors",
            level=0.0,
        ),
        figure_name="errors",
        caption="Mean error of a run's speedups over its policies, by where the costs of the forecast are from",
        columns=[
            Column("runs", "runs of"),
            Column("number", "runs"),
            Column("forecast: median, 90th percentile %", pair("forecast"), PERCENTS),
            Column("text known: median, 90th percentile %", pair("text"), PERCENTS),
            Column("text known, without probe: median, 90th percentile %", pair("unprobed"), PERCENTS),
            Column("decomposition: median %", "decomposition_median", PERCENT),
            Column("inside 95 % interval, %", "inside", PERCENT),
        ],
        shown=shown,
        table=[table_row(number, run, row) for number, run in enumerate(documents) for row in run["rows"]],
        trust=[
            f"Prompts: {sequences['tuning']} for tuning and {sequences['holdout']} held out, of the lab, in a split of "
            "each run's own.",
            machine_line(config, documents[0]),
            f"The costs were measured on: {', '.join(sorted(devices))}.",
            f"Load: other processes used {'; '.join(loads)} of the CPUs' time, in the median.",
            f"Noise floor (A/A test): {np.median(floors):.1f} % in the median, at most {max(floors):.1f} %.",
            f"Half-width of the forecasts' intervals: {everything['half_width']:.1f} % in the median.",
            *run_errors(documents),
        ],
    )


def pair(name: str) -> Callable[[Row], list[float] | None]:
    """Return the median and the 90th percentile of a row's errors; None without such errors."""
    return lambda row: [row[f"{name}_median"], row[f"{name}_p90"]] if f"{name}_median" in row else None


def summary(runs: Sequence[Document]) -> dict[str, float]:
    """Summarise the errors of all rows of these runs, in percent."""
    rows = [row for run in runs for row in run["rows"]]
    values: dict[str, float] = {}
    for name, key in SUMMARISED.items():
        known = [row for row in rows if row[key] is not None]
        if known:
            errors = error_summary(*([value_of(row[of]) for row in known] for of in (key, "measured")))
            values |= {f"{name}_median": errors["median_abs_percent"], f"{name}_p90": errors["p90_abs_percent"]}
    inside = [row["forecast"]["low"] <= row["measured"]["estimate"] <= row["forecast"]["high"] for row in rows]
    widths = [100 * (row["forecast"]["high"] / row["forecast"]["estimate"] - 1) for row in rows]
    return {**values, "inside": 100 * float(np.mean(inside)), "half_width": float(np.median(widths))}


def value_of(speedup: Any) -> float:
    """Return a speedup without its interval."""
    return float(speedup["estimate"] if isinstance(speedup, Mapping) else speedup)


def miss(row: Row, name: str) -> str:
    """Say by how much the speedups of this name miss the measured ones."""
    return (
        f"{NAMES[name]} miss the measured speedups by {row[f'{name}_median']:.1f} % in the median and "
        f"{row[f'{name}_p90']:.1f} % at the 90th percentile"
    )


def speedups(run: Document, key: str) -> list[float]:
    """Return a run's speedups under this key, without their intervals."""
    return [value_of(row[key]) for row in run["rows"]]


def measured(run: Document) -> list[float]:
    """Return a run's measured speedups."""
    return speedups(run, "measured")


def lost_percent(run: Document) -> float:
    """Compute by how many percent the chosen policy was slower than the best measured one, no speculation included."""
    choice = run["choice"]
    chosen = choice["measured_speedup"]["estimate"]
    return float(100 * (1 - chosen / max(1.0, *measured(run))))


def load_percent(runs: Sequence[Document]) -> float:
    """Return the share of the CPUs' time that other processes used, in the median of these runs."""
    return float(np.median([run["load"]["others_percent"] for run in runs]))


def run_errors(documents: Sequence[Document]) -> list[str]:
    """Say how far a run's measured speedups lie from the replay of its text, by age and rescaling of the costs."""
    lines = []
    for what, key, fresh in (
        ("costs profiled by the run itself", TEXT_KNOWN, True),
        ("costs from before, rescaled by a probe", TEXT_KNOWN, False),
        ("costs from before as they were", UNPROBED, False),
    ):
        runs = [run for run in documents if (run["costs"] == "fresh profile") is fresh]
        halves = [
            np.concatenate([np.log(np.array(measured(run)) / speedups(run, key)) for run in half])
            for half in (runs[::2], runs[1::2])
            if half
        ]
        spreads = [100 * float(np.sqrt((half**2).mean())) for half in halves]
        lines.append(f"{what}: {' and '.join(f'{value:.1f} %' for value in spreads)}")
    return [f"Root mean square error with the text known, in each half of the runs: {'; '.join(lines)}."]


def flat(value: float) -> dict[str, float]:
    """Return a value as an estimate without uncertainty."""
    return {"estimate": value, "low": value, "high": value}


def table_row(number: int, run: Document, row: Row) -> dict[str, Any]:
    """Return the row of table.csv of a policy in a run."""
    return {
        "run": number,
        "state": run["state"],
        "costs": run["costs"],
        "policy": row["policy"],
        **{name: row[name] for name in ("measured", "forecast", "forecast_without_probe", TEXT_KNOWN, UNPROBED)},
        "costs_known": row["costs_known"],
        "decomposition": row["predicted"],
        "rounds_identical_percent": row["rounds_identical_percent"],
    }
