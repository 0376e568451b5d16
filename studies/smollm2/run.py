"""SmolLM2-135M-Instruct with EAGLE and with prompt lookup: `python -m studies smollm2`.

Runs what `realrun validate` does, as README's first command, with each drafter: the forecast is written before the
held-out prompts are decoded.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from realrun.decode.sampling import Sampler
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.measure.record import RecordSettings
from realrun.pairs.prompts import read_prompts
from specsim.cli.console import progress_bar
from specsim.io.examples import TASKS
from specsim.io.progress import Progress
from specsim.policy.registry import POLICIES
from studies.common import Config, Document, load, named
from studies.smollm2.report import report

RESULT = "validation.json"
RECORDED = (f"*/{RESULT}",)


def validated(folder: Path, drafter: str, config: Config, progress: Progress) -> Document:
    """Return the validation of a drafter; read where it is there."""
    if not (folder / RESULT).is_file():
        pair = load(config, drafter)
        sampler = Sampler(config["mode"], config["temperature"], seed=config["seed"])
        settings = ValidationSettings(
            record=RecordSettings(config["depth"], config["max_new_tokens"], sampler),
            kinds=tuple(POLICIES[name] for name in config["policies"]),
            trials=config["trials"],
            repeats=config["repeats"],
            seed=config["seed"],
            minutes=config["minutes"],
        )
        validate(pair, read_prompts(TASKS, pair.tokenizer, config["prompts"]), settings, folder, progress)
    return dict(json.loads((folder / RESULT).read_text()))


def main(out: Path, config: Config) -> None:
    """Validate each drafter, and write the report."""
    with progress_bar() as progress:
        make = partial(validated, config=config)
        documents = {
            name: make(folder=out / name, drafter=name, progress=named(progress, name)) for name in config["drafters"]
        }
    report(config, documents).write(out)
