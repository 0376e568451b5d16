"""Decode a leaderboard's held-out prompts for real, with every drafter's policies and without, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler
from realrun.leaderboard.costs import read_own
from realrun.machine_load import Load, mean_load, watch
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.validation.measured_costs import MeasuredCosts, Run
from realrun.validation.timing import Runner, Timings, decode_in_turns, make_arm, warm_up
from realrun.validation.validate import output_identical, rounds_identical
from specsim.arrays import Floats, Ints
from specsim.files import write_json
from specsim.policy.base import Policy
from specsim.progress import Counter
from specsim.replaying.replay import Replay
from specsim.trace.trace import Trace


class OneRun(TypedDict):
    """A decoded sequence."""

    tokens: list[int]
    rounds: list[list[Any]]


class Busy(TypedDict):
    """See `Load`."""

    others_percent: float | None
    stolen_percent: float | None


class Repeat(TypedDict):
    """What one repeat measured: runs by label, probes by drafter."""

    runs: dict[str, list[OneRun]]
    probes: dict[str, dict[str, Any]]
    load: Busy


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
    """Of one contender: seconds and output tokens [S]; rounds of each sequence, at the median of their repeats; shares
    of the last repeat that are as replayed and as recorded, None for a baseline."""

    seconds: Floats
    tokens: Ints
    rounds: list[list[Round]]
    rounds_identical: float | None
    output_identical: float | None

    def seconds_for(self, wanted: Ints) -> Floats:
        """Seconds per sequence [S] for as many tokens as wanted [S]."""
        return np.asarray(self.seconds / self.tokens * wanted)


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
) -> list[Measured]:
    """What every contender took, in their order; a repeat that is in the folder is read.

    Parameters
    ----------
    pairs : by the name that contenders give, the baselines' among them
    prompts : of the held-out sequences, in the order of `held`, whose numbers and budgets they take
    costs : of every drafter, whose probes take turns with the contenders, one drafter's on each prompt
    """
    sampler, names = Sampler(**held.meta["decoding"]), list(costs)
    arms = [make_arm(one.label, one.policy, pairs[one.drafter], sampler) for one in contenders]
    timings, warm = Timings(), False

    def saw(index: int) -> None:
        for arm, one in enumerate(contenders):
            if one.drafter in costs:
                rounds = timings.runs[arm, index][-1].rounds
                costs[one.drafter].saw([(one.policy, len(prompts[index].tokens), rounds)])

    for repeat in range(repeats):
        path = folder / f"{repeat}.json"
        if path.is_file():
            found = read_own(path, Repeat)
            for arm, one in enumerate(contenders):
                for index, run in enumerate(found["runs"][one.label]):
                    timings.add(arm, index, _run_from(run))
            for index in range(len(prompts)):
                saw(index)
            for name in names:
                costs[name].resume(found["probes"][name])
            continue
        if not warm:
            warm_up(arms, prompts, held)
            warm = True

        def probing(index: int, repeat: int = repeat) -> Runner:
            name = names[(repeat * len(prompts) + index) % len(names)]
            return costs[name].probing(prompts[index], index)

        def report(done: int, total: int, repeat: int = repeat) -> None:
            saw(done - 1)
            progress(repeat * total + done, repeats * total)

        load = watch()
        decode_in_turns(
            arms,
            prompts,
            held,
            timings,
            seed=seed,
            order=np.random.default_rng((seed, repeat)),
            beside=probing,
            progress=report,
        )
        if repeat == repeats - 1:
            for name in names:
                costs[name].finish(prompts[-1], len(prompts) - 1)
        write_json(
            {
                "runs": {
                    one.label: [_run_json(run) for run in timings.last_runs(arm, range(len(prompts)))]
                    for arm, one in enumerate(contenders)
                },
                "probes": {name: costs[name].probed.as_dict() for name in names},
                "load": load()._asdict(),
            },
            path,
        )
    return [_measured(one, arm, timings, len(prompts)) for arm, one in enumerate(contenders)]


def load_of(folder: Path, repeats: int) -> dict[str, float | None]:
    """How busy others kept the machine, the mean over the repeats in the folder."""
    found = [Load(**read_own(folder / f"{repeat}.json", Repeat)["load"]) for repeat in range(repeats)]
    return mean_load(found)._asdict()


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
        tokens=np.array([len(run.tokens) for run in last]),
        rounds=[timings.rounds(arm, index) for index in everything],
        rounds_identical=None if one.replayed is None else rounds_identical(one.replayed, last),
        output_identical=None if one.trace is None else output_identical(one.trace, last),
    )


def _run_json(run: Decoded) -> dict[str, Any]:
    return {"tokens": run.tokens, "rounds": [astuple(one) for one in run.rounds]}


def _run_from(document: Mapping[str, Any]) -> Decoded:
    def round_of(values: Sequence[Any]) -> Round:
        fields: Any = [tuple(value) if isinstance(value, list) else value for value in values]
        return Round(*fields)

    return Decoded(document["tokens"], [round_of(values) for values in document["rounds"]], 0.0)
