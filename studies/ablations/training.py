"""Train the drafters of the study, and Cali-TS's predictor."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from studies.common import Config, Document, cached

DONE = "training.json"  # in the folder of a drafter's weights


def run_training(options: str, folder: Path) -> Document:
    """Run `realrun train` and return what it trained on and how long it took."""
    command = [sys.executable, "-m", "realrun", "train", *shlex.split(options), "--out", str(folder), "--json"]
    document = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {"options": options, "tokens": document.get("tokens"), "seconds": document.get("seconds")}


def train_drafter(out: Path, name: str, config: Config) -> Path:
    """Return the folder of a drafter's weights, trained unless it is there; "model" and other names as they are."""
    if name not in config["drafters"]:
        return Path(name)
    drafters = out / "drafters"
    options = config["drafters"][name].format(drafters=drafters)
    options += f" --target {config['target']} {config['training']['shared']} --cache {out / 'text'}"
    cached(drafters / name / DONE, lambda: run_training(options, drafters / name))
    return drafters / name


def train_predictor(out: Path, name: str, config: Config) -> Path:
    """Return the folder of Cali-TS's predictor for a drafter, trained unless it is there."""
    drafter, folder = train_drafter(out, name, config), out / "predictors" / name
    options = f"predictor --target {config['target']} --drafter {drafter} {config['training']['predictor']}"
    cached(folder / DONE, lambda: run_training(options, folder))
    return folder
