"""The decoding loop over chains and trees: lossless, and replayed round for round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numba as nb
import numpy as np
import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft, Siblings
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Decoded, RoundContext
from realrun.decode.sampling import Sampler
from realrun.decode.verify import match_verifier
from realrun.measure.record import RecordSettings, record
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.base import Policy, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.registry import CHAIN_POLICIES, TREE_POLICIES, make_policy
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.tiny import POSITIONS, random_prompts, tiny_pair, tiny_prompts
from tests.support.tree_policies import CoinTree

DEPTH, TOKENS = 8, 30
TREE_DEPTH, NODES, WIDTH = 5, 300, 6
CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
SETTINGS = {  # every policy, with settings that stop drafting here and there on this pair
    "fixed_k": [{"k": 1}, {"k": 5}],
    "max_confidence": [
        {"lambda0": 0.5, "dynamic": False, "max_draft_tokens": DEPTH},
        {"lambda0": 0.3, "target_rate": 0.4, "epsilon": 0.3, "max_draft_tokens": 6},
    ],
    "adaedl": [
        {"gamma": 0.2, "lambda0": 0.3, "dynamic": False, "max_draft_tokens": DEPTH},
        {"gamma": 0.3, "target_rate": 0.4, "epsilon": 0.3, "max_draft_tokens": 6},
    ],
    "time_gain": [{"cost_ratio": 0.3, "max_draft_tokens": DEPTH}],
    "hugging_face": [
        {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.3, "schedule": s, "max_draft_tokens": DEPTH}
        for s in ("constant", "heuristic", "heuristic_transient")
    ],
    "llama_cpp": [{"p_min": p_min, "max_draft_tokens": DEPTH} for p_min in (0.2, 0.4)],
    "p_min": [{"p_min": 0.4, "max_draft_tokens": DEPTH}],
    "space_k": [{"k": 3}],
    "beta_ts": [
        {"alpha0": 3.0, "beta0": 1.0, "counting": counting, "theta": theta, "carry": carry, "max_draft_tokens": DEPTH}
        for counting, theta, carry in (("exact", "per_token", False), ("printed", "per_round", True))
    ],
}
TREE_SETTINGS: dict[str, list[dict[str, Any]]] = {  # of trees that differ from round to round on this pair
    "vct": [{"width": 1, "depth": 4}, {"width": 2, "depth": 4}, {"width": 3, "depth": 4, "level_nodes": 6}],
    "cartesian": [{}, {"s1": 4, "s2": 2, "s3": 1, "s4": 1}],
    "sparse_tree": [{"children": (4.0, 3.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0)}],
    "optimal_tree": [{"children": (3.0, 2.0, 2.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)}],
    "cape": [
        {"width_30": 5, "width_60": 3, "width_80": 2, "depth": 4},
        {"width_30": 2, "width_60": 6, "width_80": 2, "depth": 5},
    ],
    "eagle2": [{"nodes": 6, "depth": 4, "top_k": 3}, {"nodes": 14, "depth": 3, "top_k": 4}],
    "pct": [
        {"cost_ratio": 0.1, "leaf_threshold": 0.05, "width": 4, "max_depth": TREE_DEPTH},
        {"cost_ratio": 0.3, "leaf_threshold": 0.1, "width": 5, "max_depth": 3, "max_nodes": 5, "test": "level"},
    ],
    "beta_ts_tree": [
        {"alpha0": 3.0, "beam": 2, "width": 3, "max_depth": TREE_DEPTH},
        {"alpha0": 2.0, "counting": "printed", "theta": "per_round", "carry": True, "nodes": 6, "max_depth": 4},
    ],
}
# Policies that read a trained predictor's score are run with every drafter, in tests/contract/test_drafters.py.
ARMS = [
    make_policy(name, settings)
    for name, kind in CHAIN_POLICIES.items()
    if "score" not in kind.features
    for settings in SETTINGS.get(name, [{"max_draft_tokens": DEPTH}])
]
TREES = [
    *(
        make_policy(name, s)
        for name, kind in TREE_POLICIES.items()
        if "score" not in kind.features
        for s in TREE_SETTINGS.get(name, [{}])
    ),
    CoinTree(),
]


@nb.njit
def no_state(params):
    return (0.0,)


@nb.njit
def flip(state, params, step, depth, u):
    return u < params.heads, state


@nb.njit
def unchanged(state, params, drafted, accepted):
    return state


@dataclass(frozen=True)
class Coin(ChainPolicy):
    """Draft on when a coin says so: a policy that reads nothing but its uniforms."""

    heads: float = setting(0.7, 0.0, 1.0)
    max_draft_tokens: int = setting(DEPTH, 1, 256, bounds="depth")

    name = "coin"
    source = "these tests"
    initial_state = staticmethod(no_state)
    keep_drafting = staticmethod(flip)
    update = staticmethod(unchanged)


@nb.njit
def flip_after(state, params, step, depth, u):
    return u < params.heads - 0.1 * state[0], state


@nb.njit
def verified_tokens(state, params, drafted, accepted):
    return (1.0 * drafted,)


@dataclass(frozen=True)
class DroppingCoin(Coin):
    """A coin that drops the token it stops at, the likelier the more tokens were verified before."""

    name = "dropping_coin"
    keep_drafting = staticmethod(flip_after)
    update = staticmethod(verified_tokens)

    @property
    def drops_refused(self) -> bool:
        return True


mode = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())


def decoder(sampler: Sampler, eos: Sequence[int] = (), siblings: Siblings = "top_k", **verifiers: Any) -> Decoder:
    pair = tiny_pair()
    return Decoder(pair.target, DraftModel(pair.drafter.model, eos, siblings=siblings), eos, sampler, **verifiers)


@cache
@torch.inference_mode()
def longest_output(prompt: tuple[int, ...], sampler: Sampler, sequence: int) -> list[int]:
    tokens = list(prompt)
    for position in range(TOKENS):
        logits = tiny_pair().target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens.append(int(sampler.tokens(logits, sequence, position)))
    return tokens[len(prompt) :]


def plain_output(prompt: Sequence[int], count: int, sampler: Sampler, sequence: int) -> list[int]:
    """The target alone, without a cache and without the loop under test."""
    assert count <= TOKENS
    return longest_output(tuple(prompt), sampler, sequence)[:count]


def check_counts(decoded: Decoded, policy: Policy | None, eos: Sequence[int] = ()) -> None:
    """Every round emits its accepted tokens and one more, unless the end of text cut it."""
    t = 0
    for r in decoded.rounds:
        assert r.t == t
        assert 0 <= r.accepted <= min(policy.max_draft_tokens if policy else 0, r.verified)
        assert r.accepted <= r.last <= r.verified <= r.drafted <= MAX_DRAFTED and (r.last > 0) == (r.accepted > 0)
        assert min(r.draft_s, r.policy_s, r.verify_s, r.other_s) >= 0 and r.verify_s > 0
        t += r.accepted + 1
    ended = bool(decoded.tokens) and decoded.tokens[-1] in eos
    assert t - len(decoded.tokens) in ((0, 1) if ended else (0,))
    assert decoded.prefill_s > 0 and decoded.seconds == pytest.approx(sum(r.seconds for r in decoded.rounds))


@mode
def test_the_baseline_is_the_targets_own_output_one_token_a_round(sampler: Sampler) -> None:
    (prompt,) = random_prompts(1, seed=2)
    decoded = decoder(sampler).decode(prompt, 20, None, sequence=3)
    assert decoded.tokens == plain_output(prompt, 20, sampler, 3)
    assert decoded.log() == [(t, 0, 0) for t in range(20)]


def test_drafts_are_accepted_and_rejected_on_this_pair() -> None:
    """Else the claims above would say little."""
    for sampler in CHOICES.values():
        rounds = [
            r
            for sequence, prompt in enumerate(random_prompts(6, seed=1))
            for r in decoder(sampler).decode(prompt, 40, ARMS[1], sequence=sequence).rounds
        ]
        assert {r.accepted for r in rounds} >= {0, 1, 2}
        assert 0.1 < sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds) < 0.9


def test_an_accepted_end_of_text_cuts_the_token_after_it() -> None:
    """Both ends: the drafter proposes it and is right, or the target adds it itself."""
    cut = []
    for prompt in random_prompts(12, seed=6):
        eos = (plain_output(prompt, 4, Sampler(), 0)[3],)
        decoded = decoder(Sampler(), eos).decode(prompt, 24, ARMS[1])
        assert decoded.tokens[-1] == eos[0] and decoded.tokens.count(eos[0]) == 1
        last = decoded.rounds[-1]
        cut.append(last.t + last.accepted == len(decoded.tokens))
    assert set(cut) == {True, False}


@cache
def recorded(sampler: Sampler, ends: bool, trees: bool) -> tuple[tuple[int, ...], Trace]:
    """End-of-text tokens that stand in the outputs, and a trace that holds every policy's drafts."""
    prompts, eos = tiny_prompts(3, seed=7), tuple[int, ...]()
    if ends:
        eos = tuple({plain_output(p.tokens, 12, sampler, s)[4 * s] for s, p in enumerate(prompts)})
    pair = replace(tiny_pair(), eos_token_ids=eos)
    size = (TREE_DEPTH, TOKENS, sampler, NODES, WIDTH) if trees else (DEPTH, TOKENS, sampler)
    trace = record(pair, prompts, RecordSettings(*size))
    assert (trace.output_tokens < TOKENS).any() == ends
    return eos, trace


@mode
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("policy", [*ARMS, Coin(), DroppingCoin(), *TREES], ids=str)
def test_the_output_is_the_targets_own_and_replay_repeats_every_round(
    sampler: Sampler, ends: bool, policy: Policy
) -> None:
    eos, trace = recorded(sampler, ends, isinstance(policy, TreePolicy))
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2), policy), seed=9, log=True)
    real, log, state = decoder(sampler, eos), [], None
    for index, prompt in enumerate(tiny_prompts(3, seed=7)):
        decoded = real.decode(prompt.tokens, TOKENS, policy, sequence=index, seed=9, state=state)
        plain = plain_output(prompt.tokens, TOKENS, sampler, index)
        assert decoded.tokens == plain[: min([plain.index(token) + 1 for token in eos if token in plain] or [TOKENS])]
        check_counts(decoded, policy, eos)
        log += [(index, *r) for r in decoded.tree_log()]
        state = decoded.state
    assert replayed.rounds is not None and replayed.rounds.rows() == log
    assert replayed.truncated is None or not replayed.truncated.any()


def test_state_starts_anew_with_every_sequence() -> None:
    """A dynamic threshold has moved after the first sequence; the second must not see it."""
    first, second = random_prompts(2, seed=8)
    policy = make_policy("adaedl", {"epsilon": 1.0, "max_draft_tokens": DEPTH})
    used = decoder(Sampler())
    used.decode(first, 30, policy)
    after, fresh = used.decode(second, 30, policy), decoder(Sampler()).decode(second, 30, policy)
    assert after.tokens == fresh.tokens and after.log() == fresh.log()


def greedy_by_one_verifier(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Wrong on purpose: accepts one token more than the target agrees with."""
    emitted = match_verifier(logits, draft, context)
    if len(emitted) <= len(draft.tokens):
        emitted = [*draft.tokens[: len(emitted)], emitted[-1]]
    return emitted


@mode
def test_a_verifier_that_accepts_one_token_too_many_is_caught(sampler: Sampler) -> None:
    broken = decoder(sampler, verifier=greedy_by_one_verifier)
    outputs = [broken.decode(p, 24, ARMS[1], sequence=s) for s, p in enumerate(random_prompts(3, seed=1))]
    plain = [plain_output(p, 24, sampler, s) for s, p in enumerate(random_prompts(3, seed=1))]
    assert [o.tokens[:24] for o in outputs] != plain


def test_a_draft_describes_every_token_it_holds() -> None:
    (prompt,) = random_prompts(1, seed=3)
    drafter = DraftModel(tiny_pair().drafter.model, ())
    with torch.inference_mode():
        drafter.begin(prompt[:-1])
        asked: list[int] = []
        draft = drafter.propose(prompt, RoundContext(Sampler(), 0, 0, 5), lambda step, depth: not asked.append(depth))
    assert asked == [1, 2, 3, 4]  # the last token of a full draft needs no decision
    assert draft.parents == [-1, 0, 1, 2, 3] and len(draft.steps) == len(draft.step_s) == 5
    for step in draft.steps:
        assert 0 < step.prob <= step.confidence <= 1 and 0 <= step.entropy_nats <= np.log(97)
        assert all(float(np.float32(x)) == x for x in step)


@pytest.mark.parametrize(
    ("prompt", "budget", "says"),
    [([], 4, "empty"), ([1], 0, "max_new_tokens=0"), ([1], -3, "max_new_tokens"), ([1] * 9, 152, "160")],
)
@pytest.mark.parametrize("policy", [None, ARMS[0]], ids=str)
def test_input_that_cannot_be_decoded_is_refused(
    prompt: list[int], budget: int, says: str, policy: ChainPolicy | None
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        decoder(Sampler()).decode(prompt, budget, policy)
    assert "\n" not in str(caught.value)


def test_prompt_and_output_may_fill_every_position() -> None:
    (prompt,) = random_prompts(1, seed=4)
    decoded = decoder(Sampler()).decode(prompt, POSITIONS - len(prompt), ARMS[1])
    assert len(decoded.tokens) == POSITIONS - len(prompt)
