"""Time all contenders of a case in turns, each after its result was compared with the reference's.

The comparison is on the very inputs of the measurement. A contender that fails or differs is not timed. Own kernels
also run on poisoned memory, which reveals unwritten elements.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from speckernels.bench import machine
from speckernels.bench.cases.base import SEED, Arguments, Case, Operation, Work
from speckernels.bench.timing import Call, Clock, Stopwatch, graph_calls, interleave
from speckernels.runtime.dispatch import AUTO, implementation, use_backend


def copied(args: Any) -> Any:
    """Copy arguments, tensors with the same strides."""
    if isinstance(args, torch.Tensor):
        return args.clone()
    return type(args)(map(copied, args)) if isinstance(args, (tuple, list)) else args


def total_bytes(args: Any) -> int:
    """Number of bytes of all tensors."""
    if isinstance(args, torch.Tensor):
        return args.numel() * args.element_size()
    return sum(map(total_bytes, args)) if isinstance(args, (tuple, list)) else 0


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it returns the arguments that it changes."""

    def run(*args: Any) -> Any:
        function(*args)
        return args

    return run


class Poison(TorchFunctionMode):
    """Fill new tensors with NaN or the largest integer, which reveals unwritten elements."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("empty", "empty_like", "empty_strided", "new_empty"):
            if result.is_floating_point():
                result.fill_(torch.nan)
            else:
                result.fill_(True if result.dtype == torch.bool else torch.iinfo(result.dtype).max)
        return result


OWN = ("triton", "cuda")
COMPILED = ("torch_compile", "flex", "flex_tuned")  # tens of seconds a shape
REPEATS, LIMIT_S = 50, 1.0  # of readings per case and mode
MAX_BUFFERS, CPU_BUFFERS = 512, 3

Run = Callable[..., Any]


class DeviceLost(RuntimeError):
    """The GPU stopped answering; nothing can be measured until the process ends."""


@dataclass(frozen=True)
class Reading:
    """Times of one contender in one mode.

    samples_us : microseconds per call, one per repeat
    buffers : copies of the inputs that the calls went round
    cold_cache : whether every call found its inputs out of the L2 cache
    """

    samples_us: Sequence[float]
    buffers: int
    cold_cache: bool


@dataclass
class Measured:
    """Readings of a case by contender and mode; for those without one, the error."""

    work: Work
    readings: dict[tuple[str, str], Reading] = field(default_factory=dict)
    errors: dict[tuple[str, str], Exception] = field(default_factory=dict)


def contender_names(operation: Operation, case: Case, device: torch.device) -> tuple[str, ...]:
    """List what can be timed: on a CPU torch alone, on a GPU also torch.compile, our backends, and rivals."""
    if not machine.is_gpu(device):
        return ("torch",)
    compiled = ("torch_compile",) if case.compiled else ()
    rivals = (name for name, rival in operation.rivals.items() if rival.applies(case))
    return ("torch", *compiled, *OWN, *rivals)


class Bench:
    """One run on one device.

    minutes : no case starts that might not end by then, judging by the slowest so far
    ceilings : the device's limits, measured here
    conditions : the GPU's clocks, power and temperature at the beginning
    """

    def __init__(self, device: torch.device, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end, self._slowest_s = now, now() + 60 * minutes, 0.0
        self.device = device
        self.conditions = [machine.conditions(device)]
        self.ceilings = machine.measure_ceilings(device)
        self._clocks = machine.clocks(device)

    def measure(self, operation: Operation, case: Case, names: Sequence[str]) -> Measured | None:
        """Measure these contenders; None if there is no time left.

        Raises DeviceLost, and whatever the operation's inputs and reference raise.
        """
        start = self._now()
        if start + self._slowest_s > self._end:
            return None
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # of the rivals: what matters is their time
            measured = self._measure(operation, case, names)
        self._slowest_s = max(self._slowest_s, self._now() - start)
        return measured

    def facts(self) -> dict[str, Any]:
        """Describe device, versions and ceilings."""
        conditions = [*self.conditions, machine.conditions(self.device)]
        return {
            "device": machine.device_name(self.device),
            "versions": machine.versions(),
            "ceilings": vars(self.ceilings),
            "conditions": [each for each in conditions if each],
        }

    def row(self, case: Case, name: str, mode: str, reading: Reading, work: Work) -> dict[str, Any]:
        """Describe a reading: times, rates, and the ratio to the floor (a call's time on the host has no floor)."""
        p20_us, median_us, p80_us = (float(us) for us in np.quantile(reading.samples_us, (0.2, 0.5, 0.8)))
        row = {
            "op": case.op,
            "backend": name,
            "shape": dict(case.shape),
            "label": case.label,
            "dtype": case.dtype_name,
            "mode": mode,
            "median_us": median_us,
            "p20_us": p20_us,
            "p80_us": p80_us,
            "repeats": len(reading.samples_us),
            "buffers": reading.buffers,
            "cold_cache": reading.cold_cache,
            **vars(work),
        }
        if mode != "host":
            floor_us, kind = self.ceilings.floor(work, mode)
            row |= {"achieved_gb_s": work.bytes / median_us / 1e3, "achieved_tflop_s": work.flops / median_us / 1e6}
            row |= {"floor_us": floor_us, "floor_kind": kind, "ratio_to_floor": median_us / floor_us}
        return row

    def _measure(self, operation: Operation, case: Case, names: Sequence[str]) -> Measured:
        args = operation.inputs(case, torch.Generator(self.device).manual_seed(SEED))
        expected = operation.reference(*copied(args))
        measured = Measured(operation.work(case, args, expected))
        ready = {}
        for name in names:
            try:
                run = prepared(operation, case, args, name)
                check(operation, case, name, run, args, expected)
                ready[name] = run
            except Exception as error:  # whatever it is, the others are worth a measurement
                failed = self._recovered(error)
                measured.errors |= {(name, clock.mode): failed for clock in self._clocks}
        del expected
        buffers = [args, *(copied(args) for _ in range(self._buffer_count(args, measured.work) - 1))]
        for clock in self._clocks:
            self._time(case, clock, ready, buffers, measured)
        return measured

    def _buffer_count(self, args: Arguments, work: Work) -> int:
        """Copies of the inputs, so that their total leaves the L2 cache cold."""
        if not machine.is_gpu(self.device):
            return CPU_BUFFERS
        copies = -(-machine.evict_bytes(self.device) // max(1, work.bytes))
        return max(1, min(copies, MAX_BUFFERS, machine.buffer_bytes(self.device) // max(1, total_bytes(args))))

    def _time(
        self,
        case: Case,
        clock: Clock,
        contenders: Mapping[str, Run],
        buffers: Sequence[Arguments],
        measured: Measured,
    ) -> None:
        stopwatches: dict[str, Stopwatch] = {}
        used: dict[str, int] = {}
        for name, run in contenders.items():
            try:
                with use_backend(backend_of(name)):
                    calls: list[Call] = [partial(run, *args) for args in buffers]
                    if machine.is_gpu(self.device):  # what is prepared once per buffer must not fall into a capture
                        for call in calls:
                            call()
                    if clock.mode == "graph":
                        estimate_us = self._clocks[0].stopwatch(calls)()  # the check has warmed it up
                        calls = graph_calls(calls, max(estimate_us, 1.0))
                    stopwatches[name] = _with_backend(backend_of(name), clock.stopwatch(calls))
                used[name] = min(len(calls), len(buffers))
            except Exception as error:
                measured.errors[name, clock.mode] = self._recovered(error)
        try:
            samples = interleave(stopwatches, repeats=REPEATS, limit_s=LIMIT_S)
        except Exception as error:
            failed = self._recovered(error)
            measured.errors |= {(name, clock.mode): failed for name in stopwatches}
            return
        for name, samples_us in samples.items():
            cold = clock.mode == "launch"
            if clock.mode == "graph":
                cold = used[name] * measured.work.bytes >= machine.evict_bytes(self.device)
            measured.readings[name, clock.mode] = Reading(samples_us, used[name], cold)

    def _recovered(self, error: Exception) -> Exception:
        """Return the error without its frames, which hold the buffers; raise DeviceLost if the GPU is gone."""
        error = error.with_traceback(None)
        if machine.is_gpu(self.device):
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception as same:  # it stays until the process ends
                raise DeviceLost(f"the GPU stopped answering: {one_line(error)}") from same
        return error


def backend_of(name: str) -> str:
    """Return the dispatcher's backend for a contender."""
    return name if name in OWN else AUTO


def prepared(operation: Operation, case: Case, args: Arguments, name: str) -> Run:
    """Prepare a contender outside any clock; return a function of Arguments."""
    if name in OWN:
        return operation.run
    if name == "torch":
        return operation.reference
    if name == "torch_compile":
        # A fresh start: after several shapes torch would silently run eager code instead.
        torch.compiler.reset()
        compiled = torch.compile(implementation(operation.name, "reference"), dynamic=False)
        return in_place(compiled) if operation.in_place else compiled
    return operation.rivals[name].prepare(case, args)


def check(operation: Operation, case: Case, name: str, run: Run, args: Arguments, expected: Any) -> None:
    """Raise unless the contender gives the reference's result, our backends also from poisoned memory."""
    with use_backend(backend_of(name)):
        operation.check(expected, run(*copied(args)), case)
    if name in OWN:
        kernel = implementation(operation.name, name)
        with Poison():
            changed = copied(args)
            actual = kernel(*changed)
        operation.check(expected, changed if operation.in_place else actual, case)


def one_line(error: Exception) -> str:
    """Type and first line of a message, at most 300 characters."""
    words = " ".join(str(error).strip().splitlines()[:1])
    return f"{type(error).__name__}: {words}"[:300]


def _with_backend(backend: str, stopwatch: Stopwatch) -> Stopwatch:
    def read() -> float:
        with use_backend(backend):
            return stopwatch()

    return read
