"""Decoding with draft trees: loss-free, replayed round for round, with caches that hold what they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft, Siblings, layout
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Decoded, Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.decode.tree_verify import Accepted, TreeVerifier, TypicalAcceptance, match_tree, reject_tree
from realrun.lm.kernels import use_kernels
from realrun.lm.static.llama import StaticLlama
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.recording.record import RecordSettings, record
from specsim.cost.model import ConstantCost
from specsim.errors import InputError
from specsim.policy.registry import TREE_POLICIES, make_policy
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.realrun.decode import test_decode
from tests.support.sampling_distribution import Distribution, add, warped
from tests.support.tiny import VOCAB, random_prompts, tiny_pair, tiny_prompts
from tests.support.tree_policies import CoinTree, KeepNone, Wide

DEPTH, WIDTH = 5, 6
CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
SETTINGS: dict[str, list[dict[str, Any]]] = {  # of trees that differ from round to round on this pair
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
        {"cost_ratio": 0.1, "leaf_threshold": 0.05, "width": 4, "max_depth": DEPTH},
        {"cost_ratio": 0.3, "leaf_threshold": 0.1, "width": 5, "max_depth": 3, "max_nodes": 5, "test": "level"},
    ],
    "hardware_pct": [{"width": 4, "max_depth": DEPTH, "max_nodes": 20, "min_path_prob": 0.02}],
    "beta_ts_tree": [
        {"alpha0": 3.0, "beam": 2, "width": 3, "max_depth": DEPTH},
        {"alpha0": 2.0, "counting": "printed", "theta": "per_round", "carry": True, "nodes": 6, "max_depth": 4},
    ],
}


def arms() -> list[TreePolicy]:
    """Tree policies but those that read a predictor's score, which this pair has not; tests/contract has them."""
    kinds = {name: kind for name, kind in TREE_POLICIES.items() if "score" not in kind.features}
    policies = [make_policy(name, s) for name in kinds for s in SETTINGS.get(name, [{}])]
    assert all(isinstance(policy, TreePolicy) for policy in policies)
    return policies  # type: ignore[return-value]


ARMS = [*arms(), CoinTree()]
OWN = [*ARMS, Wide(0), Wide(1), Wide(2), KeepNone(2)]
mode = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())
policies = pytest.mark.parametrize("policy", OWN, ids=str)


def decoder(sampler: Sampler, eos: Sequence[int] = (), verifier: TreeVerifier | None = None, **options: Any) -> Decoder:
    pair = tiny_pair()
    return Decoder(pair.target, DraftModel(pair.drafter.model, eos, **options), eos, sampler, tree_verifier=verifier)


@cache
def whole_output(prompt: tuple[int, ...], sampler: Sampler, sequence: int) -> list[int]:
    return test_decode.plain_output(prompt, 24, sampler, sequence)


def plain_output(prompt: Sequence[int], count: int, sampler: Sampler, sequence: int) -> list[int]:
    """The first, up to 24, tokens of the target alone."""
    return whole_output(tuple(prompt), sampler, sequence)[:count]


def check_counts(decoded: Decoded, policy: TreePolicy, eos: Sequence[int] = ()) -> None:
    """Every round emits its accepted tokens and one more, unless the end of text cut it."""
    t = 0
    for r in decoded.rounds:
        assert r.t == t
        assert 0 <= r.accepted <= min(policy.max_draft_tokens, r.verified) <= r.verified <= r.drafted <= MAX_DRAFTED
        assert r.accepted <= r.last <= r.verified and (r.last > 0) == (r.accepted > 0)
        assert min(r.draft_s, r.policy_s, r.verify_s, r.other_s) >= 0 and r.verify_s > 0
        t += r.accepted + 1
    ended = bool(decoded.tokens) and decoded.tokens[-1] in eos
    assert t - len(decoded.tokens) in ((0, 1) if ended else (0,))


@mode
@policies
def test_output_is_the_targets_own(sampler: Sampler, policy: TreePolicy) -> None:
    loop = decoder(sampler)
    for sequence, prompt in enumerate(random_prompts(2, seed=1)):
        for budget in (1, 2, 3, 24):  # below and above the depth
            decoded = loop.decode(prompt, budget, policy, sequence=sequence)
            assert decoded.tokens == plain_output(prompt, budget, sampler, sequence)
            check_counts(decoded, policy)


@mode
@policies
@pytest.mark.parametrize("place", [0, 11])
def test_decoding_ends_with_the_end_of_text(sampler: Sampler, policy: TreePolicy, place: int) -> None:
    (prompt,) = random_prompts(1, seed=5)
    plain = plain_output(prompt, 24, sampler, 0)
    eos = (plain[place],)
    decoded = decoder(sampler, eos).decode(prompt, 24, policy)
    assert decoded.tokens == plain[: plain.index(eos[0]) + 1]
    check_counts(decoded, policy, eos)


def test_trees_are_accepted_beside_the_chain() -> None:
    """Else the claims above would say little."""
    policy = make_policy("vct", {"width": 3, "depth": 3})  # nodes 1, 4 and 13 are the chain
    for sampler in CHOICES.values():
        rounds = [
            r
            for sequence, prompt in enumerate(random_prompts(6, seed=1))
            for r in decoder(sampler).decode(prompt, 40, policy, sequence=sequence).rounds
        ]
        assert {r.accepted for r in rounds} >= {0, 1, 2}
        assert len({r.last for r in rounds} - {0, 1, 4, 13}) > 3


@cache
def recorded(sampler: Sampler, eos: tuple[int, ...]) -> tuple[Pair, Sequence[Prompt], Trace]:
    pair, prompts = replace(tiny_pair(), eos_token_ids=eos), tiny_prompts(3, seed=7)
    return pair, prompts, record(pair, prompts, RecordSettings(DEPTH, 24, sampler, 300, WIDTH))


@mode
@pytest.mark.parametrize("eos_from_output", [False, True])
@pytest.mark.parametrize("policy", ARMS, ids=str)
def test_replay_repeats_every_real_round(sampler: Sampler, eos_from_output: bool, policy: TreePolicy) -> None:
    eos: tuple[int, ...] = ()
    if eos_from_output:
        eos = tuple({plain_output(p.tokens, 9, sampler, s)[2 + 3 * s] for s, p in enumerate(tiny_prompts(3, seed=7))})
    pair, prompts, trace = recorded(sampler, eos)
    assert (trace.output_tokens < 24).any() == eos_from_output
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2)), seed=9, log=True)
    real = Decoder(pair.target, DraftModel(pair.drafter.model, eos), eos, sampler)
    log, state = [], None
    for index, prompt in enumerate(prompts):
        decoded = real.decode(prompt.tokens, 24, policy, sequence=index, seed=9, state=state)
        log += [(index, *r) for r in decoded.tree_log()]
        state = decoded.state
    assert replayed.rounds is not None and replayed.truncated is not None
    assert not replayed.truncated.any()
    assert replayed.rounds.rows() == log


@torch.inference_mode()
def plain_siblings(tokens: Sequence[int], sampler: Sampler, position: int, width: int) -> tuple[Any, Any]:
    """Of the draft model alone, without a cache: the first siblings after these tokens and their probs."""
    logits = tiny_pair().drafter.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
    found, probs = sampler.candidates(logits, 0, [position], width)
    return found[0].tolist(), np.float32(probs[0].double().numpy())


@mode
@pytest.mark.parametrize("policy", [make_policy("vct", {"width": 3, "depth": 3}), CoinTree(0.02)], ids=str)
def test_drafted_nodes_are_what_plain_passes_say(sampler: Sampler, policy: TreePolicy) -> None:
    """Round after round, so that what is left in the draft cache counts as well."""
    (prompt,) = random_prompts(1, seed=3)
    loop = decoder(sampler)
    drafter = loop.drafter
    assert isinstance(drafter, DraftModel)
    with torch.inference_mode():
        tokens, state = list(prompt), policy.initial_state(policy.params)
        loop.target.prefill(tokens[:-1])
        drafter.begin(tokens[:-1])
        for _ in range(8):
            before, t = list(tokens), len(tokens) - len(prompt)
            rounds: list[Round] = []
            state, draft = loop.round(
                tokens, RoundContext(loop.sampler, 0, t, policy.max_draft_tokens, 5), policy, state, rounds
            )
            grower = drafter._grower
            tree, total = grower.tree, draft.drafted + 1
            texts, expanded = [before], set[int]()
            for node in range(1, total):
                parent, rank = int(tree.parent[node]), int(tree.rank[node])
                found, probs = plain_siblings(texts[parent], sampler, t + int(tree.depth[parent]), rank + 1)
                assert grower.token[node] == found[rank] and tree.prob[node] == probs[rank]
                assert tree.path[node] == tree.path[parent] * probs[rank]
                assert tree.depth[node] == tree.depth[parent] + 1
                texts.append([*texts[parent], found[rank]])
                expanded.add(parent)
            levels = Counter(int(tree.depth[node]) for node in expanded)
            assert draft.level_nodes == [levels[level] for level in range(len(levels))]
            assert len(draft.step_s) == len(levels) and draft.policy_s > 0
            kept = [int(node) for node in draft.nodes]
            assert kept == sorted(kept) and len(kept) == rounds[0].verified
            assert draft.tokens == [texts[node][-1] for node in kept]
            assert [kept[p] if p >= 0 else 0 for p in draft.parents] == [int(tree.parent[node]) for node in kept]


@mode
def test_the_static_cache_decodes_trees_as_well(sampler: Sampler) -> None:
    (prompt,) = random_prompts(1, seed=6)
    for policy in (ARMS[1], CoinTree()):
        fused = decoder(sampler).decode(prompt, 24, policy)
        with use_kernels("reference"):
            static = decoder(sampler)
            decoded = static.decode(prompt, 24, policy)
        assert isinstance(static.target, StaticLlama)
        assert decoded.tokens == fused.tokens and decoded.tree_log() == fused.tree_log()


def test_nothing_drafted_makes_plain_rounds() -> None:
    (prompt,) = random_prompts(1, seed=2)
    assert decoder(Sampler()).decode(prompt, 9, Wide(0)).tree_log() == [(t, 0, 0, 0, 0) for t in range(9)]
    kept = decoder(Sampler()).decode(prompt, 9, KeepNone(2)).tree_log()
    assert [(r[0], *r[2:]) for r in kept] == [(t, 0, 0, 0) for t in range(9)]
    assert [r[1] for r in kept] == [14, 14, 14, 14, 14, 14, 6, 2, 0]  # no deeper than what is left


def test_a_tree_ends_where_its_arrays_and_the_vocabulary_do() -> None:
    (prompt,) = random_prompts(1, seed=2)
    for sampler in CHOICES.values():
        decoded = decoder(sampler).decode(prompt, 6, Wide(2000, 1))
        assert {r.drafted for r in decoded.rounds[:-1]} == {VOCAB}
        assert all(r.accepted == 1 for r in decoded.rounds[:-1])  # one of all tokens is right
        assert decoded.tokens == plain_output(prompt, 6, sampler, 0)
        decoded = decoder(sampler).decode(prompt, 6, Wide(30, 64))
        assert decoded.rounds[0].drafted == MAX_DRAFTED
        assert decoded.tokens == plain_output(prompt, 6, sampler, 0)


class OneTooMany:
    """Wrong on purpose: accepts a child of the last accepted node, whatever the target says."""

    lossy: ClassVar[bool] = True

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> Accepted:
        path, token = match_tree(logits, draft, context)
        last = path[-1] if path else -1
        return ([*path, draft.parents.index(last)] if last in draft.parents else path), token


@mode
def test_a_verifier_that_accepts_one_token_too_many_is_caught(sampler: Sampler) -> None:
    broken, policy = decoder(sampler, verifier=OneTooMany()), ARMS[1]
    outputs = [broken.decode(p, 24, policy, sequence=s).tokens[:24] for s, p in enumerate(random_prompts(3, seed=1))]
    assert outputs != [plain_output(p, 24, sampler, s) for s, p in enumerate(random_prompts(3, seed=1))]


def test_a_drafter_of_chains_alone_says_so() -> None:
    class ChainDrafter:
        kind = "chain"
        wants_target_hidden = False

        def prepare(self, *args: Any) -> None: ...

        def begin(self, *args: Any) -> None: ...

        def propose(self, *args: Any) -> Draft:
            return Draft()

        def commit(self, *args: Any) -> None: ...

    loop = Decoder(tiny_pair().target, ChainDrafter(), (), Sampler())
    with pytest.raises(InputError, match="chains only"):
        loop.decode([1, 2, 3], 4, ARMS[0])


def test_a_tree_of_width_one_is_a_chain() -> None:
    """By rejection sampling too, where every draw is keyed alike."""
    chain, tree = make_policy("fixed_k", {"k": 4}), make_policy("vct", {"width": 1, "depth": 4})
    for sampler in (*CHOICES.values(), Sampler("rejection", 0.9, seed=3)):
        for sequence, prompt in enumerate(random_prompts(2, seed=11)):
            loop = decoder(sampler, siblings="iid")
            one, other = (loop.decode(prompt, 30, policy, sequence=sequence) for policy in (chain, tree))
            assert one.tokens == other.tokens and one.tree_log() == other.tree_log()


@pytest.mark.parametrize("siblings", get_args(Siblings))
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_multi_branch_rejection_emits_tokens(siblings: Siblings, top_p: float) -> None:
    loop = decoder(Sampler("rejection", 0.9, seed=3, top_p=top_p), siblings=siblings)
    accepted = set()
    for sequence, prompt in enumerate(random_prompts(3, seed=12)):
        for policy in ARMS[:4]:
            decoded = loop.decode(prompt, 20, policy, sequence=sequence)
            assert len(decoded.tokens) == 20 and all(0 <= token < VOCAB for token in decoded.tokens)
            check_counts(decoded, policy)
            accepted |= {r.accepted for r in decoded.rounds}
    assert accepted >= {0, 1, 2}


def test_drawn_siblings_of_which_some_are_dropped_are_refused() -> None:
    policy = make_policy("eagle2", {"nodes": 4, "depth": 3, "top_k": 3})
    for siblings in ("iid", "without_replacement"):
        with pytest.raises(InputError, match="top_k"):
            decoder(Sampler("rejection", 0.9), siblings=siblings).decode([1, 2, 3], 9, policy)
    assert len(decoder(Sampler("rejection", 0.9)).decode([1, 2, 3], 9, policy).tokens) == 9


@policies
def test_typical_acceptance_is_greedy_where_the_temperature_is_low(policy: TreePolicy) -> None:
    for sequence, prompt in enumerate(random_prompts(2, seed=1)):
        plain = plain_output(prompt, 16, Sampler(), sequence)
        for sampler in (Sampler(), Sampler("gumbel", 1e-4, seed=2)):
            loop = decoder(sampler, verifier=TypicalAcceptance())
            assert loop.decode(prompt, 16, policy, sequence=sequence).tokens == plain


def test_typical_acceptance_takes_more_than_the_targets_own_tokens() -> None:
    sampler, policy = Sampler("rejection", 1.5, seed=2), make_policy("vct", {"width": 2, "depth": 4})
    rounds = {}
    for verifier in (reject_tree, TypicalAcceptance(0.01, 0.1)):
        decoded = [decoder(sampler, verifier=verifier).decode(p, 24, policy) for p in random_prompts(3, seed=1)]
        for one in decoded:
            check_counts(one, policy)
            assert all(0 <= token < VOCAB for token in one.tokens)
        rounds[verifier] = sum(len(one.rounds) for one in decoded)
    assert rounds[TypicalAcceptance(0.01, 0.1)] < 0.8 * rounds[reject_tree]


def test_layout_gives_depths_and_ancestors() -> None:
    depths, visible = layout(np.array([-1, -1, 0, 1, 1, 4]))
    assert depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
    seen = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 2, 5}, {0, 2, 5, 6}]
    assert [set(np.flatnonzero(row)) for row in visible] == seen


# The whole loop follows the target's distribution in multi-branch rejection, by many samples over a small vocabulary.
SMALL_VOCAB, LENGTH, SAMPLES = 4, 3, 1500
SMALL_PROMPT = [1, 3, 0, 2]
SAMPLED = Sampler("rejection", 1.2, seed=5, top_p=0.8)


@cache
def disagreeing() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    def model(seed: int) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=SMALL_VOCAB, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, initializer_range=0.5, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=0, pad_token_id=None,
        )  # fmt: skip
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).double().eval()

    return model(2), model(4)


@cache
def target_distribution() -> Distribution:
    """Of the first tokens, from plain passes of the target over every path."""
    target, _ = disagreeing()
    distribution: Distribution = {}

    def after(path: tuple[int, ...]) -> list[float]:
        with torch.inference_mode():
            logits = target(input_ids=torch.tensor([[*SMALL_PROMPT, *path]]), use_cache=False).logits[0, -1]
        return warped(logits.tolist(), SAMPLED.temperature, SAMPLED.top_p)

    add(distribution, (), 1.0, after, LENGTH)
    return distribution


def p_value(siblings: Siblings, policy: TreePolicy, verifier: TreeVerifier | None = None) -> float:
    """Of a chi-square test of the loop's first tokens against the target's distribution; 0 for an impossible output."""
    target, draft = disagreeing()
    loop = Decoder(target, DraftModel(draft, (), siblings=siblings), (), SAMPLED, tree_verifier=verifier)
    distribution, counts = target_distribution(), Counter[tuple[int, ...]]()
    for sequence in range(SAMPLES):
        counts[tuple(loop.decode(SMALL_PROMPT, LENGTH + 1, policy, sequence=sequence).tokens[:LENGTH])] += 1
    if not counts.keys() <= distribution.keys():
        return 0.0
    often = [path for path, chance in distribution.items() if SAMPLES * chance >= 5]
    seen, expected = [counts[path] for path in often], [SAMPLES * distribution[path] for path in often]
    rest = SAMPLES * sum(chance for path, chance in distribution.items() if path not in often)
    if rest > 0:
        seen, expected = [*seen, SAMPLES - sum(seen)], [*expected, rest]
    return float(stats.chisquare(seen, np.array(expected) * SAMPLES / sum(expected)).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("siblings", get_args(Siblings))
@pytest.mark.parametrize("policy", [Wide(2), Wide(3, 2)], ids=str)
def test_many_samples_of_multi_branch_rejection_follow_the_target(siblings: Siblings, policy: TreePolicy) -> None:
    assert p_value(siblings, policy) > 1e-3


@pytest.mark.slow
def test_samples_catch_a_wrong_rule_for_siblings() -> None:
    """Distributions of other siblings than were drafted."""

    class Swapped:
        lossy: ClassVar[bool] = True

        def __call__(self, logits: torch.Tensor, draft: Draft, *place: Any) -> Accepted:
            return reject_tree(logits, replace(draft, siblings="iid"), *place)

    assert p_value("without_replacement", Wide(3, 2), Swapped()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Sampler(), Sampler("gumbel", 0.8, seed=1)], ids=["greedy", "gumbel"])
def test_the_lab_replays_every_round(lab_pair64: Pair, prompts: list[Prompt], sampler: Sampler) -> None:
    chosen = prompts[:3]
    trace = record(lab_pair64, chosen, RecordSettings(8, 48, sampler, 250, 8))
    table = cost_table(trace, ConstantCost(1e-3, 1e-2))
    eos = lab_pair64.eos_token_ids
    real = Decoder(lab_pair64.target, DraftModel(lab_pair64.drafter.model, eos), eos, sampler)
    compared = 0
    for policy in ARMS:
        replayed = replay(trace, policy, table, seed=2, log=True)
        assert replayed.rounds is not None and replayed.truncated is not None
        state = None
        for index, prompt in enumerate(chosen):
            decoded = real.decode(prompt.tokens, 48, policy, sequence=index, seed=2, state=state)
            state = decoded.state
            recorded_text = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
            assert decoded.tokens == recorded_text
            if replayed.truncated[: index + 1].any():
                continue
            log = [row[1:] for row in replayed.rounds.rows() if row[0] == index]
            assert decoded.tree_log() == log
            compared += 1
    assert compared > 0.8 * len(ARMS) * len(chosen)
