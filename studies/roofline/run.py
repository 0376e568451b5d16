"""Rooflines against measured costs: `python -m studies.roofline.run [OUT]`.

Profiles the lab's target at several depths, with several drafters and in batches, calibrates a roofline on every other
cell of each profile, and compares it with the cells that it has not seen. A second start goes on with what is there.

Writes OUT/report.md, in which every number comes from the profiles, or from what `experts.py` measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from realrun.pairs.pair import LAB_DEEP, LAB_WEIGHTS, load_pair
from realrun.profiling.batches import profile_batches
from realrun.profiling.profile import profile
from realrun.profiling.turns import TURN_ROUNDS
from specsim.cli.console import progress_bar
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
from specsim.cost.roofline.passes import Operation, Roofline
from specsim.files import write_text
from specsim.progress import Progress
from specsim.report.markdown import markdown_table
from studies.common import Config, Document, claim, kept, run_study
from studies.roofline import experts

PROFILE = "profile.json"
RECORDED = ("config.json", f"*/{PROFILE}")
SETTINGS = ("contexts", "depth", "repeats", "seed")  # of a profile
GOAL = 0.08  # median error on cells that a calibration has not seen
COLUMNS = ["cells", "not calibrated: median", "calibrated: median", "90th percentile", "largest",
           "share of memory, of throughput, launch, overlap"]  # fmt: skip
REGION_COLUMNS = ["region", "cells", "median", "signed median", "largest"]
# A layer of Qwen3-30B-A3B's experts on an H100, NVIDIA's measurements (aiconfigurator-core 0.12.0): tokens, seconds.
EXPERT_LAYER_S = {1: 49e-6, 2: 75e-6, 4: 124e-6, 8: 228e-6, 16: 420e-6, 32: 422e-6}


def cases(config: Config) -> list[tuple[str, str]]:
    """Targets and drafters that are profiled."""
    *_, last = config["targets"]
    return [*((target, "model") for target in config["targets"]), *((last, drafter) for drafter in config["drafters"])]


def case_name(target: str, drafter: str) -> str:
    """Of the folder of a case."""
    return f"{target.replace(':', '-')}-{drafter}"


def lab_target(name: str) -> Architecture:
    """The lab's target, as deep as its name says."""
    lab = find_architecture(str(LAB_WEIGHTS / "target"), name)
    _, _, layers = name.partition(f"{LAB_DEEP}:")
    return replace(lab, num_layers=int(layers)) if layers else lab


def lab_drafter(document: Document, name: str, target: Architecture) -> Drafter:
    """The drafter that was profiled."""
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
    """The costs of a case before any calibration."""
    model = lab_target(target)
    passes = Roofline(model, find_hardware(config["hardware"]), config["dtype"])
    return RooflineCost(passes, lab_drafter(document, drafter, model))


def halves(cells: Cells) -> tuple[Cells, Cells]:
    """The cells that a calibration sees, and those that it is judged by."""
    seen = cells.alternate
    return cells.select(seen), cells.select(~seen)


def percent(error: float) -> str:
    return f"{100 * error:.1f}"


def errors(cost: RooflineCost, cells: Cells) -> list[str]:
    """Median, 90th percentile and largest absolute error in per cent."""
    found = np.abs(predicted_seconds(cost, cells) / cells.seconds - 1)
    return [percent(float(value)) for value in (np.median(found), np.quantile(found, 0.9), found.max())]


def judged(cost: RooflineCost, measured: Measured) -> tuple[RooflineCost, Cells]:
    """The roofline calibrated on half of the cells, and the others."""
    seen, unseen = halves(measured_cells(measured))
    return calibrate(cost, measured, seen), unseen


def case_row(cost: RooflineCost, measured: Measured) -> list[str]:
    """Cells, how far the roofline is off on them before and after calibration, and what the calibration found."""
    fitted, unseen = judged(cost, measured)
    found = fitted.target.derating
    what = f"{found.memory:.2f}, {found.compute:.2f}, {1e6 * found.launch_s:.0f} us, {found.overlap:.2f}"
    before, *_ = errors(cost, unseen)
    return [str(len(unseen.seconds)), before, *errors(fitted, unseen), what]


def case_rows(documents: Mapping[tuple[str, str], Document], config: Config) -> Iterator[list[str]]:
    """Every case's."""
    for (target, drafter), document in documents.items():
        row = case_row(roofline(document, target, drafter, config), profile_from_json(document, target))
        yield [f"{target}, {drafter}", *row]


def batch_rows(documents: Mapping[str, Document], config: Config) -> Iterator[list[str]]:
    """Those of batches, by target; the last cell is the noise floor of what was measured."""
    for target, document in documents.items():
        row = case_row(roofline(document, target, "model", config), batch_profile_from_json(document, target))
        yield [target, *row, percent(document["noise_floor"])]


def region_rows(cost: RooflineCost, measured: Measured) -> Iterator[list[str]]:
    """Errors by region, on the cells not seen."""
    for one in residuals(*judged(cost, measured)):
        yield [one.region, str(one.cells), percent(one.median_abs), f"{100 * one.bias:+.1f}", percent(one.worst)]


def depth_rows(documents: Mapping[tuple[str, str], Document], config: Config) -> Iterator[list[str]]:
    """The deepest target's calibration, asked about the others: passes of the target alone."""
    *others, deepest = config["targets"]
    document = documents[deepest, "model"]
    fitted = calibrate(roofline(document, deepest, "model", config), profile_from_json(document, deepest))
    for target in others:
        cells = measured_cells(profile_from_json(documents[target, "model"], target))
        passes = cells.select(cells.kind == "verify")
        moved = replace(fitted, target=replace(fitted.target, model=lab_target(target)))
        yield [target, str(len(passes.seconds)), *errors(moved, passes)]


def expert_operations(passes: Roofline, tokens: int) -> list[Operation]:
    """What a layer does about its experts."""
    return [one for one in passes.operations(tokens, 0) if "expert" in one.name or one.name == "router"]


def expert_rows() -> Iterator[list[str]]:
    """Published times of a layer of experts beside the roofline's, before and after calibration on them."""
    model = find_architecture("qwen3-30b-a3b").first(1)
    layer = replace(model, experts=Experts(128, 8, 768, routing="balanced"))
    passes = Roofline(layer, find_hardware("h100"))
    each = [expert_operations(passes, tokens) for tokens in EXPERT_LAYER_S]
    fitted = fit_passes(passes, each, np.array([*EXPERT_LAYER_S.values()]))
    for (tokens, measured_s), operations in zip(EXPERT_LAYER_S.items(), each, strict=True):
        told = [float(one.total(operations)) for one in (passes, fitted)]
        shown = (f"{1e6 * s:.0f} ({100 * (s / measured_s - 1):+.1f} %)" for s in told)
        yield [str(tokens), f"{1e6 * measured_s:.0f}", *shown]


def batch_lines(documents: Mapping[str, Document], config: Config) -> list[str]:
    """Of rooflines of several sequences together."""
    asked, rows = config["in_batches"]["probes"], [*batch_rows(documents, config)]
    met = sum(float(row[3]) <= 100 * GOAL for row in rows)
    deepest, document = list(documents.items())[-1]
    cost, measured = roofline(document, deepest, "model", config), batch_profile_from_json(document, deepest)
    return [
        "## In batches",
        "",
        f"Batches of {', '.join(map(str, asked['batches']))} sequences with the draft model, all at one context "
        f"({', '.join(map(str, asked['contexts']))}): draft steps by place, passes over 1 to {asked['depth'] + 1} "
        f"tokens of every sequence, each {asked['repeats']} times; all batches took turns of {TURN_ROUNDS} rounds. The "
        "noise floor is how far the medians of every other repeat and of those between lie apart (median over cells). "
        f"One calibration serves all batches; its goal was met in {met} of {len(rows)} targets.",
        "",
        *markdown_table(["target", *COLUMNS, "noise floor"], rows),
        f"{deepest} by region:",
        "",
        *markdown_table(REGION_COLUMNS, region_rows(cost, measured)),
    ]


def report_text(documents: Mapping[tuple[str, str], Document], batched: Mapping[str, Document], config: Config) -> str:
    """The whole report as Markdown."""
    made = next(iter(documents.values()))["provenance"]
    deepest = config["targets"][-1], "model"
    of_deepest = roofline(documents[deepest], *deepest, config), profile_from_json(documents[deepest], deepest[0])
    rows = [*case_rows(documents, config)]
    met = sum(float(row[3]) <= 100 * GOAL for row in rows)
    device = find_hardware(config["hardware"])
    lines = [
        "# Rooflines against what was measured",
        "",
        f"Profiles of {made['device']}, {made['threads']} thread, {made['dtype']}, {made['date'][:10]}, at contexts "
        f"{', '.join(map(str, config['contexts']))}: draft steps by their place, passes of the target over 1 to "
        f"{config['depth'] + 1} tokens, tokens without speculation. Ceilings are those of {device.title}. Each "
        "roofline is calibrated on every other cell, as on a chessboard of sizes and contexts, judged by the others; "
        "errors are absolute, in per cent of what was measured. Before calibration it knows the data sheet alone, and "
        "nothing of what Python takes to start an operation.",
        "",
        f"Goal: a median of at most {100 * GOAL:.0f} % on cells not seen; met in {met} of {len(rows)} cases.",
        "",
        *markdown_table(["target, drafter", *COLUMNS], rows),
        f"## By region: {config['targets'][-1]} with its draft model",
        "",
        *markdown_table(REGION_COLUMNS, region_rows(*of_deepest)),
        *batch_lines(batched, config),
        "## Another depth",
        "",
        f"Passes of the target under the calibration of {config['targets'][-1]}: beyond what was calibrated, and "
        "results that use it say so.",
        "",
        *markdown_table(["target", "cells", "median", "90th percentile", "largest"], depth_rows(documents, config)),
        "## A layer of experts",
        "",
        "Qwen3-30B-A3B on an H100 in bfloat16, balanced routing: microseconds as NVIDIA measured them "
        "(aiconfigurator-core 0.12.0), as the roofline has them from data sheets and usual derating, and calibrated on "
        "these six.",
        "",
        *markdown_table(["tokens", "measured", "not calibrated", "calibrated"], expert_rows()),
        *experts.section(experts.read()),
    ]  # fmt: skip
    return "\n".join(lines)


def profiled(target: str, drafter: str, config: Config) -> Document:
    """Measure a case."""
    pair = load_pair(target, dtype=config["dtype"], threads=config["threads"], drafter=drafter)
    return profile(pair, **{key: config[key] for key in SETTINGS}, tree_tokens=0)


def profiled_in_batches(target: str, config: Config, report: Progress) -> Document:
    """Measure batches of a target."""
    pair = load_pair(target, dtype=config["dtype"], threads=config["threads"])
    return profile_batches(
        pair, **config["in_batches"]["probes"], seed=config["seed"], progress=partial(report, f"batches of {target}")
    )


def main(out: Path, config: Config) -> None:
    """Profile what is not there, and write the report."""
    claim(out, config)
    documents: dict[tuple[str, str], Document] = {}
    batched: dict[str, Document] = {}
    with progress_bar() as report:
        for number, case in enumerate(cases(config)):
            report("profile", number, len(cases(config)))
            documents[case] = kept(out / case_name(*case) / PROFILE, partial(profiled, *case, config))
        for target in config["in_batches"]["targets"]:
            done = out / case_name(target, "batches") / PROFILE
            batched[target] = kept(done, partial(profiled_in_batches, target, config, report))
    write_text(out / "report.md", report_text(documents, batched, config))


if __name__ == "__main__":
    run_study(main, __file__)
