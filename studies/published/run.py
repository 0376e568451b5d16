"""Published measurements against predictions: `python -m studies published`.

Also writes preset.json, which all runs fit together and specsim/cost/roofline/engines.json has, and errors.json, which
specsim/cost/roofline/published_errors.json has; and llamacpp.json of the same folder.
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
