"""What training decides, on the lab: `python -m studies.training.run [OUT]`.

Trains, with every seed, the decoders of EDD's ablation, the early exits of EESD's, and EAGLE; records them, profiles
each structure on the deepened target, and replays. Trains MEDUSA's first head further and with more in it, and SPACE's
target at several learning rates. Nothing is really decoded but to record. A second start goes on with what is there.

Writes OUT/figures/ and OUT/report.md, in which every number comes from the runs; the report grows by a section
whenever one is finished. What a section is made of lies in OUT as one JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specsim.cli.console import progress_bar
from specsim.files import write_json, write_text
from specsim.progress import Progress
from studies.common import Config, Document, claim, run_study
from studies.training import decoders, exits, heads, heat, sizes, text
from studies.training.seeds import as_document, from_document

RECORDED = ("*.json",)
Measure = Callable[[Path, Config, Progress], Document]
Section = Callable[[Config, Any, Path], list[str]]
SECTIONS: dict[str, tuple[Measure, Section]] = {
    "decoders": (decoders.measure, text.decoder_section),
    "heads": (heads.measure, text.head_section),
    "exits": (exits.measure, text.exit_section),
    "sizes": (sizes.measure, text.size_section),
    "heat": (heat.measure, text.heat_section),
}


def kept(path: Path, make: Callable[[], Document]) -> Document:
    """A document with replays in it; made where it is not there."""
    if not path.is_file():
        write_json(as_document(make()), path)
    return dict(from_document(json.loads(path.read_text())))


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    lines = text.introduction(config)
    with progress_bar() as report:
        for name, (measure, section) in SECTIONS.items():
            found = kept(out / f"{name}.json", lambda measure=measure: measure(out, config, report))  # type: ignore[misc]
            lines += section(config, found, out / "figures")
            write_text(out / "report.md", "\n".join(lines))


if __name__ == "__main__":
    run_study(main, __file__)
