"""Traces in which the target's token has given ranks, and every tree of a size, by enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from specsim.policy.static_tree import shape as shapes
from specsim.trace.trace import Trace
from tests.support.reference import build_trace


def ranked_trace(ranks: np.ndarray, lengths: list[int]) -> Trace:
    """A trace with these true ranks [N, D], but -1 beyond each output's end."""
    left = np.concatenate([np.arange(length, 0, -1) for length in lengths])
    inside = np.arange(ranks.shape[1]) < left[:, None]
    ranks = np.where(inside, ranks, -1).astype(np.int16)
    return build_trace(np.random.default_rng(0), ranks == 0, lengths, true_rank=ranks)


def drawn_trace(rates: np.ndarray, lengths: list[int], seed: int = 0) -> Trace:
    """A trace whose ranks are drawn with these chances [D, R]; R stands for none of them."""
    u = np.random.default_rng(seed).random((sum(lengths), len(rates), 1))
    return ranked_trace((u > np.cumsum(rates, axis=1)).sum(axis=2), lengths)


@cache
def all_trees(depth: int, ranks: int, nodes: int) -> tuple[shapes.Shape, ...]:
    """Every tree of so many nodes below the root, no deeper and no wider than this."""

    def below(depth: int, nodes: int, rank: int) -> Iterator[tuple[shapes.Path, ...]]:
        """What can be below a node: its children of this rank and above, with all below them."""
        if nodes == 0:
            yield ()
        elif depth and rank < ranks:
            for size in range(1, nodes + 1):
                for inner in below(depth - 1, size - 1, 0):
                    for rest in below(depth, nodes - size, rank + 1):
                        yield ((rank,), *((rank, *path) for path in inner), *rest)

    return tuple(shapes.from_paths(paths) for paths in below(depth, nodes, 0))
