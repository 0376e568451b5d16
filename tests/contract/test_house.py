"""The house rules: who may import whom, and how large a folder and a file may grow."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from realrun.drafters.registry import DRAFTERS
from tests.support import ROOT

PACKAGES = ("specsim", "realrun", "kernels/speckernels")
MOST_LINES = 800  # lines of a file that is no test
MOST_MIB = 64  # of a checkout
KERNELS_MIB = 16  # that the part for a GPU leaves for compiled kernels
CARRIED = ("specsim", "realrun", "kernels", "tests", "pyproject.toml")  # to a GPU, as docs/howto/profile_gpu.md says


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


BROKEN = [  # a file added to a folder, its import, and what is said of it
    ("specsim/trace/added.py", "import specsim.replaying.replay", "specsim.trace.added -> specsim.replaying.replay"),
    ("specsim/policy/added.py", "def f():\n import specsim.learn.fit", "specsim.policy.added -> specsim.learn.fit"),
    ("realrun/decode/added.py", "from realrun.drafters import eagle", "realrun.decode.added -> realrun.drafters.eagle"),
    ("realrun/added.py", "", "- realrun.added"),
    ("specsim/cost/added.py", "import torch", "specsim.cost.added -> torch"),
    ("specsim/cli/added.py", "import realrun.provenance", "specsim.cli.added -> realrun.provenance"),
    ("kernels/speckernels/ops/added.py", "import specsim.io.errors", "speckernels.ops.added -> specsim.io.errors"),
    ("realrun/experiment/added.py", "from studies import common", "realrun.experiment.added -> studies"),
    ("specsim/replaying/added.py", "import specsim.replaying.again", "No cycles are allowed in specsim.replaying."),
    ("specsim/replaying/again.py", "import specsim.replaying.added", "No cycles are allowed in specsim.replaying."),
]  # fmt: skip


def test_imports_that_break_a_contract_are_found(copied: Path) -> None:
    for file, line, _ in BROKEN:
        (copied / file).write_text(f"{line}\n")
    done = lint_imports(copied)
    assert done.returncode == 1 and "6 broken" in done.stdout
    said = done.stdout.replace("studies.common", "studies")
    assert [what for _, _, what in BROKEN if what not in said] == []


def test_no_file_is_longer_than_one_idea_needs() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*PACKAGES, "studies")}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_only_its_own_file_knows_a_kind_of_drafter() -> None:
    """Elsewhere in realrun no name of a kind is compared with; `origin`, its source, may be "model" as well."""
    found = []
    for path in sources("realrun"):
        if path.is_relative_to(ROOT / "realrun" / "drafters"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and not ast.unparse(node.left).endswith(".origin"):
                names = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)} & {*DRAFTERS}
                found += [f"{path.relative_to(ROOT)}, line {node.lineno}: {name}" for name in names]
    assert found == []


def test_policies_read_their_settings_by_name() -> None:
    """By number, a setting put between others would turn a threshold into another in silence."""
    found = []
    for path in sources("specsim"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "params":
                found += [f"{path.relative_to(ROOT)}, line {node.lineno}: {ast.unparse(node)}"]
    assert found == []


def test_a_module_gives_a_name_once() -> None:
    """Where two files are joined, the second would take a constant from the first in silence."""
    found = []
    for path in sources(*PACKAGES, "studies"):
        given = Counter[str]()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                given[node.name] += not any("overload" in ast.unparse(each) for each in node.decorator_list)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                given.update(target.id for target in targets if isinstance(target, ast.Name))
        found += [f"{path.relative_to(ROOT)}: {name}" for name, times in given.items() if times > 1 and name != "_"]
    assert found == []


CLOCKS = ("perf_counter(", "process_time(", "monotonic()", "thread_time(", "time_ns(", "time.time(")


def test_tests_prove_and_benchmarks_alone_read_a_clock() -> None:
    """A time that a test waits for is missed on a busy machine; what measures time runs by `nox -s bench`."""
    texts = {path: path.read_text() for path in sources("tests") if path != Path(__file__)}
    readers = [path for path, text in texts.items() if any(clock in text for clock in CLOCKS)]
    assert {path.parent.relative_to(ROOT).as_posix() for path in readers} == {"tests/bench"}
    marked = "pytestmark = pytest.mark.bench"
    assert [path.name for path in sources("tests/bench") if marked not in texts[path]] == []


def test_all_seconds_of_a_round_are_read_in_one_place() -> None:
    """Two clocks in a round, such as the wall's beside the process's, would add up to nothing."""
    clocks = ("perf_counter(", "process_time(", "thread_time(", "time_ns(")
    readers = {
        path.relative_to(ROOT).as_posix() for path in sources("realrun") if any(c in path.read_text() for c in clocks)
    }
    assert readers == {"realrun/lm/clock.py", "realrun/machine_load.py"}


def tracked_mib(*folders: str) -> float:
    """What a commit's files weigh."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git")
    return sum((ROOT / name).stat().st_size for name in listed.stdout.split("\0") if name) / 2**20


def test_a_checkout_is_light_enough_to_be_carried() -> None:
    assert f"git archive HEAD {' '.join(CARRIED)} " in (ROOT / "docs" / "howto" / "profile_gpu.md").read_text()
    assert 0 < tracked_mib(*CARRIED) < MOST_MIB - KERNELS_MIB
    assert tracked_mib() < MOST_MIB
