"""Shapes of recent architectures, and bytes and FLOPs of their passes: against the models of transformers, products
that torch counts, published sizes, and figures worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost
from specsim.cost.roofline.architecture import find_architecture, public_shapes, published
from specsim.cost.roofline.config import ModelConfig
from specsim.cost.roofline.cost import RooflineCost, find_drafter
from specsim.cost.roofline.hardware import Derating, Hardware, find_hardware, known_hardware
from specsim.cost.roofline.passes import Operation, Roofline
from specsim.cost.roofline.shape import Architecture, Attention, Experts, LatentAttention, LinearAttention, Mlp
from tests.support.active_weights import active_weights, flops_of_weights
from tests.support.checks import refusal

DEVICE = Hardware(
    "plain",
    memory_bytes_s=1e12,
    flops={"bfloat16": 1e14, "float8": 2e14, "float4": 4e14},
    link_bytes_s=1e11,
)


def passes(model: str | Architecture, layers: int = 1, **other: Any) -> Roofline:
    """Passes of a model's first layers."""
    shape = find_architecture(model) if isinstance(model, str) else model
    return Roofline(shape.first(layers), DEVICE, derating=Derating(), **other)


def by_name(roofline: Roofline, *asked: int) -> dict[str, Operation]:
    return {operation.name: operation for operation in roofline.operations(*asked)}


def last_layer(name: str) -> Architecture:
    """The last layer of a model; it has experts even if the first layers are dense."""
    model = find_architecture(name)
    return model.after(model.num_layers - 1)


HEADS: tuple[Literal["eagle3", "mtp"], ...] = ("eagle3", "mtp")
# Billions of parameters, all and active, as names and model cards print them; cards count some of the embeddings.
PUBLISHED = {
    "deepseek-v3": (671, 37), "kimi-k2": (1040, 32), "glm-5": (744, 40), "minimax-m2.5": (230, 10),
    "qwen3-next-80b-a3b": (80, 3), "qwen3.5-397b-a17b": (397, 17), "qwen3.5-35b-a3b": (35, 3),
    "qwen3-235b-a22b": (235, 22), "llama-4-scout": (109, 17), "llama-4-maverick": (400, 17),
    "gpt-oss-120b": (117, 5.1), "gpt-oss-20b": (21, 3.6), "qwen3.5-27b": (27, 27), "minicpm3-4b": (4, 4),
    "llama-3.1-405b": (405, 405), "qwen2.5-3b": (3.09, 3.09), "qwen2.5-14b": (14.7, 14.7), "qwq-32b": (32.5, 32.5),
    "qwen3-14b": (14.8, 14.8), "gemma-3-27b": (27, 27), "gemma-4-31b": (30.7, 30.7), "gemma-4-26b-a4b": (25.2, 3.8),
    "nemotron-3-nano-30b-a3b": (31.6, 3.6), "nemotron-3-super-120b-a12b": (120.6, 12.7), "glm-4.7": (355, 32),
    "nemotron-3-ultra-550b-a55b": (550, 55), "deepseek-v4-flash": (284, 13), "deepseek-v4-pro": (1600, 49),
    "glm-4.5-air": (106, 12), "glm-4.7-flash": (30, 3), "mimo-v2-flash": (309, 15), "qwen3.5-122b-a10b": (122, 10),
    "qwen3-coder-480b-a35b": (480, 35), "mixtral-8x22b": (141, 39), "seed-oss-36b": (36, 36),
    "longcat-flash": (560, 27),
    "smollm3-3b": (3.08, 3.08), "llama-3.2-3b": (3.21, 3.21), "llama-3.1-70b": (70.6, 70.6),
    "qwen2.5-0.5b": (0.49, 0.49), "qwen2.5-7b": (7.61, 7.61), "qwen2.5-72b": (72.7, 72.7),
    "qwen3-32b": (32.8, 32.8), "qwen3-30b-a3b": (30.5, 3.3),
    "mixtral-8x7b": (46.7, 12.9), "gemma-2-9b": (9.24, 9.24), "qwen2.5-32b": (32.8, 32.8), "qwen3-1.7b": (1.72, 1.72),
    # Gemma 3's by its report's table 1, without vision: embeddings and the rest.
    "gemma-3-4b": (0.675 + 3.209, 0.675 + 3.209), "gemma-3-1b": (0.302 + 0.698, 0.302 + 0.698), "phi-4": (14.7, 14.7),
    "mistral-large": (123, 123), "mistral-small-24b": (23.6, 23.6), "mistral-7b": (7.25, 7.25), "qwen3-4b": (4.0, 4.0),
    "mistral-7b-v0.1": (7.24, 7.24), "qwen2.5-1.5b": (1.54, 1.54), "devstral-small": (23.6, 23.6),
    "deepseek-v3.2": (671, 37), "gemma-3-12b": (11.8, 11.8), "mimo-7b": (7.6, 7.6), "glm-5.2": (744, 40),
}  # fmt: skip


def numbers(shape: dict[str, Any]) -> dict[str, int]:
    """The integers of a configuration and of its parts."""
    parts = [numbers(part) for part in shape.values() if isinstance(part, dict)]
    return {key: each for part in (*parts, shape) for key, each in part.items() if type(each) is int}


PUBLISHED_SHAPES = {
    **{name: numbers(shape) for name, shape in public_shapes().items()},
    **{f"{kind} of {name}": numbers(head) for kind in HEADS for name, head in published().heads[kind].items()},
}
# By the end of a key; the first that fits.
TILES = {
    "conv_kernel_dim": 1, "per_layer_input": 256, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 8,
    "_dim": 16, "_rank": 16, "window": 32, "index_topk": 128, "chunk_size": 128,
}  # fmt: skip
HEADS_OF_GROUPS = (
    ("num_key_value_heads", "num_attention_heads"), ("num_global_key_value_heads", "num_attention_heads"),
    ("linear_num_key_heads", "linear_num_value_heads"),
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    model, (total, active) = find_architecture(name), PUBLISHED[name]
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.025)
    head = model.vocab_size * model.hidden_size  # in or out, by the card
    assert (active_weights(model) - head) / 1e9 <= active * 1.05 + 0.5
    assert (active_weights(model) + head) / 1e9 >= active * 0.95


@pytest.mark.parametrize("name", PUBLISHED_SHAPES)
def test_sizes_fill_tiles_and_heads_are_shared_evenly(name: str) -> None:
    """Trained models have sizes that matrix units take whole: what a mistyped digit rarely leaves."""
    shape = PUBLISHED_SHAPES[name]
    heads = {key: shape[key] for key in shape if key.endswith("heads")}
    assert all(number % 2 == 0 or number == 1 for number in heads.values())
    for few, many in HEADS_OF_GROUPS:
        assert shape.get(many, 0) % shape.get(few, 1) == 0
    for key, number in shape.items():
        multiple = next((multiple for ending, multiple in TILES.items() if key.endswith(ending)), 1)
        assert number % multiple == 0, key
    for chosen in ("num_experts_per_tok", "top_k_experts"):
        assert shape.get(chosen, 2) % 2 == 0 or shape[chosen] == 1


def test_most_numbers_are_the_defaults_of_the_models_class_in_transformers() -> None:
    """A class of transformers carries the configuration of a model of its family: 446 numbers and lists agree."""
    transformers = pytest.importorskip("transformers")
    agreeing = 0
    for shape in public_shapes().values():
        if shape["model_type"] in transformers.CONFIG_MAPPING:
            defaults = transformers.CONFIG_MAPPING[shape["model_type"]]().to_dict()
            equal = [key for key in shape if key in defaults and shape[key] == defaults[key]]
            agreeing += sum(type(shape[key]) in (int, list) for key in equal)
    assert agreeing >= 446


FROM_TRANSFORMERS = (
    "deepseek-v3", "deepseek-v3.2", "glm-5", "minicpm3-4b", "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-397b-a17b",
    "minimax-m2.5", "llama-4-scout", "llama-4-maverick", "qwen3-235b-a22b", "gpt-oss-120b",
)  # fmt: skip


@pytest.mark.parametrize("name", FROM_TRANSFORMERS)
def test_all_matrices_of_the_model_in_transformers_are_counted(name: str) -> None:
    """But for the gate of Qwen's shared experts, a row, and biases of experts."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    keys = {**public_shapes()[name]}
    heads = keys.setdefault("num_key_value_heads", keys["num_attention_heads"])
    config = transformers.CONFIG_MAPPING[keys.pop("model_type")](**keys)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(
        parameter.numel()
        for key, parameter in whole.named_parameters()
        if parameter.dim() > 1 and "shared_expert_gate" not in key and not key.endswith("_bias")
    )
    model = find_architecture(name)
    assert model.parameters - model.norms == matrices
    assert model.of(LatentAttention) or model.plain_attention.kv_heads == heads


@pytest.mark.parametrize("name", sorted(public_shapes()))
def test_a_token_is_multiplied_with_every_active_weight_once(name: str) -> None:
    """Two FLOPs per weight, without attention to the cache and to states; convolutions count as matrices."""
    model = find_architecture(name)
    flops = flops_of_weights(Roofline(model, replace(DEVICE, memory_bytes=0.0)))
    assert flops == pytest.approx(2 * (active_weights(model) - model.norms), rel=1e-12)


def counted_flops(*products: Callable[[Any], Any]) -> int:
    """FLOPs that torch counts for products of meta tensors."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        for product in products:
            product(lambda *shape: torch.empty(shape, device="meta"))
    return int(counter.get_total_flops())


def test_latent_attention_multiplies_queries_with_latents_of_the_cache() -> None:
    """DeepSeek-V3, 3 tokens behind 1000: 128 heads, latents of 512 and rotated keys of 64, keys and values of 128."""
    operations = by_name(passes("deepseek-v3"), 3, 1000)
    assert operations["absorbed keys"].flops == counted_flops(lambda new: new(128, 3, 128) @ new(128, 128, 512))
    assert operations["attention"].flops == counted_flops(
        lambda new: new(128, 3, 576) @ new(128, 576, 1003),  # scores
        lambda new: new(128, 3, 1003) @ new(128, 1003, 512),  # latents by their weights
    )
    assert operations["absorbed values"].flops == counted_flops(lambda new: new(128, 3, 512) @ new(128, 512, 128))
    # 7168 x (1536 + 576) weights of 2 bytes; states in and out.
    assert operations["queries and latents"].bytes == 2 * 15138816 + 3 * (7168 + 2112) * 2
    assert operations["queries"].bytes == 2 * 1536 * 24576 + 3 * (1536 + 24576) * 2
    assert operations["output projection"].bytes == 2 * 16384 * 7168 + 3 * (16384 + 7168) * 2
    # 576 numbers of each token for all heads; of each query 576 in and 512 out.
    assert operations["attention"].bytes == 1003 * 576 * 2 + 3 * 128 * (576 + 512) * 2
    assert passes("deepseek-v3").kv_bytes(1000) == 1000 * 576 * 2
    assert find_architecture("deepseek-v3").num_layers * 576 * 2 == 70272  # bytes a token, 70 KB


def test_devices_share_heads_and_have_all_latents() -> None:
    alone, shared = (by_name(passes("deepseek-v3", tensor_parallel=devices), 1, 4000) for devices in (1, 8))
    cache = 4001 * 576 * 2
    assert shared["attention"].bytes - cache == (alone["attention"].bytes - cache) / 8
    assert shared["attention"].flops == alone["attention"].flops / 8
    assert shared["queries and latents"] == alone["queries and latents"]
    assert shared["queries"].flops == alone["queries"].flops / 8
    eight = passes("deepseek-v3", tensor_parallel=8)
    assert float(eight.device_bytes(3, 1000)) == pytest.approx(eight.weight_bytes / 8 + 3 * 1000 * 576 * 2)
    grouped = passes("llama-3.1-8b", tensor_parallel=16)  # 8 key-value heads of 128, two devices each
    assert float(grouped.device_bytes(1, 1000)) == pytest.approx(grouped.weight_bytes / 16 + 1000 * 2 * 128 * 2)


def test_sparse_attention_reads_chosen_tokens_and_an_index_of_all() -> None:
    """GLM-5: 64 heads, 2048 tokens a query; an indexer of 32 heads of 128, whose keys take 132 bytes in float8."""
    model = passes("glm-5")
    operations = by_name(model, 3, 100_000)
    states = 3 * 64 * (576 + 512) * 2
    assert operations["attention"].bytes == 3 * 2048 * 576 * 2 + states
    assert operations["attention"].flops == 2 * 64 * (576 + 512) * 3 * 2048
    scores = operations["index scores"]
    assert scores.flops == counted_flops(lambda new: new(32, 3, 128) @ new(32, 128, 100_003))
    assert scores.bytes == 100_003 * 132 + 2 * 4 * 3 * 100_003
    assert scores.products == "float8"
    assert operations["index queries"].flops == 2 * 3 * 2048 * 32 * 128
    assert operations["index keys"].flops == 2 * 3 * 6144 * (128 + 32)
    few = by_name(model, 3, 1000)["attention"]  # fewer than 2048: all are read, once
    assert few.bytes == 1003 * 576 * 2 + states
    assert model.kv_bytes(1000) == 1000 * (576 * 2 + 132)
    # GLM-5.2 has an indexer in the first three layers and every fourth further one, 21 of 78; each has
    # 6144 x (128 + 32) and 2048 x 32 x 128 weights.
    fewer = find_architecture("glm-5.2")
    assert find_architecture("glm-5").parameters - fewer.parameters == 57 * (6144 * 160 + 2048 * 4096)
    all_, some = (Roofline(shape, replace(DEVICE, memory_bytes=0.0)) for shape in (find_architecture("glm-5"), fewer))
    assert float(all_.kv_bytes(1000) - some.kv_bytes(1000)) == 57 * 1000 * 132
    assert by_name(some, 3, 10**5)["index scores"].flops == by_name(all_, 3, 10**5)["index scores"].flops * 21 / 78
    rule = {**public_shapes()["glm-5"], "index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert find_architecture(ModelConfig(rule), "glm-5.2") == fewer


def test_a_delta_network_reads_and_writes_a_state_of_fixed_size() -> None:
    """Qwen3-Next: 16 key heads and 32 value heads of 128, a convolution over 4 tokens; 2 sequences of 3 tokens.

    A state is written and read for every verified token, so that rejected tokens can be undone.
    """
    model = find_architecture("qwen3-next-80b-a3b")
    operations = by_name(passes(model), 3, 1000, 2)
    state = 32 * 128 * 128 * 4  # bytes of a sequence, 2 MiB
    convolved = 2 * 16 * 128 + 32 * 128  # queries, keys, values
    gated = operations["linear attention"]
    others = 6 * (convolved + 4096) * 2
    assert gated.bytes == 2 * 6 * state + others
    for states, moved in (("bfloat16", 2 * 6 * state / 2), ("replay", 2 * 2 * state)):
        assert by_name(replace(passes(model), states=states), 3, 1000, 2)["linear attention"].bytes == moved + others
    # A pass with a prompt of 500 tokens and two sequences that decode a token each.
    prompt = BatchTokens(*map(np.asarray, (3.0, 502.0, 2000.0, 2002 + 500 * 501 / 2)), 500.0)
    (mixed,) = [each for each in passes(model).batch_operations(prompt) if each.name == "linear attention"]
    assert mixed.bytes == 2 * 3 * state + 502 * (convolved + 4096) * 2
    assert gated.flops == counted_flops(
        lambda new: new(6 * 32, 1, 128) @ new(6 * 32, 128, 128),  # what the state holds of the key
        lambda new: new(6 * 32, 128, 1) @ new(6 * 32, 1, 128),  # its correction
        lambda new: new(6 * 32, 1, 128) @ new(6 * 32, 128, 128),  # what the state holds of the query
    )
    assert by_name(passes(model), 3, 100_000, 2)["linear attention"] == gated
    # 6 new tokens and 3 earlier ones of each sequence, in and out; 4 weights a channel.
    assert operations["convolution"].bytes == (2 * 6 + 2 * 2 * 3 + 4) * convolved * 2
    # Queries, keys, values, gate, and two numbers of each value head.
    assert operations["linear attention inputs"].flops == 2 * 6 * 2048 * (8192 + 4096 + 64)
    assert "attention" not in operations
    whole = passes("qwen3-next-80b-a3b", 48)
    # 12 layers of 2 key-value heads of 256, 36 of a state and 3 convolved tokens.
    fixed = 36 * (state + 3 * convolved * 2)
    assert float(whole.kv_bytes(1000)) == 1000 * 12 * 2 * 2 * 256 * 2 + fixed
    eight = passes("qwen3-next-80b-a3b", 48, tensor_parallel=8)  # four devices have a copy of each key-value head
    assert float(eight.device_bytes(1, 1000)) == pytest.approx(
        eight.weight_bytes / 8 + 1000 * 12 * 2 * 256 * 2 + fixed / 8
    )


def test_every_fourth_layer_of_a_hybrid_has_attention_and_its_gate() -> None:
    """Qwen3.5-397B: 32 heads of 256, whose queries come with a gate as wide; 2 key-value heads."""
    model = find_architecture("qwen3.5-397b-a17b")
    assert (model.num_layers, model.count(Attention), model.count(LinearAttention)) == (60, 15, 45)
    operations = by_name(passes(model, 60), 1, 1000)
    assert operations["queries, keys, values"].flops == 15 * 2 * 4096 * (2 * 32 * 256 + 2 * 2 * 256)
    assert operations["output projection"].flops == 15 * 2 * 32 * 256 * 4096
    assert operations["attention"].bytes == 15 * (1001 * 2 * 2 * 256 + 2 * 32 * 256) * 2
    named = {**public_shapes()["qwen3.5-397b-a17b"], "layer_types": ["full_attention"] * 20 + ["linear_attention"] * 40}
    assert find_architecture(ModelConfig(named)).count(Attention) == 20


def test_chunked_attention_reads_half_a_chunk_on_average() -> None:
    """Llama-4: 36 of 48 layers attend within chunks of 8192 tokens. At context c the chunk holds c mod 8192 tokens."""
    model = find_architecture("llama-4-scout")
    counts = {block.window: count for block, count in model.blocks.items() if isinstance(block, Attention)}
    assert (counts, model.count(Mlp)) == ({0: 12, 8192: 36}, 0)
    (local,) = (block for block in model.of(Attention) if block.window)
    assert float(local.attended(np.array(5000.0))) == 5000
    contexts = np.arange(8192.0, 10 * 8192)
    assert local.attended(contexts).mean() == pytest.approx(np.mean(contexts % 8192), rel=1e-3)
    assert float(local.cached(np.array(100_000.0))) == 8192
    maverick = find_architecture("llama-4-maverick")
    assert (maverick.count(Experts), maverick.count(Mlp), maverick.intermediate_size) == (24, 24, 16384)
    assert maverick.experts is not None and maverick.experts.shared_intermediate_size == 8192


def kv(model: str, context: int) -> float:
    return float(Roofline(find_architecture(model), replace(DEVICE, memory_bytes=0.0)).kv_bytes(context))


@pytest.mark.parametrize(
    ("model", "cached"),
    [
        # 10 layers of 4 key-value heads of 512, whose values are projected as keys; 50 of 16 of 256, with a window.
        ("gemma-4-31b", 10 * 100_000 * 2 * 4 * 512 * 2 + 50 * 1024 * 2 * 16 * 256 * 2),
        # An entry of 512 is key and value: 43 windows of 128; in 21 layers one for 4 tokens, with an index of 132
        # bytes, in 20 one for 128.
        ("deepseek-v4-flash", 43 * 128 * 1024 + 21 * 25_000 * (1024 + 132) + 20 * 781.25 * 1024),
        # 61 layers, of which the first two and then every second one have an entry for 128 tokens.
        ("deepseek-v4-pro", 61 * 128 * 1024 + 30 * 25_000 * (1024 + 132) + 31 * 781.25 * 1024),
        # Keys of 192 and values of 128: 9 layers of 4 heads, 39 of 8 with a window of 128.
        ("mimo-v2-flash", 9 * 100_000 * 4 * 320 * 2 + 39 * 128 * 8 * 320 * 2),
        # 60 layers of 4 heads of 128; 57 with an index of 128 numbers.
        ("minimax-m3", 100_000 * (60 * 4 * 256 * 2 + 57 * 128 * 2)),
        # 6 layers of attention; 23 states of 64 x 64 x 128 in float32 and 3 tokens of 4096 + 2 x 8 x 128 numbers.
        ("nemotron-3-nano-30b-a3b", 6 * 100_000 * 2 * 2 * 128 * 2 + 23 * (64 * 64 * 128 * 4 + 3 * 6144 * 2)),
    ],
)
def test_a_cache_of_100000_tokens_has_the_bytes_of_its_layers(model: str, cached: float) -> None:
    assert kv(model, 100_000) == pytest.approx(cached, rel=1e-12)


def test_layers_that_share_a_cache_read_it_and_add_nothing_to_it() -> None:
    """Gemma-4 of 30 layers whose last 10 use earlier keys and values: 5 of 6 layers have a window of 512."""
    config = {
        "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "hidden_size_per_layer_input": 256, "vocab_size": 262144, "use_double_wide_mlp": True,
    }  # fmt: skip
    whole, shared = (find_architecture(ModelConfig({**config, "num_kv_shared_layers": n})) for n in (0, 10))
    # Of the last 10 layers 2 attend to all tokens; MLPs there are twice as wide.
    kv_weights = 1536 * 2 * (8 * 256 + 2 * 512)
    assert shared.parameters - whole.parameters == 10 * 3 * 1536 * 6144 - kv_weights
    every, fewer = (Roofline(model, DEVICE) for model in (whole, shared))
    assert float(every.kv_bytes(2000) - fewer.kv_bytes(2000)) == (8 * 512 * 512 + 2 * 2000 * 1024) * 2

    def attention_bytes(roofline: Roofline) -> float:
        return sum(float(o.bytes) for o in roofline.operations(1, 2000) if o.name == "attention")

    assert attention_bytes(fewer) == attention_bytes(every)


def test_compressed_attention_takes_the_share_of_work_that_its_report_states() -> None:
    """At a million tokens DeepSeek-V4-Pro takes 27 % of the FLOPs a token of V3.2 and 10 % of its cache, Flash 10 and
    7 % (arXiv:2606.19348, with caches of fewer bits: a latent of V3.2 has 656 bytes, an entry of V4 about 584)."""

    def flops(name: str) -> float:
        model = Roofline(find_architecture(name), replace(DEVICE, memory_bytes=0.0))
        return sum(float(operation.flops) for operation in model.operations(1, 10**6))

    assert flops("deepseek-v4-pro") / flops("deepseek-v3.2") == pytest.approx(0.27, abs=0.01)
    assert flops("deepseek-v4-flash") / flops("deepseek-v3.2") == pytest.approx(0.10, abs=0.03)
    assert kv("deepseek-v4-pro", 10**6) / kv("deepseek-v3.2", 10**6) == pytest.approx(0.10, abs=0.015)
    assert kv("deepseek-v4-flash", 10**6) / kv("deepseek-v3.2", 10**6) == pytest.approx(0.07, abs=0.015)


def test_a_state_space_layer_and_experts_of_latents_by_hand() -> None:
    """Nemotron-3-Super: 128 heads of 64 with states of 128, 8 groups; 512 experts without a gate that see 1024 numbers,
    22 a token; a shared one of 5376. 6 sequences of a token."""
    model = find_architecture("nemotron-3-super-120b-a12b")
    counts = (model.count(LinearAttention), model.count(Experts), model.count(Attention), model.count(Mlp))
    assert counts == (40, 40, 8, 0)
    mamba, experts = (
        by_name(Roofline(replace(model, layers=(layer,)), DEVICE), 1, 1000, 6) for layer in model.layers[:2]
    )
    inner, convolved = 128 * 64, 128 * 64 + 2 * 8 * 128
    assert mamba["linear attention inputs"].flops == 2 * 6 * 4096 * (inner + convolved + 128)
    assert mamba["linear attention"].bytes == 2 * 6 * inner * 128 * 4 + 6 * (convolved + inner) * 2
    assert mamba["linear attention"].flops == 2 * 2 * 6 * inner * 128  # an update and a product with the state
    assert mamba["norms"].launches == 1  # a block a layer
    assert experts["experts' latents"].flops == experts["states of latents"].flops == 2 * 6 * 4096 * 1024
    assert experts["experts up"].flops == experts["experts down"].flops == 2 * 6 * 22 * 1024 * 2688
    assert experts["shared expert up"].flops == 2 * 6 * 4096 * 5376


def test_first_layers_are_dense_and_a_shared_expert_sees_every_token() -> None:
    model = find_architecture("kimi-k2")
    assert (model.count(Mlp), model.count(Experts)) == (1, 60)
    operations = by_name(passes(last_layer("kimi-k2")), 1, 0, 2)
    assert operations["shared expert gate, up"].flops == 2 * 2 * 7168 * 2 * 2048
    assert operations["router"].flops == 2 * 2 * 7168 * 384
    # 384 experts, 8 a token: two tokens go to 8 + 8 (1 - 8 / 384) of them.
    read = 8 + 8 * (1 - 8 / 384)
    states = 2 * 8 * (7168 + 2 * 2048) * 2
    assert operations["experts gate, up"].bytes == pytest.approx(read * 2 * 7168 * 2048 * 2 + states, rel=1e-12)


def test_a_kind_that_is_not_priced_is_refused_with_what_it_lacks() -> None:
    refusal(lambda: find_architecture(ModelConfig({"model_type": "llama5"})), "model_type 'llama5'", "nearest: ")
    refusal(
        lambda: find_architecture(ModelConfig({"model_type": "rwkv"})),
        "'rwkv', whose passes are not priced: its recurrence",
    )
    lacking = {key: value for key, value in public_shapes()["deepseek-v3"].items() if key != "kv_lora_rank"}
    refusal(lambda: find_architecture(ModelConfig(lacking), "mine"), "architecture mine has no kv_lora_rank")
    hybrid = {key: value for key, value in public_shapes()["glm-5.3-flash"].items() if key != "layer_types"}
    refusal(lambda: find_architecture(ModelConfig(hybrid)), "no layer_types, which say what layers have attention")
    longer = {**public_shapes()["qwen3.5-27b"], "layer_types": ["linear_attention"] * 65}
    refusal(lambda: find_architecture(ModelConfig(longer)), "its layer types are of 65 layers, not 64")


def test_formats_of_parts_are_their_own() -> None:
    """A layer of gpt-oss-20b: 32 experts of 3 x 2880 x 2880 weights in MXFP4, 4.25 bits each; the rest in bfloat16."""
    plain, packed = passes("gpt-oss-20b"), passes("gpt-oss-20b", weights={"experts": "mxfp4"})
    full, read = by_name(plain, 1, 100), by_name(packed, 1, 100)
    matrix = 2880 * 2880
    assert full["experts down"].bytes - read["experts down"].bytes == 4 * matrix * (16 - 4 - 8 / 32) / 8
    others = [name for name in full if name not in ("experts gate, up", "experts down")]
    assert all(full[name] == read[name] for name in others)
    assert plain.weight_bytes - packed.weight_bytes == 32 * 3 * matrix * (16 - 4.25) / 8
    head = by_name(passes("gpt-oss-20b", weights={"head": "float8"}), 1, 100)["head"]
    assert full["head"].bytes - head.bytes == 2880 * 201088


def test_experts_are_in_the_format_of_mlps_unless_they_have_their_own() -> None:
    model = last_layer("kimi-k2")
    same = by_name(passes(model, weights={"mlp": "nvfp4"}), 1, 100)
    own = by_name(passes(model, weights={"mlp": "bfloat16", "experts": "int4-g32"}), 1, 100)
    assert same["experts down"].bytes == own["experts down"].bytes  # 4.5 bits: a scale of 8 bits for 16, of 16 for 32
    weights = 7168 * 2048
    assert own["shared expert down"].bytes - same["shared expert down"].bytes == weights * (16 - 4.5) / 8
    assert own["output projection"] == same["output projection"]


@pytest.mark.parametrize(
    ("formats", "mlp", "attention"),
    [
        ({"weights": "float8"}, 1e14, 1e14),  # unpacked: as wide as the states
        ({"weights": "float8", "activations": "float8"}, 2e14, 1e14),
        ({"weights": "float8", "activations": "float8", "cache": "float8"}, 2e14, 2e14),
        ({"weights": "nvfp4", "activations": "float4"}, 4e14, 1e14),
        ({"weights": "nvfp4", "activations": "float8", "cache": "float8"}, 2e14, 2e14),
        ({"weights": "bfloat16", "activations": "float8"}, 1e14, 1e14),
        ({"weights": {"attention": "float8", "mlp": "nvfp4"}, "activations": "float4", "cache": "float8"}, 4e14, 2e14),
    ],
)
def test_products_are_of_the_wider_of_weights_and_activations(
    formats: dict[str, Any], mlp: float, attention: float
) -> None:
    """A pass of 4096 tokens, which products bound: seconds are FLOPs over the throughput of their type."""
    roofline = passes("llama-3.1-8b", **formats)
    operations = by_name(roofline, 4096, 100_000)
    for name, throughput in (("MLP down", mlp), ("attention", attention)):
        assert roofline.time(operations[name]) == pytest.approx(operations[name].flops / throughput)
    assert roofline.time(operations["head"]) == pytest.approx(operations["head"].flops / 1e14)


def test_a_cache_in_float8_has_half_the_bytes() -> None:
    full, narrow = (by_name(passes("llama-3.1-8b", cache=cache), 1, 5000)["attention"] for cache in (None, "float8"))
    assert full.bytes - narrow.bytes == 5001 * 2 * 8 * 128
    assert passes("llama-3.1-8b", cache="float8").kv_bytes(5000) == 5000 * 2 * 8 * 128


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ({"weights": {"expert": "int4"}}, ("weights of 'expert' are unknown", "attention, mlp, experts, head")),
        ({"weights": {"experts": "fp4"}}, ("weights in 'fp4' are unknown", "mxfp4, nvfp4")),
        ({"activations": "int8"}, ("activations in 'int8' are unknown; give float8 or float4",)),
        ({"cache": "int3"}, ("a cache in 'int3' is unknown",)),
    ],
)
def test_an_unknown_format_is_refused(formats: dict[str, Any], words: tuple[str, ...]) -> None:
    refusal(lambda: passes("gpt-oss-20b", **formats), *words)


def test_activations_need_hardware_that_multiplies_them() -> None:
    refusal(
        lambda: Roofline(find_architecture("llama-3.1-8b"), find_hardware("h100"), activations="float4"),
        "hardware h100 has no throughput in float4; choose one of",
    )
    assert {name for name, device in known_hardware().items() if "float4" in device.flops} == {
        "b200", "b300", "gb200", "gb300", "gb10",
    }  # fmt: skip


def test_a_cost_file_names_formats_and_says_what_it_priced() -> None:
    document = {
        "kind": "specsim-cost", "version": 1, "form": "roofline", "source": "datasheet", "date": "2026-11",
        "target": "deepseek-v3", "drafter": "prompt-lookup", "hardware": "b200", "tensor_parallel": 8,
        "weights": {"mlp": "nvfp4", "attention": "bfloat16"}, "activations": "float4", "cache": "float8",
    }  # fmt: skip
    cost = read_cost(document)
    assert isinstance(cost, RooflineCost)
    assert cost.subject == (
        "deepseek-v3 with prompt-lookup on 8 x b200 in bfloat16, weights mlp nvfp4, attention bfloat16, activations "
        "float4, cache float8"
    )
    # 656 billion weights of MLPs and experts at 4.5 bits, 15 of the rest at 16.
    assert cost.target.weight_bytes == pytest.approx(656e9 * 4.5 / 8 + 15e9 * 2, rel=0.01)


def test_weights_and_caches_must_fit_together() -> None:
    """Llama-3.1-8B on an H100: 16.1 GB of weights, and 131,072 bytes a token. 80 GB hold 64 sequences of 7,600 tokens
    and not of 8,000."""
    target = Roofline(find_architecture("llama-3.1-8b"), find_hardware("h100"))
    cost = RooflineCost(target, find_drafter("eagle", target.model), batch=64)
    assert cost.verify(4, 7600) > cost.verify(4, 1000)
    missing = 8030261248 * 2 + 64 * 8000 * 131072 - 80e9
    refusal(
        lambda: cost.verify(4, 8000), "at batch 64", "8,000 cached tokens", f"{missing / 1e9:.1f} GB more than h100 has"
    )
    with_model = replace(cost, drafter=find_drafter("llama-3.2-1b", target.model), draft_passes=None)
    more = 1235814400 * 2 + 64 * 7600 * 16 * 2 * 8 * 64 * 2
    needed = 8030261248 * 2 + 64 * 7600 * 131072
    refusal(lambda: with_model.verify(4, 7600), f"{(needed + more - 80e9) / 1e9:.1f} GB more")
    assert replace(cost, target=replace(target, cache="float8"), draft_passes=None).verify(4, 8000) > 0


def test_the_first_layers_of_a_model_are_its_dense_ones() -> None:
    """Three of DeepSeek-V3's 61 layers are dense; a layer more is always more weights."""
    model = find_architecture("deepseek-v3")
    counts = [model.first(layers).parameters for layers in range(6)]
    steps = np.diff(counts)
    assert counts[0] > 0 and steps[0] == steps[1] == steps[2] and steps[3] == steps[4] > 10 * steps[2] > 0
    assert model.first(61).parameters == model.parameters
