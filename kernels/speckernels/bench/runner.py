"""Measure operations case by case, after a check of each result, into a file that can be resumed.

For each case every contender's result is compared with the reference on the very inputs of
the measurement. One that fails or differs becomes a row with its error and is not timed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from speckernels.bench import machine
from speckernels.bench.cases import chosen
from speckernels.bench.cases.attention_rivals import RIVALS
from speckernels.bench.cases.base import SEED, Arguments, Case, Operation
from speckernels.bench.inputs import Poison, copied, in_place, total_bytes
from speckernels.bench.rows import (
    HOST_MODE,
    TIMED_MODES,
    BenchError,
    Document,
    ElsewhereError,
    Row,
    Work,
    one_line,
    read_document,
    write_document,
)
from speckernels.bench.timing import Call, Clock, Stopwatch, graph_calls, interleave
from speckernels.runtime.dispatch import AUTO, implementation, use_backend

OWN = ("triton", "cuda")
BACKENDS = ("torch", "torch_compile", *OWN, *RIVALS)
COMPILED = (
    "torch_compile",
    "flex",
    "flex_tuned",
)  # tens of seconds a shape: on a CPU and in a quick run only if asked for

REPEATS, QUICK_REPEATS, UNTIMED_REPEATS = 50, 15, 2
CASE_LIMIT_S, QUICK_CASE_LIMIT_S = 1.0, 0.3  # of readings per case and mode
MAX_BUFFERS = 512
CPU_BUFFERS = 3

Progress = Callable[[str, int, int], None]
Run = Callable[..., Any]


@dataclass(frozen=True)
class Contender:
    """Implementation of an operation: a callable of its Arguments, and the dispatcher's backend for it."""

    name: str
    run: Run
    backend: str = AUTO


def run_bench(
    out: Path | None = None,
    minutes: float = 10.0,
    ops: Sequence[str] = (),
    backends: Sequence[str] = (),
    device: torch.device | str | None = None,
    quick: bool = False,
    progress: Progress | None = None,
    *,
    headline: bool = False,
    case: Sequence[str] = (),
    now: Callable[[], float] = time.monotonic,
) -> Document:
    """Measure operations and return the document, which is also written to `out` after each case.

    out : file to write; rows that it already has are not measured again
    minutes : no case starts that might not end by then, judging by its operation's slowest so far; each operation first
        gets an equal share of the time
    ops, backends : names; empty means all, on a CPU and in a quick run all but those of COMPILED
    device : by default the GPU, else the CPU, where shapes are small and only torch is timed
    quick : fewer cases and repeats
    headline : only the cases that each operation names so; on a CPU, where shapes are small, all
    case : words such as nodes=64, all of which a case's label must hold
    progress : called with the case, the number done and their total

    Raises BenchError for an unknown name, a file measured elsewhere, or a GPU that stopped answering.
    """
    where = machine.default_device() if device is None else _usable(device)
    operations = chosen(ops)
    names = _chosen_backends(backends, where, quick)
    tasks = {op.name: [(op, op_case) for op_case in _cases(op, where, quick, headline, case)] for op in operations}
    if not any(tasks.values()):
        raise BenchError(f"no case of {', '.join(tasks)} has {' '.join(case) or 'a headline'}; leave that out")
    if minutes <= 0:
        raise BenchError(f"minutes is {minutes}; give more than 0")
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        return _run(out, now() + 60 * minutes, tasks, names, where, quick, progress, now)


def _run(
    out: Path | None,
    end: float,
    tasks: dict[str, list[tuple[Operation, Case]]],
    names: Sequence[str],
    where: torch.device,
    quick: bool,
    progress: Progress | None,
    now: Callable[[], float],
) -> Document:
    document = _open(out, where)
    if conditions := machine.conditions(where):
        document.conditions.append(conditions)
    session = _Session(document, where, names, quick, out)
    slowest_s = dict.fromkeys(tasks, 0.0)
    total, done = sum(map(len, tasks.values())), 0

    def measure_next(name: str, until: float) -> bool:
        """Measure the operation's next case if it will probably end in time; return whether it was measured."""
        nonlocal done
        queue = tasks[name]
        if not queue or now() + slowest_s[name] > until:
            return False
        op, case = queue.pop(0)
        if progress:
            progress(str(case), done, total)
        start = now()
        session.measure(op, case)
        slowest_s[name] = max(slowest_s[name], now() - start)
        done += 1
        return True

    # First equal shares of the time, then the rest in turns.
    waiting = [name for name, queue in tasks.items() if queue]
    for number, name in enumerate(waiting):
        until = now() + (end - now()) / (len(waiting) - number)
        while measure_next(name, until):
            pass
    while sum(measure_next(name, end) for name in waiting):
        pass
    if conditions := machine.conditions(where):
        document.conditions.append(conditions)
    document.unfinished = [str(case) for queue in tasks.values() for _, case in queue]
    if out is not None:
        write_document(out, document)
    if progress:
        progress("done", total - len(document.unfinished), total)
    return document


def _usable(device: torch.device | str) -> torch.device:
    try:
        where = torch.device(device)
        if where.type not in ("cpu", "cuda"):
            raise RuntimeError("give cpu or cuda")
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise BenchError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else where


def _chosen_backends(names: Sequence[str], device: torch.device, quick: bool) -> tuple[str, ...]:
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise BenchError(f"backend {unknown[0]!r} is unknown; known: {', '.join(BACKENDS)}")
    if names:
        return tuple(name for name in BACKENDS if name in names)
    light = quick or not machine.is_gpu(device)
    return tuple(name for name in BACKENDS if name not in COMPILED or not light)


def _cases(
    operation: Operation, device: torch.device, quick: bool, headline: bool, words: Sequence[str]
) -> tuple[Case, ...]:
    if not machine.is_gpu(device):
        chosen = operation.small
    elif headline:
        chosen = tuple(filter(operation.headline, operation.cases))
    else:
        chosen = operation.cases[: operation.quick] if quick and not words else operation.cases
    required = {word for words_together in words for word in words_together.split()}
    return tuple(case for case in chosen if required <= {*case.label.split(), case.dtype_name})


def _open(out: Path | None, device: torch.device) -> Document:
    """Document to extend: that of the file, if it is of this device and these versions, else a new one."""
    name, versions = machine.device_name(device), machine.versions()
    if out is not None and out.exists():
        document = read_document(out)
        if (document.device, document.versions) != (name, versions):
            here = ", ".join(f"{key} {value}" for key, value in versions.items())
            raise ElsewhereError(
                f"{out} was measured on another device or with other versions than {name}, {here}; name another file"
            )
        return document
    ceilings = machine.measure_ceilings(device)
    return Document(name, versions, _date(), ceilings)


def _date() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Session:
    """State shared by all cases of a run."""

    def __init__(
        self, document: Document, device: torch.device, backends: Sequence[str], quick: bool, out: Path | None
    ) -> None:
        self.document, self.device, self.out = document, device, out
        self._backends = backends
        self._clocks = machine.clocks(device)
        self._repeats = QUICK_REPEATS if quick else REPEATS
        self._limit_s = QUICK_CASE_LIMIT_S if quick else CASE_LIMIT_S
        self._done = {row.key for row in document.rows}
        self._dead = False

    def measure(self, operation: Operation, case: Case) -> None:
        """Add the case's missing rows to the document and write it."""
        missing = {name: self._missing_modes(operation, case, name) for name in self._backends}
        names = [name for name, modes in missing.items() if modes]
        if not names:
            return
        with torch.no_grad(), _quiet():
            for row in self._rows(operation, case, names):
                self._add(row)
                if self._dead:  # what killed the GPU is noted in full, so that the next run goes past it
                    for mode in self._modes(row.backend):
                        self._add(self._row(case, row.backend, mode, row.error))
                    break
        if self.out is not None:
            write_document(self.out, self.document)
        if self._dead:
            raise BenchError(f"the GPU stopped answering in {case}: {row.error}; run again for the rest")

    def _add(self, row: Row) -> None:
        if row.key not in self._done:
            self._done.add(row.key)
            self.document.rows.append(row)

    def _missing_modes(self, operation: Operation, case: Case, backend: str) -> list[str]:
        rival = operation.rivals.get(backend)
        if backend == "torch_compile":
            applies = case.compiled
        else:
            applies = backend in (*OWN, "torch") or (rival is not None and rival.applies(case))
        return [mode for mode in self._modes(backend) if applies and not self._is_done(case, backend, mode)]

    def _modes(self, backend: str) -> list[str]:
        if not machine.is_gpu(self.device):
            return [machine.UNTIMED_MODE.get(backend, "cpu")]
        return [clock.mode for clock in self._clocks]

    def _is_done(self, case: Case, backend: str, mode: str) -> bool:
        return self._row(case, backend, mode).key in self._done

    def _row(self, case: Case, backend: str, mode: str, error: str | None = None) -> Row:
        return Row(
            op=case.op,
            backend=backend,
            shape=dict(case.shape),
            label=case.label,
            dtype=case.dtype_name,
            device=self.document.device,
            mode=mode,
            versions=self.document.versions,
            date=_date(),
            error=error,
        )

    def _rows(self, operation: Operation, case: Case, names: Sequence[str]) -> Iterator[Row]:
        generator = torch.Generator(self.device).manual_seed(SEED)
        try:
            args = operation.inputs(case, generator)
            expected = operation.reference(*copied(args))
            work = operation.work(case, args, expected)
        except Exception as error:  # a missing operation or too little memory; the next case may do
            text = self._recovered(error)
            yield from (self._row(case, name, mode, text) for name in names for mode in self._modes(name))
            return

        ready: list[Contender] = []
        for name in names:
            try:
                contender = self._prepared(operation, case, args, name)
                self._gate(operation, case, contender, args, expected)
                ready.append(contender)
            except Exception as error:  # whatever it is, it belongs into the row
                text = self._recovered(error)
                yield from (self._row(case, name, mode, text) for mode in self._modes(name))
        del expected
        if not ready:
            return

        buffers = [args, *(copied(args) for _ in range(self._buffer_count(args, work) - 1))]
        for clock in self._clocks:
            yield from self._timed(case, work, clock, ready, buffers)

    def _prepared(self, operation: Operation, case: Case, args: Arguments, name: str) -> Contender:
        if name in OWN:
            return Contender(name, operation.run, backend=name)
        if name == "torch":
            return Contender(name, operation.reference)
        if name == "torch_compile":
            # A fresh start: after several shapes torch would silently run eager code instead.
            torch.compiler.reset()
            compiled = torch.compile(implementation(operation.name, "reference"), dynamic=False)
            return Contender(name, in_place(compiled) if operation.in_place else compiled)
        return Contender(name, operation.rivals[name].prepare(case, args))

    def _gate(self, operation: Operation, case: Case, contender: Contender, args: Arguments, expected: Any) -> None:
        """Raise unless the contender gives the reference's result, our backends also from poisoned memory."""
        with use_backend(contender.backend):
            operation.check(expected, contender.run(*copied(args)), case)
        if contender.name in OWN:
            kernel = implementation(operation.name, contender.name)
            with Poison():
                again = copied(args)
                actual = kernel(*again)
            operation.check(expected, again if operation.in_place else actual, case)

    def _buffer_count(self, args: Arguments, work: Work) -> int:
        """Copies of the inputs, so that their total leaves the L2 cache cold."""
        if not machine.is_gpu(self.device):
            return CPU_BUFFERS
        copies = -(-machine.evict_bytes(self.device) // max(1, work.bytes))
        return max(1, min(copies, MAX_BUFFERS, machine.buffer_bytes(self.device) // max(1, total_bytes(args))))

    def _timed(
        self, case: Case, work: Work, clock: Clock, contenders: Sequence[Contender], buffers: Sequence[Arguments]
    ) -> Iterator[Row]:
        stopwatches: dict[str, Stopwatch] = {}
        used: dict[str, int] = {}
        for contender in contenders:
            name = contender.name
            if clock.mode not in self._modes(name) or self._is_done(case, name, clock.mode):
                continue
            try:
                with use_backend(contender.backend):
                    calls: list[Call] = [partial(contender.run, *args) for args in buffers]
                    if machine.is_gpu(self.device):  # what is prepared once per buffer must not fall into a capture
                        for call in calls:
                            call()
                    if clock.mode == "graph":
                        estimate_us = self._clocks[0].stopwatch(calls)()  # the gate has warmed it up
                        calls = graph_calls(calls, max(estimate_us, 1.0))
                    stopwatches[name] = _named(f"{case}, {name}", contender.backend, clock.stopwatch(calls))
                used[name] = min(len(calls), len(buffers))
            except Exception as error:
                yield self._row(case, name, clock.mode, self._recovered(error))
        repeats = self._repeats if clock.mode in (*TIMED_MODES, HOST_MODE) else UNTIMED_REPEATS
        try:
            timings = interleave(stopwatches, repeats=repeats, limit_s=self._limit_s)
        except Exception as error:
            text = self._recovered(error)
            yield from (self._row(case, name, clock.mode, text) for name in stopwatches)
            return
        for name, timing in timings.items():
            cold = clock.mode == "launch"
            if clock.mode == "graph":
                cold = used[name] * work.bytes >= machine.evict_bytes(self.device)
            row = self._row(case, name, clock.mode)
            yield row.timed(timing, work, self.document.ceilings, buffers=used[name], cold_cache=cold)

    def _recovered(self, error: Exception) -> str:
        """Return the error as one line, and note a lost GPU, after which nothing can be measured."""
        if machine.is_gpu(self.device):
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception:  # the same error again: it stays until the process ends
                self._dead = True
        return one_line(error)


def _named(name: str, backend: str, stopwatch: Stopwatch) -> Stopwatch:
    def read() -> float:
        with use_backend(backend), machine.nvtx_range(name):
            return stopwatch()

    return read


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the rivals: what matters of theirs is the row
        yield
