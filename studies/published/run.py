"""Published measurements against predictions: `python -m studies published`.

Also writes the files that specsim ships: preset.json, which is part of specsim/cost/roofline/engines.json, errors.json,
which is published_errors.json there, and llamacpp.json.
"""

from __future__ import annotations

from pathlib import Path

from specsim.io.files import write_json
from studies.common import Config
from studies.published import llamacpp
from studies.published.report import Study

RECORDED: tuple[str, ...] = ()


def main(out: Path, config: Config) -> None:
    """Predict everything and write the report."""
    study = Study.of_data()
    study.report().write(out)
    study.write(out)
    write_json(llamacpp.document(), out / "llamacpp.json")
