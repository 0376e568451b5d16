"""Speedups on a GPU against forecasts made without it: `python -m studies gpu_speedups`.

Decodes with random weights in the shapes of public models, where a recorded trace decides what is accepted. The report
replays the same rounds at the costs of a data sheet, before and after calibration on another GPU's passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from realrun.experiment.scripted import ScriptedSettings, run_scripted, with_prefix
from specsim.cost.grid import GridCost, read_grid
from specsim.cost.model import CostModel
from specsim.cost.profile import profile_from_json
from specsim.cost.roofline.cost import RooflineCost, find_drafter
from specsim.cost.roofline.hardware import find_hardware
from specsim.io.errors import InputError
from specsim.io.examples import located
from specsim.policy.registry import make_policy
from specsim.replaying.priced import PricedTrace
from specsim.report.table import ERROR, SPEEDUP, THREE, Column
from specsim.trace.files import read_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from studies.common import Config, Document, cached
from studies.figures import dots, point
from studies.gpu_passes.run import fitted
from studies.gpu_passes.run import roofline as passes_of
from studies.report import Report

SHEET, OTHER, OWN = "data sheet", "another GPU's passes", "this run's profile"
SHOWN = 8
MEASURED = "scripted.json"
RECORDED = (MEASURED,)
GRIDS = Path(__file__).parents[1] / "gpu_passes" / "recorded"


def measured(config: Config) -> Document:
    """Decode with tuned policies and without speculation."""
    if not torch.cuda.is_available():
        raise InputError("the study gpu_speedups decodes on a GPU, and this machine has none; run it on a GPU")
    trace = read_trace(located(config["trace"], "trace"))
    settings = ScriptedSettings(
        config["context"], trials=config["trials"], seed=config["seed"], minutes=config["minutes"]
    )
    return run_scripted(config["target"], config["drafter"], trace, settings, device="cuda", dtype=config["dtype"])


def main(out: Path, config: Config) -> None:
    """Decode, unless the results are there, and write the report."""
    document = cached(out / MEASURED, partial(measured, config))
    grids = {name: read_grid(GRIDS / f"{name}.json") for name in (config["target"], config["drafter"])}
    report(config, document, grids, read_trace(located(config["trace"], "trace"))).write(out)


def report(config: Config, document: Document, grids: Mapping[str, GridCost], trace: Trace) -> Report:
    """Return the report.

    document : of the real run; grids : passes of target and drafter that were measured on another GPU
    trace : the one that decided what was accepted
    """
    run = sequences_run(trace, document, config)
    costs = {SHEET: roofline(config), OTHER: roofline(config, grids), OWN: profile_from_json(document["profile"], "")}
    rows = [{"label": row["label"], "measured": row["measured"]} for row in document["rows"]]
    for name, cost in costs.items():
        priced = PricedTrace(run, cost)
        for row, ran in zip(rows, document["rows"], strict=True):
            forecast = float(priced.replay(make_policy(ran["policy"], ran["params"]), seed=config["seed"]).speedup)
            row |= {name: forecast, f"{name}: error": 100 * (forecast / ran["measured"]["estimate"] - 1)}
    errors = {name: np.array([row[f"{name}: error"] for row in rows]) for name in costs}
    median = {name: f"{np.median(abs(error)):.1f} %" for name, error in errors.items()}
    chosen = max(rows, key=lambda row: float(row[OTHER]))
    best = max(row["measured"]["estimate"] for row in rows)
    hardware, other = (find_hardware(config[key]).title for key in ("hardware", "calibrated_on"))
    origin = document["provenance"]
    forecast_ms = 1000 * float(costs[OTHER].autoregressive_step(int(run.prompt_tokens.mean())))
    step_ms = 1000 * np.sum(document["autoregressive_sequence_seconds"]) / document["output_tokens"]
    return Report(
        question="Can a speedup be forecast for a GPU on which nothing was measured?",
        answer=f"With costs from the {hardware}'s data sheet, calibrated on passes of the same models on an {other}, "
        f"the forecast speedups of {len(rows)} policies are off by a median of {median[OTHER]} and by "
        f"{max(abs(errors[OTHER])):.1f} % at most; the data sheet alone is off by {median[SHEET]}. The policy that the "
        f"forecast ranks first is {chosen['measured']['estimate'] / best:.3f} times as fast as the fastest.",
        figure=dots(
            [(named(row), {"measured": row["measured"], "forecast": point(row[OTHER])}) for row in rows],
            "speedups",
            f"{config['target']} with {config['drafter']} on an {hardware}",
            "speedup, baseline = 1; 95 % intervals",
            level=1,
        ),
        figure_name="speedups",
        caption=f"Speedups measured on an {hardware}, and forecast from an {other}'s passes",
        columns=[
            Column("policy", "label"),
            Column("measured", "measured", SPEEDUP),
            Column("forecast from another GPU", OTHER, THREE),
            Column("error, %", f"{OTHER}: error", ERROR),
            Column("data sheet alone: error, %", f"{SHEET}: error", ERROR),
            Column("profile of this run: error, %", f"{OWN}: error", ERROR),
        ],
        shown=rows[:SHOWN],
        table=[{**row, "measured": row["measured"]["estimate"]} for row in rows],
        trust=[
            f"Machine: {origin['device']}, {config['dtype']}, torch {origin['torch']}, {origin['date'][:10]}, one run "
            f"without load; the calibration: studies/gpu_passes. Target {config['target']}, draft model "
            f"{config['drafter']}, random weights, batch 1, {config['context']} tokens before every prompt.",
            f"Prompts: {document['output_tokens']} tokens of {run.sequences} sequences, decoded once by every policy. "
            f"A recorded trace of a toy pair ({config['trace']}) decides what is accepted, so the rounds are known and "
            "the errors are those of costs alone. A forecast for a user's text has the error of acceptance as well.",
            f"Noise floor: replayed at the profile of this run itself, the median error is {median[OWN]}; the "
            f"policies were tuned at it. A step without speculation takes {step_ms:.2f} ms, "
            f"forecast {forecast_ms:.2f} ms.",
            "One pair of dense models, decoded by this suite: an engine adds overhead to every step.",
        ],
    )


def named(row: Document) -> str:
    """Return the policy's name without its settings."""
    return str(row["label"]).split("(")[0]


def sequences_run(trace: Trace, document: Document, config: Config) -> Trace:
    """Return the held-out sequences that the real run decoded before its time was over."""
    whole = with_prefix(trace, config["context"])
    held = whole.select(split_sequences(whole, seed=config["seed"])[1])
    order = np.random.default_rng(config["seed"]).permutation(held.sequences)  # as the run draws it
    run = held.select(np.sort(order[: document["sequences"]["run"]]))
    assert int(run.output_tokens.sum()) == document["output_tokens"]
    return run


def roofline(config: Config, grids: Mapping[str, GridCost] | None = None) -> CostModel:
    """Return costs from the data sheet, at the shares of its ceilings that passes on another GPU reached."""
    passes = {}
    for name in (config["target"], config["drafter"]):
        passes[name] = passes_of(name, config)
        if grids is not None:
            seen = np.ones(grids[name].median_s.shape, dtype=np.bool_)
            other = {**config, "hardware": config["calibrated_on"]}
            passes[name] = replace(passes[name], derating=fitted(name, grids[name], seen, other).derating)
    target, drafter = passes.values()
    return RooflineCost(target, find_drafter(config["drafter"], target.model), drafter)
