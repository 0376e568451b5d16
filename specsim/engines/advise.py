"""Recommend a draft length K from an engine's counts: tokens per round over seconds per round, for every K."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specsim.cost.files import CostLike, as_cost, with_batch
from specsim.cost.linear import LinearCost
from specsim.cost.model import CostModel
from specsim.cost.roofline.cost import RooflineCost
from specsim.cost.roofline.serving import prompts_s as others_prompts_s
from specsim.engines.by_load import ByLoad, speedups_by_load
from specsim.engines.counted import MAY_ABSTAIN, UNKNOWN_PHI, Counted, counted
from specsim.engines.flags import draft_length_flags, kind_of
from specsim.engines.import_records import SourceLike, as_counts
from specsim.engines.signatures import Signature, find_signatures
from specsim.io.arrays import Floats, Seconds
from specsim.io.errors import InputError
from specsim.replaying.intervals import Estimate, interval_columns
from specsim.replaying.result import Result

if TYPE_CHECKING:
    import pandas as pd

NEAR_PERCENT = 1.0  # a K this close to the best is as good
SURE = 0.95  # posterior probability of being that close from which on a K is recommended without reserve
# Seconds of a round [D + 1] for K = 0, 1, ..., of catching up after a fully accepted draft, and of other requests'
# prompts per output token [D + 1].
RoundSeconds = tuple[Seconds, float, Seconds]
DRAWS = 4000  # of acceptance rates
MOST_TIMES = 2**14  # largest multiple of the counted rounds that is suggested
NORMAL = 1.96  # standard errors in half of a 95 % interval
MOST_BEYOND = 4  # draft tokens beyond the longest counted, for which acceptance is extrapolated
STEEPEST_FALL = 0.8  # largest ratio of one extrapolated rate to the one before, in the pessimistic case
BLOCK = ("block", "dflash", "dspark", "medusa", "p-eagle", "pard")  # draft all tokens at once: acceptance depends on K
# Requests to measure: their speedups have this standard deviation, and no difference below this is looked for.
REQUEST_SD, LEAST_DIFFERENCE, MOST_REQUESTS = 0.25, 0.02, 1000


@dataclass(frozen=True)
class DraftLengthAdvice:
    """The value of a draft length of `k` tokens; 0 is decoding without speculation.

    tokens_per_round : expected of a decoding step, the target's own token included
    speedup : over decoding without speculation, with a 95 % credible interval of counts and costs
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
    k : recommended draft length: the K with the largest expected speed; 0 if that is slower than no speculation, or at
        best within `NEAR_PERCENT` of it; None if its interval does not decide, and for an upper bound
    candidate : the draft length with the largest expected speed, at least 1
    sure : whether k is within `NEAR_PERCENT` of the best with a posterior probability of `SURE`
    times_rounds : if not sure: the multiple of the counted rounds that would settle it at the same rates; None if sure,
        or if no number of rounds would
    rounds : counted rounds
    requests : counted requests; None if the counts are sums over requests
    notes : what the numbers assume, such as extrapolation
    signatures : signs of a fault, each with what to check
    cost_band : 5th and 95th percentile of measured over predicted speedup with such costs; None if unknown
    beyond : lengths beyond the longest counted, if acceptance goes on falling as it does
    upper_bound : whether the steps without a draft are unknown, so that speedups are upper bounds
    error_known : whether the error of the costs is known from published runs or a calibration; if not, decisions assume
        a typical error, and no interval is shown
    off_above : number of requests at once above which speculation is slower, and its 95 % interval; None if unknown
    by_load : speedups by number of requests at once; None if the costs are of a single batch size
    """

    lengths: tuple[DraftLengthAdvice, ...]
    k: int | None
    candidate: int
    sure: bool
    times_rounds: int | None
    rounds: int
    notes: tuple[str, ...] = ()
    signatures: tuple[Signature, ...] = ()
    cost_band: tuple[float, float] | None = None
    beyond: tuple[DraftLengthAdvice, ...] = ()
    upper_bound: bool = False
    off_above: BreakEven | None = None
    requests: int | None = None
    error_known: bool = True
    by_load: ByLoad | None = None

    @property
    def longest(self) -> bool:
        """Whether the candidate is the longest counted, so that longer drafts may be faster."""
        return self.candidate == self.lengths[-1].k

    @property
    def requests_to_measure(self) -> int:
        """Requests that tell K = 0 from `candidate`, in pairs, if their speedups differ as usual."""
        difference = max(abs(math.log(self.lengths[self.candidate].speedup)), LEAST_DIFFERENCE)
        requests = min((NORMAL * REQUEST_SD / difference) ** 2, MOST_REQUESTS)
        return 10 * math.ceil(max(requests, 20) / 10)

    def shown(self, length: DraftLengthAdvice) -> str:
        """Format a speedup, with its interval if the error of the costs is known."""
        return str(length.speedup) if self.error_known else f"{float(length.speedup):.2f}"

    @property
    def _even(self) -> str:
        assert self.off_above is not None
        return str(self.off_above) if self.error_known else self.off_above.without_interval

    def __repr__(self) -> str:
        return "; ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        """The answer, then what it depends on."""
        chosen = self.lengths[self.candidate]
        if self.upper_bound:
            most = max(float(length.speedup) for length in self.lengths)
            yield f"at most {most:.2f} times as fast: steps without a draft were not counted, and none is recommended"
            yield "give generated tokens beside the counts, as in a scrape or in a log with throughput lines"
            return
        if self.k is None:
            if any(sign.in_time for sign in self.signatures):
                yield "nothing is recommended: acceptance changed while it was counted"
                return
            yield (
                f"not decidable: K = {chosen.k} is {self.shown(chosen)} times as fast as without speculation; "
                f"measure K = 0 and K = {chosen.k} for about {self.requests_to_measure} requests"
            )
            if self.off_above is not None:
                yield f"predicted {self._even}"
            return
        if not self.k:
            last = self.lengths[-1] if self._may_be_faster or not self.beyond else self.beyond[-1]
            up_to = f" up to K = {last.k}" if self.longest else ""
            faster = "faster" if chosen.speedup.high < 1 else f"{NEAR_PERCENT:g} % faster"
            yield f"turn speculation off: no draft length{up_to} is {faster} (K = {chosen.k}: {self.shown(chosen)})"
        else:
            yield f"K = {self.k}, {self.shown(chosen)} times as fast as without speculation"
        if self.off_above is not None and (self.k or self.off_above.requests):
            yield self._even
        if not self.sure and self.k:
            yield f"{100 * chosen.near:.0f} % likely to be within {NEAR_PERCENT:g} % of the best"
        if self.times_rounds:
            have, what = (self.rounds, "rounds") if self.requests is None else (self.requests, "requests")
            yield f"collect about {self.times_rounds * have:,} {what} to be sure (have {have:,})"
        if self.longest and (self.k or self._may_be_faster):
            yield self._longer()

    @property
    def _may_be_faster(self) -> list[DraftLengthAdvice]:
        """Longer drafts than those counted that may be faster than these, and than none."""
        least = 1.01 * max(1.0, float(self.lengths[-1].speedup))
        return [length for length in self.beyond if length.speedup.high > least]

    def _longer(self) -> str:
        """Whether longer drafts than those counted may be faster, and the run that would tell."""
        better = self._may_be_faster
        if not better:
            return (
                "longer drafts were not counted and may be faster"
                if not self.beyond
                else "longer drafts gain nothing if acceptance goes on falling"
            )
        best = max(better, key=lambda length: length.speedup.estimate)
        ends = dict.fromkeys(f"{end:.2f}" for end in (best.speedup.low, best.speedup.high))
        return (
            f"longer drafts were not counted and may be faster: K = {best.k} about {' to '.join(ends)} times "
            f"(extrapolated); serve with K = {self.beyond[-1].k} to know"
        )

    def flags(self, engine: str, drafter: str | None = None) -> str:
        """The flags that make this engine draft K tokens; drafter : its kind, such as "eagle3".

        InputError if nothing is recommended.
        """
        if self.k is None:
            raise InputError(f"nothing is recommended: {self}")
        return draft_length_flags(engine, self.k, drafter)

    def to_frame(self) -> pd.DataFrame:
        """Tabulate K, a row each: tokens per round, speedup with its 95 % interval, probabilities."""
        import pandas as pd  # slow to import, and the advice does not need it

        return pd.DataFrame({**vars(length), **interval_columns(length.speedup)} for length in self.lengths)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        rows, beyond = (
            [{**vars(length), "speedup": length.speedup.as_dict()} for length in lengths]
            for lengths in (self.lengths, self.beyond)
        )
        parts = {"lengths": rows, "beyond": beyond, "signatures": [sign._asdict() for sign in self.signatures]}
        even = None if self.off_above is None else self.off_above._asdict()
        by_load = None if self.by_load is None else self.by_load._asdict()
        return {**vars(self), "longest": self.longest, **parts, "off_above": even, "by_load": by_load}


def advise(
    source: SourceLike,
    cost: CostLike,
    *,
    context: int = 1000,
    policy: str | None = None,
    seed: int = 0,
    isl: int | None = None,
    osl: int | None = None,
    drafter: str | None = None,
) -> Advice:
    """Recommend a draft length from counts of accepted drafts.

    The rate at which the i-th token is accepted, if all before it were, is that of the counts. Its interval takes
    requests, or intervals of a log, as the independent units, and holds the error of the costs, too. Speeds follow from
    the rates, for rounds of K tokens each. This assumes rates that do not depend on K, although rounds of another K
    begin at other places of the text, and drafters that fill a block see another one.

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
    drafter : str, optional
        Kind of drafter, such as "eagle3"; default: that of the costs. One that may abstain (prompt-lookup, suffix) is
        advised only where the steps without a draft are known.

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
    counts = counted(source)
    depth = len(counts.verified)
    kind = drafter_kind(cost) if drafter is None else kind_of(drafter)
    upper_bound = counts.plain_steps is None and kind in MAY_ABSTAIN
    block = kind in BLOCK
    beyond = 0 if upper_bound or block or not counts.accepted[-1] else MOST_BEYOND
    context = context if isl is None or osl is None else round(isl + osl / 2)
    seconds = _seconds(cost, depth + beyond, context, isl, osl)
    error = cost.speedup_error
    lengths = _lengths(counts, seconds, error, seed)
    candidate = max(lengths[1:], key=lambda length: length.speedup.estimate)
    signatures = find_signatures(counts, source, kind)
    k = _decided(candidate.k, candidate.speedup)
    if upper_bound or any(sign.in_time for sign in signatures):
        k = None
    chosen = candidate if k is None else lengths[k]
    sure, times = k is not None and chosen.near >= SURE, None
    if not sure and not upper_bound:
        factor = 2
        while factor <= MOST_TIMES and times is None:
            more = _lengths(counts, seconds, error, seed, times=factor)
            settled = _decided(candidate.k, more[candidate.k].speedup)
            times = factor if settled is not None and more[settled].near >= SURE else None
            factor *= 2

    def expected_at(model: CostModel) -> Floats:
        """The expected speedups of K = 0, 1, ... at the batch size of these costs."""
        return _expected(counts, _seconds(model, depth, context, isl, osl), model.speedup_error[0])[1]

    by_load = None if upper_bound else speedups_by_load(cost, expected_at)
    even = off_above(cost, by_load, candidate) if by_load is not None and isl is None else None
    return Advice(
        tuple(lengths), k, candidate.k, sure, times, int(counts.rounds),
        (*cost.notes(depth, (context, context)), *_notes(counts, kind)), signatures, cost.error_band,
        tuple(_beyond(counts, seconds, error, beyond)), upper_bound, even,
        len(counts.unit_rounds) if counts.unit == "requests" else None,
        cost.error_known, by_load,
    )  # fmt: skip


def drafter_kind(cost: CostModel) -> str | None:
    """The kind of drafter that costs are of; None if they do not tell."""
    if isinstance(cost, LinearCost):
        return cost.method or None
    return cost.drafter.method or cost.drafter.kind if isinstance(cost, RooflineCost) else None


def _decided(k: int, speedup: Estimate) -> int | None:
    """K if it is faster than no speculation; 0 if slower, at best within `NEAR_PERCENT`; else None."""
    slower = speedup.estimate < 1 and speedup.high < 1 + NEAR_PERCENT / 100
    return k if speedup.low > 1 else 0 if slower else None


def _notes(counts: Counted, kind: str | None) -> Iterator[str]:
    """Assumptions of the estimates and their intervals."""
    if kind in BLOCK:
        yield (
            f"counted at K = {len(counts.rates)}: a drafter of blocks predicts otherwise at another K, and worse above "
            "the block that it was trained for; measure the K that you choose"
        )
    elif kind == "mtp" and len(counts.rates) > 1:
        yield (
            f"counted at K = {len(counts.rates)}: the first tokens of MTP are accepted more often where fewer are "
            "drafted (vllm#48892), so that a shorter K may be better than it looks"
        )
    if counts.share_drafting < 1 - LEAST_DIFFERENCE:
        yield f"{100 * counts.share_drafting:.0f} % of the steps draft; the others yield one token each"
    if len(counts.unit_rounds) < 2:
        yield (
            "requests are not told apart in these counts: they are taken to differ as usual, with "
            f"{UNKNOWN_PHI:g} times the variance of equal requests"
        )


def _seconds(cost: CostModel, longest: int, context: int, isl: int | None, osl: int | None) -> RoundSeconds:
    """Seconds of rounds, of catching up, and of other requests' prompts, which are 0 unless isl and osl are given."""
    prompts_s = np.zeros(longest + 1)
    if isl is not None and osl is not None:
        prompts_s = np.array([others_prompts_s(cost, isl, osl, k) for k in range(longest + 1)])
    rounds_s = np.array([cost.round_seconds(k, context) for k in range(longest + 1)])
    return rounds_s, float(cost.catch_up(context)), prompts_s


def _expected(counts: Counted, seconds: RoundSeconds, bias: float) -> tuple[Floats, Floats]:
    """Tokens per step and speedups [D + 1] of K = 0, 1, ..., at the counted rates. bias : of the logarithm"""
    (tokens,), (speedups,) = _speedups(counts.rates[None], seconds, counts.share_drafting)
    # No step is shorter than a baseline decode step, so that the speedup is at most the tokens per step.
    return tokens, np.minimum(speedups * np.exp(bias * (np.arange(len(speedups)) > 0)), tokens)


def _lengths(
    counts: Counted, seconds: RoundSeconds, error: tuple[float, float], seed: int, *, times: int = 1
) -> list[DraftLengthAdvice]:
    """The value of every K: at the counted rates, with intervals of the rates and of the costs."""
    rng = np.random.default_rng(seed)
    bias, sd = error
    tokens, found = _expected(counts, seconds, bias)
    most, speedups = _speedups(counts.draw_rates(DRAWS, rng, times), seconds, counts.share_drafting)
    speedups[:, 1:] *= np.exp(bias + sd * rng.standard_normal((DRAWS, 1)))  # costs of all K err alike
    speedups = np.minimum(speedups, most)
    best = speedups.max(axis=1, keepdims=True)
    near, first = speedups >= (1 - NEAR_PERCENT / 100) * best, speedups.argmax(axis=1)
    low, high = np.quantile(speedups, (0.025, 0.975), axis=0)
    return [
        DraftLengthAdvice(
            k,
            float(tokens[k]),
            Estimate(value := float(found[k]), min(float(low[k]), value), max(float(high[k]), value)),
            float((first == k).mean()),
            float(near[:, k].mean()),
        )
        for k in range(len(counts.accepted) + 1)
    ]


def _beyond(counts: Counted, seconds: RoundSeconds, error: tuple[float, float], more: int) -> list[DraftLengthAdvice]:
    """Extrapolate to drafts of up to `more` tokens beyond the longest counted.

    Expected rates go on falling by the counted factor; the interval reaches from a steeper fall to none.
    """
    rates = counts.rates
    if not more:
        return []
    falls = min(1.0, float((rates[-1] / rates[0]) ** (1 / (len(rates) - 1)))) if len(rates) > 1 else 0.9
    factors = np.array([min(falls**2, STEEPEST_FALL), falls, 1.0])[:, None]  # pessimistic, expected, optimistic
    further = rates[-1] * factors ** np.arange(1, more + 1)
    tokens, speedups = _speedups(
        np.concatenate([np.tile(rates, (3, 1)), further], axis=1), seconds, counts.share_drafting
    )
    speedups = np.minimum(speedups * math.exp(error[0]), tokens)
    return [
        DraftLengthAdvice(k, float(tokens[1, k]), Estimate(*(float(speedups[row, k]) for row in (1, 0, 2))), 0.0, 0.0)
        for k in range(len(rates) + 1, len(rates) + more + 1)
    ]


def _speedups(rates: Floats, seconds: RoundSeconds, share: float) -> tuple[Floats, Floats]:
    """Tokens per step and speedups [R, D + 1] of K = 0, 1, ..., D, by rates [R, D] of the i-th token.

    share : of the steps that draft; the others take a step without a draft, and yield a token
    """
    rounds_s, catch_up_s, prompts_s = seconds
    rounds_s, prompts_s = (part[: rates.shape[1] + 1] for part in (rounds_s, prompts_s))
    whole = np.concatenate([np.zeros((len(rates), 1)), np.cumprod(rates, axis=1)], axis=1)  # P(all K accepted)
    tokens = 1 + share * np.cumsum(whole, axis=1)
    steps_s = rounds_s[0] + share * (rounds_s - rounds_s[0] + whole * catch_up_s)
    return tokens, tokens * (rounds_s[0] + prompts_s[0]) / (steps_s + tokens * prompts_s)


class BreakEven(NamedTuple):
    """Concurrent requests above which speculation is slower: estimate and 95 % interval; None if above `most`.

    most : the largest number tried, because no more fit into memory or are covered by the costs
    slower : stretches [first, last] of fewer requests at which speculation is slower, too
    """

    requests: int | None
    low: int | None
    high: int | None
    most: int
    slower: tuple[tuple[int, int], ...] = ()

    @property
    def without_interval(self) -> str:
        """The estimate alone, as a sentence."""
        return str(self).partition(" (")[0]

    def __str__(self) -> str:
        interval = " to ".join(f"over {self.most}" if end is None else f"{end}" for end in (self.low, self.high))
        few = " and ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in self.slower)
        if self.requests is None:
            reach = "" if self.low is None else f" (95 % interval: off above {interval})"
            if few:
                return f"off at {few} requests at once, on for all other numbers up to {self.most}{reach}"
            return f"on for all numbers of requests at once up to {self.most}{reach}"
        if not self.requests:
            return f"off at any number of requests at once (95 % interval: off above {interval})"
        above = f"above {self.requests} request{'s' * (self.requests > 1)} at once (95 % interval: {interval})"
        return f"off at {few} and {above}" if few else f"off {above}"


def off_above(cost: CostModel, by_load: ByLoad, candidate: DraftLengthAdvice) -> BreakEven:
    """Find the largest number of concurrent requests at which some counted K is faster than no speculation.

    The interval holds the errors of costs and counts; acceptance is assumed not to depend on the load.
    """
    speedup = candidate.speedup
    sd_here = math.log(speedup.high / speedup.low) / (2 * NORMAL) if speedup.high > speedup.low else 0.0
    counts_variance = max(sd_here**2 - cost.speedup_error[1] ** 2, 0.0)
    best = np.log([values for k, values in by_load.speedups.items() if int(k)]).max(axis=0)
    sds = np.array([with_batch(cost, batch).speedup_error[1] for batch in by_load.batches])
    reach = NORMAL * np.sqrt(sds**2 + counts_variance)

    def last_faster(values: Floats) -> int | None:
        """The largest batch that is faster; None if even the largest that was tried is."""
        faster = [batch for batch, value in zip(by_load.batches, values, strict=True) if value > 0]
        return None if by_load.batches[-1] in faster else max(faster, default=0)

    low, high = (last_faster(best + side * reach) for side in (-1, 1))
    last, slower = last_faster(best), list[tuple[int, int]]()
    for batch, value, before in zip(by_load.batches, best, (1.0, *best), strict=False):
        if value <= 0 and (last is None or batch < last):
            slower.append((slower.pop()[0] if before <= 0 else batch, batch))
    return BreakEven(last, low, high, by_load.batches[-1], tuple(slower))
