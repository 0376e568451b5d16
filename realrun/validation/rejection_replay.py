"""How far the replay of a rejection-sampling trace is from real runs of the same prompts.

Real runs differ from the recorded output and from one another, so what is compared is what
they have in common with the replay: tokens per round (tau), accepted over drafted tokens
(v_d) and rounds, with intervals over sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.arrays import Floats
from specsim.cost.model import ConstantCost
from specsim.errors import InputError
from specsim.policy.chain.base import ChainPolicy
from specsim.progress import Counter
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.speedup.intervals import Estimate, resample
from specsim.trace.outcomes import as_recorded
from specsim.trace.trace import Trace

_ANY_COST = ConstantCost(1e-3, 1e-2)  # rounds do not depend on it


@dataclass(frozen=True)
class Counts:
    """What was emitted, in how many rounds, of what was drafted and accepted: float64 [S] each."""

    tokens: Floats
    rounds: Floats
    drafted: Floats
    accepted: Floats

    @property
    def tau(self) -> float:
        """Tokens per round."""
        return float(self.tokens.sum() / self.rounds.sum())

    @property
    def v_d(self) -> float:
        """Accepted over drafted tokens."""
        return float(self.accepted.sum() / self.drafted.sum())


@dataclass(frozen=True)
class Approximation:
    """One policy: replay over drawn outcomes, replay as recorded, and real runs, on the same prompts."""

    policy: ChainPolicy
    drawn: Counts
    recorded: Counts
    real: Counts

    def as_dict(self) -> dict[str, Any]:
        """tau, v_d and rounds per 100 tokens of each; errors against the real runs in percent, with intervals."""
        sides = {"drawn": self.drawn, "recorded": self.recorded, "real": self.real}
        return {
            "policy": str(self.policy),
            "tau": {name: side.tau for name, side in sides.items()},
            "v_d": {name: side.v_d for name, side in sides.items()},
            "rounds_per_100_tokens": {name: 100 / side.tau for name, side in sides.items()},
            "tau_error_percent": {
                name: error_percent(sides[name], self.real, ("tokens", "rounds")).as_dict()
                for name in ("drawn", "recorded")
            },
            "v_d_error_percent": {
                name: error_percent(sides[name], self.real, ("accepted", "drafted")).as_dict()
                for name in ("drawn", "recorded")
            },
        }


def error_percent(predicted: Counts, real: Counts, of: tuple[str, str]) -> Estimate:
    """How much larger the predicted ratio of two counts is than the real one, with a 95 % interval over sequences."""
    sums = np.array([getattr(side, name) for side in (predicted, real) for name in of])  # [4, S]
    every = np.concatenate([[np.arange(sums.shape[1])], resample(sums.shape[1])])  # the data, then resamples
    totals = sums[:, every].sum(-1)
    errors = 100 * ((totals[0] / totals[1]) / (totals[2] / totals[3]) - 1)
    low, high = np.quantile(errors[1:], [0.025, 0.975])
    return Estimate(float(errors[0]), float(low), float(high))


def measure_approximation(
    pair: Pair,
    trace: Trace,
    prompts: Sequence[Prompt],
    policies: Sequence[ChainPolicy],
    *,
    seeds: Sequence[int],
    progress: Counter | None = None,
) -> list[Approximation]:
    """Replay the trace, and decode its prompts for real with these seeds of sampling.

    prompts[i] is the prompt of the trace's sequence i. Take seeds that differ from the
    trace's own, so that the runs are independent of what was recorded. Raises InputError for a
    trace without acceptance probabilities.
    """
    if not trace.approximate:
        raise InputError("the trace is not of rejection sampling with accept_prob; record it in rejection mode")
    sampler = Sampler(**trace.meta["decoding"])
    priced = [PricedTrace(one, _ANY_COST) for one in (trace, as_recorded(trace))]
    found = []
    for number, policy in enumerate(policies):
        runs: list[list[Decoded]] = [[] for _ in prompts]
        for done, seed in enumerate(seeds):
            target, drafter = pair.make_drafter()
            decoder = Decoder(target, drafter, pair.eos_token_ids, replace(sampler, seed=seed))
            for index, prompt in enumerate(prompts):
                budget, sequence = int(trace.budget_tokens[index]), int(trace.sequence_id[index])
                runs[index].append(decoder.decode(prompt.tokens, budget, policy, sequence=sequence, seed=seed))
            if progress:
                progress(number * len(seeds) + done + 1, len(policies) * len(seeds))
        drawn, recorded = (one.replay(policy) for one in priced)
        found.append(Approximation(policy, _replayed(drawn), _replayed(recorded), _decoded(runs)))
    return found


def _replayed(result: Replay) -> Counts:
    columns = (result.output_tokens, result.num_rounds, result.drafted, result.accepted)
    return Counts(*(column.astype(np.float64) for column in columns))


def _decoded(runs: Sequence[Sequence[Decoded]]) -> Counts:
    """Sums over each sequence's runs."""
    sums = [
        (
            sum(len(run.tokens) for run in of_one),
            sum(len(run.rounds) for run in of_one),
            sum(r.drafted for run in of_one for r in run.rounds),
            sum(r.accepted for run in of_one for r in run.rounds),
        )
        for of_one in runs
    ]
    return Counts(*np.array(sums, dtype=np.float64).T)
