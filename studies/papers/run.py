"""Report on the consistency of the five papers' tables: `python -m studies papers`.

Runs no model: the figures are in data/findings.json, the printed tables beside it.
"""

from __future__ import annotations

from pathlib import Path

from studies.common import Config
from studies.papers.report import report

RECORDED = ()  # no real run


def main(out: Path, config: Config) -> None:
    """Write the report."""
    report().write(out)
