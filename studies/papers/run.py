"""Report on the consistency of the five papers' tables: `python -m studies papers`.

Runs no model: every figure is a finding of `python -m studies.papers audit`.
"""

from __future__ import annotations

from pathlib import Path

from studies.common import Config
from studies.papers.audit import findings
from studies.papers.report import report

RECORDED = ()  # no real run


def main(out: Path, config: Config) -> None:
    """Audit the tables and write the report."""
    report(findings()).write(out)
