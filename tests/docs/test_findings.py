"""Scripts in findings/: their headers, and that they name no folder or index of a machine."""

from __future__ import annotations

import datetime
import os
import re
import shlex
from pathlib import Path

import pytest

from docs.tables import FIELDS, FINDINGS, finding_header
from tests.support import ROOT

SCRIPTS = sorted(FINDINGS.glob("*.sh"))
INSTALL = re.compile(r"^venv/bin/pip install -q (?:--no-deps )?(.+)$", re.MULTILINE)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_finding_is_a_script_that_anybody_can_run(path: Path) -> None:
    header, text = finding_header(path), path.read_text()
    assert os.access(path, os.X_OK)
    assert tuple(header) == FIELDS
    assert datetime.date.fromisoformat(header["date"]) and header["finding"].endswith(".")
    assert text.startswith("#!/usr/bin/env bash\n# engine: ") and "\nset -eu\n" in text and "mktemp -d" in text
    packages = shlex.split(" ".join(INSTALL.findall(text)))
    assert packages and all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\w.]+", package) for package in packages)
    assert "specsim" not in text and not re.search(r"://(?!127\.0\.0\.1)|[\s\"'=]/(?!v1/)\w+/|index-url", text)
    assert all(word in text for word in ("expected: ", "seen: ", "the behaviour has changed"))


def test_at_least_six_findings_are_listed() -> None:
    page = (ROOT / "docs" / "findings.md").read_text()
    assert len(SCRIPTS) >= 6
    assert all(f"`{path.stem}`" in page for path in SCRIPTS)
