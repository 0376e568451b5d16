"""The leaderboard: every policy tuned on a part of a trace, ranked on the held-out part.

Ranking is by the speedup replayed on the held-out sequences. The leader is picked on those same sequences, so all
intervals hold at once (`Simultaneous`), and rows that are not significantly slower are marked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.cost.files import CostLike
from specsim.cost.model import CostModel
from specsim.io.arrays import Floats, Ints, Strings
from specsim.io.errors import InputError
from specsim.io.progress import Counter, Progress
from specsim.learn.evaluate import TRUNCATED, truncated_reason
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
from specsim.replaying.intervals import Comparison, Estimate, against_baseline, ratio_interval, simultaneous
from specsim.replaying.prediction import Prediction, oracle_name, oracle_seconds, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay, compile_kernel
from specsim.replaying.result import Result
from specsim.replaying.rounds import RoundLog
from specsim.report.board import RankedBoard, RankedRow, Recommended, Recorded
from specsim.report.experiment import Difference, Parts, PartSeconds, Skipped
from specsim.report.page import NEAR_PERCENT, simplest
from specsim.trace.files import TraceLike
from specsim.trace.joined import JoinedTrace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


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
    jobs: int = -1,
    progress: Progress | None = None,
) -> list[Board]:
    """Rank policies on several traces: a board per trace and maximal draft length, in that order.

    traces : by the name that the boards carry
    costs : a single cost model for all traces, or a cost model for each
    kinds : policies to compare; default: `default_policies`
    max_drafts : longest drafts in tokens, a board for each; default: the depth of the trace
    replays : number of replays to average over if the policy or the trace is random
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
    settings = _Settings(search, tuning_share, [*range(seed, seed + replays)], jobs)
    boards = []
    for number, (name, trace) in enumerate(traces.items()):
        cost = costs[number % len(costs)]
        for depth in max_drafts or (trace.depth,):
            report = partial(progress, f"{name}, drafts up to {depth}") if progress else None
            boards.append(_board(name, PricedTrace(trace.shallower(depth), cost), chosen, settings, report))
    return boards


@dataclass(frozen=True)
class _Settings:
    search: SearchSettings
    tuning_share: float
    seeds: list[int]
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
    rows = contest.run(entries, skipped, progress)
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

    def run(self, entries: Sequence[Form], skipped: list[tuple[str, str]], progress: Counter | None) -> list[Row]:
        """Rows of all variants, in threads; those that cannot be judged are added to `skipped`."""
        from joblib import Parallel, delayed

        rows: list[Row] = []
        parallel = Parallel(n_jobs=self.settings.jobs, prefer="threads", return_as="generator")
        results = parallel(delayed(self._enter)(*entry) for entry in entries)
        for done, result in enumerate(results, start=1):
            if isinstance(result, Row):
                rows.append(result)
            else:
                skipped.append(result)
            if progress:
                progress(done, len(entries))
        return rows

    def _enter(self, kind: type[Policy], variant: Variant) -> Row | tuple[str, str]:
        """Return the row of a variant, or its label and why it cannot be judged."""
        name = label(kind, variant)
        try:
            policy, truncated_trials = fit_counted(kind, variant, self.train, self.settings.search)
            row = self._row(name, policy, variant.tuned, truncated_trials)
        except InputError as error:  # such as costs that do not cover this policy's shape
            return name, str(error)
        if reason := truncated_reason(self.holdout.trace, row.prediction.truncated_share):
            return name, reason
        return row

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


@dataclass(frozen=True, repr=False)
class Row:
    """A variant of a policy on the held-out sequences.

    replays : number of replays averaged; 1 unless the policy is random
    lengths : rounds by drafted tokens that the target verified [D + 1 or more], of all replays together
    token_s : seconds per output token in draft, policy, verify, other
    speculative_s : seconds per held-out sequence [S], mean of the replays
    train_speedup : on the tuning sequences, whether it was tuned or not
    speedup : with an interval that holds for all rows of the board at once; the prediction's holds for it alone
    truncated_trials : settings of its search that the recorded trees are too small to judge
    rule_gap : seconds over those of the rule learned from the same signals, less 1; None for trees, or without a rule
    to_leader : the leader's speedup less this row's, its interval holding for all rows at once; None for the leader
    """

    label: str
    policy: Policy
    tuned: bool
    prediction: Prediction
    replays: int
    lengths: Ints
    token_s: tuple[float, ...]
    speculative_s: Floats
    train_speedup: float
    speedup: Estimate
    truncated_trials: int = 0
    rule_gap: float | None = None
    to_leader: Comparison | None = None

    def __repr__(self) -> str:
        return f"{self.label}: speedup {self.speedup}"

    @property
    def tied(self) -> bool:
        """Whether the difference to the leader is not significant (95 %, all rows at once)."""
        return self.to_leader is not None and not self.to_leader.significant

    @property
    def mean_length(self) -> float:
        """Mean number of drafted tokens that a round verified."""
        return float(self.lengths @ np.arange(len(self.lengths)) / self.lengths.sum())

    def length_quantile(self, q: float) -> int:
        """Least number of verified tokens that a share q of the rounds does not exceed."""
        return int(np.searchsorted(self.lengths.cumsum(), q * self.lengths.sum()))

    def document(self, domain_speedups: dict[str, float]) -> RankedRow:
        """Return the row of leaderboard.json. domain_speedups : by domain"""
        prediction, behind = self.prediction, self.to_leader
        assert prediction.oracle_regret is not None
        return RankedRow(
            label=self.label,
            settings=str(self.policy).removeprefix(self.policy.name)[1:-1],
            tuned=self.tuned,
            policy=self.policy.name,
            params=self.policy.settings,
            speedup=self.speedup,
            v_d=prediction.v_d,
            r_d=prediction.r_d,
            hm=prediction.hm,
            tau=prediction.tau,
            oracle_regret=prediction.oracle_regret,
            learned_rule_gap=self.rule_gap,
            train_speedup=self.train_speedup,
            mean_draft_tokens=self.mean_length,
            draft_tokens_quantiles={f"{q:g}": self.length_quantile(q) for q in (0.1, 0.5, 0.9)},
            rounds_by_draft_tokens=self.lengths.tolist(),
            token_seconds=PartSeconds(*self.token_s),
            truncated_trials=self.truncated_trials,
            truncated_share=prediction.truncated_share,
            seeds=self.replays,
            tied_with_leader=self.tied,
            leader_minus_this=None if behind is None else Difference.of(behind),
            sequence_seconds=self.speculative_s.tolist(),
            domain_speedups=domain_speedups,
        )


@dataclass(frozen=True, repr=False)
class Board(Result):
    """A trace at a maximal draft length.

    tuning, holdout : sequences; output_tokens : of the hold-out ones, together
    baseline_s : seconds per held-out sequence [S]; domains : of these sequences [S]
    rule, rule_speedup : the fastest rule learned from the policies' signals on the tuning sequences, and what it
        reaches on the held-out ones (`learned_rule` of the leaderboard); None where no chain or signal is there
    rows : best first; skipped : (policy, reason)
    cost_band : 5th and 95th percentile of measured over predicted speedup with such costs; None if unknown
    """

    trace: str
    max_draft: int
    meta: Mapping[str, Any]
    tuning: int
    holdout: int
    output_tokens: int
    baseline_s: Floats
    domains: Strings
    oracle: Estimate
    oracle_of: str
    rule: Policy | None
    rule_speedup: Estimate | None
    rows: list[Row]
    skipped: list[tuple[str, str]]
    cost_band: tuple[float, float] | None = None

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.rows))

    def to_frame(self) -> pd.DataFrame:
        """Tabulate the variants of policies, best first; speedups as ratios, lengths in tokens."""
        import pandas as pd  # slow to import, and a comparison does not need it

        return pd.DataFrame(
            {
                "label": row.label,
                "policy": row.policy.name,
                "speedup": row.speedup.estimate,
                "speedup_low": row.speedup.low,
                "speedup_high": row.speedup.high,
                "tied_with_leader": row.tied,
                **{name: getattr(row.prediction, name) for name in ("v_d", "r_d", "hm", "tau", "oracle_regret")},
                "mean_draft_tokens": row.mean_length,
                "settings": str(row.policy),
            }
            for row in self.rows
        )

    def plot(self) -> Figure:
        """Speedup of every row with its 95 % interval, between the baseline and the oracle."""
        from specsim.report.leaderboard_figures import ranking_figure  # matplotlib is slow to import

        return ranking_figure(self.document.rows, self.oracle)

    def domain_speedups(self, row: Row) -> dict[str, float]:
        """Speedup of a row on the held-out sequences of every domain."""
        parts = {str(name): self.domains == name for name in np.unique(self.domains)}
        return {
            name: float(self.baseline_s[part].sum() / row.speculative_s[part].sum()) for name, part in parts.items()
        }

    @property
    def recommended(self) -> Row | None:
        """The row with the fewest settings of those within `NEAR_PERCENT` of the best; None if none surely gains."""
        if against_baseline(self.rows[0].speedup) != "faster":
            return None
        return self.rows[simplest((row.speedup, len(fields(row.policy))) for row in self.rows)]

    @property
    def unjudged(self) -> str:
        """A sentence where recorded trees were too small to judge policies or settings, else nothing."""
        left_out = [name for name, reason in self.skipped if TRUNCATED in reason]
        partly = [row.label for row in self.rows if row.truncated_trials]
        left_out += [f"some settings of {name}" for name in partly]
        if not left_out:
            return ""
        return (
            f"Trees could not be judged fully: the recorded ones are too small for {', '.join(left_out)}; record "
            "larger ones with `realrun record --tree-nodes --tree-width`."
        )

    @property
    def warnings(self) -> list[str]:
        """Differences that are not significant, and notes on costs, a sentence each."""
        warned = [f"costs: {note}" for note in self.rows[0].prediction.cost_notes]
        if tied := sum(row.tied for row in self.rows):
            others = f"{tied} of {len(self.rows) - 1} other policies"
            warned.insert(0, f"not significant on {self.holdout} sequences: the leader's lead over {others}")
        return [*([self.unjudged] if self.unjudged else []), *warned]

    @property
    def document(self) -> RankedBoard:
        """Return the board of leaderboard.json."""
        meta, recommended = self.meta, self.recommended
        date = (meta.get("provenance") or {}).get("date")
        return RankedBoard(
            trace=self.trace,
            max_draft=self.max_draft,
            recorded=Recorded(
                meta.get("target"),
                meta.get("drafter"),
                meta.get("decoding"),
                meta.get("device"),
                meta.get("dtype"),
                date,
            ),
            sequences=Parts(self.tuning, self.holdout),
            output_tokens=self.output_tokens,
            baseline_token_seconds=float(self.baseline_s.sum()) / self.output_tokens,
            oracle=self.oracle,
            oracle_of=self.oracle_of,
            learned_rule=str(self.rule) if self.rule else None,
            learned_rule_speedup=self.rule_speedup,
            rows=[row.document(self.domain_speedups(row)) for row in self.rows],
            recommended=None if recommended is None else Recommended(recommended.label, NEAR_PERCENT),
            cost_band=None if self.cost_band is None else list(self.cost_band),
            unjudged=self.unjudged,
            skipped=[Skipped(policy=policy, reason=reason) for policy, reason in self.skipped],
            warnings=self.warnings,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return self.document.as_dict()


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
