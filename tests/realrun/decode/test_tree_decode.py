"""Decoding with draft trees: loss-free, replayed round for round, with caches that hold what they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft, layout
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.decode.verify import Accepted, TypicalAcceptance, match_tree, reject_tree
from specsim.policy.registry import make_policy
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy
from tests.realrun.decode.test_decode import CHOICES, TREES, check_counts, decoder, mode, plain_output
from tests.support.checks import refusal
from tests.support.tiny import VOCAB, random_prompts, tiny_pair
from tests.support.tree_policies import CoinTree, KeepNone, Wide

OWN = [*TREES, Wide(0), Wide(1), Wide(2), KeepNone(2)]
policies = pytest.mark.parametrize("policy", OWN, ids=str)


@mode
@pytest.mark.parametrize("policy", [Wide(0), Wide(1), Wide(2), KeepNone(2)], ids=str)
def test_trees_that_no_trace_holds_give_the_targets_own_output(sampler: Sampler, policy: TreePolicy) -> None:
    loop = decoder(sampler)
    for sequence, prompt in enumerate(random_prompts(2, seed=1)):
        decoded = loop.decode(prompt, 24, policy, sequence=sequence)
        assert decoded.tokens == plain_output(prompt, 24, sampler, sequence)
        check_counts(decoded, policy)


@torch.inference_mode()
def plain_siblings(tokens: Sequence[int], sampler: Sampler, position: int, width: int) -> tuple[Any, Any]:
    """Of the draft model alone, without a cache: the first siblings after these tokens and their probs."""
    logits = tiny_pair().drafter.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
    tokens, probs = sampler.candidates(logits, 0, [position], width)
    return tokens[0].tolist(), np.float32(probs[0].double().numpy())


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
                children, probs = plain_siblings(texts[parent], sampler, t + int(tree.depth[parent]), rank + 1)
                assert grower.token[node] == children[rank] and tree.prob[node] == probs[rank]
                assert tree.path[node] == tree.path[parent] * probs[rank]
                assert tree.depth[node] == tree.depth[parent] + 1
                texts.append([*texts[parent], children[rank]])
                expanded.add(parent)
            levels = Counter(int(tree.depth[node]) for node in expanded)
            assert draft.level_nodes == [levels[level] for level in range(len(levels))]
            assert len(draft.step_s) == len(levels) and draft.policy_s > 0
            selected = [int(node) for node in draft.nodes]
            assert selected == sorted(selected) and len(selected) == rounds[0].verified
            assert draft.tokens == [texts[node][-1] for node in selected]
            assert [selected[p] if p >= 0 else 0 for p in draft.parents] == [
                int(tree.parent[node]) for node in selected
            ]


def test_nothing_drafted_makes_plain_rounds() -> None:
    (prompt,) = random_prompts(1, seed=2)
    assert decoder(Sampler()).decode(prompt, 9, Wide(0)).full_log() == [(t, 0, 0, 0, 0, 0) for t in range(9)]
    log = decoder(Sampler()).decode(prompt, 9, KeepNone(2)).full_log()
    assert [(r[0], *r[2:]) for r in log] == [(t, 0, 0, 0, 0) for t in range(9)]
    assert [r[1] for r in log] == [14, 14, 14, 14, 14, 14, 6, 2, 0]  # no deeper than what is left


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
    broken, policy = decoder(sampler, tree_verifier=OneTooMany()), TREES[1]
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
    refusal(lambda: loop.decode([1, 2, 3], 4, TREES[0]), "chains only")


def test_a_tree_of_width_one_is_a_chain() -> None:
    chain, tree = make_policy("fixed_k", {"k": 4}), make_policy("vct", {"width": 1, "depth": 4})
    for sampler in CHOICES.values():
        for sequence, prompt in enumerate(random_prompts(2, seed=11)):
            loop = decoder(sampler)
            on_chain, on_tree = (loop.decode(prompt, 30, policy, sequence=sequence) for policy in (chain, tree))
            assert on_chain.tokens == on_tree.tokens and on_chain.full_log() == on_tree.full_log()


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_multi_branch_rejection_emits_tokens(top_p: float) -> None:
    loop = decoder(Sampler("rejection", 0.9, seed=3, top_p=top_p))
    accepted = set()
    for sequence, prompt in enumerate(random_prompts(3, seed=12)):
        for policy in TREES[:4]:
            decoded = loop.decode(prompt, 20, policy, sequence=sequence)
            assert len(decoded.tokens) == 20 and all(0 <= token < VOCAB for token in decoded.tokens)
            check_counts(decoded, policy)
            accepted |= {r.accepted for r in decoded.rounds}
    assert accepted >= {0, 1, 2}


@policies
def test_typical_acceptance_is_greedy_where_the_temperature_is_low(policy: TreePolicy) -> None:
    for sequence, prompt in enumerate(random_prompts(2, seed=1)):
        plain = plain_output(prompt, 16, Sampler(), sequence)
        for sampler in (Sampler(), Sampler("gumbel", 1e-4, seed=2)):
            loop = decoder(sampler, tree_verifier=TypicalAcceptance())
            assert loop.decode(prompt, 16, policy, sequence=sequence).tokens == plain


def test_typical_acceptance_takes_more_than_the_targets_own_tokens() -> None:
    sampler, policy = Sampler("rejection", 1.5, seed=2), make_policy("vct", {"width": 2, "depth": 4})
    rounds = {}
    for verifier in (reject_tree, TypicalAcceptance(0.01, 0.1)):
        decoded = [decoder(sampler, tree_verifier=verifier).decode(p, 24, policy) for p in random_prompts(3, seed=1)]
        for run in decoded:
            check_counts(run, policy)
            assert all(0 <= token < VOCAB for token in run.tokens)
        rounds[verifier] = sum(len(run.rounds) for run in decoded)
    assert rounds[TypicalAcceptance(0.01, 0.1)] < 0.8 * rounds[reject_tree]


def test_layout_gives_depths_and_ancestors() -> None:
    depths, visible = layout(np.array([-1, -1, 0, 1, 1, 4]))
    assert depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
    seen = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 2, 5}, {0, 2, 5, 6}]
    assert [set(np.flatnonzero(row)) for row in visible] == seen
