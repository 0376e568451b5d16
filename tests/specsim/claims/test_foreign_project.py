"""The pytest plugin where nothing but specsim's wheel, what it needs and pytest are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specsim.claims.files import read_claims
from tests.specsim.claims.conftest import CLAIMS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TORCH_FREE = """\
import importlib.util, sys


def pytest_sessionfinish():
    assert importlib.util.find_spec("torch") is None and "torch" not in sys.modules
    assert "specsim" in sys.modules and "site-packages" in sys.modules["specsim"].__file__
    print("no torch")
"""


def succeed(*command: object, cwd: Path, code: int = 0) -> str:
    """What a command prints that ends with this exit code, in an environment that knows nothing of this repository."""
    strange = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
    env = {name: value for name, value in os.environ.items() if name not in strange}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=env, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel of these sources."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home / "venv", with_pip=True)
    interpreter = home / "venv" / "bin" / "python"
    succeed(interpreter, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", home / "wheels", ROOT, cwd=home)
    (wheel,) = (home / "wheels").glob("specsim-*.whl")
    succeed(interpreter, "-m", "pip", "install", "-c", ROOT / "constraints.txt", wheel, "pytest", cwd=home)
    return interpreter


@pytest.fixture
def project(recorded: Path, tmp_path: Path) -> Path:
    """Somebody's repository: a trace, a right and a wrong claim about it, and a test of their own."""
    shutil.copytree(recorded / "trace", tmp_path / "speed" / "trace")
    (tmp_path / "speed" / "chat.claims.toml").write_text(CLAIMS.replace("2.33", "2.5"))
    (tmp_path / "conftest.py").write_text(TORCH_FREE)
    (tmp_path / "test_theirs.py").write_text("def test_theirs():\n    assert True\n")
    return tmp_path


def verdicts(junit: Path) -> dict[str | None, bool]:
    """Of every test case of a JUnit file whether it passed; the file's own counts must agree."""
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    passed = {case.get("name"): case.find("failure") is None for case in suite.iter("testcase")}
    counts = {key: int(str(suite.get(key))) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": len(passed), "failures": list(passed.values()).count(False), "errors": 0, "skipped": 0}
    return passed


def test_claims_are_collected_fail_are_updated_and_pass(python: Path, project: Path) -> None:
    listed = succeed(python, "-m", "pytest", "--collect-only", "-q", cwd=project)
    names = ["speed/chat.claims.toml::speedup of four drafts", "speed/chat.claims.toml::drafts are accepted"]
    assert all(name in listed for name in [*names, "test_theirs.py::test_theirs", "3 tests collected"])

    failed = succeed(python, "-m", "pytest", "-s", "--junitxml=theirs.xml", cwd=project, code=1)
    assert "1 failed, 2 passed" in failed and "Traceback" not in failed and "no torch" in failed
    assert "speedup of four drafts: drifted: claimed 2.5 +- 0.5 %, found 2.329" in failed
    of_claims = {"speedup of four drafts": False, "drafts are accepted": True}
    assert verdicts(project / "theirs.xml") == {**of_claims, "test_theirs": True}
    output = succeed(python, "-m", "specsim", "claims", "check", "speed", "--junit", "ours.xml", cwd=project, code=1)
    assert "DRIFTED" in output and verdicts(project / "ours.xml") == of_claims

    succeed(python, "-m", "pytest", "--claims-update", cwd=project)
    text = (project / "speed" / "chat.claims.toml").read_text()
    assert "# A bound is a statement about prompts like these." in text
    assert read_claims(project / "speed" / "chat.claims.toml")[0].statement.expected == pytest.approx(2.329, abs=1e-3)
    assert "3 passed" in succeed(python, "-m", "pytest", "-s", "--junitxml=theirs.xml", cwd=project)
    assert all(verdicts(project / "theirs.xml").values())


def test_one_claim_can_be_chosen_and_a_bad_file_is_one_line(python: Path, project: Path) -> None:
    chosen = succeed(python, "-m", "pytest", "speed/chat.claims.toml::drafts are accepted", cwd=project)
    assert "1 passed" in chosen
    (project / "bad.claims.toml").write_text("version = 2\n")
    refused = succeed(python, "-m", "pytest", cwd=project, code=2)
    assert "bad.claims.toml: version is 2" in refused and "Traceback" not in refused
