"""The benchmark: cases, rivals, clocks, the check of results, time limits. The GPU is played by a stand-in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from speckernels.bench import machine, measure
from speckernels.bench.cases import OPERATIONS, ordered_cases
from speckernels.bench.cases import tree_attention as attention_cases
from speckernels.bench.cases.base import (
    SEED,
    Arguments,
    Case,
    Mismatch,
    Operation,
    Rival,
    Work,
    equal,
    random_tree,
    relative_error,
)
from speckernels.bench.cases.tree_attention import OPERATION, PAGE_SLOTS, RIVALS
from speckernels.bench.machine import Ceilings
from speckernels.bench.measure import OWN, Bench, DeviceLost, Measured, Reading, contender_names, one_line
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
)
from speckernels.ops.tree_attention import tree_attention
from speckernels.runtime import dispatch
from tests.support import ROOT

CEILINGS = Ceilings(copy_gb_s=4000.0, matmul_tflop_s=800.0, matmul_dtype="bfloat16", launch_us=4.0, graph_node_us=1.5)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class FakeTime:
    """Seconds that pass only where something is said to take time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_us(self, us: float) -> None:
        self.now += us / 1e6


# Rows


def test_floor_is_the_largest_limit() -> None:
    assert CEILINGS.floor(Work(4_000_000_000, 0), "graph") == (1000.0, "bytes")
    assert CEILINGS.floor(Work(0, 8 * 10**11), "launch") == (1000.0, "flops")
    assert CEILINGS.floor(Work(100, 100), "launch") == (4.0, "launch")
    assert CEILINGS.floor(Work(100, 100), "graph") == (1.5, "launch")


def row_of(mode: str, work: Work) -> dict[str, Any]:
    """Of 50 readings whose median is 20 us."""
    bench = Bench.__new__(Bench)
    bench.ceilings = CEILINGS
    case = Case("toy", {"n": 8, "top_k": 0}, torch.int32)
    return bench.row(case, "cuda", mode, Reading([20.0, 19.0, 22.0, 20.0, 20.0] * 10, 3, True), work)


def test_a_row_has_rates_floor_and_ratio() -> None:
    row = row_of("graph", Work(40_000_000, 10**9))
    assert {key: row[key] for key in ("op", "backend", "label", "dtype", "mode")} == {
        "op": "toy", "backend": "cuda", "label": "n=8 top_k=0", "dtype": "int32", "mode": "graph",
    }  # fmt: skip
    assert (row["floor_us"], row["floor_kind"], row["ratio_to_floor"]) == (10.0, "bytes", 2.0)
    assert row["achieved_gb_s"] == pytest.approx(2000.0)  # 40 MB in 20 us
    assert row["achieved_tflop_s"] == pytest.approx(50.0)  # 1 GFLOP in 20 us
    assert (row["median_us"], row["repeats"], row["buffers"], row["cold_cache"]) == (20.0, 50, 3, True)
    # Sorted, 10 times 19, 30 times 20, 10 times 22: places 9.8, 24.5 and 39.2 from 0.
    assert [row[name] for name in ("p20_us", "median_us", "p80_us")] == pytest.approx([19.8, 20.0, 20.4])


def test_a_calls_time_on_the_host_has_no_floor() -> None:
    row = row_of("host", Work(100, 0))
    assert row["median_us"] == 20.0 and not {"floor_us", "ratio_to_floor", "achieved_gb_s"} & {*row}


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

    samples = interleave(
        {name: partial(stopwatch, name, us) for name, us in (("a", 1.0), ("b", 2.0), ("c", 3.0))},
        repeats=3,
        limit_s=1e9,
    )
    assert order == list("abcbcacab")
    assert samples == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [3.0] * 3}


def test_time_limit_leaves_a_few_repeats() -> None:
    time = FakeTime()

    def slow() -> float:
        time.pass_us(2e6)
        return 2e6

    assert interleave({"slow": slow}, repeats=50, limit_s=1.0, seconds=time) == {"slow": [2e6] * MIN_REPEATS}


# Cases


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_cases_are_distinct_and_named_after_their_operation(operation: Operation) -> None:
    for cases in (operation.cases, operation.small):
        keys = [str(case) for case in cases]
        assert len(set(keys)) == len(keys)
        assert {case.op for case in cases} == {operation.name}
        assert all(isinstance(size, int) for case in cases for size in case.shape.values())


def test_the_main_cases_come_first_and_operations_take_turns() -> None:
    headline = {op.name: sum(map(op.headline, op.cases)) for op in OPERATIONS}
    assert {name: count for name, count in headline.items() if count} == {"tree_attention": 12, "draft_statistics": 8}
    ordered = ordered_cases(on_gpu=True)
    assert sorted(str(case) for _, case in ordered) == sorted(str(case) for op in OPERATIONS for case in op.cases)
    main = [*filter(lambda pair: pair[0].headline(pair[1]), ordered)]
    others = len(OPERATIONS) - 2
    assert set(map(str, (case for _, case in main))) <= set(map(str, (case for _, case in ordered[: 20 + others])))
    assert len({op.name for op, _ in ordered[: 20 + others]}) == len(OPERATIONS)
    assert {op.name for op, _ in ordered[20 + others :][: len(OPERATIONS)]} == {op.name for op in OPERATIONS}
    assert [case for _, case in ordered_cases(on_gpu=False)] == [case for op in OPERATIONS for case in op.small]


def test_contenders_of_a_gpu_and_of_a_cpu() -> None:
    operation = OPERATION
    plain, compiled = (next(case for case in operation.cases if case.compiled == flag) for flag in (False, True))
    assert {"torch", *OWN, "sdpa_packed", "prefix_merge"} <= {*contender_names(operation, plain, GPU)}
    assert not {"torch_compile", "flex", "flex_tuned"} & {*contender_names(operation, plain, GPU)}
    assert {"torch_compile", "flex", "flex_tuned"} <= {*contender_names(operation, compiled, GPU)}
    assert contender_names(operation, operation.small[0], CPU) == ("torch",)


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
        case.shape["context"]: OPERATION.work(case, (), None)
        for case in OPERATION.cases
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
    monkeypatch.setattr(measure, "REPEATS", 3)
    monkeypatch.setattr(measure, "LIMIT_S", 0.0)


def run(operation: Operation, case: Case, names: list[str]) -> Measured:
    measured = Bench(CPU, 1).measure(operation, case, names)
    assert measured is not None
    return measured


def test_ceilings_of_the_cpu() -> None:
    ceilings = machine.measure_ceilings(torch.device("cpu"), repeats=3, limit_s=0.1)
    assert ceilings.copy_gb_s > 0.1 and ceilings.matmul_tflop_s > 1e-4 and 0 < ceilings.launch_us < 1000
    assert ceilings.graph_node_us is None


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_every_operation_is_checked_and_timed_in_all_backends(operation: Operation) -> None:
    for case in operation.small:
        names = ["torch", *OWN, *(["sdpa_packed"] if operation.rivals else [])]
        names = [name for name in names if name not in operation.rivals or operation.rivals[name].applies(case)]
        measured = run(operation, case, names)
        assert measured.errors == {} and {*measured.readings} == {(name, "cpu") for name in names}
        assert all(min(reading.samples_us) > 0 for reading in measured.readings.values())
        assert measured.work.bytes > 0


def test_the_benchmarks_run_without_a_gpu_and_write_what_a_report_needs(tmp_path: Path) -> None:
    """In a process of its own, as it is meant to run."""
    file = tmp_path / "bench.json"
    command = [sys.executable, "-m", "pytest", "kernels/benchmarks", "--benchmark-only", f"--benchmark-json={file}"]
    command += ["-q", "-p", "no:cacheprovider", "-k", "compact_kv or typical_acceptance"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["kind"] == "speckernels-benchmark" and document["device"] == machine.device_name(CPU)
    assert {*document["versions"]} == {*machine.versions()} and document["ceilings"]["copy_gb_s"] > 0
    chosen = [(op, case) for op, case in ordered_cases(on_gpu=False) if op.name in ("compact_kv", "typical_acceptance")]
    assert [row["param"] for row in document["benchmarks"]] == [f"{case}-cpu-torch" for _, case in chosen]
    for row in document["benchmarks"]:
        facts = row["extra_info"]
        assert facts["ratio_to_floor"] == pytest.approx(facts["median_us"] / facts["floor_us"])
        assert row["stats"]["median"] * 1e6 == pytest.approx(facts["median_us"])  # the device's time, not the host's


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
def doubled(monkeypatch: pytest.MonkeyPatch, fast: None) -> None:
    """The reference doubles its argument."""
    monkeypatch.setattr(Operation, "reference", lambda self, x: 2 * x)


@pytest.mark.usefixtures("doubled")
def test_a_wrong_result_gives_an_error_and_no_time() -> None:
    calls = []

    def wrong(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return 2 * x + (torch.arange(len(x)) == 3)

    operation = plain(wrong)
    measured = run(operation, operation.small[0], ["torch", "sdpa"])
    assert [*measured.readings] == [("torch", "cpu")]
    assert "result 0 differs in 1 of" in str(measured.errors["sdpa", "cpu"])
    assert len(calls) == 1  # the check, and never again


@pytest.mark.usefixtures("doubled")
def test_a_contender_that_fails_gives_its_words() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not today\nat all")

    operation = plain(broken)
    measured = run(operation, operation.small[0], ["sdpa"])
    assert one_line(measured.errors["sdpa", "cpu"]) == "RuntimeError: not today"


@pytest.mark.usefixtures("doubled")
def test_the_check_sees_unwritten_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def partly(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
        return out

    def lucky(x: torch.Tensor) -> torch.Tensor:  # what the memory happened to hold
        return 2 * x

    monkeypatch.setattr(measure, "implementation", lambda name, backend: partly)
    operation = plain(lucky, public=lucky)
    measured = run(operation, operation.small[0], ["cuda"])
    assert not measured.readings and "differs in 1 of" in str(measured.errors["cuda", "cpu"])


@pytest.mark.usefixtures("fast")
def test_a_path_has_the_root_the_nodes_that_move_and_nothing_else() -> None:
    (operation,) = (each for each in OPERATIONS if each.name == "compact_kv")
    for case in operation.small:
        path = operation.inputs(case, torch.Generator().manual_seed(SEED))[2]
        moved = case.shape["moved"]
        assert (path[:, 0] == 0).all() and (path[:, moved + 1 :] == -1).all() and path.shape[1] == case.shape["nodes"]
        assert ((path[:, 1 : moved + 1] > torch.arange(1, moved + 1)) & (path[:, 1 : moved + 1] < path.shape[1])).all()


def test_in_place_operations_do_not_spoil_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: torch.Tensor) -> Any:
        x *= 2
        return (x,)

    monkeypatch.setattr(Operation, "reference", lambda self, x: double(x))
    operation = plain(double, in_place=True)
    assert not run(operation, operation.small[0], ["torch", "sdpa"]).errors


@pytest.mark.usefixtures("doubled")
def test_no_case_starts_that_would_end_too_late() -> None:
    time = FakeTime()

    def slow(case: Case, generator: torch.Generator) -> Any:
        time.pass_us(25e6)
        return (torch.rand(case.shape["n"], generator=generator),)

    operation = plain(lambda x: 2 * x, inputs=slow)
    bench = Bench(CPU, 1.5, time)
    measured = [bench.measure(operation, case, ["torch"]) for case in (*operation.small, *operation.small)]
    assert [each is not None for each in measured] == [True] * 3 + [False] * 3
    assert time() <= 100 + 90


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, fast: None) -> FakeCuda:
    """The benchmark believes in a GPU with an L2 cache of 500 bytes; calls run on the CPU."""
    time = FakeTime()
    cuda = FakeCuda(time, replay_us=30.0)
    monkeypatch.setattr(machine, "is_gpu", lambda device: True)
    monkeypatch.setattr(machine, "evict_bytes", lambda device: 1000)
    monkeypatch.setattr(machine, "buffer_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(machine, "clocks", lambda device: [LaunchClock(device, 8, cuda), GraphClock(cuda)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return cuda


@pytest.mark.usefixtures("doubled")
def test_a_gpu_run_gives_launch_and_graph_rows(monkeypatch: pytest.MonkeyPatch, pretended_gpu: FakeCuda) -> None:
    def ours(x: torch.Tensor) -> torch.Tensor:
        pretended_gpu.kernel(7.0)
        return 2 * x

    def uncapturable(x: torch.Tensor) -> torch.Tensor:
        if pretended_gpu.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        pretended_gpu.kernel(9.0)
        return 2 * x

    monkeypatch.setattr(measure, "implementation", lambda name, backend: ours)
    operation = plain(uncapturable, public=ours)
    for size, buffers in ((10, 13), (1000, 1)):  # copies of 80 bytes that exceed 1000
        measured = run(operation, Case("toy", {"n": size}, torch.float32), ["cuda", "sdpa"])
        launch, graph = (measured.readings["cuda", mode] for mode in ("launch", "graph"))
        assert launch.samples_us == pytest.approx([7.0] * 3) and launch.buffers == graph.buffers == buffers
        assert graph.samples_us == pytest.approx([7.0 + 30.0 / 20] * 3)  # 20 calls share a replay's 30 us
        assert launch.cold_cache and graph.cold_cache
        assert measured.readings["sdpa", "launch"].samples_us == pytest.approx([9.0] * 3)
        assert [*measured.errors] == [("sdpa", "graph")] and "not permitted" in str(measured.errors["sdpa", "graph"])


@pytest.mark.usefixtures("doubled")
def test_the_compiled_reference_is_measured(monkeypatch: pytest.MonkeyPatch, pretended_gpu: FakeCuda) -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        pretended_gpu.kernel(5.0)
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(measure, "implementation", lambda name, backend: reference)
    operation = plain(reference)
    measured = run(operation, Case("toy", {"n": 10}, torch.float32), ["torch_compile"])
    assert [*measured.readings] == [("torch_compile", "launch"), ("torch_compile", "graph")] and not measured.errors


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_our_kernels_are_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch, operation: Operation) -> None:
    monkeypatch.setattr(machine, "measure_ceilings", lambda device: CEILINGS)
    measured = Bench(machine.default_device(), 2).measure(operation, operation.cases[0], OWN)
    assert measured is not None and measured.errors == {}
    assert {*measured.readings} == {(name, mode) for name in OWN for mode in ("launch", "graph", "host")}


@pytest.mark.gpu
def test_ceilings_of_a_gpu() -> None:
    ceilings = machine.measure_ceilings(machine.default_device())
    assert ceilings.copy_gb_s > 50 and ceilings.matmul_tflop_s > 1
    assert ceilings.graph_node_us is not None and 0 < ceilings.graph_node_us < ceilings.launch_us < 1000


@pytest.mark.usefixtures("doubled")
def test_a_gpu_that_is_lost_ends_the_run(monkeypatch: pytest.MonkeyPatch, pretended_gpu: FakeCuda) -> None:
    alive = [True]

    def deadly(x: torch.Tensor) -> torch.Tensor:
        alive[0] = False
        raise RuntimeError("an illegal memory access was encountered")

    def synchronize() -> None:
        if not alive[0]:
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(DeviceLost, match="the GPU stopped answering: RuntimeError: an illegal"):
        run(plain(deadly), Case("toy", {"n": 10}, torch.float32), ["sdpa"])


def test_the_hosts_time_ends_where_the_call_returns() -> None:
    time = FakeTime()
    cuda = FakeCuda(time)
    cuda.synchronize = lambda: time.pass_us(500.0)  # type: ignore[method-assign]
    read = HostClock(cuda, time).stopwatch([lambda: time.pass_us(7.0)])
    assert read() == pytest.approx(7.0) and read() == pytest.approx(7.0)


# Rivals of tree attention: each gives the reference's result on what it is given


def arguments_of(case: Case) -> Arguments:
    return OPERATION.inputs(case, torch.Generator().manual_seed(SEED))


@pytest.mark.parametrize("case", OPERATION.small, ids=str)
@pytest.mark.parametrize("name", ["sdpa_packed", "prefix_merge"])
def test_it_gives_what_the_reference_gives(name: str, case: Case) -> None:
    args = arguments_of(case)
    OPERATION.check(OPERATION.reference(*args), RIVALS[name].prepare(case, args)(*args), case)


@pytest.mark.parametrize("nodes", [1, 8, 40])
def test_pages_and_mask_of_xqa_say_what_the_cache_and_the_bits_do(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's function is played by our own reference, which reads the arguments as its documentation says."""
    case = Case(
        "tree_attention",
        {"nodes": nodes, "context": 150, "batch": 2, "q_heads": 4, "kv_heads": 2, "head": 16},
        torch.float32,
    )

    def xqa(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor,
        output: torch.Tensor, workspace: torch.Tensor, semaphores: torch.Tensor, num_kv_heads: int, page_size: int,
        *, kv_layout: str, q_scale: float, q_seq_len: int, mask: torch.Tensor | None,
    ) -> None:  # fmt: skip
        assert (kv_layout, page_size, num_kv_heads) == ("HND", PAGE_SLOTS, k.shape[1])
        assert not semaphores.view(torch.int32).any() and q.dim() == (5 if nodes > 1 else 4)
        bits = torch.ones(len(q), 1, 1, dtype=torch.int32) if mask is None else mask.view(torch.int32)
        context = seq_lens.view(torch.int32)[:, 0] - q_seq_len
        query = q.view(len(q), nodes, *q.shape[-2:]).transpose(1, 2)
        scale = q_scale / q.shape[-1] ** 0.5
        cached = (pages[page_table.long()].transpose(1, 2).flatten(2, 3) for pages in (k, v))
        output.copy_(tree_attention(query, *cached, bits, context, scale).view(output.shape))

    module = ModuleType("flashinfer.xqa")
    module.xqa = xqa  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", module)
    monkeypatch.setattr(attention_cases, "FLASHINFER_WORKSPACE_BYTES", 1)
    args = arguments_of(case)
    OPERATION.check(OPERATION.reference(*args), RIVALS["xqa"].prepare(case, args)(*args), case)


def test_flex_is_measured_with_and_without_autotuning(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic, mode: modes.append(mode))
    case = OPERATION.small[0]
    for name in ("flex", "flex_tuned"):
        RIVALS[name].prepare(case, arguments_of(case))
    assert modes == [None, "max-autotune-no-cudagraphs"]
