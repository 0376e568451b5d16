"""Turns of a few rounds, in which all that is measured sees the same machine.

A shared machine drifts within seconds. What takes turns by sequence is therefore timed on different machines; what
takes turns by round is not (`studies/measurement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

TURN_ROUNDS = 2  # of an arm before the next may go on; studies/measurement says why


class Runner(Protocol):
    """Something that goes through a sequence by rounds, as `realrun.decode.decoder.Decoding` does."""

    @property
    def position(self) -> float:
        """Output tokens so far."""

    @property
    def done(self) -> bool: ...

    def advance(self) -> Any: ...


def turns(
    runners: Iterable[Runner], order: np.random.Generator, turn_rounds: int = TURN_ROUNDS, shift: int = 0
) -> Iterator[None]:
    """Take all to their end, a turn at a time: whoever is furthest behind does the next few rounds, one of them by lot.

    shift : rounds by which everyone's first turn is shorter than `turn_rounds`
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
    """All of `turns`."""
    for _ in turns(runners, order, turn_rounds, shift):
        pass
