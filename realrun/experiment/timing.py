"""Time arms that really decode, in turns of a few rounds, so that all of them see the same machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler
from realrun.measure.interleaving import TURN_ROUNDS, Runner, take_turns
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.replaying.intervals import Estimate, beyond_floor, ratio_interval
from specsim.trace.trace import Trace

LEAST_REPEATS = 3  # so that there is a median
WARM_UP_TOKENS = 24


def check_repeats(repeats: int) -> None:
    """Refuse a number of repeats that has no median among them: fewer than three, or an even number."""
    if repeats < LEAST_REPEATS or repeats % 2 == 0:
        wanted = max(LEAST_REPEATS, repeats + 1)
        raise InputError(
            f"{repeats} repeats have no median run, which takes an odd number from {LEAST_REPEATS} on; "
            f"pass --repeats {wanted}"
        )


class Arm(NamedTuple):
    """A policy on a decoder of its own; policy None is the autoregressive baseline.

    pair : tells arms whose decoders are alike from others
    """

    name: str
    policy: Policy | None
    decoder: Decoder
    pair: int


def make_arm(name: str, policy: Policy | None, pair: Pair, sampler: Sampler) -> Arm:
    """An arm with its own caches, over weights that all arms of the pair share."""
    return Arm(name, policy, Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler), id(pair))


def turned(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms with their decoders exchanged: among a pair's arms the first takes the last arm's, and so on.

    Where its caches lie in memory makes a decoder a little faster or slower than another for as long as it lives, which
    would look like a difference of arms. So every arm decodes each other sequence with another's.
    """
    places = defaultdict(list)
    for place, arm in enumerate(arms):
        places[arm.pair].append(place)
    exchanged = list(arms)
    for own in places.values():
        for place, other in zip(own, reversed(own), strict=True):
            exchanged[place] = arms[place]._replace(decoder=arms[other].decoder)
    return exchanged


class Timings:
    """What every arm did: its runs [repeats] by (arm, sequence)."""

    def __init__(self) -> None:
        self.runs: dict[tuple[int, int], list[Decoded]] = defaultdict(list)

    def add(self, arm: int, sequence: int, run: Decoded) -> None:
        self.runs[arm, sequence].append(run)

    def last_runs(self, arm: int, sequences: Iterable[int]) -> list[Decoded]:
        """Each sequence's last run."""
        return [self.runs[arm, sequence][-1] for sequence in sequences]

    def rounds(self, arm: int, sequence: int) -> list[Round]:
        """The sequence's rounds, each at the median of its repeats: as `typical_rounds`."""
        return typical_rounds(self.runs[arm, sequence])

    def seconds(self, arm: int, sequences: Iterable[int]) -> Floats:
        """Of each sequence, the sum of `rounds` [S]."""
        return np.array([sum(round_.seconds for round_ in self.rounds(arm, sequence)) for sequence in sequences])

    def wall_s(self, arm: int, sequences: Iterable[int]) -> Floats:
        """Of each sequence, the seconds of all its repeats together, interruptions included [S]."""
        return np.array([sum(run.seconds for run in self.runs[arm, sequence]) for sequence in sequences])

    def seconds_for_baseline(self, arm: int, sequences: Sequence[int]) -> Floats:
        """Of each sequence, `seconds` for as many tokens as arm 0, the baseline, emitted there [S].

        In low precision an output may differ from the baseline's, in length too.
        """
        return self._for_baseline(self.seconds(arm, sequences), arm, sequences)

    def wall_s_for_baseline(self, arm: int, sequences: Sequence[int]) -> Floats:
        """As `seconds_for_baseline`, of `wall_s` [S]."""
        return self._for_baseline(self.wall_s(arm, sequences), arm, sequences)

    def _for_baseline(self, seconds: Floats, arm: int, sequences: Sequence[int]) -> Floats:
        wanted, emitted = (
            np.array([len(run.tokens) for run in self.last_runs(number, sequences)]) for number in (0, arm)
        )
        return np.asarray(seconds * wanted / emitted)

    def mean_round_s(self, arm: int, sequences: Iterable[int]) -> float:
        """Mean seconds of an arm's `rounds`."""
        rounds = [round_ for sequence in sequences for round_ in self.rounds(arm, sequence)]
        return sum(round_.seconds for round_ in rounds) / len(rounds)


def typical_rounds(runs: Sequence[Decoded]) -> list[Round]:
    """Take each round at its median over repeats that did the same rounds.

    So an interruption that one repeat met does not count. Where repeats differ (rejection sampling draws anew in
    each), the rounds of the repeat of median seconds. There is an odd number of repeats, but where a limit of time cut
    them short: of an even number the slower of the middle two, which flatters nobody.
    """
    middle = len(runs) // 2
    if len({tuple(run.full_log()) for run in runs}) > 1:
        return sorted(runs, key=lambda run: run.seconds)[middle].rounds
    together = zip(*(run.rounds for run in runs), strict=True)
    return [sorted(same, key=lambda round_: round_.seconds)[middle] for same in together]


class WallClock(NamedTuple):
    """The plain wall-clock speedup, interruptions included; whether it differs from that by medians beyond noise."""

    speedup: Estimate
    differs: bool

    @classmethod
    def of(cls, baseline_s: Floats, own_s: Floats, measured: Estimate, floor_percent: float) -> WallClock:
        """Compare all repeats together, in seconds of each sequence [S], with the speedup measured by medians."""
        speedup = ratio_interval(baseline_s, own_s)
        return cls(speedup, beyond_floor(floor_percent, speedup.estimate, measured.estimate))


def decode_sequence(
    arms: Sequence[Arm],
    prompt: Prompt,
    trace: Trace,
    index: int,
    states: Sequence[Any],
    *,
    seed: int,
    order: np.random.Generator,
    beside: Runner | None = None,
    turn_rounds: int = TURN_ROUNDS,
    shift: int = 0,
) -> list[Decoded]:
    """Decode the trace's sequence of this index by all arms at once; policies start from these states.

    The first round of a turn finds the caches full of what others computed, and takes longer for it. So turns should
    end elsewhere in every repeat: what one repeat met at a turn's beginning the next meets later in it.

    shift : rounds by which the first turns are shorter
    beside : what else takes turns on it, such as probes of costs
    """
    budget, number = int(trace.budget_tokens[index]), int(trace.sequence_id[index])
    decodings = [
        Decoding(arm.decoder, prompt.tokens, budget, arm.policy, number, seed, state)
        for arm, state in zip(arms, states, strict=True)
    ]
    take_turns([*decodings, *([] if beside is None else [beside])], order, turn_rounds, shift)
    return [decoding.result for decoding in decodings]


def warm_up(arms: Sequence[Arm], prompts: Sequence[Prompt], trace: Trace) -> None:
    """Let every arm decode a little before the clock counts."""
    for arm in arms:
        arm.decoder.decode(prompts[0].tokens, min(WARM_UP_TOKENS, int(trace.budget_tokens[0])), arm.policy)
