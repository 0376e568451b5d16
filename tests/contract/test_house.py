"""The house rules: who may import whom, and how large a folder and a file may grow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGES = ("specsim", "realrun", "kernels/speckernels")
MOST_FILES = 13  # .py files of a folder
MOST_LINES = 400  # lines of a file that is no test
UNFINISHED = {"realrun/cli", "realrun/cli/train_drafters.py"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def lint_imports(home: Path) -> subprocess.CompletedProcess[str]:
    """Check the import contracts of the packages below a folder."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"]
    paths = {"PYTHONPATH": f"{home}{os.pathsep}{home / 'kernels'}", "COLUMNS": "200"}
    return subprocess.run(command, cwd=home, env=os.environ | paths, capture_output=True, text=True)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The packages' sources and their contracts, to be spoilt."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("data", "weights", "*.pyc"))
    return tmp_path


def test_imports_follow_the_layers() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("folder", "line", "broken"),
    [
        ("specsim/trace", "import specsim.replaying.replay", "specsim is built in layers"),
        ("specsim/policy", "def late():\n    from specsim.fitting import fit", "specsim is built in layers"),
        ("realrun/decode", "from realrun.drafters import eagle", "realrun is built in layers"),
        ("realrun", "", "realrun is built in layers"),  # a module of no layer
        ("specsim/cost", "import torch", "specsim needs neither models nor kernels"),
        ("specsim/cli", "import realrun.provenance", "specsim needs neither models nor kernels"),
        ("kernels/speckernels/ops", "import specsim.errors", "speckernels stands alone"),
        ("realrun/validation", "from studies import common", "nothing imports a study"),
    ],
)
def test_an_import_that_breaks_a_contract_is_found(copied: Path, folder: str, line: str, broken: str) -> None:
    (copied / folder / "added.py").write_text(f"{line}\n")
    done = lint_imports(copied)
    assert done.returncode == 1
    assert f"{broken} BROKEN" in done.stdout


def test_a_circle_of_imports_is_found(copied: Path) -> None:
    (copied / "specsim/rng.py").write_text("import specsim.policy.user_file\n")
    with (copied / "specsim/policy/base.py").open("a") as base:
        base.write("import specsim.policy.registry\n")
    assert "no package imports in a circle BROKEN" in lint_imports(copied).stdout


def test_no_folder_holds_more_files_than_a_reader_keeps_in_mind() -> None:
    folders = {path.parent for path in sources(*PACKAGES, "studies", "kernels")}
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES}.keys() <= UNFINISHED


def test_no_file_is_longer_than_one_idea_needs() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*PACKAGES, "studies")}
    assert {path: count for path, count in lines.items() if count > MOST_LINES}.keys() <= UNFINISHED
