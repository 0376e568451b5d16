"""Replays of joined traces, against a plain loop that knows nothing of lags but what each cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specsim.cost.joined import JoinedCost, joined_table
from specsim.cost.model import ConstantCost, CostModel
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.chain.base import Step
from specsim.policy.registry import SWITCH_POLICIES, make_policy
from specsim.policy.switch.base import SwitchPolicy
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace
from tests.support.joined_traces import DEPTH, joined_trace
from tests.support.switching import TakesTurns


@dataclass(frozen=True)
class HandCost(CostModel):
    """Every part of a round has a price of its own, so that none can stand for another."""

    step_s: float
    lacking_s: float

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Any:
        return n_tokens * self.step_s + 1e-4 * np.asarray(context, dtype=float)

    def catch_up(self, context: npt.ArrayLike) -> Any:
        return np.full(np.shape(context), self.lacking_s)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Any:
        return 1.0 + 0.01 * n_tokens + np.zeros(np.shape(context))

    def policy_step(self) -> float:
        return 1e-3 * self.step_s

    def round_overhead(self) -> float:
        return 1e-2 * self.step_s

    def autoregressive_step(self, context: npt.ArrayLike) -> Any:
        return np.ones(np.shape(context))


COST = JoinedCost((HandCost(1e-3, 0.0), HandCost(0.2, 0.05), HandCost(0.1, 0.02)))
LIMITS = {"k1": 5, "k2": 3, "k3": 4, "floor2": 0.3, "floor3": 0.5}
POLICIES = [
    *(make_policy("one_drafter", {**LIMITS, "drafter": n}) for n in (1, 2, 3)),
    make_policy("switch_match", {**LIMITS, "least": 0.15}),
    make_policy("first_that_drafts", LIMITS),
    TakesTurns(**LIMITS),
    TakesTurns(**LIMITS, carry=False),
]


def plain_replay(trace: JoinedTrace, policy: SwitchPolicy, cost: JoinedCost) -> Iterator[tuple[tuple[int, ...], float]]:
    """(sequence, t, drafted, accepted, drafter) of every round and what it takes, each drafter with a cache of tokens.

    The context is that of the cost table's column, of 16 tokens.
    """
    params, state = policy.params, policy.initial_state(policy.params)
    limits = (LIMITS["k1"], LIMITS["k2"], LIMITS["k3"])
    ends = (trace.prompt_tokens + trace.output_tokens).max() - 2
    for sequence in range(trace.sequences):
        if not policy.carries_state:
            state = policy.initial_state(params)
        start, end = trace.offsets[sequence : sequence + 2].tolist()
        prompt, t = int(trace.prompt_tokens[sequence]), 0
        cached = [prompt - 1] * len(trace.parts)  # the prompt but for the pending token
        while t < end - start:
            row, context = start + t, prompt + t - 1
            middle = np.clip((context // 16 + 0.5) * 16, trace.prompt_tokens.min() - 1, ends)
            reach = [min(DEPTH, int(part.draft_limit[row])) for part in trace.parts]
            d, drafted, asked = int(state[0]), 0, 0
            if max(reach):
                foretold = np.array([1.0 if n else float(p) for n, p in enumerate(trace.columns.foretold[row])])
                d, asked = policy.choose(state, params, foretold), 1
                state = (float(d), *state[1:])
                most = min(limits[d], reach[d])
                while drafted < most:
                    drafted += 1
                    if drafted < most:
                        asked += 1
                        step = Step(0.0, float(trace.parts[d].confidence[row, drafted - 1]), 0.0, 0.0, 0.0)
                        if not policy.keep_drafting(state, params, step, drafted, 0.0)[0]:
                            break
            accepted = min(drafted, int(trace.parts[d].match_len[row]))
            own = cost.parts[d]
            took = float(own.verify(drafted + 1, middle)) + own.round_overhead() + asked * own.policy_step()
            if drafted:
                took += float(own.draft(drafted, middle)) + (context - cached[d]) * float(own.catch_up(middle))
                state = policy.update(state, params, drafted, accepted)
                cached[d] = min(context + drafted, context + accepted + 1)  # the pending token and all but the last
            yield (sequence, t, drafted, accepted, d + 1 if drafted else 0), took
            t += accepted + 1


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_rounds_and_seconds_are_those_of_a_plain_loop(policy: Policy) -> None:
    trace = joined_trace()
    assert isinstance(policy, SwitchPolicy)
    replayed = PricedTrace(trace, COST).replay(policy, log=True)
    rounds, seconds = zip(*plain_replay(trace, policy, COST), strict=True)
    log = replayed.rounds
    columns = (log.sequence, log.t, log.drafted, log.accepted, log.drafter)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == list(rounds)
    parts = np.stack([log.draft_s, log.policy_s, log.verify_s, log.other_s])
    np.testing.assert_allclose(parts.sum(axis=0), seconds, rtol=1e-12)
    sequences = [np.bincount(log.sequence, part) for part in parts]
    np.testing.assert_allclose(np.stack(sequences, axis=1), replayed.seconds, rtol=1e-12)
    expected = np.bincount([round_[0] for round_ in rounds], seconds)
    np.testing.assert_allclose(replayed.speculative_s, expected, rtol=1e-12)
    assert (log.verified == log.drafted).all() and (log.last == log.accepted).all()
    assert replayed.num_rounds.sum() == len(log) and replayed.accepted.sum() == log.accepted.sum()


def test_the_policies_of_this_test_are_all_there_are_and_switch() -> None:
    assert {policy.name for policy in POLICIES} - {TakesTurns.name} == SWITCH_POLICIES.keys()
    for policy in POLICIES[3:]:
        log = PricedTrace(joined_trace(), COST).replay(policy, log=True).rounds
        assert log is not None and len(set(log.drafter.tolist()) - {0}) >= 2, policy


@pytest.mark.parametrize("drafter", [1, 2, 3])
def test_one_drafter_of_a_joined_trace_replays_as_it_does_alone(drafter: int) -> None:
    trace = joined_trace()
    policy = make_policy("one_drafter", {"drafter": drafter, "k1": 4, "k2": 4, "k3": 4})
    together = PricedTrace(trace, COST).replay(policy, log=True)
    alone = PricedTrace(trace.parts[drafter - 1], COST.parts[drafter - 1]).replay(
        make_policy("fixed_k", {"k": 4}), log=True
    )
    assert together.rounds.rows() == alone.rounds.rows()
    np.testing.assert_allclose(together.seconds[:, [0, 2, 3]], alone.seconds[:, [0, 2, 3]], rtol=1e-12)
    asked = together.policy_steps.sum() - alone.policy_steps.sum()  # the choice of a drafter is a decision more
    rows = trace.offsets[together.rounds.sequence] + together.rounds.t
    assert asked == (trace.columns.draft_limit[:, rows].max(axis=0) > 0).sum()


def test_a_joined_trace_needs_a_switching_policy_and_a_plain_one_none() -> None:
    trace, own = joined_trace(), ConstantCost(0.1, 1.0)
    with pytest.raises(InputError, match="fixed_k.*joined trace has 3"):
        PricedTrace(trace, COST).replay(make_policy("fixed_k"))
    with pytest.raises(InputError, match="switch_match.*specsim join"):
        PricedTrace(trace.parts[0], own).replay(make_policy("switch_match"))
    with pytest.raises(InputError, match="drafter=3.*2 drafters"):
        PricedTrace(joined_trace(drafters=2), JoinedCost(COST.parts[:2])).replay(
            make_policy("one_drafter", {"drafter": 3})
        )
    with pytest.raises(InputError, match="costs of 1 drafters for a joined trace of 3"):
        PricedTrace(trace, own).table()
    with pytest.raises(InputError, match="costs are of 3 drafters, the trace is of a single drafter"):
        PricedTrace(trace.parts[0], COST).table()
    assert joined_table(trace, COST).each_draft_s.shape[0] == 3
