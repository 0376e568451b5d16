"""The decoding loop: loss-free, replayed round for round, with caches that hold what they should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numba as nb
import numpy as np
import pytest
import torch

from realrun.decode.chain_verify import match_verifier
from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Decoded, RoundContext
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.lm.llama import FusedLlama
from realrun.recording.record import RecordSettings, record
from specsim.cost.model import ConstantCost
from specsim.errors import InputError
from specsim.policy.base import setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.registry import CHAIN_POLICIES, make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.tiny import POSITIONS, random_prompts, tiny_pair, tiny_prompts

DEPTH = 8
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
# What needs a trained predictor's score is run in test_predictor.py and on the lab.
ARMS = [
    make_policy(name, settings)
    for name, kind in CHAIN_POLICIES.items()
    if "score" not in kind.features
    for settings in SETTINGS.get(name, [{"max_draft_tokens": DEPTH}])
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
policies = pytest.mark.parametrize("policy", ARMS, ids=str)


def decoder(sampler: Sampler, eos: Sequence[int] = (), **options: object) -> Decoder:
    pair = tiny_pair()
    return Decoder(pair.target, DraftModel(pair.drafter.model, eos), eos, sampler, **options)  # type: ignore[arg-type]


@torch.inference_mode()
def plain_output(prompt: Sequence[int], count: int, sampler: Sampler, sequence: int) -> list[int]:
    """The target alone, without a cache and without the loop under test."""
    tokens = list(prompt)
    for position in range(count):
        logits = tiny_pair().target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens.append(int(sampler.tokens(logits, sequence, position)))
    return tokens[len(prompt) :]


def check_counts(decoded: Decoded, policy: ChainPolicy | None, eos: Sequence[int] = ()) -> None:
    """Every round emits its accepted tokens and one more, unless the end of text cut it."""
    t = 0
    for index, r in enumerate(decoded.rounds):
        assert r.t == t
        assert 0 <= r.accepted <= r.drafted <= (0 if policy is None else policy.max_draft_tokens)
        assert min(r.draft_s, r.policy_s, r.verify_s, r.other_s) >= 0 and r.verify_s > 0
        t += r.accepted + 1
        assert t <= len(decoded.tokens) or index == len(decoded.rounds) - 1
    ended = bool(decoded.tokens) and decoded.tokens[-1] in eos
    assert t - len(decoded.tokens) in ((0, 1) if ended else (0,))
    assert decoded.prefill_s > 0 and decoded.seconds == pytest.approx(sum(r.seconds for r in decoded.rounds))


@mode
@policies
def test_output_is_the_targets_own(sampler: Sampler, policy: ChainPolicy) -> None:
    drafter = decoder(sampler)
    for sequence, prompt in enumerate(random_prompts(3, seed=1)):
        for budget in (1, 2, 3, 24):  # below and above the draft length
            decoded = drafter.decode(prompt, budget, policy, sequence=sequence)
            assert decoded.tokens == plain_output(prompt, budget, sampler, sequence)
            assert len(decoded.tokens) == budget
            check_counts(decoded, policy)


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


@mode
@policies
@pytest.mark.parametrize("place", [0, 1, 2, 5, 11])
def test_decoding_ends_with_the_end_of_text(sampler: Sampler, policy: ChainPolicy, place: int) -> None:
    (prompt,) = random_prompts(1, seed=5)
    plain = plain_output(prompt, 24, sampler, 0)
    eos = (plain[place],)
    decoded = decoder(sampler, eos).decode(prompt, 24, policy)
    assert decoded.tokens == plain[: plain.index(eos[0]) + 1]
    check_counts(decoded, policy, eos)


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


@mode
@pytest.mark.parametrize("eos_from_output", [False, True])
def test_replay_repeats_every_real_round(sampler: Sampler, eos_from_output: bool) -> None:
    prompts = tiny_prompts(4, seed=7)
    eos: tuple[int, ...] = ()
    if eos_from_output:
        eos = tuple({plain_output(p.tokens, 12, sampler, s)[4 * (s % 3)] for s, p in enumerate(prompts[:3])})
    pair = replace(tiny_pair(), eos_token_ids=eos)
    trace = record(pair, prompts, RecordSettings(DEPTH, 30, sampler))
    table = cost_table(trace, ConstantCost(1e-3, 1e-2))
    real = Decoder(pair.target, DraftModel(pair.drafter.model, eos), eos, sampler)
    for policy in (*ARMS, Coin(), DroppingCoin()):
        replayed = replay(trace, policy, table, seed=9, log=True)
        log, state = [], None
        for index, prompt in enumerate(prompts):
            decoded = real.decode(prompt.tokens, 30, policy, sequence=index, seed=9, state=state)
            log += [(index, *r) for r in decoded.tree_log()]
            state = decoded.state
        assert replayed.rounds is not None and replayed.rounds.rows() == log
    assert (trace.output_tokens < 30).any() == eos_from_output


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


def cached_values(lm: CachedLM) -> list[torch.Tensor]:
    """Keys and values [layers, heads, length, size], of the fused pass or of the library's cache."""
    if isinstance(lm, FusedLlama):
        return [part[:, :, : lm.length].clone() for part in (lm.keys, lm.values)]
    layers = lm.cache.layers
    return [torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers])]


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


def test_a_prompt_of_one_token_decodes() -> None:
    assert decoder(Sampler()).decode([5], 12, ARMS[1]).tokens == plain_output([5], 12, Sampler(), 0)
