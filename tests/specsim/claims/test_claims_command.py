"""Claims on the command line, and those that this repository makes of itself, none of them too loose."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from specsim.claims.check import check
from specsim.claims.claim import Claim, Statement
from specsim.claims.files import claim_files, read_claims
from tests.specsim.claims.conftest import CLAIMS, ClaimFile, write_validation
from tests.support.commands import assert_refused, call, json_of

ROOT = Path(__file__).parents[3]
UNDECIDED = CLAIMS.replace("at_least = 0.5", "at_least = 0.7")


def test_all_outputs_agree(claim_file: ClaimFile, tmp_path: Path) -> None:
    """The table, the JSON and the JUnit XML say of each claim the same."""
    path = claim_file(UNDECIDED.replace("2.33", "2.5"))
    junit, out = tmp_path / "claims.xml", tmp_path / "claims.json"
    result = call("specsim", "claims", "check", path, "--junit", junit, "--out", out)
    assert result.code == 1 and "0 of 2 claims pass" in result.out
    document = json.loads(out.read_text())
    verdicts = {claim["name"]: claim["verdict"] for claim in document["claims"]}
    assert verdicts == {"speedup of four drafts": "drifted", "drafts are accepted": "not decidable"}
    suite = ElementTree.parse(junit).getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "2")
    assert {case.get("name"): case[0].get("type") for case in suite} == verdicts
    for name, verdict in verdicts.items():
        assert any(name in line and verdict.upper() in line for line in result.out.splitlines())
    assert not document["passed"] and document["verdicts"]["not decidable"] == 1


@pytest.mark.parametrize(("text", "code"), [(CLAIMS, 0), (CLAIMS.replace("2.33", "2.5"), 1)])
def test_the_github_action_checks_claims(text: str, code: int, claim_file: ClaimFile, tmp_path: Path) -> None:
    """Its last step, with the inputs that GitHub would put into its environment."""
    action = ROOT / ".github" / "actions" / "claims" / "action.yml"
    install, check_step = re.findall(r"^ +run: (.*)$", action.read_text(), re.MULTILINE)
    for path in re.findall(r"\$GITHUB_ACTION_PATH(/[./a-z]*)", install):
        assert (Path(f"{action.parent}{path}") / ("" if path.endswith("txt") else "pyproject.toml")).is_file()
    written = {"JUNIT": tmp_path / "claims.xml", "BENCHMARK_JSON": tmp_path / "speed.json"}
    inputs = {"CLAIMS": claim_file(text), **written}
    specsim = f'specsim() {{ "{sys.executable}" -m specsim "$@"; }}'
    environment = os.environ | {name: str(value) for name, value in inputs.items()} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", f"{specsim}\n{check_step}"], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert all(path.is_file() for path in written.values())
    assert set(re.findall(r"inputs\.([a-z-]+)", action.read_text())) == set(
        re.findall(r"^  ([a-z-]+):$", action.read_text().partition("runs:")[0], re.MULTILINE)
    )


def test_nothing_is_written_where_a_claim_cannot_be_evaluated(claim_file: ClaimFile, tmp_path: Path) -> None:
    path = claim_file(CLAIMS.replace('"v_d"', '"v_t"'))
    junit = tmp_path / "claims.xml"
    assert_refused(call("specsim", "claims", "check", path, "--junit", junit), path, "v_t")
    assert not junit.exists()


def test_seconds_are_written_as_pytest_benchmark_has_them(recorded: Path, tmp_path: Path) -> None:
    """Its own comparison reads them."""
    files = [tmp_path / "0001_old.json", tmp_path / "0002_new.json"]
    for file in files:
        assert call("specsim", "claims", "check", recorded, "--benchmark-json", file).code == 0
    command = [sys.executable, "-m", "pytest_benchmark", "compare", *map(str, files)]
    compared = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert compared.returncode == 0 and compared.stdout.count("speedup of four drafts") == 2, compared


@pytest.mark.parametrize("shipped", ["", "edd-llama2-chat-7b-a6000"])
def test_recorded_claims_of_a_trace_hold(shipped: str, recorded: Path, tmp_path: Path) -> None:
    out, cost = tmp_path / "deep" / "new.claims.toml", shipped or recorded / "cost.json"
    out.parent.mkdir()
    words = ["record", out, recorded / "trace", "--cost", cost, "--policy", "fixed_k", "--set", "k=3"]
    assert call("specsim", "claims", *words).code == 0
    assert json_of(call("specsim", "claims", "check", out, "--json"))["passed"]
    assert_refused(call("specsim", "claims", *words), out, "--overwrite")
    assert_refused(call("specsim", "claims", *words[:-4], "--overwrite"), "--policy")


def test_recorded_claims_of_a_run_hold(tmp_path: Path) -> None:
    out = tmp_path / "run.claims.toml"
    assert call("specsim", "claims", "record", out, write_validation(tmp_path / "run")).code == 0
    assert json_of(call("specsim", "claims", "check", out, "--json"))["verdicts"]["holds"] == 5


def test_recorded_claims_of_a_leaderboard_and_of_benchmarks_hold(recorded: Path, tmp_path: Path) -> None:
    board = ["leaderboard", recorded / "trace", "--cost", recorded / "cost.json", "--policy", "fixed_k", "--trials", 3]
    assert call("specsim", *board, "--out", tmp_path / "board").code == 0
    stats = {"median": 0.1, "q1": 0.09, "q3": 0.11}
    times = {"benchmarks": [{"fullname": "test_it", "stats": stats}]}
    (tmp_path / "benchmark.json").write_text(json.dumps(times))
    for number, source in enumerate([tmp_path / "board" / "leaderboard.json", tmp_path / "benchmark.json"]):
        out = tmp_path / f"{number}.claims.toml"
        assert call("specsim", "claims", "record", out, source).code == 0
        assert json_of(call("specsim", "claims", "check", out, "--json"))["passed"]


@pytest.mark.parametrize("document", [[], {}, {"kind": "specsim-validation"}, {"boards": [{}]}, {"benchmarks": [3]}])
def test_what_makes_no_claim_is_refused(tmp_path: Path, document: Any) -> None:
    (tmp_path / "it.json").write_text(json.dumps(document))
    assert_refused(call("specsim", "claims", "record", tmp_path / "it.claims.toml", tmp_path / "it.json"), "it.json")
    assert not (tmp_path / "it.claims.toml").exists()
    assert_refused(call("specsim", "claims", "record", tmp_path / "it.toml", tmp_path / "it.json"), ".claims.toml")


def pytest_run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest in another project."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    plugin = ["-p", "specsim.claims.pytest_plugin", "-p", "no:cacheprovider"]
    code = "import sys, pytest; code = pytest.main(); print('torch' in sys.modules); sys.exit(code)"
    return subprocess.run(
        [sys.executable, "-c", code, *plugin, *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.claims.toml").write_text("version = 2\n")
    failed = pytest_run(tmp_path)
    assert failed.returncode == 2 and "version is 2" in failed.stdout and "Traceback" not in failed.stdout


def test_a_policy_file_outside_the_working_tree_runs_only_with_the_option(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file leaves a mark when it runs; a link from inside the tree to it is outside, too."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for folder in (outside, inside):
        folder.mkdir()
        (folder / "trace").symlink_to(recorded / "trace")
        (folder / "it.claims.toml").write_text(CLAIMS.replace('policy = "fixed_k"', 'policy = "theirs.py"'))
    (outside / "theirs.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    (inside / "theirs.py").symlink_to(outside / "theirs.py")
    monkeypatch.chdir(inside)
    for folder in (outside, inside):
        path = folder / "it.claims.toml"
        command = ["specsim", "claims", "check", path]
        assert_refused(call(*command), "theirs.py", "outside the working tree", "--allow-policy-files")
        assert not (tmp_path / "mark").exists()
        assert_refused(call(*command, "--allow-policy-files"), "defines no policy")  # hence it ran
        (tmp_path / "mark").unlink()
    assert "--allow-policy-files" in pytest_run(inside, str(path)).stdout
    assert not (tmp_path / "mark").exists()
    pytest_run(inside, str(path), "--allow-policy-files")
    (tmp_path / "mark").unlink()
    (inside / "theirs.py").unlink()
    shutil.copy(outside / "theirs.py", inside)
    assert_refused(call("specsim", "claims", "check", inside), "defines no policy")
    assert (tmp_path / "mark").exists()


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
    (wheel,) = (home / "wheels").glob("specsim_llm-*.whl")
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_claim_can_be_chosen(python: Path, project: Path) -> None:
    chosen = succeed(python, "-m", "pytest", "speed/chat.claims.toml::drafts are accepted", cwd=project)
    assert "1 passed" in chosen


TIMED = ROOT / "claims" / "timed"


def kept_files(*, timed: bool) -> list[Path]:
    return [path for path in claim_files([ROOT / "claims"]) if (TIMED in path.parents) == timed]


def test_claims_that_need_a_clock_are_of_what_nox_measures() -> None:
    claims = [claim for path in kept_files(timed=True) for claim in read_claims(path)]
    measured = {(claim.home / subject.document).resolve() for claim in claims for subject in claim.subjects}
    (file,) = measured
    assert file == ROOT / "results" / "claims" / "speed.json"
    assert f"--benchmark-json={file.relative_to(ROOT)}" in (ROOT / "noxfile.py").read_text()


@pytest.mark.slow
def test_no_figure_can_move_by_more_than_its_tolerance() -> None:
    """Every expected value and every end of an interval is moved by twice its tolerance and more; all of it drifts."""
    moved = []
    for claim in (claim for path in kept_files(timed=False) for claim in read_claims(path)):
        statement = claim.statement
        if statement.expected is not None:
            moved.append(stating(claim, expected=beyond(statement, statement.expected)))
        if statement.interval is not None:
            low, high = statement.interval
            moved.append(stating(claim, interval=(low, beyond(statement, high))))
            moved.append(stating(claim, interval=(low - (beyond(statement, low) - low), high)))
    assert moved
    assert [claim.name for claim in moved if check(claim).verdict != "drifted"] == []


def stating(claim: Claim, **changes: object) -> Claim:
    """The claim with another statement."""
    return replace(claim, statement=msgspec.structs.replace(claim.statement, **changes))


def beyond(statement: Statement, value: float) -> float:
    """A larger value, beyond the tolerance."""
    return value + 2.1 * (statement.around(value)[1] - value) + 1e-6 * abs(value) + 1e-9
