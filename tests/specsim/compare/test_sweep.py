"""Sweeps: every speedup against single replays, and the same answer whoever does the work, whatever happens to it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import specsim
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.compare import sweep as sweeping
from specsim.compare.sweep import Cell, Configuration, Swept, configurations_of, sweep, sweep_job_as_dict, write_sweep
from specsim.cost.files import read_cost
from specsim.io.errors import InputError
from specsim.io.workers import Workers
from specsim.trace.files import depth_at, pack_trace, read_trace, read_trace_at, write_trace
from specsim.trace.split import split_sequences
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of
from tests.support.lossy_cluster import losing_a_worker

COSTS = ("specdecode-bench-llama3.1-8b-eagle-h100", "edd-llama2-chat-7b-a6000")
HERE = Workers(jobs=1)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of different acceptance and depth."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, accept_prob, depth in (("often", 0.9, 6), ("seldom", 0.3, 4)):
        write_trace(generate(IID(accept_prob), sequences=6, output_tokens=30, depth=depth), folder / name)
    return [folder / "often", folder / "seldom"]


def cells_of(traces: list[Path]) -> list[Cell]:
    return [Cell(str(trace), name, read_cost(name, batch=size), size)
            for trace in traces for name, size in ((COSTS[0], 1), (COSTS[0], 16), (COSTS[1], None))]  # fmt: skip


def points() -> list[Configuration]:
    return configurations_of(["fixed_k", "beta_ts"], 8, depth=4)


def assert_same(swept: Swept, other: Swept) -> None:
    """To the last bit."""
    assert np.array_equal(swept.tuning, other.tuning) and np.array_equal(swept.holdout, other.holdout)
    assert swept.best == other.best and swept.reasons == other.reasons
    assert swept.table().equals(other.table())


def test_every_speedup_is_that_of_a_replay(traces: list[Path]) -> None:
    cells, configurations = cells_of(traces), points()
    assert [name for name, _ in configurations] == ["fixed_k"] * 4 + ["beta_ts"] * 8
    swept = sweep(cells, configurations, HERE)
    for number, cell in enumerate(cells):
        trace = read_trace(cell.trace)
        for part, speedups in zip(split_sequences(trace), (swept.tuning, swept.holdout), strict=True):
            for at, (policy, settings) in enumerate(configurations):
                run = specsim.replay(trace.select(part), cell.cost, policy, **settings)
                replayed = run.autoregressive_s.sum() / run.speculative_s.sum()
                assert speedups[number, at] == pytest.approx(replayed, rel=1e-12)
        best = swept.best[number]
        assert best.configuration == int(np.argmax(swept.tuning[number]))
        reported = best.holdout["speedup"]
        assert reported["estimate"] == pytest.approx(swept.holdout[number, best.configuration], rel=1e-12)
        assert reported["low"] < reported["estimate"] < reported["high"]
        assert best.tuning_speedup == swept.tuning[number, best.configuration]


def test_progress_counts_replays_of_all_cells(traces: list[Path]) -> None:
    reports: list[tuple[int, int]] = []
    sweep(cells_of(traces), points(), HERE, progress=lambda *at: reports.append(at))
    assert reports[0] == (0, 72) and reports[-1] == (72, 72) and reports == sorted(reports)


def test_what_a_trace_cannot_serve_is_told(traces: list[Path]) -> None:
    deep = [Configuration("fixed_k", {"k": 5}), Configuration("fixed_k", {"k": 2}), Configuration("pct", {})]
    swept = sweep(cells_of(traces)[::3], deep, HERE)
    assert (swept.tuning > 0).tolist() == [[True, True, False], [False, True, False]]
    assert "needs recorded trees" in swept.reasons[0] and swept.best[1].configuration == 1
    nothing = sweep(cells_of(traces)[:1], [Configuration("pct", {})], HERE)
    assert nothing.best == [None] and nothing.as_dict()["cells"][0]["refused"] == 1


def test_a_table_has_a_row_for_every_cell_and_configuration(traces: list[Path], tmp_path: Path) -> None:
    swept = sweep(cells_of(traces), points(), HERE)
    write_sweep(tmp_path / "out", swept, {"seed": 0})
    frame = pq.read_table(tmp_path / "out" / "sweep.parquet").to_pandas()
    assert len(frame) == 6 * 12
    row = frame[(frame.trace == str(traces[1])) & (frame.batch == 16) & (frame.settings == '{"k": 3}')]
    assert row.tuning_speedup.tolist() == [swept.tuning[4, 2]]
    assert row.holdout_speedup.tolist() == [swept.holdout[4, 2]]
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["cells"] == swept.as_dict()["cells"]


def test_a_trace_is_fetched_from_any_store(traces: list[Path], tmp_path: Path) -> None:
    """fsspec's own store in memory stands for S3 and its like."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    store = fsspec.filesystem("memory")
    store.put(f"{traces[0]}/", "/bucket/often/", recursive=True)
    pack_trace(traces[1], tmp_path / "seldom.zip")
    store.put(str(tmp_path / "seldom.zip"), "/bucket/seldom.zip")
    try:
        assert depth_at("memory://bucket/often") == 6 and depth_at("memory://bucket/seldom.zip") == 4
        there = [Cell(f"memory://bucket/{name}", COSTS[0], read_cost(COSTS[0])) for name in ("often", "seldom.zip")]
        here = [Cell(str(path), COSTS[0], read_cost(COSTS[0])) for path in traces]
        swept, own = sweep(there, points(), HERE), sweep(here, points(), HERE)
        assert np.array_equal(swept.tuning, own.tuning) and swept.best == own.best
        with pytest.raises(InputError, match="memory://bucket/no.*missing"):
            read_trace_at("memory://bucket/no")
        store.rm("/bucket/often/steps.parquet")
        with pytest.raises(InputError, match="memory://bucket/often/steps.parquet is missing"):
            read_trace_at("memory://bucket/often")
        with pytest.raises(InputError, match="nowhere://bucket cannot be fetched"):
            read_trace_at("nowhere://bucket")
    finally:
        store.rm("/bucket", recursive=True)


def test_the_command_prints_the_best_of_every_cell(traces: list[Path], tmp_path: Path) -> None:
    given = ["specsim", "sweep", *traces, "--cost", COSTS[0], "--batch", "1,16", "--policy", "fixed_k", "--jobs", 1]
    done = json_of(call(*given, "--json"))
    assert [(Path(cell["trace"]).name, cell["batch"]) for cell in done["cells"]] == [
        ("often", 1), ("often", 16), ("seldom", 1), ("seldom", 16)
    ]  # fmt: skip
    assert done["configurations"] == 4 and all(cell["best"]["params"]["k"] <= 4 for cell in done["cells"])
    shown = call(*given, "--out", tmp_path / "out")
    assert shown.code == 0 and "4 configurations in each of 4 cells" in shown.out
    assert "all speedups: " in shown.out and "sweep.parquet" in shown.out


def test_an_interrupted_sweep_goes_on_and_ends_in_the_same_bytes(
    traces: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[int, int]] = []
    evaluate = sweeping._evaluate

    def noted(task: sweeping.Task, start: int) -> Any:
        if interrupt_after is not None and len(done) == interrupt_after:
            raise KeyboardInterrupt
        done.append((task.number, start))
        return evaluate(task, start)

    monkeypatch.setattr(sweeping, "_evaluate", noted)
    monkeypatch.setattr(sweeping, "TOGETHER", 3)
    given = ["specsim", "sweep", *traces, "--cost", COSTS[0], "--batch", "1,16", "--trials", 5, "--jobs", 1,
             "--policy", "fixed_k", "--policy", "beta_ts", "--out"]  # fmt: skip
    interrupt_after = None
    assert call(*given, tmp_path / "whole").code == 0
    whole, out = {*done}, tmp_path / "out"
    assert len(whole) == 16 and not (tmp_path / "whole" / "sweep.journal").exists()
    done.clear()
    interrupt_after = 7
    assert "the same command goes on" in call(*given, out).err
    assert [path.name for path in out.iterdir()] == ["sweep.journal"]
    # A line that the kill cut short is as good as none.
    journal = out / "sweep.journal"
    torn = journal.read_bytes()[:-20]
    journal.write_bytes(torn)
    first, interrupt_after = {*done}, None
    done.clear()
    assert call(*given, out).code == 0
    assert len(done) == 16 - 6 and len(first & {*done}) == 1 and first | {*done} == whole
    assert sorted(path.name for path in out.iterdir()) == ["sweep.json", "sweep.parquet"]
    for name in ("sweep.json", "sweep.parquet"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_decides_a_sweep_names_its_study(traces: list[Path], tmp_path: Path) -> None:
    """A trace or a cost that was changed under its name is another sweep's."""
    changed = Path(shutil.copytree(traces[0], tmp_path / "often"))
    cells = [Cell(str(changed), COSTS[0], read_cost(COSTS[0]))]
    before = sweep_job_as_dict(cells, points())
    assert before == sweep_job_as_dict(cells, points())
    priced = [dataclasses.replace(cells[0], cost=read_cost(COSTS[1]))]
    assert sweep_job_as_dict(priced, points())["costs"] != before["costs"]
    shutil.rmtree(changed)
    write_trace(generate(IID(0.9), sequences=6, output_tokens=30, depth=6, seed=1), changed)
    assert sweep_job_as_dict(cells, points())["traces"] != before["traces"]


def test_what_cannot_be_swept_is_refused_in_one_line(traces: list[Path], tmp_path: Path) -> None:
    given = ["specsim", "sweep", traces[0], "--cost", COSTS[0], "--jobs", 1]
    for more, words in [
        (["--cost", COSTS[0]], ("given twice",)),
        (["--batch", "many"], ("--batch", "1,8,64")),
        (["--policy", "nonesuch"], ("nonesuch", "known")),
        (["--scheduler", "tcp://127.0.0.1:1"], ("loky has no scheduler",)),
    ]:
        assert_refused(call(*given, *more), *words)
    assert_refused(call("specsim", "sweep", tmp_path, "--cost", COSTS[0]), "not a trace", "meta.json")


def test_one_line_says_what_a_backend_needs(traces: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)  # an import of it fails
    given = ["specsim", "sweep", traces[0], "--cost", COSTS[0], "--policy", "fixed_k", "--backend", "dask"]
    assert_refused(call(*given), "backend dask is not installed", ".[dask]")


def _die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("backend", ["loky", "dask"])
def test_workers_that_are_killed_end_in_one_line(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "dask":
        pytest.importorskip("distributed", reason="the extra [dask] is not installed")
        dask = pytest.importorskip("dask")
        monkeypatch.setitem(dask.config.config["distributed"]["scheduler"], "allowed-failures", 0)

    def work() -> None:
        with Workers(backend, 2).ready() as each:
            list(each(_die, [(0,), (1,)]))

    refusal(work, "a worker process was killed", "--jobs", "goes on")


def test_dask_workers_that_die_at_the_start_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    dask = pytest.importorskip("dask")

    def work() -> None:
        with dask.config.set({"distributed.worker.preload": ["import os\nos._exit(3)"]}), Workers("dask", 1).ready():
            pass

    refusal(work, "dask cannot start workers on this machine")


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_ends_in_the_same_bytes(traces: list[Path], tmp_path: Path) -> None:
    """Killed again and again while it works, by what only a started-anew process can go on from."""
    given = [sys.executable, "-m", "specsim", "sweep", *map(str, traces), "--cost", COSTS[0], "--batch", "1,2,4,8",
             "--trials", "3000", "--jobs", "1", "--policy", "adaedl", "--out"]  # fmt: skip
    assert subprocess.run([*given, str(tmp_path / "whole")], capture_output=True, check=False).returncode == 0
    journal, kills = tmp_path / "out" / "sweep.journal", 0
    while True:
        kept = len(journal.read_bytes().splitlines()) if journal.exists() else 0
        process = subprocess.Popen([*given, str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while process.poll() is None:
            if journal.exists() and len(journal.read_bytes().splitlines()) > kept + 1:
                process.kill()
                break
            time.sleep(0.001)
        process.communicate()
        if process.returncode == 0:
            break
        kills += 1
    assert kills >= 2
    for name in ("sweep.json", "sweep.parquet"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not journal.exists()


@pytest.mark.slow
def test_processes_of_this_machine_give_the_same_answer(traces: list[Path]) -> None:
    assert_same(sweep(cells_of(traces), points(), Workers(jobs=2)), sweep(cells_of(traces), points(), HERE))


@pytest.mark.slow
def test_a_dask_cluster_that_loses_a_worker_gives_the_same_answer(traces: list[Path], tmp_path: Path) -> None:
    cells = cells_of([Path(shutil.copytree(traces[n % 2], tmp_path / f"{n}")) for n in range(6)])
    swept = losing_a_worker(lambda workers, progress: sweep(cells, points(), workers, progress=progress))
    assert_same(swept, sweep(cells, points(), HERE))
