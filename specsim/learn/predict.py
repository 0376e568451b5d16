"""Predict or replay a policy on a recorded trace."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specsim.cost.files import CostLike, as_cost
from specsim.io.errors import InputError
from specsim.learn.fit import fit, is_fitted, needs_fitting
from specsim.learn.space import cap_depth
from specsim.policy.base import Policy, Settings, build_policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.registry import PolicyName, find_policy, make_policy
from specsim.replaying.expected import expected_replay
from specsim.replaying.prediction import Prediction, oracle_seconds, predict_policy, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.replaying.result import Result
from specsim.trace.files import TraceLike, as_trace
from specsim.trace.split import split_sequences

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class PolicyPrediction(Result, Prediction):
    """A prediction with the sequences that it was learned and reported on.

    learned_on : sequences that the policy learned from, none of which it is reported on; 0 if it learned nothing
    sequences : sequences that it is reported on
    expected : whether it is the exact expectation over the policy's random draws
    """

    learned_on: int = 0
    sequences: int = 0
    expected: bool = False

    @property
    def notes(self) -> list[str]:
        """Caveats of these numbers, in words."""
        learned = f"learned on {self.learned_on} sequences, reported on {self.sequences} others"
        return [*([learned] if self.learned_on else []), *(["expected"] if self.expected else []), *super().notes]


@dataclass(frozen=True, repr=False, eq=False)
class Run(Replay):
    """A replay that shows itself as a figure; `Replay` documents its arrays."""

    def __repr__(self) -> str:
        tokens, rounds = int(self.output_tokens.sum()), int(self.num_rounds.sum())
        return f"{self.policy}: {tokens:,} tokens in {rounds:,} rounds, speedup {self.speedup:.3f}"

    def plot(self) -> Figure:
        """Accepted tokens per round, and where the time of a token goes, beside autoregressive decoding.

        Returns
        -------
        matplotlib.figure.Figure
            Shown by a notebook; `savefig` writes it.

        Examples
        --------
        >>> import specsim
        >>> trace, cost = specsim.read_trace("example:lab-eagle"), specsim.read_cost("example:lab-deep-eagle")
        >>> figure = specsim.replay(trace, cost, "fixed_k", k=3).plot()
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['Accepted tokens per round', 'Time per output token']
        """
        from specsim.report.figures import run_figure  # matplotlib is slow to import

        accepted = None if self.rounds is None else self.rounds.accepted
        tokens = int(self.output_tokens.sum())
        return run_figure(accepted, self.seconds.sum(axis=0) / tokens, float(self.autoregressive_s.sum()) / tokens)


def predict(
    trace: TraceLike,
    cost: CostLike,
    policy: PolicyName | Policy,
    *,
    tuning_share: float = 0.5,
    expected: bool = False,
    seed: int = 0,
    **settings: Any,
) -> PolicyPrediction:
    """Predict the speedup of a policy over autoregressive decoding.

    A policy that learns from data or costs is trained on part of the sequences and reported on the others, unless all
    its learned settings are given.

    Parameters
    ----------
    trace : Trace, str or Path
        Recorded positions, or where they are, as `read_trace` takes it.
    cost : CostModel, str, Path or mapping
        Seconds of draft steps and target passes, or where they are, as `read_cost` takes it.
    policy : str, Path, class or Policy
        A name that `policies` lists, FILE.py, FILE.py:NAME, a class, or a policy as `make_policy` and `tune` give it.
    tuning_share : float
        Share of the sequences that a policy learns from, in (0, 1).
    expected : bool
        Compute the exact expectation over the policy's random draws instead of a single replay.
    seed : int
        Seed of the split and of the policy's random draws.
    **settings
        Settings of the policy. For a name or a class, limits of the draft length are lowered to the depth of the trace
        unless they are given.

    Returns
    -------
    PolicyPrediction
        `speedup` (ratio, with its 95 % interval over sequences), `v_d`, `r_d`, `hm`, `tau` (tokens per target
        pass), counts in tokens and rounds, `seconds`, `ar_seconds`, and `oracle_regret`; `to_frame()` is a pandas
        table of a single row.

    Raises
    ------
    InputError
        For an unknown policy or setting, a policy that the trace or the costs cannot serve, or a policy object that
        still has to learn.
    TypeError
        For anything that is not a trace, costs or a policy, nor the name of any.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192 (speculative decoding); EESD, arXiv:2406.03853, Eqs. 11-12 (v_d, r_d).

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    >>> cost = specsim.ConstantCost(s_d=0.001, s_t=0.010)
    >>> prediction = specsim.predict(trace, cost, "fixed_k", k=4)
    >>> prediction.speedup.low < prediction.speedup < prediction.speedup.high
    True
    """
    part, chosen, learned_on = fitted_part(priced(trace, cost), policy, settings, tuning_share, seed)
    return predict_fitted(part, chosen, learned_on, expected=expected, seed=seed)


def priced(trace: TraceLike, cost: CostLike) -> PricedTrace:
    """Read a trace and costs, as every function takes them."""
    return PricedTrace(as_trace(trace), as_cost(cost))


def predict_fitted(
    part: PricedTrace, chosen: Policy, learned_on: int, *, expected: bool = False, seed: int = 0
) -> PolicyPrediction:
    """Predict with the policy and sequences that `fitted_part` returns."""
    if not expected:
        prediction = predict_policy(part, chosen, seed=seed)
    elif isinstance(chosen, ChainPolicy):
        result = expected_replay(part.trace, chosen, part.table(chosen))
        prediction = summarise(result, oracle_seconds(part, [type(chosen)]))
    else:
        raise InputError(f"policy {chosen.name} is of trees, which have no exact expectation; leave out --expected")
    sequences = part.trace.sequences
    return PolicyPrediction(**vars(prediction), learned_on=learned_on, sequences=sequences, expected=expected)


def fitted_part(
    priced: PricedTrace, policy: PolicyName | Policy, settings: Settings, tuning_share: float, seed: int
) -> tuple[PricedTrace, Policy, int]:
    """Return the sequences to report on, the fitted policy, and the number of sequences that it learned from."""
    chosen, given = _policy(policy, settings, priced.trace.depth)
    if not isinstance(policy, Policy) and needs_fitting(type(chosen)):
        tuning, rest = split_sequences(priced.trace, tuning_share=tuning_share, seed=seed)
        train = priced.trace.select(tuning)
        learned = fit(type(chosen), given, train, PricedTrace(train, priced.cost).table())
        if learned != chosen:  # not all was given
            return priced.select(rest), learned, len(tuning)
    elif not is_fitted(chosen, given, priced.trace, priced.table()):
        raise InputError(f"policy {chosen.name} is not fitted to data yet; give its name instead of an object")
    return priced, chosen, 0


def replay(trace: TraceLike, cost: CostLike, policy: PolicyName | Policy, *, seed: int = 0, **settings: Any) -> Run:
    """Replay a trace under a policy, round for round what a real run would do.

    Parameters
    ----------
    trace, cost, policy, seed, **settings
        As in `predict`.

    Returns
    -------
    Run
        Counts [S] and seconds [S, 4] (draft, policy, verify, other) per sequence, as a pandas table by `to_frame()`;
        `rounds` holds every round: its counts in tokens, its seconds (`draft_s`, `policy_s`, `verify_s`, `other_s`),
        and `baseline_s`, the seconds of its tokens without speculation. `rounds.to_frame()` is a table of them;
        `plot()` is a matplotlib figure.

    Raises
    ------
    InputError
        As in `predict`, and for a policy that still has to learn: `predict` and `tune` fit it on other sequences than
        it is reported on.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192: under lossless decoding every round starts from a prefix of the
    target's output, so that the same recording serves all policies.

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    >>> run = specsim.replay(trace, specsim.ConstantCost(s_d=0.001, s_t=0.010), "fixed_k", k=5)
    >>> rounds = run.rounds.to_frame()
    >>> len(rounds) == int(run.num_rounds.sum())
    True
    >>> seconds = rounds[["draft_s", "policy_s", "verify_s", "other_s"]].sum(axis=1)
    >>> f"{rounds['baseline_s'].sum() / seconds.sum():.3f}", f"{run.speedup:.3f}"
    ('2.297', '2.297')
    """
    both = priced(trace, cost)
    chosen, given = _policy(policy, settings, both.trace.depth)
    if not is_fitted(chosen, given, both.trace, both.table()):
        raise InputError(
            f"policy {chosen.name} learns from data or costs and is not fitted; use specsim.predict, or replay the "
            "`best` of specsim.tune"
        )
    return Run(**vars(both.replay(chosen, seed=seed, log=True)))


def _policy(policy: PolicyName | Policy, settings: Settings, depth: int) -> tuple[Policy, Settings]:
    """Return the policy and its given, not learned, settings.

    For a name or class: these settings, with drafts no longer than the trace is deep; for an object: all but its
    defaults.
    """
    if not isinstance(policy, Policy):
        kind = find_policy(policy)
        given = {**cap_depth(kind, depth), **settings}
        return build_policy(kind, given), given
    chosen = make_policy(policy, settings)
    fields = dataclasses.fields(chosen)
    return chosen, {f.name: value for f in fields if (value := getattr(chosen, f.name)) != f.default}
