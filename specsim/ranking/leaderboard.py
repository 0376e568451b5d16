"""The leaderboard: every policy tuned on one part of a trace, ranked on the other.

Ranking is by the speedup replayed on the held-out sequences. The leader is picked on those same sequences, so all
intervals hold at once (`specsim.speedup.simultaneous`), and rows that are not significantly slower are marked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.arrays import Floats, Ints
from specsim.cost.model import CostModel
from specsim.errors import InputError
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES, SWITCH_POLICIES
from specsim.progress import Counter, Progress
from specsim.ranking.learned_rule import learned_rule
from specsim.ranking.replays import mean_seconds, replay_seeds, rounds_of, together
from specsim.ranking.sensitivity import Sweep, sweep, swept_settings
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import compile_kernel
from specsim.replaying.sums import PARTS
from specsim.speedup.intervals import Comparison, Estimate, ratio_interval
from specsim.speedup.prediction import Prediction, oracle_name, oracle_seconds, summarise
from specsim.speedup.result import Result
from specsim.speedup.simultaneous import simultaneous
from specsim.trace.joined import JoinedTrace
from specsim.trace.outcomes import DRAWS
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from specsim.tuning.evaluate import TRUNCATED, truncated_reason
from specsim.tuning.settings import SearchSettings
from specsim.tuning.variants import Form, applicable_variants, fit_counted, label

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Row:
    """One form of one policy on the hold-out sequences.

    replays : how many it was averaged over; 1 unless the policy draws
    lengths : rounds by drafted tokens that the target verified [D + 1 or more], of all replays together
    token_s : seconds per output token in draft, policy, verify, other
    speculative_s : seconds per hold-out sequence [S], mean of the replays
    train_speedup : on the tuning sequences, whether it was tuned or not
    speedup : with its interval that holds for all rows of the board at once; the prediction's own holds for it alone
    truncated_trials : settings of its search that the recorded trees are too small to judge
    rule_gap : seconds over those of the rule learned from the same signals, less 1; None of trees, or without a rule
    to_leader : the leader's speedup less this one's, its interval holding for all rows at once; None for the leader
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

    def as_dict(self) -> dict[str, Any]:
        document = self.prediction.as_dict()
        keys = ("policy", "params", "speedup", "v_d", "r_d", "hm", "tau", "oracle_regret")
        return {
            "label": self.label,
            "settings": str(self.policy).removeprefix(self.policy.name)[1:-1],
            "tuned": self.tuned,
            **{key: document[key] for key in keys},
            "speedup": self.speedup.as_dict(),
            "learned_rule_gap": self.rule_gap,
            "train_speedup": self.train_speedup,
            "mean_draft_tokens": self.mean_length,
            "draft_tokens_quantiles": {f"{q:g}": self.length_quantile(q) for q in (0.1, 0.5, 0.9)},
            "rounds_by_draft_tokens": self.lengths.tolist(),
            "token_seconds": dict(zip(PARTS, self.token_s, strict=True)),
            "truncated_trials": self.truncated_trials,
            "truncated_share": (document["truncated_rounds"] or 0) / document["rounds"],
            "seeds": self.replays,
            "tied_with_leader": self.tied,
            "leader_minus_this": self.to_leader.as_dict() if self.to_leader else None,
            "sequence_seconds": self.speculative_s.tolist(),
        }


@dataclass(frozen=True, repr=False)
class Board(Result):
    """One trace at one maximal draft length.

    tuning, holdout : sequences; output_tokens : of the hold-out ones, together
    baseline_s : seconds per hold-out sequence [S]
    rule, rule_speedup : the fastest rule learned from the policies' signals on the tuning sequences, and what it
        reaches on the held-out ones (`specsim.ranking.learned_rule`); None where no chain or signal is there
    rows : best first; skipped : (policy, reason)
    """

    trace: str
    max_draft: int
    meta: Mapping[str, Any]
    approximate: bool
    tuning: int
    holdout: int
    output_tokens: int
    baseline_s: Floats
    oracle: Estimate
    oracle_of: str
    rule: Policy | None
    rule_speedup: Estimate | None
    rows: list[Row]
    skipped: list[tuple[str, str]]
    sweeps: list[Sweep]

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.rows))

    def to_frame(self) -> pd.DataFrame:
        """A table with one row per form of a policy, best first; speedups as ratios, lengths in tokens."""
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

        return ranking_figure(self.as_dict())

    @property
    def unjudged(self) -> str:
        """A sentence where recorded trees were too small to judge policies or settings, else nothing."""
        left_out = [name for name, reason in self.skipped if TRUNCATED in reason]
        partly = [row.label for row in self.rows if row.truncated_trials]
        partly += [one.label for one in self.sweeps if one.truncated]
        left_out += [f"some settings of {name}" for name in dict.fromkeys(partly)]
        if not left_out:
            return ""
        return (
            f"Trees could not be judged fully: the recorded ones are too small for {', '.join(left_out)}; record "
            "larger ones with `realrun record --tree-nodes --tree-width`."
        )

    @property
    def warnings(self) -> list[str]:
        """What these sequences do not show, a sentence each."""
        warned = [f"costs: {note}" for note in self.rows[0].prediction.cost_notes]
        if tied := sum(row.tied for row in self.rows):
            others = f"{tied} of {len(self.rows) - 1} other policies"
            warned.insert(0, f"not significant on {self.holdout} sequences: the leader's lead over {others}")
        return [*([self.unjudged] if self.unjudged else []), *warned]

    def as_dict(self) -> dict[str, Any]:
        keys = ("target", "drafter", "decoding", "device", "dtype")
        return {
            "trace": self.trace,
            "max_draft": self.max_draft,
            "approximate": self.approximate,
            "recorded": {key: self.meta.get(key) for key in keys},
            "sequences": {"tuning": self.tuning, "holdout": self.holdout},
            "output_tokens": self.output_tokens,
            "baseline_token_seconds": float(self.baseline_s.sum()) / self.output_tokens,
            "oracle": self.oracle.as_dict(),
            "oracle_of": self.oracle_of,
            "learned_rule": str(self.rule) if self.rule else None,
            "learned_rule_speedup": self.rule_speedup.as_dict() if self.rule_speedup else None,
            "rows": [row.as_dict() for row in self.rows],
            "unjudged": self.unjudged,
            "skipped": [{"policy": name, "reason": reason} for name, reason in self.skipped],
            "sensitivity": [s.as_dict() for s in self.sweeps],
            "warnings": self.warnings,
        }


def leaderboard(
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
    """A board per trace and maximal draft length, in that order.

    traces : by the name that the boards carry
    costs : one cost model for all traces, or one for each
    kinds : policies to compare; default: `default_policies`
    max_drafts : longest drafts in tokens, a board for each; default: the depth of the trace
    replays : how many to average over where a policy draws, or a trace of rejection sampling does
    sensitivity : whether to vary each tuned setting as well
    jobs : threads; -1 for one per core. The answer does not depend on it.
    """
    if len(costs) not in (1, len(traces)):
        raise InputError(f"{len(costs)} costs for {len(traces)} traces; give one for all or one for each")
    if replays < 1:
        raise InputError(f"replays={replays}; give at least 1")
    chosen = list(default_policies(traces.values()).values()) if kinds is None else list(kinds)
    search = SearchSettings(trials=trials, seed=seed, jobs=1)  # policies, not points, go to the threads
    boards = []
    for number, (name, trace) in enumerate(traces.items()):
        cost = costs[number % len(costs)]
        for depth in max_drafts or (trace.depth,):
            report = partial(progress, f"{name}, drafts up to {depth}") if progress else None
            priced = PricedTrace(trace.shallower(depth), cost)
            boards.append(_board(name, priced, chosen, search, tuning_share, replays, sensitivity, jobs, report))
    return boards


def default_policies(traces: Iterable[Trace]) -> Mapping[str, type[Policy]]:
    """All policies, by name, that are meant for such traces: of joined ones those that choose a drafter."""
    return SWITCH_POLICIES if all(isinstance(trace, JoinedTrace) for trace in traces) else POLICIES


def _board(
    name: str,
    whole: PricedTrace,
    kinds: Sequence[type[Policy]],
    search: SearchSettings,
    tuning_share: float,
    replays: int,
    sensitivity: bool,
    jobs: int,
    progress: Counter | None,
) -> Board:
    from joblib import Parallel, delayed

    trace = whole.trace
    tuning, rest = split_sequences(trace, tuning_share=tuning_share, seed=search.seed)
    train, holdout = whole.select(tuning), whole.select(rest)
    draws = [*range(search.seed, search.seed + replays)]
    entries, skipped = applicable_variants(trace, kinds, whole.cost)
    oracle_s = _oracle(holdout, kinds_of(entries), draws)

    def run(kind: type[Policy], variant: Variant) -> tuple[Row, list[Sweep]] | tuple[str, str]:
        name = label(kind, variant)
        try:
            policy, truncated_trials = fit_counted(kind, variant, train, search)
            train_speedup = train.replay(policy, seed=search.seed).speedup
            row = _row(name, policy, variant.tuned, train_speedup, holdout, draws, oracle_s)
        except InputError as error:  # such as costs that do not cover this policy's shape
            return name, str(error)
        if reason := truncated_reason(trace, row.prediction.truncated_share):
            return name, reason
        row = dataclasses.replace(row, truncated_trials=truncated_trials)

        def speedup(other: Policy) -> tuple[float, float]:
            whole = together(replay_seeds(holdout, other, draws))
            return whole.speedup, summarise(whole).truncated_share

        names = swept_settings(kind, variant) if sensitivity else []
        return row, [sweep(name, policy, setting, train, speedup) for setting in names]

    for kind in kinds:
        compile_kernel(kind)  # once, ahead of the threads
    rows: list[Row] = []
    sweeps: list[Sweep] = []
    results = Parallel(n_jobs=jobs, prefer="threads", return_as="generator")(delayed(run)(*entry) for entry in entries)
    for done, (row, more) in enumerate(results, start=1):
        if isinstance(row, str):
            skipped.append((row, more))
        else:
            rows.append(row)
            sweeps += more
        if progress:
            progress(done, len(entries))
    if not rows:
        why = "; ".join(f"{policy}: {reason}" for policy, reason in skipped)
        raise InputError(f"trace {name} serves none of the policies ({why}); choose others")
    rows.sort(key=lambda row: -row.speedup.estimate)
    found = simultaneous(holdout.baseline_s, [row.speculative_s for row in rows])
    rule = learned_rule(train, search) if any(isinstance(row.policy, ChainPolicy) for row in rows) else None
    rule_s = None if rule is None else mean_seconds(replay_seeds(holdout, rule, draws))
    rows = [
        dataclasses.replace(
            row,
            speedup=found.speedups[at],
            to_leader=found.difference(0, at) if at else None,
            rule_gap=None
            if rule_s is None or not isinstance(row.policy, ChainPolicy)
            else float(row.speculative_s.sum() / rule_s.sum() - 1),
        )
        for at, row in enumerate(rows)
    ]
    return Board(
        trace=name,
        max_draft=trace.depth,
        meta=trace.meta,
        approximate=trace.approximate,
        tuning=len(tuning),
        holdout=len(rest),
        output_tokens=int(holdout.trace.output_tokens.sum()),
        baseline_s=holdout.baseline_s,
        oracle=ratio_interval(holdout.baseline_s, oracle_s),
        oracle_of=oracle_name(kinds_of(entries)),
        rule=rule,
        rule_speedup=None if rule_s is None else ratio_interval(holdout.baseline_s, rule_s),
        rows=rows,
        skipped=skipped,
        sweeps=sweeps,
    )


def kinds_of(entries: Sequence[Form]) -> list[type[Policy]]:
    """The kinds of these forms, chains' first kind if there is none."""
    return [kind for kind, _ in entries] or [FixedK]


def _oracle(priced: PricedTrace, kinds: Sequence[type[Policy]], seeds: Sequence[int]) -> Floats:
    """The oracle's seconds per sequence [S]; where outcomes are drawn, the mean over all that policies meet."""
    if not priced.trace.approximate:
        return oracle_seconds(priced, kinds)
    total: Floats = np.sum([oracle_seconds(priced, kinds, seed=seed) for seed in seeds], axis=0)
    return total / (DRAWS * len(seeds))


def _row(
    name: str,
    policy: Policy,
    tuned: bool,
    train_speedup: float,
    holdout: PricedTrace,
    seeds: Sequence[int],
    oracle_s: Floats,
) -> Row:
    replays = replay_seeds(holdout, policy, seeds)
    whole = together(replays)
    times = len(replays) * replays[0].draws  # outcomes that all of `whole` sums over
    verified = np.concatenate([rounds_of(one).verified for one in replays])
    prediction = summarise(whole, oracle_s * times)
    return Row(
        label=name,
        policy=policy,
        tuned=tuned,
        prediction=prediction,
        replays=len(replays),
        lengths=np.bincount(verified, minlength=holdout.trace.depth + 1),
        token_s=tuple((whole.seconds.sum(axis=0) / whole.output_tokens.sum()).tolist()),
        speculative_s=mean_seconds(replays),
        train_speedup=train_speedup,
        speedup=prediction.speedup,
    )
