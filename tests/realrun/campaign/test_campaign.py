"""The campaign: stages inside their time, results that can be read, failures that stop nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from realrun.campaign import job as job_module
from realrun.campaign import profile as profile_stage
from realrun.campaign import run as campaign
from realrun.campaign.job import Job, read_result
from realrun.campaign.run import run_campaign
from realrun.cli.campaign import state_in_words
from realrun.cli.main import app
from specsim.cost.grid import grid_from_json
from specsim.io.errors import InputError
from specsim.report.result_files import list_results
from specsim.trace.files import read_trace
from tests.contract.test_house import CARRIED
from tests.support import ROOT


def stage(name: str, share: float = 1.0, **result: Any) -> SimpleNamespace:
    """A stage that remembers its jobs, and returns this result or raises this error."""
    jobs: list[Job] = []

    def run(job: Job) -> dict[str, Any]:
        jobs.append(job)
        if "raises" in result:
            raise result["raises"]
        return {"complete": True} | result

    return SimpleNamespace(name=name, share=share, run=run, jobs=jobs)


def put(monkeypatch: pytest.MonkeyPatch, *stages: SimpleNamespace) -> dict[str, SimpleNamespace]:
    """These stages and no others."""
    by_name = {stage.name: stage for stage in stages}
    monkeypatch.setattr(campaign, "STAGES", {name: stage.share for name, stage in by_name.items()})
    monkeypatch.setattr(campaign, "load_stage", by_name.__getitem__)
    return by_name


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    return put(monkeypatch, stage("first"), stage("broken", raises=ValueError("no luck")), stage("last", 2.0))


def test_a_failed_stage_leaves_its_reason_and_the_next_one_runs(tmp_path: Path, stages: dict[str, Any]) -> None:
    results = run_campaign(tmp_path, minutes=1)
    assert [r["stage"] for r in results] == ["first", "broken", "last"]
    assert results[1]["error"] == "ValueError: no luck" and not results[1]["complete"]
    for name, result in zip(stages, results, strict=True):
        assert read_result(tmp_path / f"{name}.json") == result
        assert result["provenance"]["date"] and result["reduced"]


def test_complete_stages_are_kept_and_others_run_again(tmp_path: Path, stages: dict[str, Any]) -> None:
    run_campaign(tmp_path, minutes=1)
    run_campaign(tmp_path, minutes=1)
    assert [len(s.jobs) for s in stages.values()] == [1, 2, 1]
    run_campaign(tmp_path, minutes=1, overwrite=True)
    assert [len(s.jobs) for s in stages.values()] == [2, 3, 2]


def test_time_is_shared_by_weight(tmp_path: Path, stages: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: 1000.0))  # no stage takes any time
    run_campaign(tmp_path, minutes=4)
    first, broken, last = (s.jobs[0].deadline - 1000 for s in stages.values())
    assert (first, broken, last) == (60, 80, 240)  # a quarter of 240 s; what the first one left is shared again
    run_campaign(tmp_path, minutes=4, overwrite=True, begun=880.0)
    assert [s.jobs[1].deadline - 1000 for s in stages.values()] == [30, 40, 120]  # the minutes began before


def test_a_stage_that_cannot_be_imported_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that lacks what one stage needs, the others run."""
    last = stage("last")

    def load(name: str) -> Any:
        if name == "first":
            raise ImportError("Numba needs NumPy 2.4 or less")
        return last

    monkeypatch.setattr(campaign, "STAGES", {"first": 1.0, "last": 1.0})
    monkeypatch.setattr(campaign, "load_stage", load)
    first, second = run_campaign(tmp_path, minutes=1)
    assert first["error"] == "ImportError: Numba needs NumPy 2.4 or less" and second["complete"]


def test_the_stage_of_kernels_needs_neither_numba_nor_transformers() -> None:
    """Versions that do not go together on a machine then cost the other stages, not this one."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('numba', 'transformers', 'optuna')); "
        "import realrun.cli.main, realrun.campaign.run as run; run.load_stage('kernels')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stage_is_ended_behind_its_minutes_and_keeps_what_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]

    def run(job: Job) -> dict[str, Any]:
        for done in range(100):
            now[0] += 10
            job.save({"rows": done})
            try:
                job.on_time("decode", done, 100)
            except Exception:  # such as the stages have, and what they call
                continue
        return {"complete": True}

    put(monkeypatch, SimpleNamespace(name="slow", share=1.0, run=run), stage("last"))
    for module in (campaign, job_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    slow, last = run_campaign(tmp_path, minutes=2)
    assert (slow["left"], slow["rows"], slow["complete"]) == ("decode: 6 of 100 done", 6, False)  # 60 s, and grace of 6
    assert slow["seconds"] == 70 and last["complete"]


def test_unknown_stage_and_no_time_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="stage 'kernel' is unknown; known: all, smoke, kernels, profile, lab, validate"
    ):
        run_campaign(tmp_path, minutes=1, stages=["kernel"])
    with pytest.raises(InputError, match="minutes=0"):
        run_campaign(tmp_path, minutes=0)


def test_the_command_fails_when_a_stage_does(tmp_path: Path, stages: dict[str, Any]) -> None:
    done = CliRunner().invoke(app, ["campaign", "--out", str(tmp_path), "--minutes", "1", "--json"])
    assert done.exit_code == 1
    assert [s["stage"] for s in json.loads(done.stdout)["stages"]] == ["first", "broken", "last"]


def test_a_reduced_profile_is_complete_and_read(tmp_path: Path) -> None:
    (profile,) = run_campaign(tmp_path / "out", minutes=2, stages=["profile"], device="cpu")
    assert profile["complete"] and not profile.get("errors"), profile
    assert {r.file for r in list_results(tmp_path / "out")} == {"profile.json"}
    for name, document in profile["grids"].items():
        assert grid_from_json(document, name).pass_s(1, 4, 64) > 0


def test_a_stage_without_time_says_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_stage, "measure_ceilings", lambda device: SimpleNamespace(copy_gb_s=1.0))
    (result,) = run_campaign(tmp_path, minutes=1, stages=["profile"], device="cpu", begun=-1e9)
    assert not result["complete"] and result["left"] == list(profile_stage.REDUCED_SHAPES)
    assert state_in_words(result) == "out of time (llama-3.1-8b, qwen3-0.6b left): run again to go on"


@pytest.mark.slow
def test_reduced_stages_give_results_that_specsim_reads(tmp_path: Path) -> None:
    """Without a GPU: cost grids, a lab pair trained in seconds with its traces, and validation."""
    results = run_campaign(tmp_path / "out", minutes=0.7, stages=["profile", "lab", "validate"], device="cpu")
    assert all(r["complete"] and not r.get("errors") for r in results), results
    files = {r.file: r for r in list_results(tmp_path / "out")}
    assert set(files) == {"profile.json", "lab.json", "validate.json", "lab-greedy.zip", "lab-gumbel.zip"}
    assert sum(p.stat().st_size for p in (tmp_path / "out").iterdir()) < 16 * 2**20
    profile, lab, validate = results
    for name, document in profile["grids"].items():
        assert grid_from_json(document, name).pass_s(1, 4, 64) > 0
    assert lab["trained"]["target"]["tokens"] > 0
    assert read_trace(tmp_path / "out" / "lab-gumbel.zip").sequences == lab["traces"]["gumbel"]["sequences"]
    (scripted,) = validate["scripted"].values()
    assert all(row["rounds_identical_percent"] == 100 for row in scripted["rows"])
    assert all(row["rounds_identical_percent"] > 99 for row in validate["lab"]["rows"])


@pytest.mark.slow
def test_a_part_of_a_checkout_is_enough(tmp_path: Path) -> None:
    """The one that docs/howto/profile_gpu.md carries to a machine without a network."""
    for name in CARRIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc", ".*"))
        else:
            shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "realrun", "campaign", "--out", "results", "--minutes", "3"]
    paths = {"PYTHONPATH": f".{os.pathsep}kernels"}
    stages = ("smoke", "kernels")
    command += [word for stage in stages for word in ("--stage", stage)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = {name: json.loads((tmp_path / "results" / f"{name}.json").read_text()) for name in stages}
    assert all(result["complete"] for result in results.values()) and "passed" in results["kernels"]["tests"]["outcome"]
