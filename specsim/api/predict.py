"""Predict or replay one policy on a recorded trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specsim.api.run import Run
from specsim.cost.files import CostLike, as_cost
from specsim.errors import InputError
from specsim.fitting.fit import fit, is_fitted, needs_fitting
from specsim.policy.base import Policy, build_policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.registry import NAMED, PolicyName, find_policies, find_policy, make_policy
from specsim.replaying.expected import expected_replay
from specsim.replaying.priced import PricedTrace
from specsim.speedup.prediction import Prediction, oracle_seconds, predict_policy, summarise
from specsim.speedup.result import Result
from specsim.trace.files import TraceLike, as_trace
from specsim.trace.split import split_sequences
from specsim.tuning.space import cap_depth


@dataclass(frozen=True, repr=False)
class PolicyPrediction(Result, Prediction):
    """A prediction that says what it is of.

    learned_on : sequences that the policy learned from, none of which it is reported on; 0 if it learned nothing
    sequences : sequences that it is reported on
    expected : whether it is the exact expectation over what the policy draws
    """

    learned_on: int = 0
    sequences: int = 0
    expected: bool = False

    @property
    def notes(self) -> list[str]:
        """What a reader must know of these numbers, in words."""
        learned = f"learned on {self.learned_on} sequences, reported on {self.sequences} others"
        return [*([learned] if self.learned_on else []), *(["expected"] if self.expected else []), *super().notes]


def policies(files: PolicyName | Iterable[PolicyName] = ()) -> dict[str, type[Policy]]:
    """The policies that there are, by name.

    Parameters
    ----------
    files : str, Path, class, or several, optional
        Policies of your own, as FILE.py, FILE.py:NAME, or classes.

    Returns
    -------
    dict
        The class of each policy; `source` names its paper, its fields are its settings.

    Raises
    ------
    InputError
        Where a file cannot serve or two policies have one name.

    References
    ----------
    Each class names its own in `source`.

    Examples
    --------
    >>> import specsim
    >>> specsim.policies()["adaedl"].source
    'Agrawal et al. 2024 (AdaEDL), section 3 and Algorithm 1'
    """
    return {**NAMED, **find_policies(files)}


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
    """Predict the speedup of one policy over autoregressive decoding.

    A policy that learns from data or costs learns on one part of the sequences and is reported on the other,
    unless all that it learns is given.

    Parameters
    ----------
    trace : Trace, str or Path
        Recorded positions, or where they are, as `read_trace` takes it.
    cost : CostModel, str, Path or mapping
        Seconds of draft steps and target passes, or where they are, as `read_cost` takes it.
    policy : str, Path, class or Policy
        A name that `policies` lists, FILE.py, FILE.py:NAME, a class, or a policy as `make_policy` and `tune` give it.
    tuning_share : float
        Share of the sequences that a policy which learns learns from, in (0, 1).
    expected : bool
        Take the exact expectation over what the policy draws in place of one replay.
    seed : int
        Seed of the split and of what the policy draws.
    **settings
        Settings of the policy. Of one given by name or class, limits of the draft length that are not given are lowered
        to the depth of the trace.

    Returns
    -------
    PolicyPrediction
        `speedup` (ratio, with its 95 % interval over sequences), `v_d`, `r_d`, `hm`, `tau` (tokens per target
        pass), counts in tokens and rounds, `seconds`, `ar_seconds`, and `oracle_regret`; `to_frame()` is a pandas
        table of one row.

    Raises
    ------
    InputError
        For an unknown policy or setting, a policy that the trace or the costs cannot serve, or one given as an
        object that has not learned what it learns.
    TypeError
        For what is neither a trace, costs or a policy nor names one.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192 (speculative decoding); EESD, arXiv:2406.03853, Eqs. 11-12 (v_d, r_d).

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    >>> cost = specsim.ConstantCost(s_d=0.001, s_t=0.010)
    >>> found = specsim.predict(trace, cost, "fixed_k", k=4)
    >>> found.speedup.low < found.speedup.estimate < found.speedup.high
    True
    """
    part, chosen, learned_on = fitted_part(priced(trace, cost), policy, settings, tuning_share, seed)
    return predict_fitted(part, chosen, learned_on, expected=expected, seed=seed)


def priced(trace: TraceLike, cost: CostLike) -> PricedTrace:
    """A trace and costs as all functions take them."""
    return PricedTrace(as_trace(trace), as_cost(cost))


def predict_fitted(
    part: PricedTrace, chosen: Policy, learned_on: int, *, expected: bool = False, seed: int = 0
) -> PolicyPrediction:
    """The prediction of what `fitted_part` gives."""
    if not expected:
        found = predict_policy(part, chosen, seed=seed)
    elif isinstance(chosen, ChainPolicy):
        result = expected_replay(part.trace, chosen, part.table(chosen))
        found = summarise(result, oracle_seconds(part, [type(chosen)], seed=seed))
    else:
        raise InputError(f"policy {chosen.name} is of trees, which --expected does not average; replay it")
    return PolicyPrediction(**vars(found), learned_on=learned_on, sequences=part.trace.sequences, expected=expected)


def fitted_part(
    priced: PricedTrace, policy: PolicyName | Policy, settings: Mapping[str, Any], tuning_share: float, seed: int
) -> tuple[PricedTrace, Policy, int]:
    """What a policy is reported on, the policy as it is there, and how many sequences it learned from (0: nothing)."""
    chosen, given = _policy(policy, settings, priced.trace.depth)
    if not isinstance(policy, Policy) and needs_fitting(type(chosen)):
        tuning, rest = split_sequences(priced.trace, tuning_share=tuning_share, seed=seed)
        train = priced.trace.select(tuning)
        learned = fit(type(chosen), given, train, PricedTrace(train, priced.cost).table())
        if learned != chosen:  # not all was given
            return priced.select(rest), learned, len(tuning)
    elif not is_fitted(chosen, given, priced.trace, priced.table()):
        raise InputError(f"policy {chosen.name} has not learned yet; give its name, and it learns before it predicts")
    return priced, chosen, 0


def replay(trace: TraceLike, cost: CostLike, policy: PolicyName | Policy, *, seed: int = 0, **settings: Any) -> Run:
    """Replay a trace under one policy, round for round what a real run would do.

    Parameters
    ----------
    trace, cost, policy, seed, **settings
        As in `predict`.

    Returns
    -------
    Run
        Counts [S] and seconds [S, 4] (draft, policy, verify, other) per sequence, as a pandas table by `to_frame()`;
        `rounds` holds every round, and `rounds.to_frame()` is a table of them; `plot()` is a matplotlib figure.

    Raises
    ------
    InputError
        As in `predict`, and for a policy which learns and has not learned: `predict` and `tune` let it learn
        on other sequences than it is reported on.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192: under loss-free decoding every round starts from a prefix of the
    target's output, so that one recording serves all policies.

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    >>> run = specsim.replay(trace, specsim.ConstantCost(s_d=0.001, s_t=0.010), "fixed_k", k=5)
    >>> len(run.rounds.to_frame()) == int(run.num_rounds.sum())
    True
    """
    both = priced(trace, cost)
    chosen, given = _policy(policy, settings, both.trace.depth)
    if not is_fitted(chosen, given, both.trace, both.table()):
        raise InputError(
            f"policy {chosen.name} learns from data or costs and has not yet; use specsim.predict, or replay the "
            "`best` of specsim.tune"
        )
    return Run(**vars(both.replay(chosen, seed=seed, log=True)))


def _policy(policy: PolicyName | Policy, settings: Mapping[str, Any], depth: int) -> tuple[Policy, dict[str, Any]]:
    """The policy and those of its settings that are given, not learned.

    By name or class: these settings, drafts no longer than the trace is deep. An object's: all but its defaults.
    """
    if not isinstance(policy, Policy):
        kind = find_policy(policy)
        given = {**cap_depth(kind, depth), **settings}
        return build_policy(kind, given), given
    chosen = make_policy(policy, settings)
    fields = dataclasses.fields(chosen)
    return chosen, {f.name: value for f in fields if (value := getattr(chosen, f.name)) != f.default}
