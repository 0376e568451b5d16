"""Recommend a draft length K from an engine's counts: tokens per round over seconds per round, for every K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.acceptance.sources import Source, describe, verified_by_depth
from specsim.cost.files import CostLike, as_cost
from specsim.cost.model import CostModel
from specsim.cost.roofline.serving import prompts_s as others_prompts_s
from specsim.engines.flags import draft_length_flags
from specsim.engines.import_records import SourceLike, as_counts
from specsim.io.arrays import Floats, Seconds
from specsim.io.errors import InputError
from specsim.replaying.intervals import Estimate
from specsim.replaying.prediction import interval_columns
from specsim.replaying.result import Result

if TYPE_CHECKING:
    import pandas as pd

NEAR_PERCENT = 1.0  # a K this close to the best is as good
SURE = 0.95  # posterior probability of being that close from which on a K is recommended without reserve
# Of rounds [D + 1] with K = 0, 1, ... drafts, of catching up after a whole draft, of prompts [D + 1] by output token.
RoundSeconds = tuple[Seconds, float, Seconds]
DRAWS = 4000  # of acceptance rates
MOST_TIMES = 2**14  # largest multiple of the counted rounds that is suggested


@dataclass(frozen=True)
class DraftLengthAdvice:
    """The value of a draft length of `k` tokens; 0 is decoding without speculation.

    tokens_per_round : expected, the target's own token included
    speedup : over decoding without speculation, with a 95 % credible interval
    best, near : posterior probabilities that it is the best, and within `NEAR_PERCENT` of the best
    """

    k: int
    tokens_per_round: float
    speedup: Estimate
    best: float
    near: float


@dataclass(frozen=True, repr=False)
class Advice(Result):
    """The recommended draft length, and the value of every length that the counts cover.

    lengths : for K = 0, 1, ..., up to the longest counted draft
    k : recommended draft length: the K with the largest expected speed
    sure : whether it is within `NEAR_PERCENT` of the best with a posterior probability of `SURE`
    times_rounds : if not sure: the multiple of the counted rounds that would settle it at the same rates; None if sure,
        or if no number of rounds would
    rounds : counted rounds
    notes : notes of the cost model, such as extrapolation
    cost_band : 5th and 95th percentile of measured over predicted speedup with such costs; None if unknown
    """

    lengths: tuple[DraftLengthAdvice, ...]
    k: int
    sure: bool
    times_rounds: int | None
    rounds: int
    notes: tuple[str, ...] = ()
    cost_band: tuple[float, float] | None = None

    @property
    def longest(self) -> bool:
        """Whether the recommended draft is the longest counted, so that longer drafts may be faster."""
        return self.k == self.lengths[-1].k

    def __repr__(self) -> str:
        chosen = self.lengths[self.k]
        parts = ["turn speculation off: no draft length is faster"]
        if self.k:
            parts = [f"K = {self.k}, {chosen.speedup} times as fast as without speculation"]
            if self.cost_band is not None:
                ends = (chosen.speedup.low, chosen.speedup.high)
                low, high = (end * ratio for end, ratio in zip(ends, self.cost_band, strict=True))
                parts[0] += f" ([{low:.2f}, {high:.2f}] with the error of uncalibrated costs)"
        if not self.sure:
            parts.append(f"{100 * chosen.near:.0f} % likely to be within {NEAR_PERCENT:g} % of the best")
        if self.times_rounds:
            parts.append(f"collect about {self.times_rounds * self.rounds:,} rounds to be sure (have {self.rounds:,})")
        if self.longest:
            parts.append("longer drafts were not counted and may be faster")
        return "; ".join(parts)

    def flags(self, engine: str, drafter: str | None = None) -> str:
        """The flags that make this engine draft K tokens; drafter : its kind, such as "eagle3"."""
        return draft_length_flags(engine, self.k, drafter)

    def to_frame(self) -> pd.DataFrame:
        """Tabulate K, a row each: tokens per round, speedup with its 95 % interval, probabilities."""
        import pandas as pd  # slow to import, and the advice does not need it

        return pd.DataFrame({**vars(length), **interval_columns(length.speedup)} for length in self.lengths)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        rows = [{**vars(length), "speedup": length.speedup.as_dict()} for length in self.lengths]
        return {**vars(self), "longest": self.longest, "lengths": rows}


def advise(
    source: SourceLike,
    cost: CostLike,
    *,
    context: int = 1000,
    policy: str | None = None,
    seed: int = 0,
    isl: int | None = None,
    osl: int | None = None,
) -> Advice:
    """Recommend a draft length from counts of accepted drafts.

    The rate at which the i-th token is accepted, if all before it were, has Jeffreys' prior and the counts'
    likelihood. Speeds follow from the rates, for rounds of K tokens each. This assumes independent rounds, and rates
    that do not depend on K, although rounds of another K begin at other places of the text.

    Parameters
    ----------
    source : path, mapping, Counters, Rounds, Trace or ImportedRecords
        Acceptance counts: counters as .json or as a mapping of "drafted" and "accepted" by draft position, a
        rounds.parquet, a trace, or the result of `import_records`.
    cost : CostModel, str, Path or mapping
        Cost of draft steps and target passes, at its batch, as `read_cost` takes it.
    context : int
        Cached tokens at which costs are taken.
    policy : str, optional
        Use only rounds recorded under this policy.
    seed : int
        Seed of the draws from the posterior.
    isl, osl : int, optional
        Input and output length of the requests of a server whose batch is that of the costs: their prompts, read in
        the steps of the others, are part of a token's time, and contexts follow from them. For costs of shapes and
        hardware.

    Returns
    -------
    Advice
        `k`, and every K in `lengths`; `flags(engine)` gives the engine's flags, `to_frame()` a pandas table.

    Raises
    ------
    InputError
        For a context below 1, and if nothing was drafted.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, Theorem 3.8: the speedup of K drafts at a single rate.

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
    if (isl is None) != (osl is None):
        raise InputError("isl and osl go together; give both lengths of a request")
    source, cost = as_counts(source, policy=policy), as_cost(cost)
    accepted, verified = counts_by_depth(source)
    prompts_s = np.zeros(len(verified) + 1)
    if isl is not None and osl is not None:
        context = round(isl + osl / 2)
        prompts_s = np.array([others_prompts_s(cost, isl, osl, k) for k in range(len(verified) + 1)])
    seconds = (*_seconds(cost, len(verified), context), prompts_s)
    lengths = _lengths(accepted, verified, seconds, seed)
    chosen = max(lengths, key=lambda length: length.speedup.estimate)
    sure, times = chosen.near >= SURE, None
    if not sure:
        factor = 2
        while factor <= MOST_TIMES and times is None:
            more = _lengths(factor * accepted, factor * verified, seconds, seed)
            times = factor if more[chosen.k].near >= SURE else None
            factor *= 2
    notes = tuple(cost.notes(len(verified), (context, context)))
    return Advice(tuple(lengths), chosen.k, sure, times, _rounds(source, verified), notes, cost.error_band)


def counts_by_depth(source: Source) -> tuple[Floats, Floats]:
    """Accepted and verified tokens [D] per depth, up to the deepest drafted; InputError if nothing was drafted."""
    accepted, verified = verified_by_depth(source)
    if not len(verified) or verified[0] < 1:
        raise InputError("nothing was drafted; give counts of rounds with drafts")
    return accepted, verified


def _rounds(source: Source, verified: Floats) -> int:
    return int(describe(source).get("rounds", verified[0]))


def _seconds(cost: CostModel, longest: int, context: int) -> tuple[Seconds, float]:
    """Seconds of rounds with K = 0, 1, ... drafts [D + 1], and of catching up after a fully accepted draft."""
    return np.array([cost.round_seconds(k, context) for k in range(longest + 1)]), float(cost.catch_up(context))


def _lengths(accepted: Floats, verified: Floats, seconds: RoundSeconds, seed: int) -> list[DraftLengthAdvice]:
    """The value of every K under the posterior of the rates."""
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


def _speedups(rates: Floats, seconds: RoundSeconds) -> tuple[Floats, Floats]:
    """Tokens per round and speedups [R, D + 1] of K = 0, 1, ..., D, by rates [R, D] of the i-th token."""
    rounds_s, catch_up_s, prompts_s = seconds
    whole = np.concatenate([np.zeros((len(rates), 1)), np.cumprod(rates, axis=1)], axis=1)  # P(all K accepted)
    tokens = 1 + np.cumsum(whole, axis=1)
    return tokens, tokens * (rounds_s[0] + prompts_s[0]) / (rounds_s + whole * catch_up_s + tokens * prompts_s)
