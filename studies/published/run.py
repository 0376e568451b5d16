"""Published measurements against predictions: `python -m studies published`.

Also writes engine.json, the preset that all rows fit together, as specsim/cost/roofline/engines.json has it, and
errors.json, which `specsim cost show` and others print of a class.
"""

from __future__ import annotations

from pathlib import Path

from studies.common import Config
from studies.published.report import Study

RECORDED: tuple[str, ...] = ()


def main(out: Path, config: Config) -> None:
    """Predict everything and write the report."""
    study = Study.of_data()
    study.report().write(out)
    study.write(out)
