"""Decode a leaderboard's held-out prompts for real, with every drafter's policies and without, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from realrun.decode.rounds import Round
from realrun.decode.sampling import Sampler
from realrun.experiment.measured_costs import MeasuredCosts, Run
from realrun.experiment.measuring import Costs, measure_in_turns
from realrun.experiment.timing import Timings, make_arm
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.machine_load import Load
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.io.arrays import Floats, Ints
from specsim.io.progress import Counter
from specsim.policy.base import Policy
from specsim.replaying.replay import Replay
from specsim.trace.trace import Trace


@dataclass(frozen=True)
class Contender:
    """One policy of one drafter, with its replay and the trace that this is of; of a baseline neither."""

    label: str
    drafter: str
    policy: Policy | None = None
    replayed: Replay | None = None
    trace: Trace | None = None


@dataclass(frozen=True)
class Measured:
    """Of one contender: seconds, by medians and of all repeats together, and output tokens [S]; rounds of each
    sequence, at the median of their repeats; shares of the last repeat that are as replayed and as recorded, None for a
    baseline."""

    seconds: Floats
    wall_s: Floats
    tokens: Ints
    rounds: list[list[Round]]
    rounds_identical: float | None
    output_identical: float | None

    def seconds_for(self, wanted: Ints) -> Floats:
        """Seconds per sequence [S] for as many tokens as wanted [S]."""
        return np.asarray(self.seconds / self.tokens * wanted)

    def wall_s_for(self, wanted: Ints) -> Floats:
        """As `seconds_for`, of all repeats together [S]."""
        return np.asarray(self.wall_s / self.tokens * wanted)


def measure(
    pairs: Mapping[str, Pair],
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    held: Trace,
    costs: Mapping[str, MeasuredCosts],
    folder: Path,
    *,
    repeats: int,
    seed: int,
    progress: Counter,
) -> tuple[list[Measured], Load]:
    """What every contender took, in their order, and the machine's load; what is in the folder is read.

    Parameters
    ----------
    pairs : by the name that contenders give, the baselines' among them
    prompts : of the held-out sequences, in the order of `held`, whose numbers and budgets they take
    costs : of every drafter, whose probes take turns with the contenders, one drafter's on each prompt
    """
    sampler = Sampler(**held.meta["decoding"])
    arms = [make_arm(one.label, one.policy, pairs[one.drafter], sampler) for one in contenders]
    own = {name: [arm for arm, one in enumerate(contenders) if one.drafter == name] for name in costs}
    timings, load = measure_in_turns(
        arms,
        {name: Costs(measured, own[name]) for name, measured in costs.items()},
        prompts,
        held,
        folder,
        repeats=repeats,
        seed=seed,
        progress=progress,
    )
    return [_measured(one, arm, timings, len(prompts)) for arm, one in enumerate(contenders)], load


def runs_of(
    drafter: str, contenders: Sequence[Contender], measured: Sequence[Measured], prompts: Sequence[Prompt]
) -> Iterator[Run]:
    """All runs of one drafter's policies."""
    for one, own in zip(contenders, measured, strict=True):
        if one.drafter == drafter:
            for prompt, rounds in zip(prompts, own.rounds, strict=True):
                yield one.policy, len(prompt.tokens), rounds


def _measured(one: Contender, arm: int, timings: Timings, sequences: int) -> Measured:
    everything = range(sequences)
    last = timings.last_runs(arm, everything)
    return Measured(
        seconds=timings.seconds(arm, everything),
        wall_s=timings.wall_s(arm, everything),
        tokens=np.array([len(run.tokens) for run in last]),
        rounds=[timings.rounds(arm, index) for index in everything],
        rounds_identical=None if one.replayed is None else rounds_identical(one.replayed, last),
        output_identical=None if one.trace is None else output_identical(one.trace, last),
    )
