"""The benchmark: rows and files, clocks, the gate, time limits and figures. The GPU is played by a stand-in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import runpy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from speckernels import bench
from speckernels.bench import BenchError, Ceilings, Document, Row, Work, machine, read_document, run_bench, runner
from speckernels.bench import cases as cases_module
from speckernels.bench.cases import OPERATIONS, tree_attention
from speckernels.bench.cases.base import Case, Mismatch, Operation, Rival, equal, random_tree, relative_error
from speckernels.bench.figures import draw
from speckernels.bench.resources import parse_report
from speckernels.bench.rows import TIMED_MODES, write_document
from speckernels.bench.summary import HEADER, failures, ratio_table
from speckernels.bench.timing import (
    GRAPH_MAX_US,
    GRAPH_MIN_CALLS,
    MIN_REPEATS,
    CpuClock,
    GraphClock,
    HostClock,
    LaunchClock,
    graph_calls,
    interleave,
    summary,
)
from speckernels.runtime import dispatch
from tests.support import ROOT

CEILINGS = Ceilings(copy_gb_s=4000.0, matmul_tflop_s=800.0, matmul_dtype="bfloat16", launch_us=4.0, graph_node_us=1.5)
VERSIONS = {"torch": "2.0", "triton": "3.0", "cuda": "13.0", "speckernels": "0+abc", "python": "3.12"}


class FakeTime:
    """Seconds that pass only where something is said to take time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_us(self, us: float) -> None:
        self.now += us / 1e6


# Rows and files


def test_floor_is_the_largest_limit() -> None:
    assert CEILINGS.floor(Work(4_000_000_000, 0), "graph") == (1000.0, "bytes")
    assert CEILINGS.floor(Work(0, 8 * 10**11), "launch") == (1000.0, "flops")
    assert CEILINGS.floor(Work(100, 100), "launch") == (4.0, "launch")
    assert CEILINGS.floor(Work(100, 100), "graph") == (1.5, "launch")


def blank(**changes: Any) -> Row:
    row = Row("compact_kv", "cuda", {"n": 8}, "n=8", "int32", "GPU", "graph", VERSIONS, "2026-01-01T00:00:00+00:00")
    return dataclasses.replace(row, **changes)


def test_timed_row_has_rates_floor_and_ratio() -> None:
    row = blank().timed(
        bench.Timing(20.0, 19.0, 22.0, 50), Work(40_000_000, 10**9), CEILINGS, buffers=3, cold_cache=True
    )
    assert (row.floor_us, row.floor_kind, row.ratio_to_floor) == (10.0, "bytes", 2.0)
    assert row.achieved_gb_s == pytest.approx(2000.0)  # 40 MB in 20 us
    assert row.achieved_tflop_s == pytest.approx(50.0)  # 1 GFLOP in 20 us
    assert (row.median_us, row.p20_us, row.p80_us, row.repeats, row.buffers) == (20.0, 19.0, 22.0, 50, 3)


@pytest.mark.parametrize("mode", ["interpreted", "emulated", "host"])
def test_modes_without_speed_claim_none(mode: str) -> None:
    row = blank(mode=mode).timed(bench.Timing(20.0, 19.0, 22.0, 5), Work(100, 0), CEILINGS, buffers=1, cold_cache=False)
    assert row.median_us == 20.0
    assert row.floor_us is row.ratio_to_floor is row.achieved_gb_s is None


def document(rows: list[Row]) -> Document:
    return Document("Some GPU", dict(VERSIONS), "2026-01-01T00:00:00+00:00", CEILINGS, rows)


def test_file_comes_back_and_pandas_reads_it(tmp_path: Path) -> None:
    timed = blank().timed(bench.Timing(20.0, 19.0, 22.0, 50), Work(400, 0), CEILINGS, buffers=3, cold_cache=True)
    whole = document([timed, blank(backend="triton", error="no such thing")])
    path = tmp_path / "new" / "bench.json"
    write_document(path, whole)
    assert read_document(path) == whole
    frame = pd.DataFrame(json.loads(path.read_text())["rows"])
    assert list(frame["median_us"].fillna(-1)) == [20.0, -1.0]
    assert sum('"op":' in line for line in path.read_text().splitlines()) == 2  # one line a row
    assert [file.name for file in path.parent.iterdir()] == ["bench.json"]
    write_document(path, document([]))
    assert read_document(path).rows == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "cannot be read as JSON"),
        ("[]", "is not a file of"),
        ('{"kind": "speckernels-bench", "version": 99}', "has version 99"),
        ('{"kind": "speckernels-bench", "version": 1, "rows": [{"x": 1}], "ceilings": {}}', "damaged"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchError, match=message):
        read_document(path)


# Clocks


def test_cpu_clock_takes_the_buffers_in_turn() -> None:
    time, seen = FakeTime(), []

    def call(buffer: int) -> None:
        seen.append(buffer)
        time.pass_us(10.0 * buffer)

    read = CpuClock(seconds=time).stopwatch([partial(call, 1), partial(call, 2)])
    assert [round(read(), 3) for _ in range(4)] == [10.0, 20.0, 10.0, 20.0]
    assert seen == [1, 2, 1, 2]


class FakeCuda:
    """Events, streams and graphs of torch.cuda on a fake clock: what is captured runs at replay only."""

    def __init__(self, time: FakeTime, replay_us: float = 0.0) -> None:
        self.time, self.log = time, []
        self._capturing: list[Callable[[], None]] | None = None
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = outer.time()
                outer.log.append("record")

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) * 1e3

        class Graph:
            def replay(self) -> None:
                outer.log.append("replay")
                outer.time.pass_us(replay_us)
                for work in self.works:
                    work()

        self.Event, self.CUDAGraph = Event, Graph

    def kernel(self, us: float) -> None:
        """What a call does: takes time, or is captured."""
        if self._capturing is not None:
            self._capturing.append(lambda: self.time.pass_us(us))
        else:
            self.log.append("kernel")
            self.time.pass_us(us)

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        works: list[Callable[[], None]] = []
        self._capturing = works
        try:
            yield
        finally:
            graph.works, self._capturing = works, None

    @property
    def capturing(self) -> bool:
        return self._capturing is not None

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        self.log.append("synchronize")


def test_launch_clock_starts_on_an_idle_gpu() -> None:
    cuda = FakeCuda(FakeTime())
    clock = LaunchClock(torch.device("cpu"), 64, cuda)
    read = clock.stopwatch([partial(cuda.kernel, 7.0), partial(cuda.kernel, 9.0)])
    assert [round(read(), 3) for _ in range(3)] == [7.0, 9.0, 7.0]
    assert cuda.log[:4] == ["synchronize", "record", "kernel", "record"]


def test_graph_clock_shares_a_replay_among_its_calls() -> None:
    cuda = FakeCuda(FakeTime())
    read = GraphClock(cuda).stopwatch([partial(cuda.kernel, 4.0), partial(cuda.kernel, 8.0)])
    cuda.log.clear()
    assert read() == pytest.approx(6.0)
    assert cuda.log == ["replay", "record", "replay", "record"]  # the first hides the launch of the second


@pytest.mark.parametrize(
    ("buffers", "estimate_us", "count"),
    [
        (1, 10_000.0, 1),  # long enough alone
        (1, 100.0, 5),  # 500 us in all
        (1, 1.0, GRAPH_MIN_CALLS),
        (300, 3.0, 300),  # all buffers, so that the cache is cold
        (300, 1000.0, int(GRAPH_MAX_US / 1000)),  # a slow call does not need them all
    ],
)
def test_calls_in_a_graph(buffers: int, estimate_us: float, count: int) -> None:
    calls = [partial(int, number) for number in range(buffers)]
    chosen = graph_calls(calls, estimate_us)
    assert len(chosen) == count
    assert chosen[0] is calls[0] and chosen[-1] is calls[(count - 1) % buffers]


def test_repeats_take_turns_and_nobody_keeps_a_neighbour() -> None:
    order: list[str] = []

    def stopwatch(name: str, us: float) -> float:
        order.append(name)
        return us

    timings = interleave(
        {name: partial(stopwatch, name, us) for name, us in (("a", 1.0), ("b", 2.0), ("c", 3.0))},
        repeats=3,
        limit_s=1e9,
    )
    assert order == list("abcbcacab")
    assert {name: timing.median_us for name, timing in timings.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert timings["a"].repeats == 3


def test_time_limit_leaves_a_few_repeats() -> None:
    time = FakeTime()

    def slow() -> float:
        time.pass_us(2e6)
        return 2e6

    assert interleave({"slow": slow}, repeats=50, limit_s=1.0, seconds=time)["slow"].repeats == MIN_REPEATS


def test_summary_is_quantiles() -> None:
    timing = summary([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert (timing.p20_us, timing.median_us, timing.p80_us, timing.repeats) == (2.0, 3.5, 5.0, 6)


# Cases


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_cases_are_distinct_and_named_after_their_operation(operation: Operation) -> None:
    for cases in (operation.cases, operation.small):
        keys = [(case.label, case.dtype) for case in cases]
        assert len(set(keys)) == len(keys)
        assert {case.op for case in cases} == {operation.name}
        assert all(isinstance(size, int) for case in cases for size in case.shape.values())
    assert operation.quick <= len(operation.cases)


def test_the_headline_is_a_few_cases_of_two_operations() -> None:
    gpu = torch.device("cuda")
    headline = {op.name: runner._cases(op, gpu, False, True, ()) for op in OPERATIONS}
    assert {name: len(cases) for name, cases in headline.items() if cases} == {
        "tree_attention": 12,
        "draft_statistics": 8,
    }


def test_cases_are_chosen_by_their_sizes_and_type() -> None:
    gpu, attention = torch.device("cuda"), tree_attention.OPERATION
    chosen = runner._cases(attention, gpu, False, False, ("nodes=64 batch=1", "bfloat16"))
    assert {(case.shape["nodes"], case.shape["batch"]) for case in chosen} == {(64, 1)} and len(chosen) == 8
    assert runner._cases(attention, gpu, False, False, ("nodes=6",)) == ()
    with pytest.raises(BenchError, match="no case of compact_kv has nodes=7; leave that out"):
        run_bench(ops=["compact_kv"], device="cpu", case=["nodes=7"])


def test_the_gpus_conditions_are_kept_where_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["1980, 2619, 312.45, 41\n", "1980, [N/A], 300, 41\n"]
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(machine.subprocess, "run", lambda command, **options: SimpleNamespace(stdout=answers.pop(0)))
    gpu = torch.device("cuda")
    assert machine.conditions(gpu) == {"sm_mhz": 1980, "memory_mhz": 2619, "power_w": 312.45, "celsius": 41}
    assert machine.conditions(gpu) == {} == machine.conditions(torch.device("cpu"))


def test_every_operation_of_the_package_has_cases() -> None:
    assert set(dispatch.OPERATIONS) <= {operation.name for operation in OPERATIONS}


def test_attention_floor_is_the_known_one() -> None:
    # 64 nodes, 32 query and 8 KV heads of 128, bf16, batch 1: 11 us at 8k and 44 us at 32k cached
    # tokens on a GPU of 790 TFLOP/s and 4.3 TB/s.
    ceilings = Ceilings(4300.0, 790.0, "bfloat16", 3.0, 1.0)
    work = {
        case.shape["context"]: tree_attention.OPERATION.work(case, (), None)
        for case in tree_attention.OPERATION.cases
        if (case.shape["nodes"], case.shape["batch"], case.shape["kv_heads"]) == (64, 1, 8)
    }
    assert ceilings.floor(work[8192], "graph")[0] == pytest.approx(11, abs=0.5)
    assert ceilings.floor(work[32768], "graph")[0] == pytest.approx(44, abs=1)
    assert ceilings.floor(work[8192], "graph")[1] == "flops"  # 46 nodes and more are bound by arithmetic


def test_random_trees_are_trees() -> None:
    parents = random_tree(50, 3, torch.Generator().manual_seed(0))
    index = torch.arange(50)
    assert (parents[:, 0] == -1).all() and (parents[:, 1:] >= 0).all()
    assert (parents < index).all() and (parents[:, 1:] >= index[1:] - 8).all()


def test_comparisons_say_where_results_differ() -> None:
    case = OPERATIONS[0].small[0]
    good, bad = torch.arange(6).view(2, 3), torch.arange(6).view(2, 3)
    bad[1, 1] = 9
    equal((good, [good]), (good, [good]), case)
    with pytest.raises(Mismatch, match=r"result 1 differs in 1 of 6 elements, first at \[1, 1\]: 9 instead of 4"):
        equal((good, [good]), (good, [bad]), case)
    with pytest.raises(Mismatch, match="shape"):
        equal(good, good[0], case)
    relative_error(good, good + 1e-9, 1e-6, "x")
    with pytest.raises(Mismatch, match="x is off by"):
        relative_error(good, bad, 1e-3, "x")
    with pytest.raises(Mismatch, match="nan"):
        relative_error(good, good * math.nan, 1e-3, "x")


# The run


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that cost nothing, few repeats."""
    monkeypatch.setattr(machine, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(runner, "REPEATS", 3)
    monkeypatch.setattr(runner, "UNTIMED_REPEATS", 1)
    monkeypatch.setattr(runner, "CASE_LIMIT_S", 0.0)


def test_ceilings_of_the_cpu() -> None:
    ceilings = machine.measure_ceilings(torch.device("cpu"), repeats=3, limit_s=0.1)
    assert ceilings.copy_gb_s > 0.1 and ceilings.matmul_tflop_s > 1e-4 and 0 < ceilings.launch_us < 1000
    assert ceilings.graph_node_us is None


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_every_operation_passes_its_gate_in_all_backends(operation: Operation) -> None:
    whole = run_bench(None, 5, [operation.name], ["torch", "triton", "cuda", "sdpa", "sdpa_expanded"], "cpu")
    assert failures(whole) == []
    assert {row.mode for row in whole.rows} == {"cpu", "interpreted", "emulated"}
    for row in whole.rows:
        assert row.p20_us is not None and 0 < row.p20_us <= (row.median_us or 0) <= (row.p80_us or 0)
        assert (row.ratio_to_floor is not None) == (row.mode in TIMED_MODES)
        assert row.bytes is not None and row.bytes > 0
    assert len(whole.rows) >= 3 * len(operation.small)
    assert not whole.unfinished


def plain(run: Callable[..., Any], name: str = "toy", **changes: Any) -> Operation:
    """An operation without kernels; `run` is its rival called sdpa."""
    operation = Operation(
        name=name,
        cases=(),
        small=tuple(Case(name, {"n": n}, torch.float32) for n in (4, 5, 6)),
        inputs=lambda case, generator: (torch.rand(case.shape["n"], generator=generator),),
        work=lambda case, args, expected: Work(8 * case.shape["n"], 0),
        rivals={"sdpa": Rival(lambda case, args: run)},
    )
    return dataclasses.replace(operation, **changes)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, fast: None) -> Callable[..., None]:
    """Benchmark these operations instead; their reference doubles its argument."""

    def use(*operations: Operation) -> None:
        monkeypatch.setattr(cases_module, "OPERATIONS", operations)
        monkeypatch.setattr(Operation, "reference", lambda self, x: 2 * x)

    return use


def test_red_gate_gives_an_error_and_no_time(install: Callable[..., None]) -> None:
    calls = []

    def wrong(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return 2 * x + (torch.arange(len(x)) == 3)

    install(plain(wrong))
    rows = run_bench(None, 1, [], ["torch", "sdpa"], "cpu").rows
    assert [row.error is None for row in rows if row.backend == "torch"] == [True] * 3
    red = [row for row in rows if row.backend == "sdpa"]
    assert all("result 0 differs in 1 of" in (row.error or "") and row.median_us is None for row in red)
    assert len(calls) == 3  # the gate of each case, and never again


def test_failing_backend_gives_its_words(install: Callable[..., None]) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not today\nat all")

    install(plain(broken))
    rows = run_bench(None, 1, [], ["sdpa"], "cpu").rows
    assert {row.error for row in rows} == {"RuntimeError: not today"}


def test_gate_sees_unwritten_memory(monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]) -> None:
    def partly(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
        return out

    def lucky(x: torch.Tensor) -> torch.Tensor:  # what the memory happened to hold
        return 2 * x

    install(plain(lucky, public=lucky))
    monkeypatch.setattr(runner, "implementation", lambda name, backend: partly)
    rows = run_bench(None, 1, [], ["cuda"], "cpu").rows
    assert len(rows) == 3 and all("differs in 1 of" in (row.error or "") for row in rows)


def test_case_without_inputs_gives_errors_for_all(install: Callable[..., None]) -> None:
    def none(case: Case, generator: torch.Generator) -> Any:
        raise MemoryError("too large")

    install(plain(lambda x: 2 * x, inputs=none))
    rows = run_bench(None, 1, [], ["torch", "sdpa"], "cpu").rows
    assert [row.error for row in rows] == ["MemoryError: too large"] * 6


def test_in_place_operations_do_not_spoil_their_inputs(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    def double(x: torch.Tensor) -> Any:
        x *= 2
        return (x,)

    install(plain(double, in_place=True))
    monkeypatch.setattr(Operation, "reference", lambda self, x: double(x))
    assert not failures(run_bench(None, 1, [], ["torch", "sdpa"], "cpu"))


def test_rows_of_a_file_are_kept(tmp_path: Path, install: Callable[..., None]) -> None:
    out = tmp_path / "bench.json"
    install(plain(lambda x: 2 * x))
    first = run_bench(out, 1, [], ["torch"], "cpu")
    both = run_bench(out, 1, [], ["torch", "sdpa"], "cpu")
    assert both.rows[: len(first.rows)] == first.rows
    assert [row.backend for row in both.rows] == ["torch"] * 3 + ["sdpa"] * 3
    assert run_bench(out, 1, [], [], "cpu").rows[:6] == both.rows
    assert read_document(out).rows[:6] == both.rows


def test_file_of_other_versions_is_refused(tmp_path: Path, install: Callable[..., None]) -> None:
    install(plain(lambda x: 2 * x))
    out = tmp_path / "bench.json"
    write_document(out, document([]))
    with pytest.raises(BenchError, match="other versions"):
        run_bench(out, 1, [], [], "cpu")


def test_rows_by_tma_are_never_mixed_with_others(
    tmp_path: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(plain(lambda x: 2 * x))
    run_bench(tmp_path / "bench.json", 1, [], [], "cpu")
    monkeypatch.setenv("SPECKERNELS_TMA", "1")
    with pytest.raises(BenchError, match="other versions than .* SPECKERNELS_TMA=1"):
        run_bench(tmp_path / "bench.json", 1, [], [], "cpu")


def test_stops_before_the_time_is_over_and_can_be_resumed(tmp_path: Path, install: Callable[..., None]) -> None:
    time, out = FakeTime(), tmp_path / "bench.json"

    def slow(case: Case, generator: torch.Generator) -> Any:
        time.pass_us(25e6)
        return (torch.rand(case.shape["n"], generator=generator),)

    install(plain(lambda x: 2 * x, "one", inputs=slow), plain(lambda x: 2 * x, "two", inputs=slow))
    seen: list[str] = []
    part = run_bench(out, 2, [], ["torch"], "cpu", progress=lambda what, done, total: seen.append(what), now=time)
    assert time() <= 100 + 2 * 60
    assert [(row.op, row.label) for row in part.rows] == [
        ("one", "n=4"),
        ("one", "n=5"),
        ("two", "n=4"),
        ("two", "n=5"),
    ]
    assert part.unfinished == ["one, n=6, float32", "two, n=6, float32"]
    assert seen[:2] == ["one, n=4, float32", "one, n=5, float32"]
    whole = run_bench(out, 9, [], ["torch"], "cpu", now=time)
    assert len(whole.rows) == 6 and not whole.unfinished
    assert read_document(out) == whole


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, fast: None) -> FakeCuda:
    """The runner believes in a GPU with an L2 cache of 500 bytes; calls run on the CPU."""
    time = FakeTime()
    cuda = FakeCuda(time, replay_us=30.0)
    monkeypatch.setattr(machine, "is_gpu", lambda device: True)
    monkeypatch.setattr(machine, "evict_bytes", lambda device: 1000)
    monkeypatch.setattr(machine, "buffer_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(machine, "clocks", lambda device: [LaunchClock(device, 8, cuda), GraphClock(cuda)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return cuda


def test_gpu_run_gives_launch_and_graph_rows(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], pretended_gpu: FakeCuda
) -> None:
    def ours(x: torch.Tensor) -> torch.Tensor:
        pretended_gpu.kernel(7.0)
        return 2 * x

    def uncapturable(x: torch.Tensor) -> torch.Tensor:
        if pretended_gpu.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        pretended_gpu.kernel(9.0)
        return 2 * x

    cases = (Case("toy", {"n": 10}, torch.float32, compiled=True), Case("toy", {"n": 1000}, torch.float32))
    install(plain(uncapturable, public=ours, cases=cases, quick=2))
    monkeypatch.setattr(runner, "implementation", lambda name, backend: ours)
    rows = run_bench(None, 1, [], ["cuda", "sdpa"], "cpu").rows
    by_key = {(row.backend, row.mode, row.label): row for row in rows}
    assert len(by_key) == len(rows) == 8
    for size, buffers in ((10, 13), (1000, 1)):  # copies of 80 bytes that exceed 1000
        launch, graph = (by_key["cuda", mode, f"n={size}"] for mode in ("launch", "graph"))
        assert launch.median_us == pytest.approx(7.0) and launch.buffers == graph.buffers == buffers
        assert graph.median_us == pytest.approx(7.0 + 30.0 / 20)  # 20 calls share a replay's 30 us
        assert launch.cold_cache and graph.cold_cache
        assert (launch.floor_us, graph.floor_us) == (4.0, 1.5)
        assert by_key["sdpa", "launch", f"n={size}"].median_us == pytest.approx(9.0)
        assert "not permitted" in (by_key["sdpa", "graph", f"n={size}"].error or "")


def test_readings_have_a_name_for_profilers(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], pretended_gpu: FakeCuda
) -> None:
    names: set[str] = set()

    def noted(name: str) -> contextlib.AbstractContextManager[None]:
        names.add(name)
        return contextlib.nullcontext()

    def run(x: torch.Tensor) -> torch.Tensor:
        pretended_gpu.kernel(5.0)
        return 2 * x

    monkeypatch.setattr(machine, "nvtx_range", noted)
    install(plain(run, cases=(Case("toy", {"n": 10}, torch.float32),)))
    run_bench(None, 1, [], ["sdpa"], "cpu")
    assert names == {"toy, n=10, float32, sdpa"}


def test_compiled_reference_is_measured_where_the_case_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], pretended_gpu: FakeCuda
) -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        pretended_gpu.kernel(5.0)
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(runner, "implementation", lambda name, backend: reference)
    cases = (Case("toy", {"n": 10}, torch.float32, compiled=True), Case("toy", {"n": 11}, torch.float32))
    install(plain(reference, cases=cases, quick=2))
    rows = run_bench(None, 1, [], ["torch_compile"], "cpu").rows
    assert [(row.label, row.mode) for row in rows] == [("n=10", "launch"), ("n=10", "graph")]
    assert not any(row.error for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_our_kernels_are_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch, operation: Operation) -> None:
    monkeypatch.setattr(machine, "measure_ceilings", lambda device: CEILINGS)
    first = dataclasses.replace(operation, quick=1)
    monkeypatch.setattr(cases_module, "OPERATIONS", (first,))
    whole = run_bench(None, 2, [], ["triton", "cuda"], "cuda", quick=True)
    assert failures(whole) == []
    assert sorted({(row.backend, row.mode) for row in whole.rows}) == [
        ("cuda", "graph"), ("cuda", "host"), ("cuda", "launch"),
        ("triton", "graph"), ("triton", "host"), ("triton", "launch"),
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_ceilings_of_a_gpu() -> None:
    ceilings = machine.measure_ceilings(machine.default_device())
    assert ceilings.copy_gb_s > 50 and ceilings.matmul_tflop_s > 1
    assert ceilings.graph_node_us is not None and 0 < ceilings.graph_node_us < ceilings.launch_us < 1000


def test_quick_and_cpu_runs_compile_nothing_unless_asked() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert runner._chosen_backends([], gpu, False) == runner.BACKENDS
    for light in (runner._chosen_backends([], gpu, True), runner._chosen_backends([], cpu, False)):
        assert set(runner.BACKENDS) - set(light) == {"torch_compile", "flex", "flex_tuned"}
    assert runner._chosen_backends(["flex"], cpu, True) == ("flex",)


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(BenchError, match=r"operation 'tree' is unknown; known: draft_statistics"):
        run_bench(None, 1, ["tree"], [], "cpu")
    with pytest.raises(BenchError, match=r"backend 'jax' is unknown; known: torch"):
        run_bench(None, 1, [], ["jax"], "cpu")
    with pytest.raises(BenchError, match="minutes"):
        run_bench(None, 0, [], [], "cpu")


def test_a_dead_gpu_ends_the_run_and_the_next_goes_past_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, install: Callable[..., None], pretended_gpu: FakeCuda
) -> None:
    alive = [True]

    def reference(self: Operation, x: torch.Tensor) -> torch.Tensor:
        pretended_gpu.kernel(3.0)
        return 2 * x

    def deadly(x: torch.Tensor) -> torch.Tensor:
        alive[0] = False
        raise RuntimeError("an illegal memory access was encountered")

    def synchronize() -> None:
        if not alive[0]:
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    out = tmp_path / "bench.json"
    install(plain(deadly, cases=(Case("toy", {"n": 10}, torch.float32),), quick=1))
    monkeypatch.setattr(Operation, "reference", reference)
    with pytest.raises(BenchError, match="stopped answering in toy, n=10, float32: RuntimeError: an illegal"):
        run_bench(out, 1, [], ["torch", "sdpa"], "cpu")
    assert [(row.backend, row.mode) for row in read_document(out).rows] == [("sdpa", "launch"), ("sdpa", "graph")]
    alive[0] = True
    rows = run_bench(out, 1, [], ["torch", "sdpa"], "cpu").rows
    assert [(row.backend, row.error is None) for row in rows[2:]] == [("torch", True)] * 2


# Reports


def gpu_document() -> Document:
    """Invented rows of a GPU, for tables and figures only."""
    whole = document([])
    slowness = {
        "torch": 30,
        "torch_compile": 12,
        "triton": 1.9,
        "cuda": 1.4,
        "sdpa": 4,
        "sdpa_expanded": 6,
        "flex": 2.8,
    }
    for operation in OPERATIONS:
        for number, case in enumerate(operation.cases):
            work = Work(4 * 10**6 * (1 + number), 0)
            if operation.name == "tree_attention":
                work = operation.work(case, (), None)
            for backend, factor in slowness.items():
                if backend in ("torch_compile", "flex") and not case.compiled:
                    continue
                if backend in ("sdpa", "sdpa_expanded", "flex") and backend not in operation.rivals:
                    continue
                for mode, extra in (("launch", 5.0), ("graph", 0.0)):
                    middle = (extra + CEILINGS.floor(work, mode)[0]) * factor * (1 + 0.1 * math.sin(number))
                    timing = bench.Timing(middle, middle * 0.97, middle * 1.05, 50)
                    row = blank(op=case.op, backend=backend, shape=dict(case.shape), label=case.label, mode=mode)
                    row = dataclasses.replace(row, dtype=case.dtype_name)
                    whole.rows.append(row.timed(timing, work, CEILINGS, buffers=4, cold_cache=True))
    whole.rows.append(blank(backend="flashinfer", error="ModuleNotFoundError: No module named 'flashinfer'"))
    return whole


def test_table_names_ratios_winners_and_failures() -> None:
    whole = gpu_document()
    table = [dict(zip(HEADER, cells, strict=True)) for cells in ratio_table(whole)]
    assert [line["operation"] for line in table[:2]] == ["draft_statistics"] * 2
    attention = next(line for line in table if (line["operation"], line["mode"]) == ("tree_attention", "graph"))
    assert attention["fastest"] == "cuda 76/76"
    assert attention["cuda"].startswith("1.4")
    assert next(line for line in table if line["flashinfer"])["flashinfer"] == "failed"
    assert failures(whole) == ["compact_kv, flashinfer: ModuleNotFoundError: No module named 'flashinfer' (1 rows)"]


def test_pytest_benchmark_has_real_shapes_on_a_gpu() -> None:
    """Those of the headline, else the most telling; small ones on a CPU."""
    benchmarks = runpy.run_path(str(ROOT / "kernels" / "benchmarks" / "test_bench_ops.py"))
    for operation in OPERATIONS:
        real, small = (benchmarks["cases_of"](operation, torch.device(kind)) for kind in ("cuda", "cpu"))
        assert real and set(map(str, real)) <= set(map(str, operation.cases))
        assert small == operation.small[:1]
    assert len(benchmarks["cases_of"](tree_attention.OPERATION, torch.device("cuda"))) == 12


def test_the_table_gives_the_hosts_time_of_a_call() -> None:
    timing = bench.Timing(20.4, 19.0, 22.0, 50)
    row = blank(mode="host").timed(timing, Work(100, 0), CEILINGS, buffers=1, cold_cache=False)
    (cells,) = ratio_table(document([row, dataclasses.replace(row, backend="triton", error="gone", median_us=None)]))
    line = dict(zip(HEADER, cells, strict=True))
    assert (line["mode"], line["cuda"], line["triton"], line["fastest"]) == ("host", "20 us", "failed", "")


def test_the_hosts_time_ends_where_the_call_returns() -> None:
    time = FakeTime()
    cuda = FakeCuda(time)
    cuda.synchronize = lambda: time.pass_us(500.0)  # type: ignore[method-assign]
    read = HostClock(cuda, time).stopwatch([lambda: time.pass_us(7.0)])
    assert read() == pytest.approx(7.0) and read() == pytest.approx(7.0)


def test_figures(tmp_path: Path) -> None:
    files = draw(gpu_document(), tmp_path / "figures")
    assert [file.name for file in files] == [
        "ratio_to_floor.png", "roofline.png", "tree_attention_nodes.png", "tree_attention_context.png",
    ]  # fmt: skip
    assert all(file.stat().st_size > 20_000 for file in files)


def test_figures_leave_out_what_was_not_timed(tmp_path: Path) -> None:
    timing = bench.Timing(9.0, 8.0, 9.5, 5)
    rows = [blank(mode="interpreted").timed(timing, Work(9, 0), CEILINGS, buffers=1, cold_cache=False)]
    assert draw(document(rows), tmp_path) == []
    rows.append(blank(mode="cpu").timed(timing, Work(9, 0), CEILINGS, buffers=1, cold_cache=False))
    assert [file.name for file in draw(document(rows), tmp_path)] == ["ratio_to_floor.png"]


def test_compiler_report() -> None:
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onev' for 'sm_90a'
ptxas info    : Function properties for _Z3onev
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack frame, 4096 bytes smem
ptxas info    : Compiling entry function '_Z3twov' for 'sm_80'
ptxas info    : Function properties for _Z3twov
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers, 400 bytes cmem[0]
"""
    first, second = parse_report(report)
    assert (first.name, first.architecture, first.registers) == ("_Z3onev", "90a", 40)
    assert (first.stack_bytes, first.spill_bytes, first.shared_bytes) == (16, 12, 4096)
    assert (second.architecture, second.registers, second.spill_bytes, second.shared_bytes) == ("80", 24, 0, 0)


def test_figures_leave_out_what_they_cannot_show(tmp_path: Path) -> None:
    """Rows of backends and shapes of other versions, and versions that a document does not name."""
    timed = blank().timed(bench.Timing(20.0, 19.0, 22.0, 50), Work(400, 0), CEILINGS, buffers=3, cold_cache=True)
    others = [dataclasses.replace(timed, backend="later"), dataclasses.replace(timed, op="tree_attention")]
    whole = dataclasses.replace(document([timed, *others]), versions={})
    assert [file.name for file in draw(whole, tmp_path)] == ["ratio_to_floor.png"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": {"n": "8"}}, "$.rows[0].shape"),
        ({"median_us": float("inf")}, "cannot be read as JSON"),
        ({"median_us": 1e300}, "$.rows[0].median_us"),
        ({"floor_us": 0}, "$.rows[0].floor_us"),
        ({"op": ["x"]}, "$.rows[0].op"),
        ({"op": "x" * 101}, "length <= 100"),
        ({"bytes": 2**70}, "$.rows[0].bytes"),
        ({"label": "\ud800"}, "cannot be read as JSON"),
        ({"cold_cache": 1}, "$.rows[0].cold_cache"),
    ],
)
def test_rows_of_other_values_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    plain = document([blank()]).as_dict()
    plain["rows"][0] |= change
    path.write_text(json.dumps(plain))
    with pytest.raises(BenchError, match=re.escape(says)):
        read_document(path)
