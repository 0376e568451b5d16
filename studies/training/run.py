"""Effects of training data and settings on the bundled models: `python -m studies training`.

Trains, with every seed, the decoders of EDD's ablation, the early exits of EESD's, and EAGLE; records them, profiles
each structure on the deepened target, and replays. Trains MEDUSA's first head further and with more in it, and SPACE's
target at several learning rates. Nothing is really decoded but to record. A second start goes on with what is there.
Each experiment writes a JSON document, from which the report is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from specsim.cli.console import progress_bar
from specsim.io.files import write_json
from specsim.io.progress import Progress
from studies.common import Config, Document, claim
from studies.training import decoders, exits, heads, heat, sizes
from studies.training.report import report
from studies.training.seeds import as_document, from_document

RECORDED = ("*.json",)
EXPERIMENTS: dict[str, Callable[[Path, Config, Progress], Document]] = {
    "decoders": decoders.measure,
    "heads": heads.measure,
    "exits": exits.measure,
    "sizes": sizes.measure,
    "heat": heat.measure,
}


def cached(path: Path, make: Callable[[], Document]) -> Document:
    """A document with replays in it; made where it is not there."""
    if not path.is_file():
        write_json(as_document(make()), path)
    return dict(from_document(json.loads(path.read_text())))


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    with progress_bar() as progress:
        documents = {
            name: cached(out / f"{name}.json", partial(measure, out, config, progress))
            for name, measure in EXPERIMENTS.items()
        }
    report(config, documents).write(out)
