"""Benchmark cases, one file per operation; each is registered here."""

from __future__ import annotations

from collections.abc import Sequence

from speckernels.bench.cases import (
    chain_rejection,
    compact_kv,
    draft_statistics,
    tree_attention,
    tree_rejection,
    typical_acceptance,
)
from speckernels.bench.cases.base import Operation
from speckernels.bench.rows import BenchError

OPERATIONS = (
    draft_statistics.OPERATION,
    tree_attention.OPERATION,
    chain_rejection.OPERATION,
    tree_rejection.OPERATION,
    typical_acceptance.OPERATION,
    compact_kv.OPERATION,
)


def chosen(names: Sequence[str]) -> list[Operation]:
    """Operations with these names (default: all); BenchError for an unknown name."""
    known = {operation.name: operation for operation in OPERATIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(f"operation {unknown[0]!r} is unknown; known: {', '.join(known)}")
    return [known[name] for name in (names or known)]
