"""Replays of joined traces: against a plain loop over what each cache holds, and the first drafter that proposes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specsim.cost.joined import JoinedCost, joined_table
from specsim.cost.model import ConstantCost, CostModel
from specsim.io.errors import InputError
from specsim.lookup.from_text import TokenText, lookup_trace
from specsim.lookup.ngram import NgramRule
from specsim.policy.base import Policy
from specsim.policy.chain.base import Step
from specsim.policy.registry import SWITCH_POLICIES, make_policy
from specsim.policy.switch.base import SwitchPolicy
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace, foretold, join_traces
from specsim.trace.trace import NO_TOKEN, Trace
from tests.support.checks import refusal
from tests.support.joined_traces import DEPTH, VOCABULARY, guessing_part, joined_trace, lookup_part, texts
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


Rounds = list[tuple[int, int, int, int, int]]  # sequence, t, drafted, accepted, drafter


def rows_of(log: Any) -> Rounds:
    columns = (log.sequence, log.t, log.drafted, log.accepted, log.drafter)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_rounds_and_seconds_are_those_of_a_plain_loop(policy: Policy) -> None:
    trace = joined_trace()
    assert isinstance(policy, SwitchPolicy)
    replayed = PricedTrace(trace, COST).replay(policy, log=True)
    rounds, seconds = zip(*plain_replay(trace, policy, COST), strict=True)
    log = replayed.rounds
    assert rows_of(log) == list(rounds)
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
    refusal(lambda: PricedTrace(trace, COST).replay(make_policy("fixed_k")), "fixed_k", "joined trace has 3")
    with pytest.raises(InputError, match="switch_match.*specsim join"):
        PricedTrace(trace.parts[0], own).replay(make_policy("switch_match"))
    with pytest.raises(InputError, match="drafter=3.*2 drafters"):
        PricedTrace(joined_trace(drafters=2), JoinedCost(COST.parts[:2])).replay(
            make_policy("one_drafter", {"drafter": 3})
        )
    refusal(lambda: PricedTrace(trace, own).table(), "costs of 1 drafters for a joined trace of 3")
    with pytest.raises(InputError, match="costs are of 3 drafters, the trace is of a single drafter"):
        PricedTrace(trace.parts[0], COST).table()
    assert joined_table(trace, COST).each_draft_s.shape[0] == 3


def rounds_of(trace: JoinedTrace, policy: str = "first_that_drafts", **settings: float) -> Rounds:
    cost = JoinedCost(tuple(ConstantCost(0.1, 1.0) for _ in trace.parts))
    log = PricedTrace(trace, cost).replay(make_policy(policy, settings), log=True).rounds
    assert log is not None
    return rows_of(log)


# The lookup knows what followed the last 1, 5 and 4 have not been seen, and then the 1 again.
TEXT = TokenText([1, 2, 3, 1], [2, 5, 4, 1, 2, 3], "all", 6)


def test_a_lookup_without_a_match_is_passed_over() -> None:
    trace = join_traces({"lookup": lookup_part([TEXT]), "right": guessing_part([TEXT], 1.0, 0)})
    # After 1 2 3 1 the lookup drafts 2 3, of which the 2 is accepted, and 5 is emitted. After the 5 it has nothing, and
    # the other drafts 4; 1 is emitted. After the 1 it drafts 2, all that the budget leaves.
    assert rounds_of(trace, k1=2, k2=1) == [(0, 0, 2, 1, 1), (0, 2, 1, 1, 2), (0, 4, 1, 1, 1)]
    # In the other order, the drafter that is always right drafts always: 2 5, and 4 is emitted; 1 2, and 3.
    other = join_traces({"right": trace.parts[1], "lookup": trace.parts[0]})
    assert rounds_of(other, k1=2, k2=1) == [(0, 0, 2, 2, 1), (0, 3, 2, 2, 1)]


def test_nothing_is_drafted_where_none_proposes_anything() -> None:
    pairs = lookup_trace([TEXT], NgramRule(min_ngram=2), DEPTH, vocabulary=VOCABULARY)
    trace = join_traces({"two words": pairs, "one word": lookup_part([TEXT])})
    # No two words come twice before the end, so that the second drafts after the two 1s; after 5 and 4 none does.
    assert rounds_of(trace, k1=2, k2=2) == [(0, 0, 2, 1, 2), (0, 2, 0, 0, 0), (0, 3, 0, 0, 0), (0, 4, 1, 1, 2)]


def often_silent(outputs: list[TokenText], seed: int) -> Trace:
    """A drafter that proposes nothing at some positions, as an engine's does before its first round."""
    part = guessing_part(outputs, 0.8, seed)
    silent = np.random.default_rng(seed).random(len(part.token)) < 0.3
    drafted = np.where(silent[:, None], NO_TOKEN, part.draft_token)
    return replace(part, draft_token=drafted, match_len=np.where(silent, 0, part.match_len).astype(np.uint8))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2), (0, 0, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_those_of_a_loop_over_the_proposals(order: tuple[int, ...], seed: int) -> None:
    """The loop reads tokens alone: of a lookup of two words and more, a drafter silent at random, and a lookup."""
    outputs = texts(seed=seed)
    pairs = lookup_trace(outputs, NgramRule(min_ngram=2), DEPTH, vocabulary=VOCABULARY)
    parts = [pairs, often_silent(outputs, seed), lookup_part(outputs)]
    trace = join_traces({str(place): parts[n] for place, n in enumerate(order)})
    limits = [3, 4, 2][: len(order)]
    expected: Rounds = []
    for sequence in range(trace.sequences):
        start, end = trace.offsets[sequence : sequence + 2].tolist()
        text, t = trace.token[start:end].tolist(), 0
        while t < len(text):
            room = int(trace.budget_tokens[sequence]) - t - 1
            draft, drafter = list[int](), 0
            for number, (n, limit) in enumerate(zip(order, limits, strict=True), start=1):
                proposed = [token for token in parts[n].draft_token[start + t].tolist() if token != NO_TOKEN]
                if not draft and proposed[: min(limit, room)]:
                    draft, drafter = proposed[: min(limit, room)], number
            accepted = 0
            while accepted < len(draft) and text[t + accepted : t + accepted + 1] == [draft[accepted]]:
                accepted += 1
            expected.append((sequence, t, len(draft), accepted, drafter))
            t += accepted + 1
    assert rounds_of(trace, **{f"k{number}": limit for number, limit in enumerate(limits, start=1)}) == expected
    assert len({row[4] for row in expected}) >= 3  # two drafters, and none


def test_a_lookup_recorded_without_probabilities_proposes_where_it_has_tokens() -> None:
    known = lookup_part(texts())
    nothing = np.zeros_like(known.prob)
    blind = replace(known, prob=nothing, confidence=nothing, meta={**known.meta, "informed": False})
    assert np.array_equal(foretold(known), known.prob[:, 0]) and (known.prob[:, 0] == 0).any()
    assert np.array_equal(foretold(blind), known.draft_token[:, 0] != NO_TOKEN)
    first = often_silent(texts(), 1)
    seeing, unseeing = (rounds_of(join_traces({"first": first, "lookup": part})) for part in (known, blind))
    assert seeing == unseeing and {row[4] for row in seeing} == {0, 1, 2}
