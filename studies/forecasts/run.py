"""How far sealed forecasts are off while the machine's state changes: `python -m studies forecasts`.

Each run is `realrun validate` in a process of its own: on a machine left alone, beside a process that computes in
bursts, and beside processes that move memory; its costs are profiled by itself, by the first run, or shipped.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from specsim.cli.console import progress_bar
from specsim.io.files import remove_folder
from studies.common import Config, Document, cached
from studies.forecasts.report import report
from studies.measurement.run import BURSTS, beside

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
    rows: list[dict[str, Any]] = [{key: row[key] for key in (*ROW, *FORECAST)} for row in document["rows"]]
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
