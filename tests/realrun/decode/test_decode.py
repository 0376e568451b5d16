"""The decoding loop over chains and trees, at once, by rounds or in batches: lossless, replayed round for round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numba as nb
import numpy as np
import pytest
import torch

from docs.pages import block
from realrun.decode.batch import BatchDecoding
from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Decoded, RoundContext
from realrun.decode.sampling import Sampler
from realrun.decode.verify import match_verifier
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.lm.batched_llama import BatchedLlama
from realrun.measure.record import RecordSettings, elapsed_ratio, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, lab_prompts
from specsim.cost.linear import LinearCost, LinearPass
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.learn.fit import fit
from specsim.policy.base import Policy, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import CHAIN_POLICIES, TREE_POLICIES, make_policy
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.pairs.inside import pair_of
from tests.support.tiny import POSITIONS, random_prompts, tiny_pair, tiny_prompts
from tests.support.tree_policies import CoinTree

DEPTH, TOKENS = 8, 30
TREE_DEPTH, NODES, WIDTH = 5, 300, 6
CHOICES = {
    "greedy": Sampler(),
    "gumbel": Sampler("gumbel", 0.8, seed=4),
    "greedy-draft": Sampler("greedy-draft", 0.1, seed=4),  # at which this pair's likeliest tokens are accepted at times
}
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
    drops_refused = True
    keep_drafting = staticmethod(flip_after)
    update = staticmethod(verified_tokens)


mode = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())


def decoder(sampler: Sampler, eos: Sequence[int] = (), **verifiers: Any) -> Decoder:
    pair = tiny_pair()
    return Decoder(pair.target, DraftModel(pair.drafter.model, eos), eos, sampler, **verifiers)


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
        log += [(index, *r[:5]) for r in decoded.full_log()]
        state = decoded.state
    assert replayed.rounds is not None and replayed.rounds.rows() == log
    assert replayed.truncated is None or not replayed.truncated.any()


@dataclass(frozen=True)
class DrawnDroppingCoin(DroppingCoin):
    """It says that it reads the drawn token."""

    name = "drawn_dropping_coin"
    features = ("prob",)


def test_sampled_drafts_are_not_dropped_by_the_drawn_token() -> None:
    for policy in (DroppingCoin(), DrawnDroppingCoin()):
        decoder(Sampler("greedy-draft")).decode([1, 2, 3], 4, policy)
    decoder(Sampler("rejection")).decode([1, 2, 3], 4, DroppingCoin())
    with pytest.raises(InputError, match="drawn_dropping_coin: drops drafted tokens by what was drawn"):
        decoder(Sampler("rejection")).decode([1, 2, 3], 4, DrawnDroppingCoin())


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
    refusal(lambda: decoder(Sampler()).decode(prompt, budget, policy), match=says)


def test_prompt_and_output_may_fill_every_position() -> None:
    (prompt,) = random_prompts(1, seed=4)
    decoded = decoder(Sampler()).decode(prompt, POSITIONS - len(prompt), ARMS[1])
    assert len(decoded.tokens) == POSITIONS - len(prompt)


# --- Round by round ---


FOUR = [
    None,
    make_policy("fixed_k", {"k": 3}),
    make_policy("beta_ts", {"max_draft_tokens": 4}),
    make_policy("vct", {"width": 2, "depth": 3}),
]
arms = pytest.mark.parametrize("policy", FOUR, ids=lambda policy: "plain" if policy is None else policy.name)


@arms
@pytest.mark.parametrize("kind", ["model", "edd", "medusa"])
@pytest.mark.parametrize(
    "sampler", [Sampler(), CHOICES["gumbel"], Sampler("rejection", 0.8, seed=4)], ids=lambda s: s.mode
)
def test_round_by_round_gives_what_decode_gives(kind: str, policy: Policy | None, sampler: Sampler) -> None:
    pair = pair_of(kind)
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    for sequence, prompt in enumerate(random_prompts(2, seed=3)):
        how = {"sequence": sequence, "seed": 5}
        whole = decoder.decode(prompt, 23, policy, **how)
        decoding = Decoding(decoder, prompt, 23, policy, **how)
        assert decoding.position == 0 and not decoding.done and decoding.result.rounds == []
        while not decoding.done:
            before = decoding.position
            draft = decoding.advance()
            round_ = decoding.result.rounds[-1]
            assert round_.t == before < decoding.position <= 23
            assert len(draft.tokens) == round_.verified and tuple(draft.step_s) == round_.step_s
            assert decoding.result.tokens == whole.tokens[: decoding.position]
        assert decoding.result.tokens == whole.tokens and decoding.result.full_log() == whole.full_log()
        assert decoding.result.state == whole.state and decoding.result.prefill_s > 0


@arms
def test_the_end_of_the_text_ends_it(policy: Policy | None) -> None:
    prompt = random_prompts(1, seed=3)[0]
    pair = tiny_pair()
    text = Decoder(*pair.make_drafter(), (), CHOICES["gumbel"]).decode(prompt, 23, None).tokens
    ends = text[9]
    decoding = Decoding(Decoder(*pair.make_drafter(), (ends,), CHOICES["gumbel"]), prompt, 23, policy)
    while not decoding.done:
        assert ends not in decoding.result.tokens
        decoding.advance()
    assert decoding.result.tokens == text[: text.index(ends) + 1]


@arms
def test_a_round_says_what_it_did_and_seconds_of_steps_are_part_of_the_drafting(policy: Policy | None) -> None:
    pair = tiny_pair()
    rounds = Decoder(*pair.make_drafter(), (), CHOICES["gumbel"]).decode(random_prompts(1)[0], 23, policy).rounds
    for round_ in rounds:
        assert 0 <= sum(round_.step_s) <= round_.draft_s and min(round_.step_s, default=1.0) > 0
        assert (round_.fed > 0) == (round_.drafted > 0)
        if policy is not None and policy.name == "vct":
            assert len(round_.level_nodes) == len(round_.step_s) and (round_.asked > 0 or not round_.drafted)
        else:  # after the last token that there is room for, nobody is asked
            assert round_.level_nodes == () and len(round_.step_s) == round_.drafted
            assert round_.asked in (round_.drafted, max(0, round_.drafted - 1))


def test_the_readme_policy_decodes_as_it_replays(tmp_path: Path) -> None:
    path = tmp_path / "prob_floor.py"
    path.write_text(block("extending.md", "class ProbFloor"))
    pair, prompts, sampler = tiny_pair(), tiny_prompts(3), Sampler("greedy")
    trace = record(pair, prompts, RecordSettings(5, 24, sampler))
    policy = make_policy(str(path), {"floor": 0.05, "max_draft_tokens": 5})
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2)), log=True)
    decoder = Decoder(pair.target, DraftModel(pair.drafter.model, pair.eos_token_ids), pair.eos_token_ids, sampler)
    assert replayed.rounds is not None
    lengths = set()
    for index, prompt in enumerate(prompts):
        decoded = decoder.decode(prompt.tokens, 24, policy, sequence=int(trace.sequence_id[index]))
        expected = [row[1:] for row in replayed.rounds.rows() if row[0] == index]
        assert [row[:5] for row in decoded.full_log()] == expected
        lengths |= {drafted for _, drafted, *_ in expected}
    assert len(lengths) > 2, "the policy decides, not its limit"


# --- The lab, in float64 ---


SIZES = [  # (prompts, output tokens)
    pytest.param((4, 40), id="4x40"),
    pytest.param((21, 128), id="21x128", marks=pytest.mark.slow),
]
LAB_CHOICES = {"greedy": Sampler("greedy"), "gumbel": Sampler("gumbel", 0.8, seed=11)}
LAB_SETTINGS = [
    ("fixed_k", {"k": 4}),
    ("max_confidence", {"lambda0": 0.4, "dynamic": True}),
    ("max_confidence", {"lambda0": 0.3, "dynamic": False}),
    ("adaedl", {"lambda0": 0.1, "dynamic": True}),
    ("adaedl", {"lambda0": -0.2, "dynamic": False}),
    ("time_gain", {"cost_ratio": 0.2}),
    ("hugging_face", {"max_draft_tokens": 16}),
    ("hugging_face", {"schedule": "heuristic", "num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}),
    ("hugging_face", {"schedule": "heuristic_transient", "num_assistant_tokens": 5}),
    ("llama_cpp", {"p_min": 0.5, "max_draft_tokens": 16}),
    ("p_min", {}),
    ("space_k", {"k": 5}),
    ("beta_ts", {"alpha0": 1.0, "beta0": 1.0}),
    ("beta_ts", {"alpha0": 1140.0, "beta0": 360.0}),
    ("beta_ts", {"alpha0": 1.0, "beta0": 1.0, "counting": "printed", "theta": "per_round", "carry": True}),
    ("cali_ts", {}),
    ("cali_ts", {"counting": "printed", "theta": "per_round", "carry": True}),
    ("cali_ts_confidence", {}),
    ("renewal_stop", {}),
]


@dataclass(frozen=True)
class LabRecorded:
    """A trace of the lab and what it was lab_recorded from."""

    sampler: Sampler
    trace: Trace
    prompts: list[Prompt]
    new_tokens: int


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture(scope="module", params=["gumbel", pytest.param("greedy", marks=pytest.mark.slow)])
def lab_recorded(request: pytest.FixtureRequest, size: tuple[int, int], lab_pair64: Pair) -> LabRecorded:
    sampler, (count, new_tokens) = LAB_CHOICES[request.param], size
    prompts = lab_prompts(lab_pair64.tokenizer, count)
    return LabRecorded(
        sampler, record(lab_pair64, prompts, RecordSettings(16, new_tokens, sampler)), prompts, new_tokens
    )


def test_every_policy_is_tested_here() -> None:
    assert {name for name, _ in LAB_SETTINGS} == set(CHAIN_POLICIES)


@pytest.mark.parametrize("spec", LAB_SETTINGS, ids=lambda spec: str(make_policy(*spec)))
def test_every_round_and_every_output_is_identical(
    lab_recorded: LabRecorded, spec: tuple[str, dict[str, Any]], lab_pair64: Pair
) -> None:
    name, settings = spec
    table = cost_table(lab_recorded.trace, ConstantCost(1e-3, 5e-3))
    policy = fit(CHAIN_POLICIES[name], settings, lab_recorded.trace, table)
    replayed = replay(lab_recorded.trace, policy, table, seed=3, log=True)
    drafter = DraftModel(lab_pair64.drafter.model, lab_pair64.eos_token_ids, lab_pair64.predictor)
    decoder = Decoder(lab_pair64.target, drafter, lab_pair64.eos_token_ids, lab_recorded.sampler)
    runs, state = [], None
    for number, prompt in enumerate(lab_recorded.prompts):
        runs.append(
            decoder.decode(prompt.tokens, lab_recorded.new_tokens, policy, sequence=number, seed=3, state=state)
        )
        state = runs[-1].state
    assert rounds_identical(replayed, runs) == 1.0
    assert sum(len(run.rounds) for run in runs) == replayed.num_rounds.sum()
    assert output_identical(lab_recorded.trace, runs) == 1.0


@torch.inference_mode()
def test_recorded_outputs_are_the_targets_own_choices(lab_recorded: LabRecorded, lab_pair64: Pair) -> None:
    """Checked without our loop and without a cache: one plain forward pass over each output."""
    sampler, trace = lab_recorded.sampler, lab_recorded.trace
    for number, prompt in enumerate(lab_recorded.prompts):
        output = trace.token[trace.offsets[number] : trace.offsets[number + 1]].tolist()
        ids = torch.tensor([prompt.tokens + output])
        logits = lab_pair64.target(input_ids=ids, use_cache=False).logits[0, len(prompt.tokens) - 1 : -1]
        assert sampler.tokens(logits, number, 0).tolist() == output
        if sampler.mode == "greedy":
            assert logits.argmax(-1).tolist() == output


def test_the_traces_look_like_real_text(lab_recorded: LabRecorded) -> None:
    """A pair that always or never agrees, or text that loops, would teach nothing."""
    meta = lab_recorded.trace.meta
    assert 0.4 < meta["first_token_accepted_share"] < 0.85
    if lab_recorded.sampler.mode == "gumbel":
        assert meta["distinct_trigram_share"] > 0.6


@pytest.mark.bench
def test_recording_costs_at_most_four_times_generating(lab_pair32: Pair, prompts: list[Prompt]) -> None:
    record(lab_pair32, prompts[:1], RecordSettings(2, 8, LAB_CHOICES["gumbel"]))  # warm-up
    trace = record(lab_pair32, prompts[:3], RecordSettings(16, 256, LAB_CHOICES["gumbel"]))
    assert elapsed_ratio(trace) < 4


# --- In batches: every sequence as it is alone, and the rounds that the simulation has ---


PROMPTS = tiny_prompts(5)
COST = LinearCost(LinearPass(0.01), LinearPass(0.002))


def decoded(k: int, count: int = 5, eos: tuple[int, ...] = (), budgets: Any = None) -> BatchDecoding:
    pair = tiny_pair(eos)
    target, drafter = BatchedLlama(pair.target), BatchedLlama(pair.drafter.model)
    prompts = [prompt.tokens for prompt in PROMPTS[:count]]
    decoding = BatchDecoding(target, drafter, prompts, budgets or [TOKENS] * count, k, eos)
    while not decoding.done:
        decoding.advance()
    return decoding


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_sequence_is_decoded_as_it_is_alone(count: int, k: int) -> None:
    free = decoded(k, count)
    common = max(range(97), key=lambda token: sum(token in row.output for row in free.rows))
    for eos in ((), (common,)):
        together = decoded(k, count, eos)
        decoder = Decoder(*tiny_pair(eos).make_drafter(), eos, Sampler())
        for prompt, row in zip(PROMPTS, together.rows, strict=False):
            alone = decoder.decode(prompt.tokens, TOKENS, FixedK(k=k) if k else None)
            assert (row.output, row.rounds) == (alone.tokens, alone.log())
    if count == 5:
        assert len({len(row.output) for row in together.rows}) > 1  # texts end at different times
        assert not k or len({tuple(row.rounds) for row in together.rows}) > 1


@pytest.mark.parametrize("k", [0, 3])
def test_rounds_are_those_of_the_simulation(k: int) -> None:
    """Sequence by sequence, and which of them share a round of the batch."""
    trace = record(tiny_pair(), PROMPTS, RecordSettings(4, TOKENS, Sampler()))
    simulated = lockstep(drafts_of(trace, FixedK(k=k) if k else None), COST, 5).rounds
    real = decoded(k)
    for row in real.rows:
        mine = simulated.sequence == row.number
        columns = (simulated.t, simulated.drafted, simulated.accepted)
        assert row.rounds == list(zip(*(column[mine].tolist() for column in columns), strict=True))
        took_part = [number for number, round_ in enumerate(real.rounds) if row.number in round_.numbers]
        assert took_part == simulated.batch_round[mine].tolist()
    drafted = np.zeros(len(real.rounds), dtype=int)
    np.maximum.at(drafted, simulated.batch_round, simulated.drafted)
    assert [len(round_.step_s) for round_ in real.rounds] == drafted.tolist()
    assert all(round_.verify_s > 0 and round_.other_s > 0 for round_ in real.rounds)


def test_budgets_differ_and_the_position_is_the_mean_of_all() -> None:
    decoding = decoded(2, 3, budgets=[1, 7, 20])
    assert [len(row.output) for row in decoding.rows] == [1, 7, 20] and decoding.position == 28 / 3
    assert decoding.rounds[0].numbers == (0, 1, 2) and set(decoding.rounds[-1].numbers) == {2}


def test_what_cannot_be_decoded_is_refused() -> None:
    refusal(lambda: decoded(1, 0), "no prompts")
    refusal(lambda: decoded(1, 2, budgets=[5, 0]), "at least 1")
    refusal(lambda: decoded(1, 2, budgets=[5, POSITIONS]), "160 positions")
