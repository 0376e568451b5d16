"""Recorded trees: exactly what best-first expansion finds, one node after the other, from single passes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import realrun.proposals.chain
import realrun.proposals.target_cache
import realrun.proposals.trees
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.lm.cached import CachedLM
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.proposals.chain import branch_columns
from realrun.proposals.recorder import RecordRequest
from realrun.proposals.target_cache import target_cache_columns
from realrun.proposals.trees import Trees, TreeSize, best_trees
from specsim.trace.trace import Trace
from specsim.trace.tree_record import TreeRecord
from tests.realrun.drafters import test_self_sd
from tests.realrun.drafters.test_state_drafters import REFERENCES
from tests.support.checks import refusal
from tests.support.dense_records import (
    Path,
    Siblings,
    as_names,
    as_record,
    check_columns,
    check_trees,
    one_by_one,
    output_of,
    paths_outside_chain,
)
from tests.support.drafting import self_sd_pair
from tests.support.pairs.inside import skipping_pair, target_of
from tests.support.pairs.state import state_pair
from tests.support.tiny import random_prompts, tiny_pair, tiny_prompts

CHOICES = {
    "greedy": Sampler(),
    "gumbel": Sampler("gumbel", 0.8, seed=4),
    "nucleus": Sampler("gumbel", 1.0, seed=5, top_p=0.6),
}
mode = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())
samplers = pytest.mark.parametrize("sampler", [CHOICES["greedy"], CHOICES["gumbel"]], ids=["greedy", "gumbel"])


def made_up(vocabulary: int, width: int, position: int, sharpness: float, grid: int | None = None) -> Siblings:
    """A drafter of random distributions; on a grid, many are equal and some 0."""

    def siblings(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([position, len(tokens), *tokens])
        probs = rng.dirichlet(np.full(vocabulary, sharpness)).astype(np.float32)
        if grid is not None:
            probs = np.round(probs * grid) / np.float32(grid)
        order = np.argsort(-probs, kind="stable")[:width]
        return order, probs[order].astype(np.float32)

    return siblings


def grown(drafters: list[Siblings], depth: int, nodes: int) -> Trees:
    """`best_trees` with made-up drafters, one for each position."""
    names: list[list[int]] = []  # tokens of every numbered node
    chains = []
    for siblings in drafters:
        tokens: list[int] = []
        chain = []
        for level in range(depth):
            chain.append(siblings(tokens))
            tokens = [*tokens, int(chain[-1][0][0])]
            if level < depth - 1:
                names.append(tokens)
        chains.append(chain)
    asked: list[list[int]] = []

    def expand(owner: np.ndarray, depths: np.ndarray, parent: np.ndarray, token: np.ndarray):  # type: ignore[no-untyped-def]
        expanded = []
        for p, d, above, new in zip(owner.tolist(), depths.tolist(), parent.tolist(), token.tolist(), strict=True):
            tokens = [*(names[above] if above >= 0 else []), new]
            assert len(tokens) == d < depth
            expanded.append(drafters[p](tokens))
            asked.append([p, *tokens])
        names.extend(tokens for _, *tokens in asked[len(asked) - len(owner) :])
        columns = zip(*expanded, strict=True)
        return tuple(np.stack(column) for column in columns)

    tokens, probs = (np.array([[part[i] for part in chain] for chain in chains]) for i in (0, 1))
    trees = best_trees(tokens, probs, nodes, expand)
    assert len({tuple(name) for name in asked}) == len(asked), "no node is expanded twice"
    return trees


@pytest.mark.parametrize("at_once", [1, 3, 16])
@pytest.mark.parametrize(
    ("depth", "width", "nodes", "sharpness"),
    [
        (1, 4, 3, 0.5),
        (1, 4, 9, 0.5),
        (4, 5, 4, 0.5),
        (4, 5, 30, 0.1),
        (6, 10, 64, 0.2),
        (6, 3, 200, 1.0),
        (3, 4, 84, 1),
    ],
)
def test_passes_side_by_side_find_what_single_steps_find(
    depth: int, width: int, nodes: int, sharpness: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.proposals.trees, "PASS_NODES", at_once)
    drafters = [made_up(30, width, position, sharpness) for position in range(5)]
    trees = grown(drafters, depth, nodes)
    tree = as_record(trees, width)
    for position, siblings in enumerate(drafters):
        recorded, outside = one_by_one(siblings, depth, nodes)
        assert as_names(tree, position) == recorded
        assert trees.horizon[position] == outside
    whole = sum(width**level for level in range(1, depth + 1))
    assert tree.count.tolist() == [min(nodes, whole)] * 5
    assert (trees.horizon == 0).all() == (nodes >= whole)


@pytest.mark.parametrize("grid", [2, 4, 10])
def test_equal_and_zero_paths_still_make_best_trees(grid: int) -> None:
    depth, width, nodes = 4, 5, 25
    drafters = [made_up(12, width, position, 0.3, grid) for position in range(30)]
    trees = grown(drafters, depth, nodes)
    tree = as_record(trees, width)
    ties = 0
    for position, siblings in enumerate(drafters):
        recorded, outside = one_by_one(siblings, depth, nodes)
        names = as_names(tree, position)
        positive = [path for path in paths_outside_chain(names) if path > 0]
        assert positive == [path for path in paths_outside_chain(recorded) if path > 0]
        assert trees.horizon[position] == outside
        assert all((0,) * level in names for level in range(1, depth + 1))
        for name, described in names.items():  # the node of that very rank, so none before it is left out
            children, probs = siblings([names[name[:level]][0] for level in range(1, len(name))])
            assert described == (children[name[-1]], probs[name[-1]])
        ties += names != recorded
    assert ties > 0


def model_siblings(model: LlamaForCausalLM, context: list[int], t: int, width: int, sampler: Sampler, sequence: int):  # type: ignore[no-untyped-def]
    """The drafter after context, at output position t, asked by one pass over the whole text at a time."""

    def siblings(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*context, *tokens]]), use_cache=False).logits[0, -1:]
            children, probs = sampler.candidates(logits, sequence, [t + len(tokens)], width)
        return children[0].numpy(), probs[0].numpy()

    return siblings


def assert_recorded(
    tree: TreeRecord, position: int, expected: tuple[dict[Path, tuple[int, np.float32]], np.float32]
) -> None:
    recorded, outside = expected
    names = as_names(tree, position)
    assert {name: token for name, (token, _) in names.items()} == {name: token for name, (token, _) in recorded.items()}
    for name, (_, prob) in names.items():
        np.testing.assert_array_max_ulp(prob, recorded[name][1], maxulp=1)
    np.testing.assert_allclose(tree.horizon[position], outside, rtol=1e-6)


@mode
@pytest.mark.parametrize(("depth", "nodes", "width", "chunk"), [(1, 4, 6, 1024), (3, 14, 4, 1024), (5, 20, 10, 40)])
def test_a_record_is_what_the_draft_model_says_path_by_path(
    sampler: Sampler, depth: int, nodes: int, width: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.proposals.trees, "CHUNK_NODES", chunk)
    monkeypatch.setattr(realrun.proposals.trees, "PASS_NODES", 5)
    pair = tiny_pair()
    lm = CachedLM(pair.drafter.model)
    for sequence, prompt in [(0, random_prompts(1)[0]), (5, [3])]:
        output = output_of(pair, prompt, 7, sampler, sequence)
        request = RecordRequest(prompt, output, depth, sampler, sequence, tree=TreeSize(nodes, width))
        columns = branch_columns(lm, request)
        tree = as_record(Trees(*(columns[f"tree_{name}"] for name in Trees._fields)), width)
        for t in range(len(output)):
            siblings = model_siblings(pair.drafter.model, [*prompt, *output[:t]], t, width, sampler, sequence)
            assert_recorded(tree, t, one_by_one(siblings, depth, nodes))
        # The cache holds what it held before the trees.
        assert lm.cache.get_seq_length() == lm.length == len(prompt) + len(output) - 1
        fresh = CachedLM(pair.drafter.model)
        with torch.inference_mode():
            fresh.prefill([*prompt, *output[:-1]])
        assert torch.equal(lm.cache.layers[0].keys, fresh.cache.layers[0].keys)


def little_pair(vocabulary: int) -> Pair:
    """A pair of so few tokens that whole trees can be recorded."""
    models = []
    for seed in (3, 4):
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        )
        torch.manual_seed(seed)
        models.append(LlamaForCausalLM(config).double().eval())
    return replace(tiny_pair(), target=models[0], drafter=IndependentKind(models[1]))


@samplers
@pytest.mark.parametrize("width", [5, 10])
def test_a_whole_tree_is_all_paths_in_level_order(sampler: Sampler, width: int) -> None:
    pair, vocabulary, depth = little_pair(5), 5, 3
    trace = record(pair, [Prompt("all", [1, 2, 3])], RecordSettings(depth, 4, sampler, 200, width))
    assert trace.tree is not None
    whole = [vocabulary, vocabulary**2, vocabulary**3]
    assert trace.tree.count.tolist() == [sum(whole)] * 4 and (trace.tree.horizon == 0).all()
    for t in range(4):
        assert trace.tree.depth[t, : sum(whole)].tolist() == np.repeat([1, 2, 3], whole).tolist()
        siblings = model_siblings(pair.drafter.model, [1, 2, 3, *trace.token[:t].tolist()], t, vocabulary, sampler, 0)
        names = as_names(trace.tree, t)
        assert list(names) == sorted(names, key=lambda name: (len(name), name))
        assert_recorded(trace.tree, t, one_by_one(siblings, depth, sum(whole)))
    probs = trace.tree.prob[:, : sum(whole)].reshape(4, -1, vocabulary)
    np.testing.assert_allclose(probs.sum(axis=2), 1, rtol=1e-6)


@pytest.fixture(scope="module", params=CHOICES.keys())
def trace(request: pytest.FixtureRequest) -> Trace:
    """Four sequences, some of which end early by an end-of-text token."""
    sampler, prompts = CHOICES[request.param], tiny_prompts(4)
    outputs = [output_of(tiny_pair(), p.tokens, 20, sampler, s) for s, p in enumerate(prompts)]
    pair = replace(tiny_pair(), eos_token_ids=(outputs[0][6], outputs[1][3]))
    return record(pair, prompts, RecordSettings(5, 20, sampler, tree_nodes=40, tree_width=6))


def test_every_position_has_its_whole_tree_to_the_very_end(trace: Trace) -> None:
    assert trace.tree is not None and trace.output_tokens.min() < 20
    assert (trace.tree.count == 40).all() and (trace.tree.depth.max(axis=1) == 5).all()
    ends = np.isin(trace.tree.token, trace.eos_token_ids) & (trace.tree.depth < 5)
    children = np.diff(trace.tree.first_child.astype(int), axis=1)[:, 1:]
    assert (children[ends] > 0).any(), "the end of text is a token like any other"


def test_the_chain_is_the_first_sibling_at_every_depth(trace: Trace) -> None:
    assert trace.tree is not None
    rows = np.arange(len(trace.token))
    node = np.zeros_like(rows)
    for depth in range(5):
        node = trace.tree.first_child[rows, node].astype(int)
        np.testing.assert_array_equal(trace.tree.token[rows, node - 1], trace.draft_token[:, depth])
        np.testing.assert_array_equal(trace.tree.rank[rows, node - 1], 0)
        if trace.meta["decoding"]["mode"] == "greedy":
            np.testing.assert_array_max_ulp(trace.tree.prob[rows, node - 1], trace.prob[:, depth], maxulp=1)


def test_nodes_on_the_true_path_have_the_true_ranks(trace: Trace) -> None:
    assert trace.tree is not None and trace.true_rank is not None
    on_path = trace.tree.on_path(trace.token, trace.offsets)
    beside_chain = 0
    for t in range(len(trace.token)):
        node, expected = 0, []
        for rank in trace.true_rank[t].tolist():
            begin, end = trace.tree.first_child[t, node : node + 2].astype(int)
            if not 0 <= rank < end - begin:
                break
            node = begin + rank
            expected.append(node)
        assert (np.flatnonzero(on_path[t]) + 1).tolist() == expected
        beside_chain += any(trace.tree.rank[t, node - 1] > 0 for node in expected)
    assert beside_chain > 3, "some paths leave the chain"


def test_trees_change_nothing_else_and_are_not_there_unless_asked_for() -> None:
    settings = RecordSettings(4, 12, CHOICES["gumbel"])
    plain = record(tiny_pair(), tiny_prompts(2), settings)
    with_trees, again = (record(tiny_pair(), tiny_prompts(2), replace(settings, tree_nodes=20)) for _ in range(2))
    assert plain.tree is None and plain.meta["tree"] is None
    assert with_trees.tree is not None and again.tree is not None
    for name in ("token", "match_len", "draft_token", "prob", "confidence", "entropy_nats", "true_rank"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(with_trees, name))
    for name in ("token", "prob", "first_child", "horizon"):
        np.testing.assert_array_equal(getattr(with_trees.tree, name), getattr(again.tree, name))


REFUSED: list[tuple[dict[str, Any], str]] = [
    *[({"max_draft_tokens": depth}, f"max_draft_tokens={depth} is outside") for depth in (0, -1, 65)],
    *[
        ({"max_draft_tokens": 8, "tree_nodes": n}, f"tree_nodes={n} is neither 0 nor in [8, 1023]")
        for n in (-1, 7, 1024)
    ],
    *[({"tree_nodes": 32, "tree_width": width}, f"tree_width={width} is outside") for width in (0, 257)],
    ({"sampler": Sampler("rejection", 0.8), "tree_nodes": 64}, "tree_nodes=64 with rejection sampling"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_cannot_be_recorded_are_refused(settings: dict[str, Any], message: str) -> None:
    refusal(lambda: RecordSettings(**settings), message)


# Drafters that read the target's cache: what each says after every branch, by the library alone.


slow = pytest.mark.slow
CASES = [  # drafters over fused parts of a target and over the library's
    *[(kind, "llama") for kind in ("edd", "eagle", "eagle3", "self-sd")],
    *[pytest.param(kind, "mistral-sdpa", marks=slow) for kind in ("edd", "eagle", "eagle3")],
    *[pytest.param("self-sd", name, marks=slow) for name in ("qwen2", "mistral")],
]
cases = pytest.mark.parametrize(("kind", "target"), CASES)


def pair_and_reference(kind: str, target: str) -> tuple[Pair, Any]:
    """A pair, and the logits [1, V] of its drafter after a context and drafted tokens."""
    if kind == "self-sd":
        return self_sd_pair(target), lambda *branch: test_self_sd.plain_logits(target, *branch)
    pair, reference = state_pair(kind, target), REFERENCES[kind]
    return pair, lambda *branch: reference(pair, *branch)[None]


@samplers
@cases
@pytest.mark.parametrize("chunk", [3, pytest.param(256, marks=slow)])
@torch.inference_mode()
def test_columns_and_ranks_are_what_the_library_says(
    sampler: Sampler, kind: str, target: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.proposals.target_cache, "CHUNK", chunk)
    monkeypatch.setattr(realrun.proposals.target_cache, "CHUNK_NODES", 4 * chunk)
    pair, reference = pair_and_reference(kind, target)
    split, drafter = pair.make_drafter()
    for sequence, prompt in [(0, random_prompts(1)[0]), (5, [3])]:
        output = output_of(pair, prompt, 7, sampler, sequence)
        request = RecordRequest(prompt, output, 3, sampler, sequence)
        dense = target_cache_columns(split, drafter.lm, request)
        assert drafter.lm.nodes == 0 and split.length == len(prompt) + len(output) - 1
        check_columns(dense, request, reference)


@cases
@torch.inference_mode()
def test_rejection_traces_hold_the_drafters_distributions_and_the_targets_verdict(
    kind: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a pass of the library over every drafted prefix, and over the text."""
    monkeypatch.setattr(realrun.proposals.target_cache, "CHUNK", 3)
    sampler, depth, count = Sampler("rejection", 0.8, seed=4, top_p=0.9), 3, 7
    pair, reference = pair_and_reference(kind, target)
    split, drafter = pair.make_drafter()

    def p_of(tokens: list[int]) -> torch.Tensor:
        return sampler.probs(pair.target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:])[0]

    for sequence, prompt in [(0, random_prompts(1)[0]), (5, [3])]:
        output = output_of(pair, prompt, count, sampler, sequence)
        chances = np.array([float(p_of([*prompt, *output[:t]])[output[t]]) for t in range(count)])
        request = RecordRequest(
            prompt, output, depth, sampler, sequence, lambda hidden, *_: hidden.sum(-1), target_prob=chances
        )
        dense = target_cache_columns(split, drafter.lm, request)
        greedy = target_cache_columns(split, drafter.lm, replace(request, sampler=Sampler()), ranks=False)
        np.testing.assert_allclose(dense["score"][:, 0], greedy["score"][:, 0], rtol=1e-6)
        same = dense["draft_token"][:, 0] == greedy["draft_token"][:, 0]
        np.testing.assert_allclose(dense["score"][same, 1], greedy["score"][same, 1], rtol=1e-6)
        for t, i in itertools.product(range(count), range(depth)):
            branch, context = dense["draft_token"][t].tolist(), [*prompt, *output[:t]]
            q = sampler.probs(reference(context, branch[:i]))[0]
            kept = own = 0.0
            if t + i < count:
                along, y = sampler.probs(reference(context, output[t : t + i]))[0], output[t + i]
                own, kept = float(along[y]), min(1.0, float(along[y] / p_of([*prompt, *output[: t + i]])[y]))
            assert dense["text_prob"][t, i] == pytest.approx(own, rel=1e-5)
            assert dense["text_accept"][t, i] == pytest.approx(kept, rel=1e-5)
            assert dense["prob"][t, i] == pytest.approx(float(q[branch[i]]), rel=1e-5)
            assert dense["confidence"][t, i] == pytest.approx(float(q.max()), rel=1e-5)
            entropy = float(torch.special.entr(q).sum())
            assert dense["entropy_nats"][t, i] == pytest.approx(entropy, rel=1e-5, abs=1e-6)
            if t + i < count:
                logits = reference(context, output[t : t + i])
                order = sampler.candidates(logits, sequence, [t + i], logits.shape[1])[0][0].tolist()
                assert dense["true_rank"][t, i] == order.index(output[t + i])


@samplers
@cases
@torch.inference_mode()
def test_trees_are_what_best_first_expansion_finds_one_node_after_the_other(
    sampler: Sampler, kind: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.proposals.trees, "CHUNK_NODES", 60)  # of three positions
    monkeypatch.setattr(realrun.proposals.trees, "PASS_NODES", 4)
    pair, reference = pair_and_reference(kind, target)
    (prompt,) = random_prompts(1, seed=8)
    output = output_of(pair, prompt, 5, sampler, 2)
    split, drafter = pair.make_drafter()
    request = RecordRequest(prompt, output, 4, sampler, 2, tree=TreeSize(20, 4))
    check_trees(target_cache_columns(split, drafter.lm, request), request, reference)


def test_an_output_shorter_than_a_draft_is_recorded_as_the_head_of_a_longer_one() -> None:
    pair, sampler = skipping_pair(target_of()), Sampler("greedy-draft", 0.8, 0)
    short, long = (record(pair, tiny_prompts(2), RecordSettings(6, tokens, sampler)) for tokens in (3, 12))
    assert short.text_prob is not None and long.text_prob is not None
    for first, of_long in zip(short.offsets[:-1], long.offsets[:-1], strict=True):
        assert short.token[first : first + 3].tolist() == long.token[of_long : of_long + 3].tolist()
        for t in range(3):
            known = short.text_prob[first + t, : 3 - t]
            assert known == pytest.approx(long.text_prob[of_long + t, : 3 - t], rel=1e-5)
