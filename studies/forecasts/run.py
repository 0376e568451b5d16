"""How far sealed forecasts are off while the machine's state changes: `python -m studies forecasts`.

Each run is `realrun validate` in a process of its own: on a machine left alone, beside a process that computes in
bursts, and beside processes that move memory; its costs are profiled by itself, by the first run, or shipped.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from specsim.cli.console import progress_bar
from specsim.cost.profile import NORMAL
from specsim.io.arrays import Floats
from specsim.io.files import remove_folder
from specsim.replaying.forecast import error_summary
from specsim.replaying.intervals import Estimate
from specsim.report.table import Column, plain
from studies.common import Config, Document, cached
from studies.figures import dots
from studies.measurement.run import BURSTS, beside
from studies.report import TENTH, Report, load_line, machine_line, median_load

CHOICE_PERCENT = 2.0  # that a choice may be slower than the best measured policy
TEXT_KNOWN, UNPROBED = "text_known", "text_known_without_probe"
DRAWN = ("forecast", TEXT_KNOWN, "decomposition")
SUMMARISED = {"forecast": "forecast", "text": TEXT_KNOWN, "unprobed": UNPROBED, "decomposition": "predicted"}
PERCENTS = plain(lambda values: ", ".join(f"{value:.1f}" for value in values))
RECORDED = ("run-*.json",)
BUSY_AND_REST_S = ("0.1", "2.0", "0.1", "2.0")
MEMORY = """
import numpy as np
source, target = np.ones(1 << 25), np.empty(1 << 25)
while True:
    np.copyto(target, source)
"""
FIRST_PROFILE = "first-profile.json"
KEPT = (
    *("environment", "dtype", "sequences", "forecast", "errors", "choice", "null_arm", "noise_floor_percent"),
    *("load", "time"),
)
ROW = ("label", "policy", "measured", "predicted", "rounds_identical_percent", "sequence_seconds")
FORECAST = ("forecast", "forecast_without_probe", "text_known", "text_known_without_probe", "costs_known")


def setting_of(number: int, config: Config) -> tuple[Config, Config]:
    """Return the state of the machine and the costs of a run, so that every pair of them comes up."""
    return config["states"][number % len(config["states"])], config["costs"][number % len(config["costs"])]


def validated(number: int, out: Path, config: Config) -> Document:
    """Validate in a process of its own; what its report keeps of the result."""
    state, costs = setting_of(number, config)
    folder = out / f"validation-{number}"
    cost = str(out / FIRST_PROFILE) if costs["cost"] == "first" else costs["cost"]
    pair = ["--target", config["target"], "--drafter", config["drafter"], "--threads", str(config["threads"])]
    command = [sys.executable, "-m", "realrun", "validate", *pair, "--out", str(folder), "--seed", str(number)]
    command += [*shlex.split(config["options"]), *(["--cost", cost] if cost else [])]
    with beside([[BURSTS, *BUSY_AND_REST_S]] * state["bursts"] + [[MEMORY]] * state["memory"]):
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):  # 1 where no difference exceeds the noise floor
        raise SystemExit(f"run {number} ended with {done.returncode}: {shlex.join(command)}")
    document = json.loads((folder / "validation.json").read_text())
    if number == 0:
        (out / FIRST_PROFILE).write_bytes((folder / "tuning_profile.json").read_bytes())
    rows = [{key: row[key] for key in (*ROW, *FORECAST)} for row in document["rows"]]
    kept = {key: document[key] for key in KEPT}
    remove_folder(folder)
    return {"state": state["name"], "costs": costs["name"], **kept, "rows": rows}


def main(out: Path, config: Config) -> None:
    """Run what is missing, and write the report."""
    out.mkdir(parents=True, exist_ok=True)
    documents = []
    with progress_bar() as progress:
        for number in range(config["runs"]):
            documents.append(cached(out / f"run-{number:02}.json", partial(validated, number, out, config)))
            progress("sealed forecasts", number + 1, config["runs"])
    report(config, documents).write(out)


def report(config: Config, documents: Sequence[Document]) -> Report:
    """Return the report. documents : of the runs"""
    costs = {kind["name"]: [run for run in documents if run["costs"] == kind["name"]] for kind in config["costs"]}
    states = {state["name"]: [run for run in documents if run["state"] == state["name"]] for state in config["states"]}
    groups = {"all runs": documents, **costs, **{f"beside: {name}": runs for name, runs in states.items()}}
    summaries = {name: summary(runs) for name, runs in groups.items() if runs}
    everything = summaries["all runs"]
    (median, p90), (known_median, known_p90) = everything.errors["forecast"], everything.errors["text"]
    good = sum(lost_percent(run) <= CHOICE_PERCENT for run in documents)
    tuning, held_out = ([run["sequences"][part] for run in documents] for part in ("tuning", "holdout"))
    devices = {str(run["forecast"]["costs"].get("device")) for run in documents}
    floors = [run["noise_floor_percent"] for run in documents]
    return Report(
        question="How good are forecasts that are made before anything is decoded?",
        answer=f"Over {len(documents)} runs in changing states of the machine, sealed forecasts miss the measured "
        f"speedups by {median:.1f} % in the median and {p90:.1f} % at the 90th percentile, and the chosen policy is "
        f"within {CHOICE_PERCENT:g} % of the best measured one in {good} runs. With the text known, which leaves the "
        f"error of the costs, they miss by {known_median:.1f} % and {known_p90:.1f} %.",
        figure=dots(
            [
                (f"{name}; {run['state']}", {error.replace("_", " "): mean_error(run, error) for error in DRAWN})
                for name, runs in costs.items()
                for run in runs
            ],
            "errors",
            "Errors of sealed forecasts",
            "mean error of a run's speedups over its policies, %",
            level=0,
        ),
        figure_name="errors",
        caption="Mean error of the speedups of each run, by where the costs of its forecast are from and by what "
        "computed beside it",
        columns=[
            Column("runs", "runs of"),
            Column("number", "runs"),
            Column("forecast: median, 90th percentile %", "forecast", PERCENTS),
            Column("text known: median, 90th percentile %", "text", PERCENTS),
            Column("text known, without probe: median, 90th percentile %", "unprobed", PERCENTS),
            Column("decomposition: median %", lambda row: row["decomposition"][0], TENTH),
            Column("inside 95 % interval, %", "inside", TENTH),
        ],
        shown=[
            {"runs of": name, "runs": len(groups[name]), **vars(group), **group.errors}
            for name, group in summaries.items()
        ],
        table=[
            {
                "run": number,
                **{name: run[name] for name in ("state", "costs")},
                **{name: row[name] for name in ("policy", "measured", *FORECAST)},
                "decomposition": row["predicted"],
                "rounds_identical_percent": row["rounds_identical_percent"],
            }
            for number, run in enumerate(documents)
            for row in run["rows"]
        ],
        trust=[
            f"Prompts: of the lab, {min(tuning)} to {max(tuning)} for tuning and {min(held_out)} to {max(held_out)} "
            "held out, in a split of each run's own.",
            machine_line(config, documents[0]),
            f"The costs were measured on: {', '.join(sorted(devices))}.",
            f"{load_line({name: median_load(runs) for name, runs in states.items() if runs})} Medians over runs.",
            f"Noise floor (A/A test): {np.median(floors):.1f} % in the median, at most {max(floors):.1f} %.",
            f"Half-width of the forecasts' intervals: {everything.half_width:.1f} % in the median.",
            run_errors(documents),
        ],
    )


def mean_error(run: Document, name: str) -> dict[str, float]:
    """Return a run's mean error over its policies in percent, as an estimate without uncertainty."""
    return Estimate.exact(run["errors"][name]["mean_percent"]).as_dict()


@dataclass(frozen=True)
class Summary:
    """Of all rows of several runs, in percent.

    errors : their median and 90th percentile, of those that have any, by name as in SUMMARISED
    inside : share of the measured speedups inside the forecast's interval; half_width : median of that interval's
    """

    errors: dict[str, tuple[float, float]]
    inside: float
    half_width: float


def summary(runs: Sequence[Document]) -> Summary:
    """Summarise the rows of these runs."""
    rows = [row for run in runs for row in run["rows"]]
    found = {}
    for name, key in SUMMARISED.items():
        if known := [row for row in rows if row[key] is not None]:
            errors = error_summary(speedups(known, key).tolist(), speedups(known, "measured").tolist())
            found[name] = errors.median_abs_percent, errors.p90_abs_percent
    low, value, high = (np.array([row["forecast"][end] for row in rows]) for end in ("low", "estimate", "high"))
    measured = speedups(rows, "measured")
    inside = float(np.mean((low <= measured) & (measured <= high)))
    return Summary(found, 100 * inside, float(np.median(100 * (high / value - 1))))


def speedups(rows: Sequence[Document], key: str) -> Floats:
    """Return the rows' speedups under this key, without their intervals."""
    return np.array([row[key]["estimate"] if isinstance(row[key], Mapping) else row[key] for row in rows])


def lost_percent(run: Document) -> float:
    """Compute by how many percent the chosen policy was slower than the best measured one, no speculation included."""
    chosen = run["choice"]["measured_speedup"]["estimate"]
    return float(100 * (1 - chosen / max(1.0, *speedups(run["rows"], "measured"))))


def run_errors(documents: Sequence[Document]) -> str:
    """Fit what the load adds to errors of costs; judge such a fit of the first half of the runs on the second half."""
    errors = [np.log(speedups(run["rows"], "measured") / speedups(run["rows"], TEXT_KNOWN)) for run in documents]
    shares = [run["load"]["others_percent"] / 100 for run in documents]
    half = len(documents) // 2
    (idle, busy), (half_idle, half_busy) = fitted(errors, shares), fitted(errors[:half], shares[:half])
    later = zip(errors[half:], shares[half:], strict=True)
    inside = [np.abs(error) <= NORMAL * (half_idle + half_busy * share**2) for error, share in later]
    return (
        f"With the text known, errors have a standard deviation of {100 * idle:.1f} % plus {100 * busy:.0f} % times "
        "the square of the share of the CPUs that other processes use. Fitted on the first half of the runs alone, it "
        f"is {100 * half_idle:.1f} % and {100 * half_busy:.0f} %, and {100 * np.concatenate(inside).mean():.0f} % of "
        "the speedups of the second half lie within the 95 % interval that follows."
    )


def fitted(errors: Sequence[Floats], shares: Sequence[float]) -> tuple[float, float]:
    """Fit the two terms of `realrun.experiment.forecast.run_error` by maximum likelihood.

    errors : by run, of its rows, which err together: a run counts once; shares : of the CPUs, by run
    """
    squares, load = np.array([np.mean(error**2) for error in errors]), np.array(shares)

    def loss(terms: Floats) -> float:
        spread = np.exp(terms[0]) + np.exp(terms[1]) * load**2
        return float(np.sum(np.log(spread) + squares / (2 * spread**2)))

    idle, busy = np.exp(minimize(loss, np.log([0.01, 0.05]), method="Nelder-Mead").x).tolist()
    return idle, busy
