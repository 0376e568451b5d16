"""The leaderboard: every policy tuned on a part of a trace, ranked on the held-out part.

Ranking is by the speedup replayed on the held-out sequences. The leader is picked on those same sequences, so all
intervals hold at once (`specsim.replaying.simultaneous`), and rows that are not significantly slower are marked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from specsim.compare.board import Board, Row
from specsim.compare.replays import mean_seconds, replay_seeds, rounds_of, together
from specsim.compare.sensitivity import Sweep, sweep, swept_settings
from specsim.cost.files import CostLike
from specsim.cost.model import CostModel
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.progress import Counter, Progress
from specsim.learn.evaluate import truncated_reason
from specsim.learn.predict import priced
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.learn.variants import Form, applicable_variants, fit_counted, label
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.renewal_stop import SIGNALS, RenewalStop
from specsim.policy.registry import POLICIES, SWITCH_POLICIES, PolicyName, find_policies
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.prediction import oracle_name, oracle_seconds, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import compile_kernel
from specsim.replaying.simultaneous import simultaneous
from specsim.trace.files import TraceLike
from specsim.trace.joined import JoinedTrace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace


def leaderboard(
    trace: TraceLike,
    cost: CostLike,
    *,
    policies: PolicyName | Iterable[PolicyName] = (),
    max_draft_tokens: int | None = None,
    trials: int = 100,
    tuning_share: float = 0.5,
    replays: int = 5,
    seed: int = 0,
    sensitivity: bool = False,
    jobs: int | None = None,
) -> Board:
    """Tune every policy on a part of the trace and rank the policies on the held-out part.

    Parameters
    ----------
    trace, cost, trials, tuning_share, seed, jobs
        As in `tune`.
    policies : str, Path, class, or several, optional
        What to compare, each as in `tune`; default: all that are meant for such a trace.
    max_draft_tokens : int, optional
        Longest draft; default: as deep as recorded.
    replays : int
        Replays to average over where a policy draws.
    sensitivity : bool
        Vary each tuned setting over its range as well.

    Returns
    -------
    Board
        `rows`, best first, and `skipped`; `to_frame()` is a pandas table, `plot()` a matplotlib figure.

    Raises
    ------
    InputError
        As in `tune`, and where the trace serves none of the policies.

    References
    ----------
    Hesterberg 2015, What Teachers Should Know About the Bootstrap, section 4.3 (intervals, paired over sequences).

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    >>> board = specsim.leaderboard(trace, specsim.ConstantCost(0.001, 0.010), policies=["fixed_k", "adaedl"], trials=8)
    >>> board.to_frame()["speedup"].is_monotonic_decreasing
    True
    """
    whole = priced(trace, cost)
    (board,) = leaderboards(
        {"trace": whole.trace},
        [whole.cost],
        kinds=list((find_policies(policies) or default_policies([whole.trace])).values()),
        max_drafts=() if max_draft_tokens is None else (max_draft_tokens,),
        trials=trials,
        tuning_share=tuning_share,
        replays=replays,
        seed=seed,
        sensitivity=sensitivity,
        jobs=jobs or -1,
    )
    return board


def leaderboards(
    traces: Mapping[str, Trace],
    costs: Sequence[CostModel],
    *,
    kinds: Sequence[type[Policy]] | None = None,
    max_drafts: Sequence[int] = (),
    trials: int = 100,
    tuning_share: float = 0.5,
    replays: int = 5,
    seed: int = 0,
    sensitivity: bool = True,
    jobs: int = -1,
    progress: Progress | None = None,
) -> list[Board]:
    """Rank policies on several traces: a board per trace and maximal draft length, in that order.

    traces : by the name that the boards carry
    costs : a single cost model for all traces, or a cost model for each
    kinds : policies to compare; default: `default_policies`
    max_drafts : longest drafts in tokens, a board for each; default: the depth of the trace
    replays : number of replays to average over if the policy or the trace is random
    sensitivity : whether to vary each tuned setting as well
    jobs : threads; -1 for one per core. Does not change the result.
    """
    if len(costs) not in (1, len(traces)):
        raise InputError(
            f"{len(costs)} costs for {len(traces)} traces; give a single cost model, or a cost model for each trace"
        )
    if replays < 1:
        raise InputError(f"replays={replays}; give at least 1")
    chosen = list(default_policies(traces.values()).values()) if kinds is None else list(kinds)
    search = SearchSettings(trials=trials, seed=seed, jobs=1)  # policies, not points, go to the threads
    settings = _Settings(search, tuning_share, [*range(seed, seed + replays)], sensitivity, jobs)
    boards = []
    for number, (name, trace) in enumerate(traces.items()):
        cost = costs[number % len(costs)]
        for depth in max_drafts or (trace.depth,):
            report = partial(progress, f"{name}, drafts up to {depth}") if progress else None
            boards.append(_board(name, PricedTrace(trace.shallower(depth), cost), chosen, settings, report))
    return boards


@dataclass(frozen=True)
class _Settings:
    """Settings of a board: how policies are tuned, split, replayed (by seeds) and swept, and the number of threads."""

    search: SearchSettings
    tuning_share: float
    seeds: list[int]
    sensitivity: bool
    jobs: int


def default_policies(traces: Iterable[Trace]) -> Mapping[str, type[Policy]]:
    """Policies meant for such traces, by name: for joined traces, those that choose a drafter."""
    return SWITCH_POLICIES if all(isinstance(trace, JoinedTrace) for trace in traces) else POLICIES


def _board(
    name: str,
    whole: PricedTrace,
    kinds: Sequence[type[Policy]],
    settings: _Settings,
    progress: Counter | None,
) -> Board:
    trace, seeds = whole.trace, settings.seeds
    tuning, rest = split_sequences(trace, tuning_share=settings.tuning_share, seed=settings.search.seed)
    train, holdout = whole.select(tuning), whole.select(rest)
    entries, skipped = applicable_variants(trace, kinds, whole.cost)
    oracle_s = oracle_seconds(holdout, kinds_of(entries))
    for kind in kinds:
        compile_kernel(kind)  # once, ahead of the threads
    contest = _Contest(train, holdout, oracle_s, settings)
    rows, sweeps = contest.run(entries, skipped, progress)
    if not rows:
        why = "; ".join(f"{policy}: {reason}" for policy, reason in skipped)
        raise InputError(f"trace {name} serves none of the policies ({why}); choose others")
    rule = learned_rule(train, settings.search) if any(isinstance(row.policy, ChainPolicy) for row in rows) else None
    rule_s = None if rule is None else mean_seconds(replay_seeds(holdout, rule, seeds))
    return Board(
        trace=name,
        max_draft=trace.depth,
        meta=trace.meta,
        tuning=len(tuning),
        holdout=len(rest),
        output_tokens=int(holdout.trace.output_tokens.sum()),
        baseline_s=holdout.baseline_s,
        domains=holdout.trace.domain,
        oracle=ratio_interval(holdout.baseline_s, oracle_s),
        oracle_of=oracle_name(kinds_of(entries)),
        rule=rule,
        rule_speedup=None if rule_s is None else ratio_interval(holdout.baseline_s, rule_s),
        rows=_ranked(rows, holdout.baseline_s, rule_s),
        skipped=skipped,
        sweeps=sweeps,
        cost_band=holdout.cost.error_band,
    )


def _ranked(rows: list[Row], baseline_s: Floats, rule_s: Floats | None) -> list[Row]:
    """Rows from the fastest to the slowest, with intervals that hold for all of them at once."""
    rows = sorted(rows, key=lambda row: -row.speedup.estimate)
    intervals = simultaneous(baseline_s, [row.speculative_s for row in rows])

    def gap(row: Row) -> float | None:
        if rule_s is None or not isinstance(row.policy, ChainPolicy):
            return None
        return float(row.speculative_s.sum() / rule_s.sum() - 1)

    return [
        dataclasses.replace(
            row,
            speedup=intervals.speedups[at],
            to_leader=intervals.difference(0, at) if at else None,
            rule_gap=gap(row),
        )
        for at, row in enumerate(rows)
    ]


@dataclass(frozen=True)
class _Contest:
    """Tunes each variant on `train`, and replays it on `holdout`.

    oracle_s : the oracle's seconds per held-out sequence [S]
    """

    train: PricedTrace
    holdout: PricedTrace
    oracle_s: Floats
    settings: _Settings

    def run(
        self, entries: Sequence[Form], skipped: list[tuple[str, str]], progress: Counter | None
    ) -> tuple[list[Row], list[Sweep]]:
        """Rows and sweeps of all variants, in threads; those that cannot be judged are added to `skipped`."""
        from joblib import Parallel, delayed

        rows: list[Row] = []
        sweeps: list[Sweep] = []
        parallel = Parallel(n_jobs=self.settings.jobs, prefer="threads", return_as="generator")
        results = parallel(delayed(self._enter)(*entry) for entry in entries)
        for done, (row, more) in enumerate(results, start=1):
            if isinstance(row, str):
                skipped.append((row, more))
            else:
                rows.append(row)
                sweeps += more
            if progress:
                progress(done, len(entries))
        return rows, sweeps

    def _enter(self, kind: type[Policy], variant: Variant) -> tuple[Row, list[Sweep]] | tuple[str, str]:
        """Return the row and sweeps of a variant, or its label and why it cannot be judged."""
        name = label(kind, variant)
        try:
            policy, truncated_trials = fit_counted(kind, variant, self.train, self.settings.search)
            row = self._row(name, policy, variant.tuned, truncated_trials)
        except InputError as error:  # such as costs that do not cover this policy's shape
            return name, str(error)
        if reason := truncated_reason(self.holdout.trace, row.prediction.truncated_share):
            return name, reason
        swept = swept_settings(kind, variant) if self.settings.sensitivity else []
        return row, [sweep(name, policy, setting, self.train, self._speedup) for setting in swept]

    def _row(self, name: str, policy: Policy, tuned: bool, truncated_trials: int) -> Row:
        train_speedup = self.train.replay(policy, seed=self.settings.search.seed).speedup
        replays = replay_seeds(self.holdout, policy, self.settings.seeds)
        total = together(replays)
        verified = np.concatenate([rounds_of(replay).verified for replay in replays])
        prediction = summarise(total, self.oracle_s * len(replays))
        return Row(
            label=name,
            policy=policy,
            tuned=tuned,
            prediction=prediction,
            replays=len(replays),
            lengths=np.bincount(verified, minlength=self.holdout.trace.depth + 1),
            token_s=tuple((total.seconds.sum(axis=0) / total.output_tokens.sum()).tolist()),
            speculative_s=mean_seconds(replays),
            train_speedup=train_speedup,
            speedup=prediction.speedup,
            truncated_trials=truncated_trials,
        )

    def _speedup(self, policy: Policy) -> tuple[float, float]:
        """Held-out speedup of a policy, and the share of its rounds that the recorded trees are too small for."""
        total = together(replay_seeds(self.holdout, policy, self.settings.seeds))
        return total.speedup, summarise(total).truncated_share


def kinds_of(entries: Sequence[Form]) -> list[type[Policy]]:
    """List the kinds of these variants; FixedK if there are no variants."""
    return [kind for kind, _ in entries] or [FixedK]


def learned_rule(train: PricedTrace, settings: SearchSettings) -> Policy | None:
    """Learn the fastest stopping rule from confidence, entropy, draft position and history, to stand beside the oracle.

    The oracle's lead has two parts: what no signal tells, and what a policy leaves unused. A rule that is optimal for
    the signals separates them. The best such rule is not known; RenewalStop comes close by construction, because it
    solves the stopping problem of a round exactly for signals in bins (`specsim.learn.renewal_stop`). What it reaches
    is a lower bound on the speedup of the best rule, so a policy may be faster than it, and its gap is then below 0.

    train : the sequences to learn from; report the rule on others
    settings : seed and threads

    Returns the faster, on `train`, of RenewalStop with its best signal and of the best fixed K, which uses no signal;
    None where the trace records no signals or is of several drafters.

    References: Chow, Robbins and Siegmund 1971, Great Expectations: The Theory of Optimal Stopping. Dinkelbach 1967, On
    Nonlinear Fractional Programming, Management Science 13 (the value of a token as a fixed point).
    """
    if unsupported_reason(train.trace, RenewalStop):
        return None
    every = dataclasses.replace(settings, trials=max(len(SIGNALS), train.trace.depth), search="grid", fixed={})
    rules: list[Policy] = []
    for kind in (FixedK, RenewalStop):
        try:
            rules.append(best_policy(kind, train, every))
        except InputError:  # such as costs that do not cover drafts this long
            return None
    return min(rules, key=lambda policy: float(train.replay(policy, seed=settings.seed).speculative_s.sum()))
