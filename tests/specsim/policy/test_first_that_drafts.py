"""The first drafter that proposes something: by hand, by a loop over the proposals, and what counts as one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specsim.cost.joined import JoinedCost
from specsim.cost.model import ConstantCost
from specsim.lookup.from_text import TokenText, lookup_trace
from specsim.lookup.ngram import NgramRule
from specsim.policy.registry import make_policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace, foretold, join_traces
from specsim.trace.trace import NO_TOKEN, Trace
from tests.support.joined_traces import DEPTH, VOCABULARY, guessing_part, lookup_part, texts

Rounds = list[tuple[int, int, int, int, int]]  # sequence, t, drafted, accepted, drafter


def rounds_of(trace: JoinedTrace, policy: str = "first_that_drafts", **settings: float) -> Rounds:
    cost = JoinedCost(tuple(ConstantCost(0.1, 1.0) for _ in trace.parts))
    log = PricedTrace(trace, cost).replay(make_policy(policy, settings), log=True).rounds
    assert log is not None
    columns = (log.sequence, log.t, log.drafted, log.accepted, log.drafter)
    return list(zip(*(column.tolist() for column in columns), strict=True))


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
