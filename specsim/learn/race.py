"""A race: all configurations on few sequences, then fewer of them on twice as many, and so on.

Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943) with sequences as the
resource. All see the same sequences, so what makes a sequence easy cancels between them.
Departures: a rung may keep as many as an equal share of the work left pays for, at most; and
points that a paired t-test finds slower than the leader are dropped before, which leaves more work for
the others later on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from specsim.io.arrays import Floats, Ints
from specsim.learn.evaluate import BATCH, Evaluator
from specsim.learn.journal import Line
from specsim.learn.search_state import SearchState, ranked
from specsim.learn.space import Settings
from specsim.policy.base import Policy
from specsim.trace.trace import Trace

EFFORT = 0.1  # of brute force's work
FIRST_SHARE = 0.25  # of the race's work, for the first rung
SURE = 0.999  # one-sided confidence with which the test drops a configuration
FINALISTS = 2  # at least; the report compares the two best


def race(state: SearchState, points: Sequence[Settings], seed: int) -> None:
    """Find the best of these points with about a tenth of the work of trying all on all sequences.

    A trace of fewer than ten sequences takes more work, because every point replays at least one.
    """
    trace = state.evaluator.trace
    state.points += points
    order = shuffled(trace, seed)
    rows = np.concatenate([[0], np.cumsum(trace.output_tokens[order])])
    sizes = rungs(rows, EFFORT * FIRST_SHARE)
    budget = EFFORT * len(points) * int(rows[-1])
    field = _Field(state.evaluator, points, order)
    alive, seen = list(range(len(points))), 0
    dropped: list[list[int]] = []
    for rung, size in enumerate(sizes):
        if rung > 0:
            share = (budget - state.replayed_rows) / (len(sizes) - rung)
            room = max(FINALISTS, int(share / (rows[size] - rows[seen])))
            survivors = in_the_race(field.seconds(alive), room)
            dropped.append([alive[i] for i in sorted(set(range(len(alive))).difference(survivors))])
            alive = [alive[i] for i in survivors]
        results: list[list[float] | None] = []
        for start in range(0, len(alive), BATCH):
            batch = alive[start : start + BATCH]
            results += state.batch(partial(field.replay, batch, seen, size), len(batch))["seconds"]
            state.replayed_rows += int(rows[size] - rows[seen]) * len(batch)
            if rung == 0:
                state.ranking = ranked([None if result is None else sum(result) for result in results])
            state.progress(min(state.replayed_rows, int(budget)), int(budget))
        state.replayed_rows += field.add(alive, results, rows, seen, size)
        alive = [i for i in alive if i in field.known]
        alive = [alive[i] for i in np.argsort(field.seconds(alive).sum(axis=1), kind="stable").tolist()]
        state.ranking = [*alive, *(i for group in reversed(dropped) for i in group)]
        seen = size
        if not alive:
            return
    state.progress(int(budget), int(budget))


class _Field:
    """Seconds of the points in the race on the sequences seen so far."""

    def __init__(self, evaluator: Evaluator, points: Sequence[Settings], order: Ints) -> None:
        self.evaluator, self.points, self.order = evaluator, points, order
        self.policies: dict[int, Policy] = {}
        self.known: dict[int, Floats] = {}

    def seconds(self, points: Sequence[int]) -> Floats:
        """Seconds [P, M] on the sequences seen."""
        return np.stack([self.known[i] for i in points]) if points else np.zeros((0, 0))

    def replay(self, batch: Sequence[int], seen: int, size: int) -> Line:
        """Seconds of each on the sequences from `seen` to `size` in the race's order; None where refused.

        A policy that carries its state replays all up to `size`, in the trace's order.
        """
        missing = [i for i in batch if i not in self.policies]
        for i, policy in zip(missing, self.evaluator.build([self.points[i] for i in missing]), strict=True):
            if isinstance(policy, Policy):
                self.policies[i] = policy
        results: dict[int, list[float]] = {}
        carrying = [i for i in batch if i in self.policies and self.policies[i].carries_state]
        plain = [i for i in batch if i in self.policies and i not in carrying]
        new = self.order[seen:size]
        for i, row in zip(plain, self.evaluator.seconds([self.policies[i] for i in plain], new), strict=True):
            results[i] = row.tolist()
        place = np.argsort(self.order[:size])  # in the trace's order
        whole = self.evaluator.seconds([self.policies[i] for i in carrying], self.order[:size][place])
        for i, row in zip(carrying, whole[:, np.argsort(place)], strict=True):
            results[i] = row.tolist()
        rows = [results.get(i) for i in batch]  # infinite where the recorded trees are too small for the policy
        return {"seconds": [row if row is not None and np.isfinite(row).all() else None for row in rows]}

    def add(
        self, points: Sequence[int], results: Sequence[list[float] | None], rows: Ints, seen: int, size: int
    ) -> int:
        """Add a rung's results; return the positions replayed again to carry states."""
        repeated_rows = 0
        for i, result in zip(points, results, strict=True):
            if result is not None:
                before = self.known.get(i, np.zeros(0))
                carried = seen > 0 and len(result) == size
                repeated_rows += int(rows[seen]) if carried else 0
                self.known[i] = np.concatenate([np.zeros(0) if carried else before, result])
            else:  # on more sequences, a tree policy may come to be refused
                self.known.pop(i, None)
        return repeated_rows


def in_the_race(seconds: Floats, room: int) -> list[int]:
    """Rows of seconds [P, M], best first: at most `room`, and none that the test finds slower than the best."""
    from scipy.special import stdtrit

    order = np.argsort(seconds.sum(axis=1), kind="stable")
    extra = seconds[order] - seconds[order[0]]
    count = extra.shape[1]
    if count > 1:
        error = extra.std(axis=1, ddof=1) / np.sqrt(count)
        order = order[extra.mean(axis=1) <= float(stdtrit(count - 1, SURE)) * error]
    return order[:room].tolist()


def rungs(rows: Ints, first_share: float) -> list[int]:
    """Number of sequences per rung: the first share of all positions, then twice as many, up to all.

    rows : positions of the first n sequences, [S + 1]
    """
    sequences = len(rows) - 1
    size = max(1, int(np.searchsorted(rows, first_share * rows[-1], side="right")) - 1)
    sizes = []
    while size < sequences:
        sizes.append(size)
        size *= 2
    return [*sizes, sequences]


def shuffled(trace: Trace, seed: int) -> Ints:
    """All sequences in random order, domains evenly mixed, so that any first few stand for the whole."""
    rng = np.random.default_rng(seed)
    place = np.empty(trace.sequences)
    for domain in np.unique(trace.domain):
        members = rng.permutation(np.flatnonzero(trace.domain == domain))
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return np.argsort(place, kind="stable")
