"""A model run part by part has the logits of the whole, over any cutting and tree, or it is refused."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from realrun.lm.cached import CachedLM
from realrun.lm.layer_stack import LibraryParts, model_parts
from realrun.lm.llama import FusedParts
from realrun.lm.split_target import SplitTarget
from realrun.lm.variants import SkippedSublayers
from specsim.io.errors import InputError
from tests.realrun.lm.test_tree_pass import make_tree
from tests.support.checks import refusal
from tests.support.families import family_model
from tests.support.split_targets import LAYERS, LEAN, LIBRARY, NAMES, close_to, stacked, target_of
from tests.support.tiny import POSITIONS, VOCAB

CLOSE = {"rtol": 0.0, "atol": 1e-10}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
names = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def test_both_kinds_of_pieces_are_tested_here() -> None:
    assert all(isinstance(model_parts(target_of(name)), FusedParts) for name in LEAN)
    assert all(isinstance(model_parts(target_of(name)), LibraryParts) for name in LIBRARY)


def say(parts: Any, model: Any, stacks: list[Any], tokens: list[int], start: int) -> torch.Tensor:
    """Logits after these tokens in slots `start` and on, through the stacks one after another."""
    end = start + len(tokens)
    x = parts.embed(tokens)
    for stack in stacks:
        x = stack.run(x, start, slice(start, end), parts.causal_mask(len(tokens), end))
    return parts.logits(parts.normed(x, model.model.norm), model.get_output_embeddings())


@names
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3)], ids=str)
def test_stacks_say_what_the_model_says_over_any_cutting_and_rollback(name: str, cuts: tuple[int, ...]) -> None:
    model = target_of(name)
    parts, plain = model_parts(model), CachedLM(model)
    edges = [0, *cuts, LAYERS]
    stacks = [parts.stack(model.model.layers[a:b]) for a, b in itertools.pairwise(edges)]
    rng = np.random.default_rng(3)
    for _ in range(10):
        tokens = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
        start = plain.length
        torch.testing.assert_close(say(parts, model, stacks, tokens, start), plain.forward(tokens), **close_to(name))
        plain.truncate(int(rng.integers(0, plain.length + 1)))  # the slots behind are written anew


@names
def test_a_long_prompt_makes_the_buffers_grow(name: str) -> None:
    model = target_of(name)
    parts, plain = model_parts(model), CachedLM(model)
    stack = parts.stack(model.model.layers)
    prompt = np.random.default_rng(1).integers(0, VOCAB, POSITIONS - 1).tolist()
    for start, end in ((0, 3), (3, 100), (100, 101), (101, 159)):
        part = prompt[start:end]
        torch.testing.assert_close(say(parts, model, [stack], part, start), plain.forward(part), **close_to(name))
    for (keys, values), layer in zip(stacked(stack, 159), plain.cache.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys[0], **close_to(name))
        torch.testing.assert_close(values, layer.values[0], **close_to(name))


@names
@pytest.mark.parametrize("seed", range(3))
def test_trees_level_by_level_or_at_once_and_the_path_that_is_kept(name: str, seed: int) -> None:
    model = target_of(name)
    parts, plain = model_parts(model), CachedLM(model)
    stack = parts.stack(model.model.layers)
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, 11).tolist()
    plain.prefill(prompt)
    say(parts, model, [stack], prompt, 0)
    tree = make_tree(rng.integers(0, 1000, 14).tolist(), seed)
    tree = type(tree)([token % VOCAB for token in tree.tokens], tree.parents)
    expected = plain.forward_nodes(tree.tokens, tree.depths, tree.visible)
    edges = [0, *tree.level_ends()] if seed else [0, len(tree.tokens)]
    logits = []
    for first, end in itertools.pairwise(edges):
        positions = torch.tensor([11 + depth for depth in tree.depths[first:end]])
        mask = parts.tree_mask(tree.visible[first:end, :end], 11 + end)
        x = stack.run(parts.embed(tree.tokens[first:end]), 11 + first, positions, mask)
        logits.append(parts.logits(parts.normed(x, model.model.norm), model.get_output_embeddings()))
    torch.testing.assert_close(torch.cat(logits), expected, **close_to(name))
    path = tree.path(len(tree.tokens) - 1)
    stack.move([11 + node for node in path], 11)
    plain.keep_nodes(path)
    more, start = [5, 6, 7], plain.length
    torch.testing.assert_close(say(parts, model, [stack], more, start), plain.forward(more), **close_to(name))


@names
def test_a_skipped_sublayer_is_one_that_adds_nothing(name: str) -> None:
    model = target_of(name)
    skips = SkippedSublayers(frozenset({0, 2}), frozenset({2, 3}))
    parts = model_parts(model)
    silent = copy.deepcopy(model)
    for numbers, projection in ((skips.attention, "self_attn.o_proj"), (skips.mlp, "mlp.down_proj")):
        for number in numbers:
            for parameter in silent.model.layers[number].get_submodule(projection).parameters():
                parameter.zero_()
    tokens = [4, 8, 15, 16, 23, 42]
    x = parts.stack(model.model.layers).run(parts.embed(tokens), 0, slice(0, 6), parts.causal_mask(6, 6), skip=skips)
    logits = parts.logits(parts.normed(x, model.model.norm), model.get_output_embeddings())
    torch.testing.assert_close(logits, CachedLM(silent).forward(tokens), **close_to(name))
    assert float((logits - CachedLM(model).forward(tokens)).abs().max()) > 0.1


PLAIN = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 8**-0.5}
OTHERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "granite logits": (GraniteConfig, GraniteForCausalLM, {**PLAIN, "logits_scaling": 8.0}),
    "granite embeddings": (GraniteConfig, GraniteForCausalLM, {**PLAIN, "embedding_multiplier": 12.0}),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_models_that_join_like_parts_otherwise_are_refused(kind: str, dtype: torch.dtype) -> None:
    config, model, special = OTHERS[kind]
    torch.manual_seed(1)
    built = model(config(**SIZES, **special)).to(dtype).eval()
    refusal(lambda: model_parts(built), match=f"^{model.__name__} has parts .*no drafter can live")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LIBRARY)
def test_models_that_fit_are_taken_in_any_type(name: str, dtype: torch.dtype) -> None:
    assert isinstance(model_parts(copy.deepcopy(target_of(name)).to(dtype)), LibraryParts)


def test_granite_without_multipliers_is_a_llama() -> None:
    """What is refused above is refused for what it says, not for its name."""
    torch.manual_seed(1)
    parts = model_parts(GraniteForCausalLM(GraniteConfig(**SIZES, **PLAIN)).double().eval())
    assert isinstance(parts, LibraryParts)


def test_what_cannot_be_taken_apart_says_so() -> None:
    with pytest.raises(InputError, match="GPT2LMHeadModel has no embed_tokens where"):
        model_parts(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2)).eval())
    with pytest.raises(InputError, match="CohereForCausalLM has parts like a Llama's and joins them otherwise"):
        model_parts(CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.06)).eval())
    flex = copy.deepcopy(target_of("qwen2-sdpa"))
    flex.config._attn_implementation = "flex_attention"
    refusal(lambda: model_parts(flex), "flex_attention attention takes no mask; load Qwen2ForCausalLM with")


FAMILIES = "Mistral, with a window", "Qwen2, with windows", "Gemma 2", "Gemma 3", "gpt-oss", "OLMo2", "Mixtral"


@pytest.mark.parametrize(
    ("name", "split"), [*itertools.product(NAMES, (0, 1, 3)), *((family, 1) for family in FAMILIES)]
)
def test_a_split_target_is_the_target(name: str, split: int) -> None:
    """Also norms behind sublayers, capped logits, experts, and windows that texts and trees leave, over rollbacks."""
    model = family_model(name) if name in FAMILIES else target_of(name)
    close = {"rtol": 0.0, "atol": 1e-5} if name in FAMILIES else close_to(name)
    target, plain = SplitTarget(model, split), CachedLM(model)
    target.keep_hidden = plain.keep_hidden = True
    rng = np.random.default_rng(2)
    for lm in (target, plain):
        lm.prefill([7, 7, 3])
    tree = make_tree([0, 0, 1, 1, 2, 5], 3)
    nodes = [token % VOCAB for token in tree.tokens]
    for _ in range(5):
        tokens, keep = rng.integers(0, VOCAB, 7).tolist(), int(rng.integers(1, 7))
        torch.testing.assert_close(target.forward(tokens), plain.forward(tokens), **close)
        assert target.hidden is not None and plain.hidden is not None
        torch.testing.assert_close(target.hidden, plain.hidden, **close)
        logits = []
        for lm in (target, plain):
            lm.truncate(lm.length - 4)
            logits.append(lm.forward_nodes(nodes, tree.depths, tree.visible))
            lm.keep_nodes(tree.path(keep))
        torch.testing.assert_close(*logits, **close)
        assert target.length == plain.length


def test_what_a_sublayer_does_inside_is_its_own_affair() -> None:
    """Phi-3 joins its projections itself and is a Llama otherwise."""
    torch.manual_seed(1)
    model = Phi3ForCausalLM(Phi3Config(**SIZES, sliding_window=None)).double().eval()
    plain, parts = CachedLM(model), model_parts(model)
    stack = parts.stack(model.model.layers)
    torch.testing.assert_close(say(parts, model, [stack], [3, 1, 4], 0), plain.forward([3, 1, 4]), **CLOSE)
