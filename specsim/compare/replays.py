"""Replays of a policy under several seeds, and their means."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specsim.io.arrays import Floats
from specsim.policy.base import Policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.replaying.rounds import RoundLog


def replay_seeds(priced: PricedTrace, policy: Policy, seeds: Sequence[int]) -> list[Replay]:
    """Replay under these seeds; only under the first if the second changes nothing."""
    replays = [priced.replay(policy, seed=seed, log=True) for seed in seeds[:2]]
    if len(replays) == 2 and np.array_equal(rounds_of(replays[0]).arrays, rounds_of(replays[1]).arrays):
        return replays[:1]
    return replays + [priced.replay(policy, seed=seed, log=True) for seed in seeds[2:]]


def together(replays: Sequence[Replay]) -> Replay:
    """Sums of counts and seconds per sequence; the baseline's too, so that ratios are means over replays."""
    if len(replays) == 1:
        return replays[0]
    sums = {name: np.sum([replay.columns[name] for replay in replays], axis=0) for name in replays[0].columns}
    return dataclasses.replace(replays[0], rounds=None, **sums)


def mean_seconds(replays: Sequence[Replay]) -> Floats:
    """Seconds per sequence [S], mean over replays."""
    return np.asarray(together(replays).speculative_s / len(replays))


def rounds_of(replay: Replay) -> RoundLog:
    assert replay.rounds is not None
    return replay.rounds
