"""Interleave measurements by turns of a few rounds, so that all of them see the same machine.

A shared machine drifts within seconds: measurements that take turns by sequence see different machines, measurements
that take turns by round do not (`studies/measurement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

TURN_ROUNDS = 2  # of an arm before the next arm; studies/measurement explains the number


class Runner(Protocol):
    """Decodes a sequence round by round, as `realrun.decode.decoder.Decoding` does."""

    @property
    def position(self) -> float:
        """Count the output tokens so far."""

    @property
    def done(self) -> bool: ...

    def advance(self) -> Any: ...


def turns(
    runners: Iterable[Runner], order: np.random.Generator, turn_rounds: int = TURN_ROUNDS, shift: int = 0
) -> Iterator[None]:
    """Run all runners to their end by turns: the least advanced does the next few rounds; ties are drawn by lot.

    shift : rounds by which the first turn of every runner is shorter than `turn_rounds`
    """
    waiting = [runner for runner in runners if not runner.done]
    rounds = {id(runner): turn_rounds - shift for runner in waiting}  # of the next turn
    while waiting:
        least = min(runner.position for runner in waiting)
        last = [runner for runner in waiting if runner.position == least]
        chosen = last[int(order.integers(len(last)))]
        for _ in range(rounds[id(chosen)]):
            chosen.advance()
            if chosen.done:
                waiting.remove(chosen)
                break
        rounds[id(chosen)] = turn_rounds
        yield


def take_turns(
    runners: Iterable[Runner], order: np.random.Generator, turn_rounds: int = TURN_ROUNDS, shift: int = 0
) -> None:
    """Run `turns` to the end."""
    for _ in turns(runners, order, turn_rounds, shift):
        pass
