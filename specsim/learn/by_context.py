"""Acceptance, costs and the best draft length by context, along requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specsim.cost.files import CostLike
from specsim.io.arrays import Bools, IntArray, Seconds
from specsim.io.errors import InputError
from specsim.learn.predict import priced
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.intervals import Estimate, ratio_interval
from specsim.replaying.prediction import interval_columns
from specsim.replaying.priced import PricedTrace
from specsim.replaying.result import Result
from specsim.trace.files import TraceLike

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ContextBin:
    """Rounds that begin at these cached tokens, first to last.

    rounds : at K = 1
    acceptance : share of first drafted tokens that are accepted
    step_s, draft_s : mean seconds of a decoding step and of a draft step there
    k : draft length of the largest speedup; 0 where none is above 1
    speedup : by draft length, from 1 on, over the same tokens without speculation
    """

    first: int
    last: int
    rounds: int
    acceptance: float
    step_s: float
    draft_s: float
    k: int
    speedup: tuple[Estimate, ...]


@dataclass(frozen=True, repr=False)
class ByContext(Result):
    """Result of `by_context`: the bins that have rounds, by context."""

    bins: tuple[ContextBin, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return "best K by context: " + ", ".join(f"{each.first}-{each.last}: {each.k}" for each in self.bins)

    def to_frame(self) -> pd.DataFrame:
        """Tabulate a row per bin: contexts, acceptance, seconds, the best K with its speedup and 95 % interval."""
        import pandas as pd  # slow to import

        names = ("first", "last", "rounds", "acceptance", "step_s", "draft_s", "k")
        return pd.DataFrame(
            {
                **{name: getattr(each, name) for name in names},
                **interval_columns(each.speedup[each.k - 1] if each.k else Estimate.exact(1.0)),
            }
            for each in self.bins
        )

    def as_dict(self) -> dict[str, Any]:
        rows = [{**vars(each), "speedup": [gain.as_dict() for gain in each.speedup]} for each in self.bins]
        return {"bins": rows, "notes": list(self.notes)}


def by_context(
    trace: TraceLike, cost: CostLike, *, edges: Sequence[int] | None = None, max_draft_tokens: int | None = None
) -> ByContext:
    """Find the best fixed draft length by context, along the trace's requests.

    A replay of every K is cut by the context at which its rounds begin. With a growing cache the pass of the target
    slows down, and so does the drafter, unless it reads a part of its cache alone.

    Parameters
    ----------
    trace, cost
        As `predict` takes them.
    edges : sequence of int, optional
        Cached tokens at which bins begin, increasing (default: powers of 2).
    max_draft_tokens : int, optional
        Largest K (default: 8, or the depth of the trace).

    Returns
    -------
    ByContext
        Bins with acceptance, seconds, and the speedup of every K with its 95 % interval over sequences.

    Raises
    ------
    InputError
        For edges that do not increase, and lengths that the trace does not hold.

    References
    ----------
    Chen et al. 2024, arXiv:2408.11049 (MagicDec: speculation at long contexts).

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.7, sequences=20, output_tokens=200, depth=4)
    >>> specsim.by_context(trace, specsim.ConstantCost(s_d=0.1, s_t=1.0), edges=[0, 128]).bins[1].first
    128
    """
    both = priced(trace, cost)
    longest = min(8, both.trace.depth) if max_draft_tokens is None else max_draft_tokens
    edges = [0, *(1 << place for place in range(6, 24))] if edges is None else list(edges)
    if not edges or any(a >= b for a, b in pairwise(edges)) or not 1 <= longest <= both.trace.depth:
        raise InputError(
            f"edges={edges}, max_draft_tokens={longest}; give increasing contexts, and 1 to {both.trace.depth}"
        )
    ends = [*edges[1:], 1 << 62]
    runs = [_rounds(both, FixedK(k=k)) for k in range(1, longest + 1)]
    bins = []
    for first, end in zip(edges, ends, strict=True):
        inside = [(run.context >= first) & (run.context < end) for run in runs]
        if all(each.any() for each in inside):
            bins.append(_bin(both, runs, inside, first))
    approximate = ("approximate: rejection sampling",) if both.trace.approximate else ()
    return ByContext(tuple(bins), (*approximate, *both.table().notes))


class _Rounds(NamedTuple):
    """Rounds of a fixed K, an array [R] each; plain_s : seconds of their tokens without speculation."""

    sequence: IntArray
    context: IntArray
    drafted: IntArray
    accepted: IntArray
    seconds: Seconds
    plain_s: Seconds


def _rounds(both: PricedTrace, policy: FixedK) -> _Rounds:
    """The rounds of a policy, each with its seconds."""
    log, trace, table = both.replay(policy, log=True).rounds, both.trace, both.table(policy)
    assert log is not None
    drafted, accepted = log.drafted, log.accepted
    context = trace.prompt_tokens[log.sequence] - 1 + log.t
    bucket = context >> table.bucket_bits
    after_whole = np.append(False, (accepted == drafted)[:-1] & (drafted > 0)[:-1]) & (log.t > 0) & (drafted > 0)
    seconds = table.draft_s[drafted, bucket] + after_whole * table.catch_up_s[bucket]
    seconds += np.maximum(drafted - 1, 0) * table.policy_step_s
    seconds += table.verify_s[drafted + 1, bucket] + table.round_overhead_s
    end = context + np.minimum(accepted + 1, trace.output_tokens[log.sequence] - log.t)
    steps_s = table.autoregressive_s[np.arange(end.max()) >> table.bucket_bits]
    elapsed_s = np.append(0.0, np.cumsum(steps_s))
    return _Rounds(log.sequence, context, drafted, accepted, seconds, elapsed_s[end] - elapsed_s[context])


def _bin(both: PricedTrace, runs: Sequence[_Rounds], inside: Sequence[Bools], first: int) -> ContextBin:
    """Summarise the rounds inside a bin."""
    speedup = []
    for run, here in zip(runs, inside, strict=True):
        plain_s, seconds = (
            np.bincount(run.sequence[here], values[here], minlength=both.trace.sequences)
            for values in (run.plain_s, run.seconds)
        )
        speedup.append(ratio_interval(plain_s, seconds))
    single, here = runs[0], inside[0]
    table, drafting = both.table(), here & (single.drafted > 0)
    bucket, best = single.context[here] >> table.bucket_bits, int(np.argmax(speedup))
    return ContextBin(
        first=first,
        last=int(max(run.context[here].max() for run, here in zip(runs, inside, strict=True))),
        rounds=int(here.sum()),
        acceptance=float(single.accepted[drafting].mean()) if drafting.any() else 0.0,
        step_s=float(table.autoregressive_s[bucket].mean()),
        draft_s=float(table.draft_s[1, bucket].mean()),
        k=best + 1 if speedup[best] > 1 else 0,
        speedup=tuple(speedup),
    )
