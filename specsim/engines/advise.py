"""Which draft length K pays, from what an engine counted: tokens per round over seconds per round, for every K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.acceptance.sources import Source, describe, verified_by_depth
from specsim.arrays import Floats, Seconds
from specsim.cost.files import CostLike, as_cost
from specsim.cost.model import CostModel
from specsim.engines.flags import draft_length_flags
from specsim.engines.formats.imported import SourceLike, as_counts
from specsim.errors import InputError
from specsim.speedup.intervals import Estimate
from specsim.speedup.prediction import interval_columns
from specsim.speedup.result import Result

if TYPE_CHECKING:
    import pandas as pd

NEAR_PERCENT = 1.0  # a K that is behind the best by no more is as good
SURE = 0.95  # posterior probability of being that near from which on a K is recommended without reserve
DRAWS = 4000  # of acceptance rates
MOST_TIMES = 2**14  # as many rounds, beyond which nobody would count


@dataclass(frozen=True)
class DraftLengthAdvice:
    """What a draft length of `k` tokens is worth; 0 is decoding without speculation.

    Parameters
    ----------
    k : int
    tokens_per_round : float
        Expected, the target's own token included.
    speedup : Estimate
        Over decoding without speculation, with a 95 % credible interval.
    best, near : float
        Posterior probabilities that it is the best, and within `NEAR_PERCENT` of the best.
    """

    k: int
    tokens_per_round: float
    speedup: Estimate
    best: float
    near: float


@dataclass(frozen=True, repr=False)
class Advice(Result):
    """The draft length that the counts speak for, beside all others that they tell something about.

    Parameters
    ----------
    lengths : tuple of DraftLengthAdvice
        For K = 0, 1, ..., as far as drafts were counted.
    k : int
        Recommended: the K of the largest expected speed.
    sure : bool
        Whether it is within `NEAR_PERCENT` of the best with a posterior probability of `SURE`.
    times_rounds : int or None
        If not: how many times as many rounds, of the same rates, would make it so; None where it is, or no count
        would.
    rounds : int
        That were counted.
    notes : tuple of str
        What the costs say of themselves, such as that they are extrapolated.
    """

    lengths: tuple[DraftLengthAdvice, ...]
    k: int
    sure: bool
    times_rounds: int | None
    rounds: int
    notes: tuple[str, ...] = ()

    @property
    def longest(self) -> bool:
        """Whether no longer draft was counted than the recommended one, so that longer ones may be better still."""
        return self.k == self.lengths[-1].k

    def __repr__(self) -> str:
        chosen = self.lengths[self.k]
        said = (
            f"K = {self.k}, {chosen.speedup} times as fast as without speculation"
            if self.k
            else "do not speculate here: no K is faster than no speculation"
        )
        if not self.sure:
            said += f"; not sure ({100 * chosen.near:.0f} %) to be within {NEAR_PERCENT:g} % of the best"
            if self.times_rounds:
                said += f", which about {self.times_rounds * self.rounds:,} rounds would tell ({self.rounds:,} counted)"
        return said + ("; longer drafts were not counted and may be better still" if self.longest else "")

    def flags(self, engine: str) -> str:
        """What makes this engine draft so many tokens; InputError for one that is not known."""
        return draft_length_flags(engine, self.k)

    def to_frame(self) -> pd.DataFrame:
        """A table with one row per K: tokens per round, speedup with its 95 % interval, probabilities."""
        import pandas as pd  # slow to import, and the advice does not need it

        return pd.DataFrame({**vars(one), **interval_columns(one.speedup)} for one in self.lengths)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        rows = [{**vars(one), "speedup": one.speedup.as_dict()} for one in self.lengths]
        return {**vars(self), "longest": self.longest, "lengths": rows}


def advise(
    source: SourceLike, cost: CostLike, *, context: int = 1000, policy: str | None = None, seed: int = 0
) -> Advice:
    """Recommend a draft length from counts of accepted drafts.

    The rate at which the i-th token is accepted, if all before it were, has Jeffreys' prior and the counts'
    likelihood; speeds follow from the rates, for drafts of every K, with K tokens in every round. Rounds are taken to
    be independent of one another, and rates not to depend on K: rounds of another K begin at other places of the
    text, of which counters tell nothing.

    Parameters
    ----------
    source : path, mapping, Counters, Rounds, Trace or Imported
        What was counted: counters as .json or as a mapping of "drafted" and "accepted" by draft position, a
        rounds.parquet, a trace, or what `import_records` gives.
    cost : CostModel, str, Path or mapping
        Of draft steps and target passes, at its batch, as `read_cost` takes it.
    context : int
        Tokens in the cache at which costs are taken.
    policy : str, optional
        Of a file of rounds, only those of this policy.
    seed : int
        Of the draws from the posterior.

    Returns
    -------
    Advice
        `k`, and every K in `lengths`; `flags(engine)` is what to type, `to_frame()` a pandas table.

    Raises
    ------
    InputError
        For a context below 1, and where nothing was drafted.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, Theorem 3.8: the speedup of K drafts, there of one rate.

    Examples
    --------
    >>> import specsim
    >>> counters = {"drafted": [9000, 9000, 9000, 9000], "accepted": [7200, 5000, 2000, 400]}
    >>> advice = specsim.advise(counters, {"s_d": 0.001, "s_t": 0.010})
    >>> advice.k, advice.sure
    (3, True)
    >>> advice.flags("sglang")
    '--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4'
    """
    if context < 1:
        raise InputError(f"context={context} tokens; give at least 1")
    source, cost = as_counts(source, policy=policy), as_cost(cost)
    accepted, verified = counts_by_depth(source)
    seconds = _seconds(cost, len(verified), context)
    lengths = _lengths(accepted, verified, seconds, seed)
    chosen = max(lengths, key=lambda one: one.speedup.estimate)
    sure, times = chosen.near >= SURE, None
    if not sure:
        factor = 2
        while factor <= MOST_TIMES and times is None:
            more = _lengths(factor * accepted, factor * verified, seconds, seed)
            times = factor if more[chosen.k].near >= SURE else None
            factor *= 2
    notes = tuple(cost.notes(len(verified), (context, context)))
    return Advice(tuple(lengths), chosen.k, sure, times, _rounds(source, verified), notes)


def counts_by_depth(source: Source) -> tuple[Floats, Floats]:
    """Accepted and verified tokens [D] per depth, as deep as any was verified; InputError where none was drafted."""
    accepted, verified = verified_by_depth(source)
    if not len(verified) or verified[0] < 1:
        raise InputError("nothing was drafted; give counts of rounds with drafts")
    told = int(np.flatnonzero(verified > 0)[-1]) + 1
    return accepted[:told], verified[:told]


def _rounds(source: Source, verified: Floats) -> int:
    return int(describe(source).get("rounds", verified[0]))


def _seconds(cost: CostModel, longest: int, context: int) -> tuple[Seconds, float]:
    """Of rounds of K = 0, 1, ... drafts [D + 1], and of catching up after a draft that was accepted whole."""
    rounds = [float(cost.autoregressive_step(context))]
    for k in range(1, longest + 1):
        rounds.append(float(cost.draft(k, context)) + float(cost.verify(k + 1, context)) + cost.round_overhead())
    return np.array(rounds), float(cost.catch_up(context))


def _lengths(accepted: Floats, verified: Floats, seconds: tuple[Seconds, float], seed: int) -> list[DraftLengthAdvice]:
    """Every K by the posterior of the rates."""
    rng = np.random.default_rng(seed)
    rates = rng.beta(accepted + 0.5, verified - accepted + 0.5, size=(DRAWS, len(accepted)))
    tokens, speedups = _speedups(rates, seconds)
    best = speedups.max(axis=1, keepdims=True)
    near, first = speedups >= (1 - NEAR_PERCENT / 100) * best, speedups.argmax(axis=1)
    low, high = np.quantile(speedups, (0.025, 0.975), axis=0)
    return [
        DraftLengthAdvice(
            k,
            float(tokens[:, k].mean()),
            Estimate(float(speedups[:, k].mean()), float(low[k]), float(high[k])),
            float((first == k).mean()),
            float(near[:, k].mean()),
        )
        for k in range(len(accepted) + 1)
    ]


def _speedups(rates: Floats, seconds: tuple[Seconds, float]) -> tuple[Floats, Floats]:
    """Tokens per round and speedups [R, D + 1] of K = 0, 1, ..., D, by rates [R, D] of the i-th token."""
    rounds_s, catch_up_s = seconds
    whole = np.concatenate([np.zeros((len(rates), 1)), np.cumprod(rates, axis=1)], axis=1)  # P(all K accepted)
    tokens = 1 + np.cumsum(whole, axis=1)
    return tokens, tokens * rounds_s[0] / (rounds_s + whole * catch_up_s)
