"""`realrun gpu`: stages inside their time, results that can be read, failures that stop nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import realrun.gpu as gpu
from realrun.cli.main import app
from realrun.gpu import REDUCED_RECIPES, RESULT, STAGES, Job, OutOfTime, Stage, run_stages
from specsim.cost.grid import read_grid
from specsim.io.errors import InputError
from tests.contract.test_house import CARRIED
from tests.support import ROOT

Jobs = dict[str, list[Job]]


def fails(job: Job) -> None:
    raise ValueError("no luck")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Three stages in place of the real ones, of which the second fails; the jobs that each was given."""
    given: Jobs = {"first": [], "broken": [], "last": []}

    def noting(name: str, run: Callable[[Job], None]) -> Stage:
        def stage(job: Job) -> None:
            given[name].append(job)
            run(job)

        return Stage(name, stage, {"first": 60.0}.get(name, 1e9))

    runs = {"first": lambda job: job.result.update(rows=3), "broken": fails, "last": lambda job: None}
    monkeypatch.setattr(gpu, "STAGES", tuple(noting(name, run) for name, run in runs.items()))
    return given


def test_a_failed_stage_leaves_its_reason_and_the_next_one_runs(tmp_path: Path, jobs: Jobs) -> None:
    results = [result.document for result in run_stages(tmp_path / "out", minutes=1)]
    assert [r["stage"] for r in results] == ["first", "broken", "last"]
    assert results[0]["rows"] == 3 and [r["complete"] for r in results] == [True, False, True]
    assert results[1]["error"] == "ValueError: no luck" and "in fails" in results[1]["traceback"]
    for result in results:
        assert json.loads((tmp_path / "out" / f"{result['stage']}.json").read_text()) == result
        assert result["provenance"]["date"] and result["reduced"]


def test_complete_stages_are_kept_and_others_run_again(tmp_path: Path, jobs: Jobs) -> None:
    run_stages(tmp_path / "out", minutes=1)
    (jobs["first"][0].work / "scratch").touch()
    run_stages(tmp_path / "out", minutes=1)
    assert [len(given) for given in jobs.values()] == [1, 2, 1]
    (tmp_path / "out" / "last.json").write_text('{"kind": "specsim-gpu')  # killed while it was written
    run_stages(tmp_path / "out", minutes=1, stages=["last"])
    assert [len(given) for given in jobs.values()] == [1, 2, 2] and (jobs["first"][0].work / "scratch").exists()
    run_stages(tmp_path / "out", minutes=1, overwrite=True)
    assert [len(given) for given in jobs.values()] == [2, 3, 3] and not (jobs["first"][0].work / "scratch").exists()


def test_a_stage_has_its_own_time_within_that_of_all(
    tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: 1000.0))  # no stage takes any time
    run_stages(tmp_path / "out", minutes=4)
    assert [given[0].deadline - 1000 for given in jobs.values()] == [60, 240, 240]
    run_stages(tmp_path / "out", minutes=4, overwrite=True, begun=800.0)  # the minutes began before
    assert [given[1].deadline - 1000 for given in jobs.values()] == [40, 40, 40]
    late = run_stages(tmp_path / "late", minutes=4, begun=0.0)
    assert [result.state for result in late] == ["out of time (the minutes were over): run again to go on"] * 3
    assert [len(given) for given in jobs.values()] == [2, 2, 2]


def test_a_stage_is_ended_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]

    def slow(job: Job) -> None:
        for done in range(100):
            now[0] += 10
            try:
                job.report("decode", done, 100)
            except Exception:  # such as what the stages call have
                continue

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu, "STAGES", (Stage("slow", slow, 60), Stage("last", lambda job: None, 60)))
    ended, last = (result.document for result in run_stages(tmp_path / "out", minutes=2))
    assert (ended["left"], ended["complete"], ended["seconds"]) == ("decode: 6 of 100 done", False, 70)
    assert last["complete"]


def test_commands_of_a_stage_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, tmp_path, 0.0, torch.device("cpu"), "lab", 0, lambda what, done, total: None)
    monkeypatch.setattr(Job, "seconds", 60.0)
    with pytest.raises(RuntimeError, match="exit code 3: a / b"):
        job.run(sys.executable, "-c", "print('a\\nb'); raise SystemExit(3)")
    monkeypatch.setattr(Job, "seconds", 0.1)
    with pytest.raises(OutOfTime, match="was not done"):
        job.run("sleep", "60")


def test_trainings_that_are_done_are_kept_and_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed or was cut off is in the result, and is what a second run starts again."""
    started: list[str] = []
    faults: dict[str, BaseException] = {"EAGLE": OutOfTime("was not done"), "draft-2": RuntimeError("exit code 1")}

    def run(job: Job, *command: str, **how: Any) -> str:
        name = Path(command[command.index("--out") + 1]).name
        started.append(name)
        if name in faults:
            raise faults.pop(name)
        return '{"tokens": 5}'

    monkeypatch.setattr(Job, "run", run)
    first = run_stages(tmp_path / "out", minutes=1, stages=["train"], device="cpu")[0].document
    assert not first["complete"] and first["left"] == "train EAGLE"
    assert first["trainings"]["EESD"]["tokens"] == 5 and first["trainings"]["draft-2"]["error"] == "exit code 1"
    assert started.index("EESD-predictor") > started.index("EESD")
    started.clear()
    again = run_stages(tmp_path / "out", minutes=1, stages=["train"], device="cpu")[0].document
    assert again["complete"] and set(started) == {"EAGLE", "draft-2"}
    assert list(again["trainings"]) == list(REDUCED_RECIPES)


def test_unknown_stage_and_no_time_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stage 'kernel' is unknown; known: check, text, train, decode-greedy"):
        run_stages(tmp_path, minutes=1, stages=["kernel"])
    with pytest.raises(InputError, match="minutes=0"):
        run_stages(tmp_path, minutes=0)


def test_the_stage_of_kernels_needs_neither_numba_nor_transformers() -> None:
    """Versions that do not go together on a machine then cost the other stages, not this one."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('numba', 'transformers')); "
        "import realrun.cli.main, realrun.gpu as gpu; gpu.Job.run = lambda *a, **v: 'passed'\n"
        "from pathlib import Path; (stage,) = gpu.chosen_stages(['kernels'])\n"
        "stage.run(gpu.Job(*(Path(),) * 2, 1e9, None, '', 0, None))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_fails_when_a_stage_does(tmp_path: Path, jobs: Jobs) -> None:
    done = CliRunner().invoke(app, ["gpu", "--out", str(tmp_path / "out"), "--minutes", "1", "--json"])
    assert done.exit_code == 1
    assert [s["stage"] for s in json.loads(done.stdout)["stages"]] == ["first", "broken", "last"]


def test_passes_of_true_shapes_can_be_read_as_costs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_stages(out, minutes=2, stages=["transfer"], device="cpu")[0].document
    assert result["complete"] and "error" not in result, result
    assert read_grid(f"{out / 'transfer.json'}:llama-3.2-1b").pass_s(1, 2, 64) > 0
    assert all(row["rounds_identical_percent"] > 99 for row in result["scripted"]["rows"])


def command_in(folder: Path, minutes: float, *stages: str) -> Any:
    """Start the command in a source tree there; its output goes to a file."""
    command = [sys.executable, "-m", "realrun", "gpu", "--out", "results", "--device", "cpu", "--minutes", str(minutes)]
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    if (folder / "realrun").exists():
        paths = {"PYTHONPATH": f".{os.pathsep}kernels"}
    # The benchmarks that a stage starts refuse to run in a worker of pytest-xdist.
    variables = {key: value for key, value in os.environ.items() if key != "PYTEST_XDIST_WORKER"} | paths
    with (folder / "printed").open("ab") as printed:
        words = [word for stage in stages for word in ("--stage", stage)]
        return subprocess.Popen([*command, *words], cwd=folder, env=variables, stdout=printed, stderr=printed)


@pytest.mark.slow
def test_all_stages_end_in_ten_minutes_and_go_on_after_a_kill(tmp_path: Path) -> None:
    """From end to end without a GPU; a run that was killed in the middle is gone on with."""
    out, weights = tmp_path / "results", tmp_path / "results-work" / "weights"
    killed = command_in(tmp_path, 9)
    while not (weights / "EESD" / RESULT).exists():
        assert killed.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    kept = [out / "check.json", out / "text.json", weights / "EESD" / RESULT]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in kept}
    assert not (out / "train.json").exists()
    assert command_in(tmp_path, 9).wait(600) == 0, (tmp_path / "printed").read_text()
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in kept} == before
    results = {stage.name: json.loads((out / f"{stage.name}.json").read_text()) for stage in STAGES}
    assert all(result["complete"] and "error" not in result for result in results.values()), results
    assert sum(result["seconds"] for result in results.values()) < 600
    skipped = [name for name, result in results.items() if "skipped" in result]
    assert skipped == ["memcheck", "racecheck", "train-more", "tests"]
    trained = results["train"]["trainings"]
    assert list(trained) == list(REDUCED_RECIPES) and not any("error" in result for result in trained.values())
    for mode, drafters in (("greedy", {"prompt-lookup", "EAGLE", "EESD", "draft-2"}), ("sampled", {"EAGLE", "EESD"})):
        board = results[f"decode-{mode}"]["board"]
        assert {row["drafter"] for row in board["rows"] if row.get("measured")} == drafters and not board["left_out"]
    assert "passed" in results["check"]["tests"] and results["kernels"]["benchmark"]["benchmarks"]


@pytest.mark.slow
def test_a_part_of_a_checkout_is_enough(tmp_path: Path) -> None:
    """The one that docs/howto/profile_gpu.md carries to a machine without a network."""
    for name in CARRIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc", ".*"))
        else:
            shutil.copy(ROOT / name, tmp_path)
    stages = ("check", "kernels")
    assert command_in(tmp_path, 4, *stages).wait(300) == 0, (tmp_path / "printed").read_text()
    results = [json.loads((tmp_path / "results" / f"{name}.json").read_text()) for name in stages]
    assert all(result["complete"] and "passed" in result["tests"] for result in results)
