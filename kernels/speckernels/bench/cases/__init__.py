"""Benchmark cases, one file per operation; each is registered here."""

from __future__ import annotations

from itertools import zip_longest

from speckernels.bench.cases import (
    chain_rejection,
    compact_kv,
    draft_statistics,
    tree_attention,
    tree_rejection,
    typical_acceptance,
)
from speckernels.bench.cases.base import Case, Operation

OPERATIONS = (
    draft_statistics.OPERATION,
    tree_attention.OPERATION,
    chain_rejection.OPERATION,
    tree_rejection.OPERATION,
    typical_acceptance.OPERATION,
    compact_kv.OPERATION,
)


def ordered_cases(*, on_gpu: bool) -> list[tuple[Operation, Case]]:
    """Order the cases so that a run that ends early has measured the most telling ones.

    On a GPU: the headline's, the first of each other operation, then the rest, operations in turns.
    Without one: the small cases.
    """
    if not on_gpu:
        return [(operation, case) for operation in OPERATIONS for case in operation.small]
    queues = []
    first = []
    for operation in OPERATIONS:
        telling = [case for case in operation.cases if operation.headline(case)] or [operation.cases[0]]
        first += [(operation, case) for case in telling]
        queues.append([(operation, case) for case in operation.cases if case not in telling])
    return first + [pair for turn in zip_longest(*queues) for pair in turn if pair is not None]
