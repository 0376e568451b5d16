"""Shapes of public models: their published sizes, and random models that compute what their twins do."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from realrun.lm.choice import make_lm
from realrun.pairs import shapes
from realrun.pairs.shapes import DRAFTERS, SHAPES, TARGETS, random_model, reduced, shape_config
from specsim.cost.roofline.architecture import architecture_from_config, find_architecture
from specsim.cost.roofline.config import ModelConfig
from specsim.io.errors import InputError
from tests.support.checks import refusal

# Billions of parameters as published: model cards, papers, or the sum over the released tensors.
PUBLIC_BILLIONS = {
    "llama-2-7b": 6.738,
    "llama-2-13b": 13.016,
    "llama-2-70b": 68.977,
    "llama-3.1-8b": 8.030,
    "qwen3-8b": 8.191,
    "vicuna-33b": 32.529,
    "llama-2-drafter-115m": 0.117,  # its name says 115M, 1.64 % of 7B is 110M
    "llama-68m": 0.068,
    "llama-160m": 0.162,
    "tinyllama-1.1b": 1.100,
    "llama-3.2-1b": 1.236,
    "qwen3-0.6b": 0.596,
}


@pytest.mark.parametrize("name", PUBLIC_BILLIONS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert shapes.parameter_count(shape_config(name)) / 1e9 == pytest.approx(PUBLIC_BILLIONS[name], abs=6e-4)


@pytest.mark.parametrize("name", PUBLIC_BILLIONS)
def test_rooflines_price_the_same_shapes(name: str) -> None:
    assert architecture_from_config(ModelConfig(shape_config(name).to_dict(), name)) == find_architecture(name)


@pytest.mark.parametrize(("drafter", "target"), [("one-layer-7b", "llama-2-7b"), ("one-layer-13b", "llama-2-13b")])
def test_a_one_layer_drafter_is_its_target_with_one_layer(drafter: str, target: str) -> None:
    config = shape_config(target)
    config.num_hidden_layers = 1
    assert shapes.parameter_count(config) == shapes.parameter_count(shape_config(drafter))


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    # 2 x layers x key-value heads x 128 x 2 bytes
    [("llama-2-7b", 512), ("llama-2-13b", 800), ("llama-2-70b", 320), ("llama-3.1-8b", 128), ("qwen3-8b", 144)],
)
def test_cache_bytes_per_token(name: str, kilobytes: int) -> None:
    assert shapes.kv_bytes_per_token(shape_config(name)) == kilobytes * 1024
    assert shapes.kv_bytes_per_token(shape_config(name), torch.float32) == kilobytes * 2048


def test_a_pass_reads_every_weight_but_an_embedding_of_its_own() -> None:
    llama = shape_config("llama-2-7b")
    assert shapes.weight_bytes(llama) - shapes.pass_weight_bytes(llama) == 32000 * 4096 * 2
    tied = shape_config("llama-3.2-1b")
    assert shapes.pass_weight_bytes(tied) == shapes.weight_bytes(tied)


@pytest.mark.parametrize("name", SHAPES)
def test_a_reduced_model_is_finite_and_keeps_its_kind(name: str) -> None:
    whole, config = shape_config(name), shape_config(name, smoke=True)
    assert type(config) is type(whole) and config.rope_parameters == whole.rope_parameters
    assert config.tie_word_embeddings == whole.tie_word_embeddings
    assert config.max_position_embeddings == whole.max_position_embeddings
    groups = config.num_attention_heads // config.num_key_value_heads
    assert groups == min(whole.num_attention_heads // whole.num_key_value_heads, 4)
    model = random_model(config, "cpu", torch.float32, seed=1)
    logits = make_lm(model).forward([1, 2, 3, 4])
    assert logits.shape == (4, config.vocab_size) and logits.isfinite().all()
    assert shapes.parameter_count(config) == sum(p.numel() for p in model.parameters()) < 300_000


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "qwen3-0.6b"])
def test_a_random_model_equals_a_normally_made_one_with_its_weights(name: str) -> None:
    """Rotary frequencies are not among the weights: a meta device leaves them without values."""
    config = shape_config(name, smoke=True)
    model = random_model(config, "cpu", torch.float32, seed=3)
    twin = AutoModelForCausalLM.from_config(config).eval()
    twin.load_state_dict(model.state_dict())
    buffers = dict(twin.named_buffers())
    assert len(buffers) > 0
    for key, value in model.named_buffers():
        assert value.device.type == "cpu"
        torch.testing.assert_close(value, buffers[key], rtol=0, atol=0)
    tokens = torch.randint(0, config.vocab_size, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, twin(tokens).logits)


def test_tied_weights_stay_one() -> None:
    model = random_model(shape_config("llama-3.2-1b", smoke=True), "cpu", torch.bfloat16, seed=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_weights_follow_the_seed_and_norms_are_one() -> None:
    config = shape_config("llama-2-7b", smoke=True)
    first, again, other = (random_model(config, "cpu", torch.float32, seed) for seed in (0, 0, 1))
    for (key, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and not a.requires_grad
        if "norm" in key:
            assert (a == 1).all()
        else:
            assert not torch.equal(a, c) and a.std() == pytest.approx(shapes.INIT_STD, rel=0.1)


@torch.inference_mode()
def test_activations_of_wide_and_deep_shapes_fit_float16() -> None:
    """One layer at true width times the deepest model's layers: the residual stream grows by addition only."""
    config = shape_config("llama-2-7b")
    config.num_hidden_layers = 1
    config.vocab_size = 64
    layers = shape_config("llama-2-70b").num_hidden_layers
    model = random_model(config, "cpu", torch.bfloat16, seed=0)
    tokens = torch.arange(4)[None]
    hidden = model.model(tokens, output_hidden_states=True).hidden_states[0]
    out = model.model.layers[0](
        hidden, position_embeddings=model.model.rotary_emb(hidden, torch.arange(4)[None]), attention_mask=None
    )
    assert layers * float((out - hidden).abs().max()) < torch.finfo(torch.float16).max / 10


def test_every_drafter_has_a_target_with_its_vocabulary() -> None:
    vocabularies = {shape_config(name).vocab_size for name in TARGETS}
    assert {shape_config(name).vocab_size for name in DRAFTERS} == vocabularies


def test_an_unknown_shape_is_answered_with_the_known_ones() -> None:
    refusal(lambda: shape_config("gpt-5"), "'gpt-5' is unknown; known: llama-2-7b, ", "qwen3-0.6b")


def test_positions_only_grow() -> None:
    assert shape_config("llama-2-7b", positions=40000).max_position_embeddings == 40000
    assert shape_config("llama-2-7b", positions=100).max_position_embeddings == 4096


def test_a_model_beyond_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "free_bytes", lambda device: 10**9)
    with pytest.raises(InputError, match=r"69.0 billion parameters need 138 GB on cpu, 1 GB are free"):
        random_model(shape_config("llama-2-70b"), "cpu", torch.bfloat16, seed=0)


def test_descriptions_are_plain_numbers() -> None:
    described = shapes.describe(reduced(shape_config("qwen3-8b")), torch.bfloat16)
    assert described["architecture"] == "qwen3" and described["weight_bytes"] == 2 * described["parameters"]
    assert {type(value) for value in described.values()} == {str, int}
