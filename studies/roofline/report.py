"""The report on rooflines: how far calibrated ones are off on cells that they have not seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from realrun.pairs.lab_drafters import LAB_WEIGHTS
from realrun.pairs.pair import LAB_DEEP
from specsim.cost.batch_profile import batch_profile_from_json
from specsim.cost.profile import profile_from_json
from specsim.cost.roofline.architecture import Architecture, Experts, find_architecture
from specsim.cost.roofline.calibration import (
    Cells,
    Measured,
    calibrate,
    fit_passes,
    measured_cells,
    predicted_seconds,
    residuals,
)
from specsim.cost.roofline.cost import Drafter, RooflineCost, find_drafter
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.report.table import Column
from studies.common import Config, Document
from studies.figures import line_panels, point
from studies.report import TENTH, Report

GOAL_PERCENT = 8.0  # median error on cells that a calibration has not seen
# A layer of Qwen3-30B-A3B's experts on an H100, NVIDIA's measurements (aiconfigurator-core 0.12.0): tokens, seconds.
EXPERT_LAYER_S = {1: 49e-6, 2: 75e-6, 4: 124e-6, 8: 228e-6, 16: 420e-6, 32: 422e-6}

Row = dict[str, Any]
Profiles = Mapping[tuple[str, str], Document]  # by target and drafter


def report(config: Config, documents: Profiles, batched: Mapping[str, Document]) -> Report:
    """Return the report. documents, batched : profiles of single sequences, and of batches by target"""
    single, in_batches = [*case_rows(documents, config)], [*batch_rows(batched, config)]
    cases = [*single, *in_batches]
    met = sum(row["median_percent"] <= GOAL_PERCENT for row in cases)
    before, after = (np.median([row[key] for row in cases]) for key in ("uncalibrated_percent", "median_percent"))
    depths = [*depth_rows(documents, config)]
    origin = next(iter(documents.values()))["provenance"]
    probes = config["in_batches"]["probes"]
    layer = [*expert_rows()]
    return Report(
        question="How accurate is a roofline cost model?",
        answer=f"Calibrated on half of a profile's cells, rooflines predict the other half within {after:.1f} % "
        f"(median over {len(cases)} profiles; {before:.0f} % before calibration), and {met} of them meet the goal of "
        f"{GOAL_PERCENT:g} %. At depths that were not calibrated the median error is "
        f"{min(row['median_percent'] for row in depths):.0f} to {max(row['median_percent'] for row in depths):.0f} %.",
        figure=line_panels(
            {
                name: {
                    label: (range(len(rows)), [point(row[key]) for row in rows])
                    for label, key in (("median", "median_percent"), ("90th percentile", "p90_percent"))
                }
                for name, rows in (("single sequences", single), ("batches", in_batches))
            },
            ("profile, in the order of table.csv", "error on unseen cells, %"),
            "errors",
            level=GOAL_PERCENT,
        ),
        figure_name="errors",
        caption="Error of calibrated rooflines on unseen cells, by profile; dashed: the goal",
        columns=[
            Column("target", "target"),
            Column("measured", "measured"),
            Column("unseen cells", "cells"),
            Column("median error before calibration, %", "uncalibrated_percent", TENTH),
            Column("after, %", "median_percent", TENTH),
            Column("90th percentile, %", "p90_percent", TENTH),
            Column("largest, %", "largest_percent", TENTH),
        ],
        shown=[row for row in cases if row["drafter"] == "model"],
        table=[
            *cases,
            *depths,
            *region_rows("regions", documents[config["targets"][-1], "model"], profile_from_json, config),
            *region_rows("regions of batches", batched[config["targets"][-1]], batch_profile_from_json, config),
            *layer,
        ],
        trust=[
            f"Machine: {origin['device']}, {origin['threads']} thread, {origin['dtype']}, {origin['date'][:10]}; "
            f"ceilings are those of {find_hardware(config['hardware']).title}. Before calibration a roofline knows the "
            "data sheet alone, and nothing of what Python takes to start an operation.",
            f"Profiles: contexts {', '.join(map(str, config['contexts']))}, up to {config['depth'] + 1} tokens a pass; "
            f"batches of {', '.join(map(str, probes['batches']))}. Prompts play no part; load was not recorded.",
            "Noise floor of the batches (medians of every other repeat against those between): "
            f"{max(row['noise_floor_percent'] for row in in_batches):.1f} % at most.",
            f"A layer of Qwen3-30B-A3B's experts on an H100, as NVIDIA measured it: off by up to "
            f"{max(abs(row['uncalibrated_percent']) for row in layer):.0f} % before and "
            f"{max(abs(row['median_percent']) for row in layer):.1f} % after calibration on the same six times.",
        ],
    )


def lab_target(name: str) -> Architecture:
    """Return the lab's target, as deep as its name says."""
    lab = find_architecture(str(LAB_WEIGHTS / "target"), name)
    _, _, layers = name.partition(f"{LAB_DEEP}:")
    return replace(lab, num_layers=int(layers)) if layers else lab


def lab_drafter(document: Document, name: str, target: Architecture) -> Drafter:
    """Return the drafter that was profiled."""
    if name == "model":
        return Drafter(name, find_architecture(str(LAB_WEIGHTS / "draft"), "lab/draft"))
    facts, kind = document["drafter_facts"], name.partition("-1")[0]
    number = {"eesd": "layers", "medusa": "heads"}.get(kind)
    if number is None:
        return find_drafter(kind, target)
    core_layers = (document.get("block_expansion") or {}).get("core_layers")  # blocks are spread evenly over these
    deep = kind == "eesd" and core_layers is not None
    count = facts[number] * target.num_layers // core_layers if deep else facts[number]
    return find_drafter({"kind": kind, number: count}, target)


def roofline(document: Document, target: str, drafter: str, config: Config) -> RooflineCost:
    """Return the costs of a case before any calibration."""
    model = lab_target(target)
    passes = Roofline(model, find_hardware(config["hardware"]), config["dtype"])
    return RooflineCost(passes, lab_drafter(document, drafter, model))


def errors(cost: RooflineCost, cells: Cells) -> dict[str, float]:
    """Return the median, 90th percentile and largest absolute error in percent."""
    off = 100 * np.abs(predicted_seconds(cost, cells) / cells.seconds - 1)
    values = (np.median(off), np.quantile(off, 0.9), off.max())
    return dict(zip(("median_percent", "p90_percent", "largest_percent"), map(float, values), strict=True))


def judged(cost: RooflineCost, measured: Measured) -> tuple[RooflineCost, Cells]:
    """Return the roofline calibrated on every other cell, as on a chessboard, and the cells between."""
    cells = measured_cells(measured)
    seen = cells.alternate
    return calibrate(cost, measured, cells.select(seen)), cells.select(~seen)


def case_row(cost: RooflineCost, measured: Measured) -> Row:
    """Return how far the roofline is off before and after calibration, and what the calibration found."""
    fitted, unseen = judged(cost, measured)
    derating = fitted.target.derating
    return {
        "cells": len(unseen.seconds),
        "uncalibrated_percent": errors(cost, unseen)["median_percent"],
        **errors(fitted, unseen),
        "memory_share": derating.memory,
        "throughput_share": derating.compute,
        "launch_us": 1e6 * derating.launch_s,
        "overlap": derating.overlap,
    }


def case_rows(documents: Profiles, config: Config) -> Iterator[Row]:
    """Yield a row for each profile of single sequences."""
    for (target, drafter), document in documents.items():
        row = case_row(roofline(document, target, drafter, config), profile_from_json(document, target))
        yield {"target": target, "drafter": drafter, "measured": "single sequences", **row}


def batch_rows(documents: Mapping[str, Document], config: Config) -> Iterator[Row]:
    """Yield a row for each profile of batches; one calibration serves all batches of a target."""
    for target, document in documents.items():
        row = case_row(roofline(document, target, "model", config), batch_profile_from_json(document, target))
        floor = 100 * document["noise_floor"]
        yield {"target": target, "drafter": "model", "measured": "batches", **row, "noise_floor_percent": floor}


def region_rows(name: str, document: Document, read: Any, config: Config) -> Iterator[Row]:
    """Yield the errors by region of the deepest target's profile, on unseen cells."""
    target = config["targets"][-1]
    for region in residuals(*judged(roofline(document, target, "model", config), read(document, target))):
        yield {
            "target": target,
            "measured": f"{name}: {region.region}",
            "cells": region.cells,
            "median_percent": 100 * region.median_abs,
            "bias_percent": 100 * region.bias,
            "largest_percent": 100 * region.worst,
        }


def depth_rows(documents: Profiles, config: Config) -> Iterator[Row]:
    """Yield the errors of the deepest target's calibration on passes of the other targets."""
    *others, deepest = config["targets"]
    document = documents[deepest, "model"]
    fitted = calibrate(roofline(document, deepest, "model", config), profile_from_json(document, deepest))
    for target in others:
        cells = measured_cells(profile_from_json(documents[target, "model"], target))
        passes = cells.select(cells.kind == "verify")
        moved = replace(fitted, target=replace(fitted.target, model=lab_target(target)))
        yield {
            "target": target,
            "measured": f"calibrated on {deepest}",
            "cells": len(passes.seconds),
            **errors(moved, passes),
        }


def expert_rows() -> Iterator[Row]:
    """Yield signed errors on published times of a layer of experts, before and after calibration on them."""
    model = find_architecture("qwen3-30b-a3b").first(1)
    layer = replace(model, experts=Experts(128, 8, 768, routing="balanced"))
    passes = Roofline(layer, find_hardware("h100"))
    each = [
        [operation for operation in passes.operations(tokens, 0)
         if "expert" in operation.name or operation.name == "router"]
        for tokens in EXPERT_LAYER_S
    ]  # fmt: skip
    fitted = fit_passes(passes, each, np.array([*EXPERT_LAYER_S.values()]))
    for (tokens, measured_s), operations in zip(EXPERT_LAYER_S.items(), each, strict=True):
        before, after = (100 * (float(cost.total(operations)) / measured_s - 1) for cost in (passes, fitted))
        yield {
            "target": "qwen3-30b-a3b, a layer of experts",
            "measured": f"{tokens} tokens, {1e6 * measured_s:.0f} us",
            "uncalibrated_percent": before,
            "median_percent": after,
        }
