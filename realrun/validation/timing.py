"""Time arms that really decode, in turns, so that a machine that drifts does so for all of them alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.pairs.prompts import Prompt
from specsim.policy.base import Policy
from specsim.trace.trace import Trace

WARM_UP_TOKENS = 24


class Arm(NamedTuple):
    """A policy as one decoder runs it; policy None is the autoregressive baseline."""

    name: str
    policy: Policy | None
    decoder: Decoder


class Turn(NamedTuple):
    """Whose turn it is: an arm and a sequence, both by number; place : among the sequence's turns, from 0."""

    arm: int
    sequence: int
    place: int
    state: Any  # the arm's policy's, after its turn before; None in the first


Step = Callable[[Turn], Decoded]  # what is done, and timed, in one turn


class Timings:
    """What every arm took.

    seconds : of each run, by (arm, sequence)
    runs : the last run, by (arm, sequence)
    rounds, drafted, accepted, emitted : of all runs, int64 [arms]; the last three in tokens
    """

    def __init__(self, arms: int):
        self.seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.runs: dict[tuple[int, int], Decoded] = {}
        self.rounds, self.drafted, self.accepted, self.emitted = np.zeros((4, arms), dtype=np.int64)

    def add(self, arm: int, sequence: int, run: Decoded) -> None:
        self.seconds[arm, sequence].append(run.seconds)
        self.runs[arm, sequence] = run
        self.rounds[arm] += len(run.rounds)
        self.drafted[arm] += sum(r.drafted for r in run.rounds)
        self.accepted[arm] += sum(r.accepted for r in run.rounds)
        self.emitted[arm] += len(run.tokens)

    def median_s(self, arm: int, sequences: Iterable[int]) -> npt.NDArray[np.float64]:
        """Each sequence's seconds, the median of its runs."""
        return np.array([np.median(self.seconds[arm, sequence]) for sequence in sequences])

    def last_runs(self, arm: int, sequences: Iterable[int]) -> list[Decoded]:
        """Each sequence's last run."""
        return [self.runs[arm, sequence] for sequence in sequences]


def take_turns(
    arms: int,
    sequences: Iterable[int],
    step: Step,
    order: np.random.Generator,
    timings: Timings,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """One repeat: every sequence by every arm, in an order of the arms shuffled anew for each sequence.

    A policy's state goes from an arm's turn to its next and starts anew with every call.

    Parameters
    ----------
    sequences : taken one by one, so that an iterator may end when time is up
    timings : where the runs are added
    progress : called with the number of turns done
    """
    states: dict[int, Any] = {}
    done = 0
    for sequence in sequences:
        for place, arm in enumerate(order.permutation(arms).tolist()):
            run = step(Turn(arm, sequence, place, states.get(arm)))
            states[arm] = run.state
            timings.add(arm, sequence, run)
            progress(done := done + 1)


def decoding(arms: Sequence[Arm], prompts: Sequence[Prompt], trace: Trace, seed: int) -> Step:
    """A turn that decodes the whole sequence, within the budget and under the number that the trace gives it.

    prompts[i] : of the trace's sequence i. Every arm is warmed up before the clock counts.
    """
    for arm in arms:
        arm.decoder.decode(prompts[0].tokens, min(WARM_UP_TOKENS, int(trace.budget_tokens[0])), arm.policy)

    def step(turn: Turn) -> Decoded:
        arm, index = arms[turn.arm], turn.sequence
        return arm.decoder.decode(
            prompts[index].tokens,
            int(trace.budget_tokens[index]),
            arm.policy,
            sequence=int(trace.sequence_id[index]),
            seed=seed,
            state=turn.state,
        )

    return step
