"""Passes over the nodes of a draft tree: each node's logits are those of its path, each kept path a plain cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from realrun.lm import cached
from realrun.lm.cached import CachedLM
from realrun.lm.kernels import use_kernels
from realrun.lm.llama import FusedLlama
from realrun.lm.static.llama import StaticLlama
from specsim.io.errors import InputError
from tests.realrun.lm.test_kernels_option import ON_CPU
from tests.support.kernel_trees import mask_bits_of, path_to_root
from tests.support.llama_models import FLOAT64, POSITIONS, SIZES, VOCAB, qwen3, recorded, small_model, with_garbage


@pytest.fixture(scope="module", autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass(frozen=True)
class Tree:
    """Nodes from 0, in level order; parents[0] is -1."""

    tokens: list[int]
    parents: list[int]

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def visible(self) -> torch.Tensor:
        """Bool [n, n]: the path to every node."""
        visible = torch.zeros(len(self.tokens), len(self.tokens), dtype=torch.bool)
        for node in range(len(self.tokens)):
            visible[node, self.path(node)] = True
        return visible

    def path(self, node: int) -> list[int]:
        """From the root to this node; none for -1."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def level_ends(self) -> list[int]:
        """Number of nodes down to every depth."""
        depths = self.depths
        return [end for end in range(1, len(depths) + 1) if end == len(depths) or depths[end] > depths[end - 1]]


def make_tree(choices: Sequence[int], seed: int) -> Tree:
    """A node below an earlier one for every number, renumbered level by level."""
    parents = [-1, *(sampler % (node + 1) for node, sampler in enumerate(choices))]
    depths = Tree([0] * len(parents), parents).depths
    order = sorted(range(len(parents)), key=lambda node: (depths[node], node))
    number = {-1: -1} | {old: new for new, old in enumerate(order)}
    tokens = np.random.default_rng(seed).integers(0, VOCAB, len(parents)).tolist()
    return Tree(tokens, [number[parents[old]] for old in order])


trees = st.builds(make_tree, st.lists(st.integers(0, 99), max_size=11), st.integers(0, 99))


def random_tree(nodes: int, seed: int) -> Tree:
    return make_tree(np.random.default_rng(seed).integers(0, 10**6, nodes - 1).tolist(), seed)


def append(lm: CachedLM, tree: Tree, ends: Sequence[int] | None = None) -> torch.Tensor:
    """Logits of all nodes, appended in passes that end before these nodes; in one pass unless given."""
    first, logits, depths, visible = 0, [], tree.depths, tree.visible
    for end in ends or [len(tree.tokens)]:
        now = slice(first, end)
        # Cloned, as another pass of the same size may overwrite it.
        logits.append(lm.forward_nodes(tree.tokens[now], depths[now], visible[now, :end]).clone())
        assert lm.nodes == end
        first = end
    return torch.cat(logits)


def by_paths(model: Any, context: Sequence[int], tree: Tree) -> torch.Tensor:
    """The same logits from plain passes over the context and the path to every leaf."""
    lm = CachedLM(model)
    lm.prefill(context)
    logits: dict[int, torch.Tensor] = {}
    for leaf in sorted(set(range(len(tree.tokens))) - set(tree.parents)):
        path = tree.path(leaf)
        logits |= zip(path, lm.forward([tree.tokens[node] for node in path]), strict=True)
        lm.truncate(len(context))
    return torch.stack([logits[node] for node in range(len(tree.tokens))])


def contents(lm: CachedLM) -> list[torch.Tensor]:
    """Keys and values of the cached tokens, [layers, heads, length, size]."""
    if isinstance(lm, StaticLlama):
        return [part[:, 0, :, : lm.length] for part in (lm.keys, lm.values)]
    if isinstance(lm, FusedLlama):
        return [part[:, :, : lm.length] for part in (lm.keys, lm.values)]
    for layer in lm.cache.layers:
        assert int(layer.get_seq_length()) == lm.length
    parts = ("keys", "values")
    return [torch.cat([getattr(layer, part)[:, :, : lm.length] for layer in lm.cache.layers]) for part in parts]


def assert_like_fresh(lm: CachedLM, tokens: Sequence[int], following: Sequence[int] = (3, 1)) -> None:
    """The cache holds these tokens, and what follows depends on nothing else. Appends two tokens."""
    fresh = CachedLM(lm.model)
    fresh.prefill(tokens)
    assert lm.length == len(tokens) and lm.nodes == 0
    if tokens:
        for own, expected in zip(contents(lm), contents(fresh), strict=True):
            torch.testing.assert_close(own, expected, **FLOAT64)
    torch.testing.assert_close(lm.forward(following), fresh.forward(following), **FLOAT64)


TWO_LAYERS = SIZES | {"num_hidden_layers": 2}


def mistral(sliding_window: int | None) -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**TWO_LAYERS, sliding_window=sliding_window)).double().eval()


def qwen2(**changes: Any) -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**TWO_LAYERS, **changes)).double().eval()


def with_static_llama(model: Any) -> StaticLlama:
    return with_garbage(StaticLlama(model))


@cache
def model_named(name: str) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "llama": small_model,
        "one key head": lambda: small_model(num_key_value_heads=1),
        "qwen3": qwen3,
        "mistral": lambda: mistral(None),
        "qwen2": qwen2,
    }
    return makers[name]()


LIBRARY = {"library": CachedLM}
OURS = {"fused": FusedLlama, "static": with_static_llama}
CASES = [
    pytest.param(make, name, id=f"{kind}, {name}")
    for kinds, names in (
        (LIBRARY, ("llama", "mistral", "qwen2")),
        (OURS, ("llama", "one key head", "qwen3")),
    )
    for kind, make in kinds.items()
    for name in names
]
every_pass = pytest.mark.parametrize(("make", "name"), CASES)
few = settings(max_examples=4, deadline=None)


@every_pass
@few
@given(tree=trees, context=st.integers(0, 40), cuts=st.sets(st.integers(1, 11)))
def test_every_node_has_the_logits_of_its_path(
    make: Callable[[Any], CachedLM], name: str, tree: Tree, context: int, cuts: set[int]
) -> None:
    """In one pass, level by level, and in any other passes."""
    model, lm = model_named(name), make(model_named(name))
    tokens = np.random.default_rng(context).integers(0, VOCAB, context).tolist()
    expected = by_paths(model, tokens, tree)
    lm.prefill(tokens)
    n = len(tree.tokens)
    for ends in ([n], tree.level_ends(), sorted({cut for cut in cuts if cut < n} | {n})):
        torch.testing.assert_close(append(lm, tree, ends), expected, **FLOAT64)
        assert lm.length == context and lm.nodes == n
        lm.truncate(context)
        assert lm.nodes == 0


@every_pass
@few
@given(rounds=st.lists(st.tuples(trees, st.integers(-1, 11), st.booleans()), min_size=1, max_size=4))
def test_kept_paths_make_the_cache_of_a_fresh_prefill(
    make: Callable[[Any], CachedLM], name: str, rounds: list[tuple[Tree, int, bool]]
) -> None:
    """Round after round, the empty path among them."""
    lm, tokens = make(model_named(name)), [5, 6, 7]
    lm.prefill(tokens)
    for tree, node, by_levels in rounds:
        logits = append(lm, tree, tree.level_ends() if by_levels else None)
        torch.testing.assert_close(logits, by_paths(lm.model, tokens, tree), **FLOAT64)
        path = tree.path(min(node, len(tree.tokens) - 1))
        lm.keep_nodes(path)
        tokens += [tree.tokens[node] for node in path]
        assert_like_fresh(lm, tokens)
        lm.truncate(len(tokens))


def test_eager_attention_reads_the_same_masks() -> None:
    model, tree, tokens = small_model(), random_tree(12, seed=5), [5, 6, 7]
    expected = by_paths(model, tokens, tree)
    model.set_attn_implementation("eager")
    lm = CachedLM(model)
    lm.prefill(tokens)
    for ends in ([12], tree.level_ends()):
        # Its softmax is in float32, whatever the model's type.
        torch.testing.assert_close(append(lm, tree, ends), expected, rtol=0, atol=1e-5)
        lm.truncate(3)


@every_pass
def test_whatever_else_is_done_drops_the_nodes(make: Callable[[Any], CachedLM], name: str) -> None:
    lm, tree, tokens = make(model_named(name)), random_tree(9, seed=1), [5, 6, 7, 8]
    for undo, left in (
        (lambda: lm.keep_nodes([]), tokens),
        (lambda: lm.truncate(9), tokens),
        (lambda: lm.truncate(2), tokens[:2]),
        (lambda: lm.forward([9]), [*tokens, 9]),
        (lambda: lm.prefill([9, 1]), [*tokens, 9, 1]),
        (lm.reset, []),
    ):
        lm.reset()
        lm.prefill(tokens)
        append(lm, tree, tree.level_ends())
        undo()
        assert_like_fresh(lm, left)


@every_pass
def test_hidden_rows_are_what_the_head_reads(make: Callable[[Any], CachedLM], name: str) -> None:
    lm, tree = make(model_named(name)), random_tree(7, seed=2)
    lm.keep_hidden = True
    lm.prefill([4, 5])
    logits = append(lm, tree, [3, 7])
    assert lm.hidden is not None and len(lm.hidden) == 4
    torch.testing.assert_close(lm.hidden @ lm.model.lm_head.weight.T, logits[3:], **FLOAT64)


@pytest.mark.parametrize("make", [CachedLM, FusedLlama, with_static_llama])
def test_a_tree_may_be_wider_than_the_positions_left(make: Callable[[Any], CachedLM]) -> None:
    model = model_named("llama")
    lm, tree, tokens = make(model), random_tree(40, seed=3), list(range(POSITIONS - 10))
    assert max(tree.depths) == 9
    lm.prefill(tokens)
    for ends in ([40], tree.level_ends()):
        torch.testing.assert_close(append(lm, tree, ends), by_paths(model, tokens, tree), **FLOAT64)
        lm.truncate(len(tokens))
    append(lm, tree)
    path = tree.path(39)[:8]
    lm.keep_nodes(path)
    assert_like_fresh(lm, [*tokens, *(tree.tokens[node] for node in path)])


def test_buffers_grow_beyond_the_positions_by_more_than_a_node() -> None:
    """Every growth drops the graphs, so near the last position not every round may need one."""
    lm = StaticLlama(model_named("llama"), capacity=POSITIONS)
    lm.prefill([1] * (POSITIONS - 10))
    append(lm, random_tree(20, seed=3))
    assert lm.capacity == 2 * POSITIONS


@pytest.mark.parametrize("make", [CachedLM, FusedLlama, with_static_llama])
def test_a_node_beyond_the_last_position_is_refused(make: Callable[[Any], CachedLM]) -> None:
    lm, chain = make(model_named("llama")), Tree([1, 2, 3], [-1, 0, 1])
    lm.prefill([1] * (POSITIONS - 3))
    append(lm, chain)
    lm.keep_nodes([0])
    with pytest.raises(InputError, match="65 tokens exceed the 64 positions"):
        append(lm, chain)
    assert lm.nodes == 0


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_large_trees_take_another_attention(make: Callable[[Any], CachedLM]) -> None:
    """More nodes than a step takes, at once and behind others, and the way back."""
    model, tree, tokens = model_named("llama"), random_tree(300, seed=4), [5, 6, 7, 8]
    expected = by_paths(model, tokens, tree)
    lm = make(model)
    lm.prefill(tokens)
    for ends in ([300], [1, 250, 257, 258, 300]):
        torch.testing.assert_close(append(lm, tree, ends), expected, **FLOAT64)
        lm.truncate(len(tokens))
    append(lm, tree)
    path = tree.path(299)
    lm.keep_nodes(path)
    assert_like_fresh(lm, [*tokens, *(tree.tokens[node] for node in path)])


SLIDING: dict[str, Callable[[], Any]] = {
    "all layers": lambda: mistral(8),
    "some layers": lambda: qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1),
}


@pytest.mark.parametrize("kind", SLIDING)
@pytest.mark.parametrize("seed", range(3))
def test_trees_and_rollbacks_across_a_window(kind: str, seed: int) -> None:
    """What has left the window comes back into it, and a node sees its window by position, not by slot."""
    model, rng = SLIDING[kind](), np.random.default_rng(seed)
    tokens, tree = rng.integers(0, VOCAB, 15).tolist(), random_tree(12, seed)

    def alone(text: list[int], count: int) -> torch.Tensor:
        return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -count:]

    def text_of(path: list[int]) -> list[int]:
        return [*tokens, *(tree.tokens[node] for node in path)]

    lm = CachedLM(model)
    assert lm.max_positions == POSITIONS
    lm.prefill(tokens)
    expected = torch.cat([alone(text_of(tree.path(node)), 1) for node in range(12)])
    for ends in ([12], tree.level_ends()):
        torch.testing.assert_close(append(lm, tree, ends), expected, **FLOAT64)
        lm.truncate(len(tokens))
    append(lm, tree)
    path, following = tree.path(11), rng.integers(0, VOCAB, 4).tolist()
    lm.keep_nodes(path)
    text = text_of(path)[:-9]  # back by more than the window
    lm.truncate(len(text))
    torch.testing.assert_close(lm.forward(following), alone([*text, *following], 4), **FLOAT64)


def test_a_tree_pass_does_not_look_for_windows_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is timed, and the look takes a millisecond."""
    lm = CachedLM(mistral(8))
    lm.prefill([1, 2, 3])
    monkeypatch.setattr(cached, "layer_types", lambda config: pytest.fail("looked for"))
    append(lm, random_tree(4, 0))
    assert lm.nodes == 4


def test_attention_that_takes_no_tree_mask_is_refused() -> None:
    model = small_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flash_attention_2 attention takes no mask of draft trees; load") as caught:
        append(CachedLM(model), random_tree(3, seed=0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kernels", ON_CPU)
def test_every_backend_passes_trees_and_keeps_paths(kernels: str) -> None:
    """In float32, as Triton takes no float64; the cache is shorter than a window, then longer."""
    model = small_model(head_dim=16, num_hidden_layers=2).float()
    lm, plain = with_garbage(StaticLlama(model, capacity=48)), FusedLlama(model)
    with use_kernels(kernels):
        for context, nodes, node in ((3, 6, 4), (30, 9, 8)):
            tree = random_tree(nodes, seed=nodes)
            for each in (lm, plain):
                each.reset()
                each.prefill(list(range(context)))
            for ends in ([nodes], [2, nodes]):
                lm.truncate(context)
                plain.truncate(context)
                # Float32 through two layers.
                torch.testing.assert_close(append(lm, tree, ends), append(plain, tree, ends), rtol=1e-4, atol=1e-5)
            for each in (lm, plain):
                each.keep_nodes(tree.path(node))
            for ours, expected in zip(contents(lm), contents(plain), strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lm.forward([1]), plain.forward([1]), rtol=1e-4, atol=1e-5)


@given(tree=st.one_of(trees, st.builds(random_tree, st.integers(30, 70), st.integers(0, 99))))
@few
def test_mask_bits_are_the_ancestors(tree: Tree) -> None:
    lm = StaticLlama(model_named("llama"))
    lm.prefill([1, 2])
    append(lm, tree)
    size = lm._sizes[len(tree.tokens), len(tree.tokens)]
    assert torch.equal(size.mask_bits, mask_bits_of(torch.tensor([tree.parents])))
    assert size.offsets[1, 0].tolist() == [
        len(path_to_root(tree.parents, node)) - 1 for node in range(len(tree.parents))
    ]


def test_one_recording_per_size_serves_trees_and_chains() -> None:
    model = model_named("llama")
    with recorded(model, capacity=POSITIONS) as (lm, recorder):
        lm.warm([1, 2, 4], POSITIONS)
        assert recorder.captured == 3
        plain, context = FusedLlama(model), list(range(20))
        for each in (lm, plain):
            each.prefill(context)
        for parents in ([-1, 0, 0, 0], [-1, 0, 1, 1], None, [-1, 0, 0, 1]):
            if parents is None:
                torch.testing.assert_close(lm.forward([7, 8, 9, 7]), plain.forward([7, 8, 9, 7]), **FLOAT64)
            else:
                tree = Tree([7, 8, 9, 7], parents)
                torch.testing.assert_close(append(lm, tree), append(plain, tree), **FLOAT64)
            for each in (lm, plain):
                each.keep_nodes([])
        ids, lengths = torch.tensor([[3, 4, 5, 6]]), torch.tensor([lm.length], dtype=torch.int32)
        torch.testing.assert_close(lm.step(ids, lengths)[0], plain.forward([3, 4, 5, 6]), **FLOAT64)
        assert recorder.captured == 3


def test_trees_that_grow_need_a_recording_per_window() -> None:
    """Ahead of the clock: 2 sizes, each without earlier nodes and with up to 32 and 64 nodes in all."""
    model = model_named("llama")
    with recorded(model, capacity=POSITIONS) as (lm, recorder):
        lm.warm([1, 3], 90, tree_nodes=40)
        assert recorder.captured == 6 and lm.capacity >= 90 > POSITIONS
        plain, context = FusedLlama(model), list(range(35))
        for each in (lm, plain):
            each.prefill(context)
        for nodes in (7, 40):
            tree, ends = random_tree(nodes, seed=6), [1, *range(4, nodes + 1, 3)]
            torch.testing.assert_close(append(lm, tree, ends), append(plain, tree, ends), **FLOAT64)
            path = tree.path(nodes - 1)
            for each in (lm, plain):
                each.keep_nodes(path)
            torch.testing.assert_close(lm.forward([1]), plain.forward([1]), **FLOAT64)
        assert recorder.captured == 6


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_replayed_graphs_equal_the_passes_of_the_cpu(name: str) -> None:
    makers = {"llama": small_model, "qwen3": qwen3}
    lm, plain = with_garbage(StaticLlama(makers[name]().to("cuda"))), FusedLlama(model_named(name))
    plain.cos, plain.sin = lm.cos.cpu(), lm.sin.cpu()  # of float32 in any model; their last bits differ by device
    lm.warm([1, 2, 3, 5], POSITIONS, tree_nodes=20)
    context = list(range(20))
    for each in (lm, plain):
        each.prefill(context)
    for seed in range(6):
        tree = random_tree(11, seed)
        for ends in ([11], [1, 3, 6, 11]):
            torch.testing.assert_close(append(lm, tree, ends).cpu(), append(plain, tree, ends), **FLOAT64)
            for each in (lm, plain):
                each.keep_nodes(tree.path(seed + 2)[:3])
    torch.testing.assert_close(lm.forward([1, 2]).cpu(), plain.forward([1, 2]), **FLOAT64)
