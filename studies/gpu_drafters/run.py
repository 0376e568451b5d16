"""The papers' drafters trained and decoding on one GPU: `python -m studies gpu_drafters`.

The real run is four stages of `realrun gpu`, and `realrun board` in float32 on a CPU with the weights that came back.
Results of these commands in OUT/gpu_drafters/gpu are used as they are, on any machine, and kept without what the report
does not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from realrun.gpu.stages import run_stages
from specsim.cli.console import progress_bar
from specsim.io.errors import InputError
from specsim.io.files import write_json
from studies.common import Config, Document
from studies.gpu_drafters.report import DECODED, FLOAT32, TEXT, TRAIN, report

STAGES = (TEXT, TRAIN, *DECODED)
RECORDED = tuple(f"{name}.json" for name in (*STAGES, FLOAT32))
POINTS = 24  # of a training's curve
GPU = "gpu"  # folder of the stages' whole results
ALL = ("complete", "left", "error", "reduced", "provenance", "seconds")
READ = {  # by what a stage's result holds it in, beside ALL; "" for the result itself
    "": ("tokens", "tokens_per_second"),
    "trainings": ("tokens", "seconds", "curve", "error"),
    "board": ("target", "dtype", "environment", "output_tokens", "drafters", "load", "noise_floor_percent", "baseline",
              "baseline_sequence_seconds", "prompts", "sequences", "errors", "forecast", "options", "left_out",
              "typical"),
    "rows": ("drafter", "role", "policy", "form", "settings", "own_target", "train_speedup", "forecast", "tau", "v_d",
             "measured", "text_known", "costs_known", "rounds_identical_percent", "output_identical_percent",
             "same_text_rounds_identical_percent", "measured_sequence_seconds"),
}  # fmt: skip


def thinned(curve: Sequence[Any]) -> list[Any]:
    """Return at most about POINTS points of a curve, its last among them."""
    return [*curve[:-1][:: 1 + len(curve) // POINTS], *curve[-1:]]


def read_of(document: Mapping[str, Any], what: str) -> Document:
    return {key: document[key] for key in READ[what] if key in document}


def kept(result: Document) -> Document:
    """Return what the report reads of a stage's result."""
    if "stage" not in result:
        return result
    document = {key: result[key] for key in ALL if key in result} | read_of(result, "")
    if "trainings" in result:
        document["trainings"] = {
            name: read_of({**one, "curve": thinned(one.get("curve", []))}, "trainings")
            for name, one in result["trainings"].items()
        }
    if "board" in result:
        rows = [read_of(row, "rows") for row in result["board"]["rows"]]
        document["board"] = {**read_of(result["board"], "board"), "rows": rows}
    return document


def main(out: Path, config: Config) -> None:
    """Run the stages, unless there are results, and write the report."""
    if torch.cuda.is_available() and not any((out / name).is_file() for name in RECORDED):
        with progress_bar() as progress:
            run_stages(
                out / GPU, minutes=config["minutes"], stages=STAGES, target=config["target"], seed=config["seed"],
                progress=progress,
            )  # fmt: skip
    for path in [out / GPU / name for name in RECORDED]:
        if path.is_file():
            write_json(kept(json.loads(path.read_text())), out / path.name)
    results = {Path(name).stem: json.loads((out / name).read_text()) for name in RECORDED if (out / name).is_file()}
    if TRAIN not in results or not any("board" in results.get(stage, {}) for stage in DECODED):
        raise InputError(
            f"the study gpu_drafters trains and decodes on a GPU, and {out / GPU} has no results of `realrun gpu`; "
            "run it on a GPU"
        )
    report(config, results).write(out)
