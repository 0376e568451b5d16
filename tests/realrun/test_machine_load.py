"""What other processes did meanwhile, from the system's counters."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realrun import machine_load
from realrun.cli.validate import resolves_something
from specsim.report.page import load_text


def stat(path: Path, *ticks: int) -> Path:
    path.write_text(f"cpu  {' '.join(map(str, ticks))} 0 0\ncpu0 1 2 3\n")
    return path


@pytest.mark.parametrize(
    ("own_s", "children_s", "others"),
    [
        ((3.0, 5.0), ((0.0, 0.0), (0.0, 0.0)), 20.0),  # of 1,000 ticks: 400 busy, 200 of them its own, 50 stolen
        ((3.0, 4.5), ((7.0, 1.0), (8.5, 1.5)), 5.0),  # 150 its own, and 200 those of a process that it started
    ],
    ids=["its own", "a child's that has ended"],
)
def test_shares_are_of_all_cpus_less_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_s: Any, children_s: Any, others: float
) -> None:
    path, own = stat(tmp_path / "stat", 100, 0, 50, 800, 0, 0, 0, 10), iter(own_s)
    children = iter([(0.0, 0.0, *seconds, 0.0) for seconds in children_s])
    monkeypatch.setattr(machine_load, "STAT", path)
    monkeypatch.setattr(machine_load.time, "process_time", lambda: next(own))
    monkeypatch.setattr(machine_load.os, "times", lambda: os.times_result(next(children)))
    monkeypatch.setattr(machine_load.os, "sysconf", lambda name: 100)
    load = machine_load.watch()
    stat(path, 400, 50, 100, 1300, 50, 0, 0, 60)
    shares = machine_load.load_from([load()])
    assert shares == (pytest.approx(others), 5.0)
    assert load_text(*shares) == f"{others:.0f} % of CPU time used by other processes, 5.0 % steal"


def test_a_system_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "STAT", tmp_path / "absent")
    shares = machine_load.load_from([machine_load.watch()()])
    assert shares == (None, None) and "unknown" in load_text(*shares)


def test_times_count_by_their_length() -> None:
    """Also one too short for any tick, in which this process may seem to have used more than there was."""
    times = [machine_load.Ticks(100, 30, 10, 0), machine_load.Ticks(300, 50, 30, 4), machine_load.Ticks(0, 0, 0.5, 0)]
    assert machine_load.load_from(times) == (pytest.approx(100 * 39.5 / 400), 1.0)


RESOLVED = [(1.04, False, False), (1.06, False, True), (0.9, False, True), (1.0, True, True)]


@pytest.mark.parametrize(("fastest", "resolved", "answer"), RESOLVED)
def test_a_run_resolves_something_by_two_rows_or_by_the_baseline(fastest: float, resolved: bool, answer: bool) -> None:
    speedups = (fastest, None), (1.0, resolved)
    rows = [SimpleNamespace(measured=estimate, resolved=distinct) for estimate, distinct in speedups]
    assert resolves_something(SimpleNamespace(rows=rows, noise_floor_percent=5.0)) == answer
