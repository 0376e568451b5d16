"""Results of a benchmark: one row per operation, shape, backend and mode, and their document.

A file is one JSON object whose `rows` are flat, one line each:
`pandas.DataFrame(json.load(open(file))["rows"])`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

VERSION = 1
KIND = "speckernels-bench"
# launch: one eager call from Python on an idle GPU; graph: per call inside a CUDA graph; host: what an eager call
# keeps the host busy; cpu: on the CPU; interpreted, emulated: Triton and CUDA sources tested without a GPU.
MODES = ("launch", "graph", "host", "cpu", "interpreted", "emulated")
TIMED_MODES = ("launch", "graph", "cpu")  # the others say nothing about the speed of a device
HOST_MODE = "host"
MAX_BYTES = 2**24  # of a file
MAX_OPERATIONS = 100  # in a file, and characters of a name
LONGEST_LINE = 900  # characters of an error

Measure = Annotated[float, msgspec.Meta(ge=1e-12, le=1e12)]  # a time in microseconds, or a ratio of two
Count = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def printable(text: str) -> str:
    """Escape all characters of a text that a terminal would not show as they are."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class BenchError(ValueError):
    """Bad input to the benchmark, or a GPU that stopped answering; one line that says what to do."""

    def __init__(self, message: object = "") -> None:
        line = printable(" ".join(str(message).split()))  # which may quote a file
        super().__init__(line if len(line) <= LONGEST_LINE else f"{line[:600]} ... {line[-290:]}")


class ElsewhereError(BenchError):
    """The file was measured on another device or with other versions."""


@dataclass(frozen=True)
class Work:
    """Minimum work of an operation on given inputs.

    bytes : each input that matters read once, each result written once
    flops : floating-point operations
    """

    bytes: int
    flops: int


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of the device.

    copy_gb_s : large copy on the device, 1e9 bytes read and written per second
    matmul_tflop_s : large matrix product, 1e12 floating-point operations per second
    launch_us : the smallest operation, launch included
    graph_node_us : the smallest operation inside a CUDA graph; None without CUDA
    """

    copy_gb_s: float
    matmul_tflop_s: float
    matmul_dtype: str
    launch_us: Measure
    graph_node_us: Measure | None

    def floor(self, work: Work, mode: str) -> tuple[float, str]:
        """Smallest possible time in microseconds, and the limit that sets it."""
        latency_us = self.graph_node_us if mode == "graph" and self.graph_node_us is not None else self.launch_us
        limits = {
            "bytes": work.bytes / (self.copy_gb_s * 1e3),
            "flops": work.flops / (self.matmul_tflop_s * 1e6),
            "launch": latency_us,
        }
        kind = max(limits, key=lambda name: limits[name])
        return limits[kind], kind


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the repeats."""

    median_us: float
    p20_us: float
    p80_us: float
    repeats: int


Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Row:
    """One measurement, or the reason why it failed.

    shape, label : the sizes by name, and the same as short text
    buffers : copies of the inputs that the calls went round
    cold_cache : whether every call found its inputs out of the L2 cache
    achieved_gb_s, achieved_tflop_s : `bytes` and `flops` over the median time
    floor_us, floor_kind : the least time by the measured ceilings, and what sets it
    error : why there is no time; None if there is one
    """

    op: Annotated[str, msgspec.Meta(max_length=MAX_OPERATIONS)]
    backend: str
    shape: Mapping[str, Count]
    label: str
    dtype: str
    device: str
    mode: str
    versions: Mapping[str, str]
    date: str
    median_us: Measure | None = None
    p20_us: Measure | None = None
    p80_us: Measure | None = None
    repeats: Count = 0
    buffers: Count = 0
    cold_cache: bool = False
    bytes: Count | None = None
    flops: Count | None = None
    achieved_gb_s: float | None = None
    achieved_tflop_s: float | None = None
    floor_us: Measure | None = None
    floor_kind: str | None = None
    ratio_to_floor: Measure | None = None
    error: str | None = None

    @property
    def key(self) -> Key:
        """Key of the row; a file has one row per key."""
        return self.op, self.label, self.dtype, self.backend, self.mode

    def timed(self, timing: Timing, work: Work, ceilings: Ceilings, *, buffers: int, cold_cache: bool) -> Row:
        """Return this row with a time, and with a floor if the mode has one."""
        per_us = 1 / timing.median_us
        row = dataclasses.replace(
            self,
            **dataclasses.asdict(timing),
            **dataclasses.asdict(work),
            buffers=buffers,
            cold_cache=cold_cache,
        )
        if self.mode not in TIMED_MODES:
            return row
        floor_us, floor_kind = ceilings.floor(work, self.mode)
        return dataclasses.replace(
            row,
            achieved_gb_s=work.bytes * per_us / 1e3,
            achieved_tflop_s=work.flops * per_us / 1e6,
            floor_us=floor_us,
            floor_kind=floor_kind,
            ratio_to_floor=timing.median_us / floor_us,
        )


@dataclass
class Document:
    """All rows of one device and one set of versions.

    unfinished : "operation, shape, dtype" of the cases that time did not allow
    conditions : the GPU's clocks, power and temperature at the beginning and the end of every run, where it tells
    """

    device: str
    versions: dict[str, str]
    date: str
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    conditions: list[dict[str, float]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as in the file."""
        return {"kind": KIND, "version": VERSION, **dataclasses.asdict(self)}


def one_line(error: Exception) -> str:
    """Type and first line of a message, at most 300 characters."""
    words = " ".join(str(error).strip().splitlines()[:1])
    return f"{type(error).__name__}: {words}"[:300]


def write_document(path: Path, document: Document) -> None:
    """Write the document atomically."""
    plain = document.as_dict()
    rows = plain.pop("rows")
    head = json.dumps(plain, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    temporary.replace(path)


def read_document(path: Path) -> Document:
    """Read a document; BenchError if the file is not a benchmark's."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        plain = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise BenchError(f"{path} does not exist; write it with `speckernels bench --out {path}`") from None
    except RecursionError:
        raise BenchError(f"{path} cannot be read as JSON: nested too deep") from None
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(plain, dict) or plain.pop("kind", None) != KIND:
        raise BenchError(f"{path} is not a file of `speckernels bench`")
    version = plain.pop("version", None)
    if version != VERSION:
        raise BenchError(f"{path} has version {version!r:.40}, this program reads version {VERSION}; measure again")
    try:
        document = msgspec.convert(plain, Document)
    except msgspec.ValidationError as error:
        raise BenchError(f"{path} is damaged: {error}; measure again") from None
    if len({row.op for row in document.rows}) > MAX_OPERATIONS:
        raise BenchError(f"{path} is damaged: more than {MAX_OPERATIONS} operations; measure again")
    return document
