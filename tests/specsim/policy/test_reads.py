"""What policies read of a drafter, and which of them would change the law of the output with sampled drafts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.acceptance.generate import generate
from specsim.io.errors import InputError
from specsim.policy.base import BIASED, build_policy
from specsim.policy.chain.base import Step
from specsim.policy.chain.hugging_face import HuggingFace
from specsim.policy.chain.p_min import LlamaCpp
from specsim.policy.registry import NAMED
from specsim.policy.user_file import check_policy
from specsim.replaying.checks import check_replayable, unsupported_reason
from specsim.serving.drafts import drafts_of
from specsim.serving.serve import fit_policies
from tests.specsim.policy.test_policy import settings_of, traced
from tests.support.acceptance_examples import difficulty
from tests.support.serving_costs import COST

# Of the token after each of three: the target's distribution and the drafter's.
P = [[F(n, 12) for n in row] for row in ((6, 4, 2), (2, 3, 7), (1, 8, 3))]
Q = [[F(n, 12) for n in row] for row in ((3, 2, 7), (6, 1, 5), (4, 5, 3))]
HALF = F(1, 2)
TOKENS = range(3)
LIKELIEST = [max(TOKENS, key=row.__getitem__) for row in Q]

# Tokens verified of the draft (x, y) after the token 0.
RULES: dict[str, Callable[[int, int], int]] = {
    "drop by the drawn token": lambda x, y: 0 if Q[0][x] < HALF else 1 if Q[x][y] < HALF else 2,
    "drop by what is behind": lambda x, y: 2 if max(Q[x]) >= HALF else 0,
    "drop by the distribution": lambda x, y: 0 if max(Q[0]) < HALF else 1 if max(Q[x]) < HALF else 2,
    "stop by the drawn token": lambda x, y: 1 if Q[0][x] < HALF else 2,
}


def law(rule: str, *, sampled: bool, by_ratio: bool) -> Counter[tuple[int, int]]:
    """Exact law of the first two output tokens, by enumeration of drafts, judgements and the target's tokens.

    sampled : drafts are drawn of q, else the likeliest; by_ratio : kept with min(1, p / q), else with p
    """
    laws: Counter[tuple[int, int]] = Counter()

    def go(output: tuple[int, ...], draft: tuple[int, ...], chance: F) -> None:
        after = output[-1] if output else 0
        p = P[after]
        if len(output) == 2:
            laws[output[0], output[1]] += chance  # type: ignore[assignment]
        elif not draft:
            for token in TOKENS:
                go((*output, token), (), chance * p[token])
        else:
            x = draft[0]
            keep = min(F(1), p[x] / Q[after][x]) if by_ratio else p[x]
            go((*output, x), draft[1:], chance * keep)
            rest = [max(p[t] - Q[after][t], F(0)) if by_ratio else p[t] * (t != x) for t in TOKENS]
            for token in TOKENS:
                if keep < 1:
                    go((*output, token), (), chance * (1 - keep) * rest[token] / sum(rest))

    for x, y in itertools.product(TOKENS, TOKENS):
        drawn = Q[0][x] * Q[x][y] if sampled else F(x == LIKELIEST[0] and y == LIKELIEST[x])
        go((), (x, y)[: RULES[rule](x, y)], drawn)
    return laws


@pytest.mark.parametrize("rule", RULES)
def test_only_sampled_drafts_that_are_dropped_by_what_was_drawn_change_the_output(rule: str) -> None:
    own = {(x, y): P[0][x] * P[x][y] for x in TOKENS for y in TOKENS}
    biased = rule in ("drop by the drawn token", "drop by what is behind")
    assert (law(rule, sampled=True, by_ratio=True) == own) is not biased
    assert law(rule, sampled=False, by_ratio=False) == own  # greedy drafts
    assert law(rule, sampled=True, by_ratio=False) == own  # the target's own sample decides: equal-samples


CHAINS = [kind for kind in NAMED.values() if hasattr(kind, "keep_drafting")]
unit = st.floats(0.0, 1.0)


@pytest.mark.parametrize("kind", CHAINS, ids=lambda kind: kind.name)
@given(st.data())
def test_decisions_do_not_depend_on_what_a_policy_does_not_name(kind: Any, data: st.DataObject) -> None:
    policy = build_policy(kind, data.draw(settings_of(kind)))
    seen, other = (data.draw(st.lists(unit, min_size=5, max_size=5).map(lambda v: Step(*v))) for _ in range(2))
    unread = {name: getattr(other, name) for name in Step._fields if name not in kind.features}
    state = policy.initial_state(policy.params)
    place = data.draw(st.integers(1, policy.max_draft_tokens)), data.draw(st.floats(0.001, 0.999))
    decisions = [policy.keep_drafting(state, policy.params, step, *place) for step in (seen, seen._replace(**unread))]
    np.testing.assert_equal(decisions[0], decisions[1])


@dataclass(frozen=True)
class Dropping(HuggingFace):
    """Hugging Face's rule, without verifying the token at which it stops."""

    name = "dropping"
    drops_refused = True


def test_a_policy_that_would_change_the_output_is_refused_with_sampled_drafts_alone() -> None:
    greedy = traced()
    sampled = replace(greedy, meta={**greedy.meta, "decoding": {"mode": "rejection"}})
    assert unsupported_reason(sampled, Dropping) == BIASED and unsupported_reason(greedy, Dropping) is None
    check_replayable(greedy, Dropping(max_draft_tokens=3))
    check_replayable(sampled, HuggingFace(max_draft_tokens=3))
    check_replayable(sampled, LlamaCpp(max_draft_tokens=3))
    with pytest.raises(InputError, match="policy dropping: drops drafted tokens by what was drawn"):
        check_replayable(sampled, Dropping(max_draft_tokens=3))
    with pytest.raises(InputError, match=r'drops tokens by step.prob; name it, as in features = \("prob",\)'):
        check_policy(dataclass(frozen=True)(type("Silent", (Dropping,), {"features": ()})))


@pytest.mark.parametrize(("name", "given"), [("budget", {}), ("dspark", {}), ("dspark", {"lag": False})])
def test_a_servers_rule_that_trims_by_what_was_drawn_is_refused_with_sampled_drafts(name: str, given: Any) -> None:
    trace = generate(difficulty(), sequences=12, output_tokens=40, depth=3, seed=4)
    part, (rule,), _ = fit_policies(trace, COST, [(name, {"max_draft_tokens": 3, **given})], tuning_share=0.5, seed=0)
    other = replace(part, prob=np.flip(part.prob).copy())
    same = np.array_equal(rule.survival(part), rule.survival(other))
    assert same == ("prob" not in rule.features) and drafts_of(part, rule).survival is not None
    sampled = replace(part, meta={**part.meta, "decoding": {"mode": "rejection"}})
    if name == "budget" or given:
        with pytest.raises(InputError, match="drops drafted tokens by what was drawn"):
            drafts_of(sampled, rule)
    else:
        drafts_of(sampled, rule)
