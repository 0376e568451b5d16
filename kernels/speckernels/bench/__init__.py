"""Benchmark of the operations: time, achieved rates, and the ratio to what the device can do.

`run_bench` measures and returns a Document; `speckernels bench` and `speckernels plot` are the
command line. The floor of a shape is the largest of bytes over copy bandwidth, operations over
matrix rate, and launch latency, all three measured in the same run.
"""

from speckernels.bench.rows import (
    BenchError,
    Ceilings,
    Document,
    ElsewhereError,
    Row,
    Timing,
    Work,
    read_document,
    write_document,
)
from speckernels.bench.runner import BACKENDS, run_bench

__all__ = [
    "BACKENDS",
    "BenchError",
    "Ceilings",
    "Document",
    "ElsewhereError",
    "Row",
    "Timing",
    "Work",
    "read_document",
    "run_bench",
    "write_document",
]
