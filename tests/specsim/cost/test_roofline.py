"""Rooflines: bytes and FLOPs by hand, shapes against the models themselves, drafters' steps, one constant changed."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.compare.hardware import Change, changes
from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost
from specsim.cost.roofline import architecture, cost, hardware, passes, shape
from specsim.cost.roofline.architecture import find_architecture, public_shapes
from specsim.cost.roofline.config import ModelConfig
from specsim.cost.roofline.cost import Overheads, RooflineCost, find_drafter
from specsim.cost.roofline.hardware import Derating, Hardware, find_hardware, known_hardware
from specsim.cost.roofline.passes import Operation, Roofline
from specsim.cost.roofline.shape import Architecture, Attention, Experts
from specsim.io.errors import InputError
from tests.support.checks import refusal
from tests.support.commands import call, json_of

IDEAL = Derating()
PLAIN = Hardware("plain", memory_bytes_s=1e12, flops={"bfloat16": 1e14, "float32": 1e13}, link_bytes_s=1e11)


def llama_7b_layer(**other: Any) -> Roofline:
    return Roofline(find_architecture("llama-2-7b").first(1), PLAIN, derating=IDEAL, **other)


def by_name(passes: Roofline, *asked: int) -> dict[str, Operation]:
    return {operation.name: operation for operation in passes.operations(*asked)}


def test_bytes_and_flops_of_a_7b_layer_are_those_worked_out_by_hand() -> None:
    """Hidden 4096, 32 heads of 128, MLP of 11008, bfloat16: 3 tokens behind 1000 cached ones."""
    operations = by_name(llama_7b_layer(), 3, 1000)
    # 3 matrices of 4096 x 4096 = 50331648 weights of 2 bytes; 3 states in (4096) and out (3 x 4096).
    qkv = operations["queries, keys, values"]
    assert (qkv.bytes, qkv.flops) == (100663296 + 3 * 16384 * 2, 2 * 3 * 50331648)
    # Keys and values of 1003 tokens, 8192 numbers each; queries in, states out, 4096 each.
    attention = operations["attention"]
    assert attention.bytes == 1003 * 8192 * 2 + 3 * 2 * 4096 * 2
    assert attention.flops == 2 * (2 * 3 * 1003 * 4096)  # scores, then values
    assert operations["output projection"].bytes == 33554432 + 3 * 8192 * 2
    # Gate and up: 2 x 4096 x 11008 weights; down: 11008 x 4096.
    assert operations["MLP gate, up"].bytes == 180355072 + 3 * (4096 + 22016) * 2
    assert operations["MLP down"].bytes == 90177536 + 3 * (11008 + 4096) * 2
    assert operations["MLP gate, up"].flops + operations["MLP down"].flops == 2 * 3 * 135266304
    weights = sum(operations[name].flops for name in operations if "attention" not in name and name != "head") / (2 * 3)
    assert weights == 202375168  # the layer's parameters but for its norms


def test_the_cache_is_read_once_whatever_the_number_of_drafted_tokens() -> None:
    single, nine = (by_name(llama_7b_layer(), n, 4000)["attention"] for n in (1, 9))
    assert nine.bytes - single.bytes == 8 * (8192 + 2 * 4096) * 2  # the new tokens' keys, values, queries, states


def test_bytes_of_a_mixtral_layer_are_of_the_experts_that_its_tokens_go_to() -> None:
    """8 experts of 3 x 4096 x 14336 weights, 2 a token: in expectation 2, 3.5 and 5.46875 of them at 1, 2, 4 tokens."""
    layer = Roofline(find_architecture("mixtral-8x7b").first(1), PLAIN, derating=IDEAL)
    expert_bytes = 3 * 4096 * 14336 * 2
    for tokens, experts in ((1, 2.0), (2, 3.5), (4, 5.46875)):
        parts = by_name(layer, 1, 100, tokens)
        read = parts["experts gate, up"].bytes + parts["experts down"].bytes
        states = 2 * tokens * (4096 + 2 * 14336 + 14336 + 4096) * 2
        assert read == experts * expert_bytes + states
        assert parts["experts gate, up"].flops + parts["experts down"].flops == 2 * 2 * tokens * expert_bytes / 2
        assert parts["router"].bytes == 4096 * 8 * 2 + tokens * (4096 + 8) * 2
    # Four tokens of one sequence use as many experts as 3.03 independent tokens.
    alike = by_name(layer, 4, 100)["experts down"].bytes - 4 * 2 * (4096 + 14336) * 2
    assert alike == pytest.approx(8 * (1 - 0.75**3.031) * expert_bytes / 3, rel=1e-4)


def test_int4_weights_take_four_bits_and_a_scale_for_every_128() -> None:
    full, packed = by_name(llama_7b_layer(), 1, 100), by_name(llama_7b_layer(weights="int4"), 1, 100)
    assert full["MLP down"].bytes - packed["MLP down"].bytes == 45088768 * (2 - 0.5 - 2 / 128)
    assert packed["MLP down"].flops == full["MLP down"].flops
    assert packed["head"] == full["head"]
    assert llama_7b_layer(weights="int8").weight_bytes == 202375168 + 2 * (2 * 32000 * 4096 + 3 * 4096)


def test_a_batch_shares_weights_and_has_a_cache_for_each_sequence() -> None:
    single, four = by_name(llama_7b_layer(), 2, 1000), by_name(llama_7b_layer(), 2, 1000, 4)
    assert four["attention"].bytes == 4 * single["attention"].bytes
    assert four["attention"].flops == 4 * single["attention"].flops
    assert four["MLP down"].bytes - single["MLP down"].bytes == 6 * (11008 + 4096) * 2


def test_devices_share_weights_and_cache_and_sum_states_twice_a_layer() -> None:
    alone, shared = by_name(llama_7b_layer(), 2, 1000), by_name(llama_7b_layer(tensor_parallel=4), 2, 1000)
    assert shared["attention"].bytes == alone["attention"].bytes / 4
    assert shared["attention"].flops == alone["attention"].flops / 4
    sums = shared["all-reduce"]
    assert sums.link_bytes == 2 * (2 * 3 / 4 * 2 * 4096 * 2)  # a ring sends 2 (D - 1) / D of 2 tokens' states
    assert (sums.all_reduces, sums.launches) == (2, 0)  # behind attention and behind the MLP
    grouped = Roofline(find_architecture("llama-3.1-8b").first(1), PLAIN, tensor_parallel=32, derating=IDEAL)
    kv = by_name(grouped, 1, 10**6)["attention"].bytes
    assert kv == pytest.approx(10**6 * 2048 * 2 / 8, rel=1e-4)  # every device has at least 1 of 8 key-value heads


def test_a_sliding_window_bounds_what_its_layers_read() -> None:
    model = find_architecture("gpt-oss-20b")
    counts = {block.window: count for block, count in model.blocks.items() if isinstance(block, Attention)}
    assert counts == {128: 12, 0: 12}
    attended = sum(counts[block.window] * block.attended(np.array([100.0, 1000.0])) for block in model.of(Attention))
    assert attended.tolist() == [24 * 100, 12 * 1000 + 12 * 128]


def test_a_mixture_writes_its_routers_choice_and_its_experts_activations() -> None:
    """Two layers of Mixtral, 4 tokens, 2 of 8 experts each, bfloat16: a router score for each of 8 experts,
    and 8 rows of 14336 for each of gate, up and their product."""
    parts = by_name(Roofline(find_architecture("mixtral-8x7b").first(2), PLAIN, derating=IDEAL), 4, 100)
    assert parts["choice of experts"].bytes == 2 * (4 * 8) * 2
    assert parts["experts activation"].bytes == 2 * 8 * (14336 + 14336 + 14336) * 2


@pytest.mark.parametrize(("routing", "read"), [("uniform", 128 * (1 - (15 / 16) ** 4)), ("balanced", 32.0)])
def test_experts_read_under_either_routing(routing: Any, read: float) -> None:
    assert Experts(128, 8, 768, routing=routing).read(4) == pytest.approx(read, rel=1e-12)


@given(count=st.integers(2, 7), seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 40))
def test_router_statistics_give_the_expected_experts_of_independent_tokens(count: int, seed: int, tokens: int) -> None:
    """Each expert is missed by n tokens with (1 - p)^n; a skew reads fewer than uniform routing does."""
    shares = np.random.default_rng(seed).dirichlet(np.ones(count))
    skewed, uniform = Experts(count, 1, 8, probs=tuple(shares.tolist())), Experts(count, 1, 8)
    assert skewed.read(tokens) == pytest.approx(float(np.sum(1 - (1 - shares) ** tokens)), rel=1e-9)
    assert skewed.read(tokens) <= uniform.read(tokens) * (1 + 1e-9)
    assert skewed.read(1) == pytest.approx(1.0)


MODELS = [
    "llama-2-7b", "llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-2-9b", "gpt-oss-20b", "deepseek-v3", "glm-5",
    "qwen3.5-397b-a17b", "minimax-m2.5",
]  # fmt: skip


@given(
    name=st.sampled_from(MODELS),
    hardware=st.sampled_from(["a100", "h200", "l40s"]),
    weights=st.sampled_from([None, "int8", "int4"]),
    overlap=st.floats(0, 1),
    tokens=st.integers(1, 300),
    context=st.integers(0, 100_000),
    batch=st.integers(1, 64),
)
def test_more_tokens_context_or_sequences_never_take_less_time(
    name: str, hardware: str, weights: str | None, overlap: float, tokens: int, context: int, batch: int
) -> None:
    device = replace(find_hardware(hardware), memory_bytes=0.0)
    passes = Roofline(find_architecture(name), device, weights=weights, derating=Derating(0.9, 0.8, 1e-6, overlap))
    base = passes.seconds(tokens, context, batch)
    more = [(tokens + 1, context, batch), (tokens, context + 7, batch), (tokens, context, batch + 1)]
    assert all(passes.seconds(*size) >= base * (1 - 1e-12) for size in more)
    faster = replace(passes, hardware=replace(device, memory_bytes_s=2 * device.memory_bytes_s))
    assert base * (1 + 1e-12) >= faster.seconds(tokens, context, batch) >= base / 2


@given(context=st.integers(1, 20_000), launch_s=st.floats(0, 1e-4), name=st.sampled_from(MODELS))
def test_twice_the_bandwidth_halves_a_step_that_memory_bounds_but_for_its_launches(
    context: int, launch_s: float, name: str
) -> None:
    device = replace(PLAIN, flops={"bfloat16": 1e20})
    passes = Roofline(find_architecture(name), device, derating=Derating(launch_s=launch_s))
    doubled = replace(passes, hardware=replace(device, memory_bytes_s=2e12))
    launches_s = launch_s * sum(operation.launches for operation in passes.operations(1, context))
    halved = (passes.seconds(1, context) - launches_s) / 2 + launches_s
    assert doubled.seconds(1, context) == pytest.approx(float(halved), rel=1e-9)


@pytest.mark.parametrize(("overlap", "seconds"), [(1.0, 0.008), (0.5, 0.0105), (0.0, 0.013)])
def test_an_operation_takes_the_longer_of_reading_and_computing(overlap: float, seconds: float) -> None:
    """4 GB at half of 1 TB/s are 8 ms, 100 GFLOP at a fifth of 100 TFLOP/s 5 ms, of which `overlap` hides; 3 launches
    of 1 us, 1 GB to other devices at 0.1 TB/s, and 2 all-reduces of 10 us."""
    passes = replace(llama_7b_layer(), derating=Derating(0.5, 0.2, 1e-6, overlap, 1e-5))
    assert float(passes.time(Operation("product", 4e9, 1e11))) == pytest.approx(seconds, rel=1e-12)
    assert float(passes.time(Operation("product", 4e9, 1e11, 3, 1e9, 2))) == pytest.approx(
        seconds + 3e-6 + 0.01 + 2e-5, rel=1e-12
    )


def test_every_device_has_its_source_and_no_ceiling_that_is_not_printed() -> None:
    assert set(known_hardware()) >= {"a100", "a6000", "a800", "h100", "h200", "l40s", "b200", "rtx-4090", "epyc-9655"}
    assert all(device.source and device.date and device.title for device in known_hardware().values())
    with pytest.raises(InputError, match="hardware a100 has no throughput in float8; choose one of float32"):
        Roofline(find_architecture("llama-2-7b"), find_hardware("a100"), dtype="float8")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: find_hardware("tpu"), "unknown GPU 'tpu'; nearest: "),
        (lambda: find_architecture("gpt-9"), "unknown model 'gpt-9'; nearest: "),
        (lambda: find_architecture(ModelConfig({"model_type": "mambo"})), "'mambo', whose passes are not known; near"),
        (lambda: find_architecture(ModelConfig({"text_config": 3})), "text_config is malformed"),
        (lambda: find_architecture(ModelConfig({**public_shapes()["qwen3-30b-a3b"], "mlp_only_layers": 7})), "is malf"),
        (lambda: find_architecture(ModelConfig({"model_type": "llama"})), "has no hidden_size that is a whole number"),
        (lambda: Roofline(find_architecture("llama-2-70b"), find_hardware("a100")), "take 138 GB a device, a100 has"),
        (lambda: llama_7b_layer(weights="int3"), "weights in 'int3' are unknown; nearest: int"),
        (lambda: llama_7b_layer(tensor_parallel=3), "3 devices cannot share the 32 heads"),
        (lambda: Experts(4, 2, 8, probs=(0.5, 0.5, 0.5, 0.1)), "sum to 1.6, a token goes to 2 experts"),
        (lambda: Experts(4, 5, 8), "5 experts a token of 4"),
        (lambda: Hardware.from_json({"flops": {}}), "is malformed (Object missing required field `memory_bytes_s`)"),
        (lambda: Derating(memory=1.5), "derating: memory=1.5; give above 0, at most 1"),
        (lambda: find_drafter({"kind": "eesd", "layers": 32}, find_architecture("llama-2-7b")), "give 1 to 31"),
        (lambda: find_drafter({"kind": "eesd", "depth": 3}, find_architecture("llama-2-7b")), "is unknown; give a"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(build: Any, message: str) -> None:
    refusal(build, message)


def priced(drafter: Any, **other: Any) -> RooflineCost:
    target = Roofline(find_architecture("llama-2-7b"), PLAIN, derating=IDEAL)
    return RooflineCost(target, find_drafter(drafter, target.model), **other)


def test_a_draft_is_one_pass_of_the_draft_model_after_another() -> None:
    cost = priced("llama-68m")
    model = replace(cost.target, model=find_architecture("llama-68m"))
    steps = [model.seconds(1, np.array([100, 900]) + place) for place in range(3)]
    assert cost.draft(3, np.array([100, 900])) == pytest.approx(np.sum(steps, axis=0))
    assert cost.catch_up(100) == pytest.approx(model.seconds(2, 100) - model.seconds(1, 100))
    assert cost.wider(9, 100) == pytest.approx(model.seconds(9, 100) - model.seconds(1, 100))


def test_medusas_heads_draft_all_tokens_in_one_pass_over_the_last_state() -> None:
    """4 residual blocks of 4096 x 4096 and 4 heads of 4096 x 32000, read once whatever the draft's length."""
    cost = priced({"kind": "medusa", "heads": 4})
    assert cost.draft(1, 100) == cost.draft(4, 100)
    assert float(cost.draft(1, 100)) == pytest.approx(2 * 4 * (4096**2 + 4096 * 32000) / 1e12, rel=1e-3)
    assert float(cost.wider(30, 100)) == 0


def test_eagle_is_one_layer_an_input_projection_and_the_targets_head() -> None:
    names = ["eagle", "edd"]
    eagle, edd = (priced(name).drafter.model for name in names)
    assert eagle.parameters - edd.parameters == 2 * 4096**2
    weights = 202375168 + 4096 * 32000  # the layer and the head; of the embedding a single row is read
    assert float(priced("edd").draft(1, 100)) == pytest.approx(2 * weights / 1e12, rel=0.01)


def test_an_early_exit_leaves_its_first_layers_out_of_verification() -> None:
    """Drafting has run them for all tokens but the last, which passes them alone."""
    cost, whole = priced({"kind": "eesd", "layers": 8}), priced("prompt-lookup")
    assert cost.verify(1, 500) == pytest.approx(whole.verify(1, 500))
    layers, tables = 202375168, 4096 * 32000
    assert float(cost.draft(1, 100)) == pytest.approx(2 * (9 * layers + tables) / 1e12, rel=0.01)
    compute_bound, bound = replace(PLAIN, memory_bytes_s=1e20), 1e14
    fast, all_layers = (
        replace(cost, target=replace(cost.target, hardware=compute_bound), draft_passes=None) for cost in (cost, whole)
    )
    saved = all_layers.verify(101, 0) - fast.verify(101, 0)
    assert float(saved) == pytest.approx(8 * 100 * 2 * layers / bound, rel=0.01)


@pytest.mark.parametrize("drafter", ["space", "prompt-lookup"])
def test_drafts_that_no_pass_makes_cost_nothing(drafter: str) -> None:
    cost = priced(drafter)
    assert float(cost.draft(5, 100)) == float(cost.catch_up(100)) == float(cost.wider(5, 100)) == 0.0


def test_a_batch_of_a_mixture_reads_more_experts_where_it_verifies_until_all_are_read() -> None:
    """Balanced routing: 4 tokens of a sequence go to 32 of 128 experts, 4 x 16 tokens to all, as 16 do."""
    model = find_architecture(ModelConfig({**public_shapes()["qwen3-30b-a3b"], "routing": "balanced"})).first(1)
    cost = RooflineCost(Roofline(model, PLAIN, derating=IDEAL), find_drafter("prompt-lookup", model))

    def expert_bytes(tokens: int, batch: int) -> float:
        operations = cost.verify_operations(BatchTokens.alike(batch, tokens, 1000))
        return float(
            sum(operation.bytes for operation in operations if operation.name in ("experts gate, up", "experts down"))
        )

    assert expert_bytes(4, 1) / expert_bytes(1, 1) == pytest.approx(4.0, rel=1e-6)
    assert expert_bytes(4, 16) / expert_bytes(1, 16) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("module", [architecture, hardware, passes, shape, cost])
def test_examples_say_what_they_give(module: ModuleType) -> None:
    tests = doctest.testmod(module)
    assert tests.attempted > 1 and tests.failed == 0


def test_layers_without_experts_are_counted() -> None:
    sparse = {**public_shapes()["qwen3-30b-a3b"], "decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}
    model = find_architecture(ModelConfig(sparse))
    assert (model.num_layers, model.count(Experts)) == (48, 22)  # every other layer, less two of these
    names = [operation.name for operation in Roofline(model, PLAIN).operations(1, 10)]
    assert "MLP down" in names and "experts down" in names


@pytest.mark.parametrize("name", sorted(public_shapes()))
def test_every_public_shape_is_read(name: str) -> None:
    model = find_architecture(name)
    assert isinstance(model, Architecture) and model.parameters > 6e7
    assert all(find_drafter(kind, model).kind == kind for kind in ("eagle", "edd", "space", "prompt-lookup"))


# Memory alone counts, and no launches.
DEVICE = Hardware("plain", memory_bytes_s=1e12, flops={"bfloat16": 1e18}, link_bytes_s=1e11)


def priced_on_memory(target: str, drafter: Any, batch: int = 1) -> RooflineCost:
    roofline = Roofline(find_architecture(target), DEVICE, derating=Derating())
    return RooflineCost(roofline, find_drafter(drafter, roofline.model), batch=batch)


def matrices(target: str, drafter: Any) -> int:
    """Weights of the drafter's layers and inputs, its head and embedding left out."""
    model = find_drafter(drafter, find_architecture(target)).model
    assert model is not None
    return sum(model.matrices.values())


def test_eagle_3_of_llama_3_1_has_the_parameters_of_the_released_drafter() -> None:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: three states of 4096 to one; attention from 8192 numbers, 32 heads and 8
    key-value heads of 128; an MLP of 14336; a head over 32,000 tokens."""
    projection, queries, kv, output = 3 * 4096 * 4096, 8192 * 4096, 8192 * 2 * 1024, 4096 * 4096
    assert matrices("llama-3.1-8b", "eagle3") == projection + queries + kv + output + 3 * 4096 * 14336
    model = find_drafter("eagle3", find_architecture("llama-3.1-8b")).model
    assert model is not None and model.head_parameters == 32000 * 4096
    operations = {
        operation.name: operation
        for operation in priced_on_memory("llama-3.1-8b", "eagle3").draft_passes.operations(1, 0)
    }
    assert operations["head"].bytes == (32000 * 4096 + 4096 + 32000) * 2
    assert operations["queries, keys, values"].flops == 2 * (queries + kv)


@pytest.mark.parametrize(
    ("target", "sizes", "hidden", "heads", "kv_heads", "head_dim", "inner"),
    [
        # configs of SpecForge
        ("kimi-k2", {}, 7168, 64, 64, 128, 18432),
        ("llama-4-scout", {}, 5120, 40, 8, 128, 32768),
        ("qwen3-30b-a3b", {}, 2048, 32, 4, 128, 12288),
        ("qwen3-coder-30b-a3b", {}, 2048, 32, 4, 128, 12288),
        ("gpt-oss-20b", {}, 2880, 64, 8, 64, 17280),
        ("deepseek-r1", {}, 7168, 56, 8, 128, 40960),
        ("qwen3-30b-a3b", {"intermediate_size": 6144}, 2048, 32, 4, 128, 6144),
    ],
)
def test_eagle_3_of_a_mixture_is_a_dense_layer(
    target: str, sizes: dict[str, int], hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int
) -> None:
    attention = 2 * hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    expected = 3 * hidden * hidden + attention + 3 * hidden * inner
    assert matrices(target, {"kind": "eagle3", **sizes}) == expected
    drafter = find_drafter({"kind": "eagle3", **sizes}, find_architecture(target)).model
    assert drafter is not None and drafter.experts is None and drafter.vocab_size == 32000


def test_eagle_3_of_llama_3_3_70b_is_narrower_than_its_target() -> None:
    """yuhuili/EAGLE3-LLaMA3.3-Instruct-70B: three states of 8192 to one of 6144, 48 heads, an MLP of 16384."""
    attention = 2 * 6144 * (48 + 2 * 8) * 128 + 48 * 128 * 6144
    expected = 3 * 8192 * 6144 + attention + 3 * 6144 * 16384
    assert matrices("llama-3.3-70b", "eagle3") == matrices("llama-3.1-70b", {"kind": "eagle3"}) == expected


@pytest.mark.parametrize(
    ("target", "layer_billions"),
    [
        # Billions of weights of a module beside embedding and head, by hand of the published sizes.
        ("mimo-v2-flash", 0.33),  # its card: 0.33B a module; dense, a window, 64 heads of 192, 8 key-value heads
        ("mimo-7b", 0.21),  # a dense layer of 177 million and 2 x 4096 to 4096
        ("glm-4.5-air", 2.37),  # 129 experts of 3 x 4096 x 1408, attention of 109 million, 2 x 4096 to 4096
        ("qwen3.5-27b", 0.43),  # attention with a gate of 105 million, 3 x 5120 x 17408, 2 x 5120 to 5120
    ],
)
def test_a_module_of_multi_token_prediction_is_as_large_as_published(target: str, layer_billions: float) -> None:
    assert matrices(target, "mtp") / 1e9 == pytest.approx(layer_billions, abs=0.006)


@pytest.mark.parametrize(("target", "megabytes"), [("gemma-4-31b", 940), ("gemma-4-26b-a4b", 840)])
def test_an_assistant_of_gemma_4_is_a_small_model_on_the_targets_cache(target: str, megabytes: int) -> None:
    """Model cards print its size in bfloat16. Its layers cache no keys and values, so a round's first pass reads one
    token."""
    cost = priced_on_memory(target, "mtp")
    model = cost.drafter.model
    assert model is not None and 2 * model.parameters / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert cost.draft_passes.kv_bytes(1000) == 0 and float(cost.catch_up(1000)) == 0
    assert float(cost.draft(1, 1000)) == pytest.approx(float(cost.draft(3, 1000)) / 3, rel=0.01)
    reached = 3 * min(1000, 1024) * model.of(Attention)[0].kv_width + 1000 * model.of(Attention)[1].kv_width
    attention = sum(float(o.bytes) for o in cost.draft_passes.operations(1, 1000) if o.name == "attention")
    assert attention == pytest.approx(2 * reached, rel=0.02)
    shape = find_architecture(target)
    by_config = find_drafter(architecture.published().heads["mtp"][target], shape)
    assert by_config == replace(cost.drafter, model=replace(model, name=by_config.model.name))


def test_multi_token_prediction_is_a_layer_of_the_target_and_a_projection() -> None:
    """DeepSeek-V3: latent attention, 257 experts, and a projection of 14336 numbers to 7168. Its README_WEIGHTS prints
    11.5 billion weights beside embedding and head, which are those of the layer."""
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 257 * 3 * 7168 * 2048
    assert matrices("deepseek-v3", "mtp") == attention + experts + 14336 * 7168
    assert (attention + experts) / 1e9 == pytest.approx(11.5, abs=0.05)
    hybrid = find_drafter("mtp", find_architecture("qwen3-next-80b-a3b")).model
    assert hybrid is not None and (hybrid.count(Attention), hybrid.count(Experts), hybrid.vocab_size) == (1, 1, 151936)
    dense = find_drafter("mtp", find_architecture("qwen3.5-27b")).model
    assert dense is not None and dense.experts is None


def test_block_drafters_draft_in_one_pass_of_as_many_rows() -> None:
    """DFlash of Qwen3-8B: 5 layers of the target's shape, and its head."""
    layer = 4096 * (32 + 2 * 8 + 32) * 128 + 3 * 4096 * 12288
    assert matrices("qwen3-8b", "block:5") == 5 * layer
    cost = priced_on_memory("qwen3-8b", {"kind": "block", "layers": 5}, batch=8)
    for drafts in (1, 4, 15):
        assert cost.draft(drafts, 1000) == pytest.approx(float(cost.draft_passes.seconds(drafts, 1000, 8)))
    assert float(cost.catch_up(1000)) == float(cost.wider(9, 1000)) == 0
    assert float(cost.draft(15, 1000)) < 1.1 * float(cost.draft(1, 1000))


def test_the_first_pass_of_eagle_3_reads_all_verified_tokens_and_projects_states() -> None:
    """A draft of 3 tokens: a pass over 4 tokens that were verified, of whose last one a token is drafted; then two
    steps without the projection of states."""
    cost = priced_on_memory("llama-3.1-8b", "eagle3", batch=4)
    passes = cost.draft_passes
    assert passes is not None
    tokens = [BatchTokens.alike(4, rows, 1000) for rows in (1, 4)]
    first = passes.batch_seconds(tokens[0]) + passes.batch_seconds(tokens[1], ends=False)
    first -= passes.batch_seconds(tokens[0], ends=False)
    projection = {operation.name: operation for operation in passes.operations(1, 1000, 4)}["input projection"]
    steps = sum(passes.seconds(1, 1000 + place, 4) - passes.time(projection) for place in (1, 2))
    assert float(cost.draft(3, 1000)) == pytest.approx(float(first + steps), rel=1e-9)
    assert float(cost.catch_up(1000)) == 0


def test_the_first_pass_of_a_prediction_module_reads_the_experts_of_all_verified_tokens() -> None:
    """DeepSeek-V3's module, 256 experts of 3 x 7168 x 2048 weights of 2 bytes, 8 a token: three drafts read those of
    4 tokens, then of one, and of one."""
    cost = priced_on_memory("deepseek-v3", "mtp")
    read = [
        256 * (1 - (1 - 8 / 256) ** rows) for rows in (3.031, 1, 1)
    ]  # four tokens of a sequence use as many experts as 3.031 independent ones
    other = matrices("deepseek-v3", "mtp") - 256 * 3 * 7168 * 2048 + 129280 * 7168
    expected = 2 * (sum(read) * 3 * 7168 * 2048 + 3 * other) / 1e12
    assert float(cost.draft(3, 100)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "block:2", "medusa:3"])
def test_steps_of_ragged_batches_are_those_of_lockstep(kind: str) -> None:
    cost = priced_on_memory("qwen3-30b-a3b", kind, batch=6)
    places = np.arange(4)
    together = cost.batch_draft(places, BatchTokens.alike(6, 1, 500.0 + places))
    assert together == pytest.approx([float(cost.draft_step(int(place), 500)) for place in places], rel=1e-12)
    assert together.sum() == pytest.approx(float(cost.draft(4, 500)))


def test_a_smaller_vocabulary_shortens_the_head() -> None:
    whole, part = (priced_on_memory("llama-3.1-8b", {"kind": "eagle", "vocabulary": size}) for size in (128256, 32064))
    saved = 3 * 32064 * (4096 + 2) * 2  # weights, and scores that are written and read
    assert float(whole.draft(1, 0) - part.draft(1, 0)) == pytest.approx(saved / 1e12, rel=1e-2)
    assert priced_on_memory("llama-3.1-8b", "eagle").drafter == whole.drafter


@pytest.mark.parametrize("name", sorted(public_shapes()))
def test_every_public_shape_has_these_drafters(name: str) -> None:
    target = find_architecture(name)
    for kind in ("eagle3", "mtp", "block:2"):
        model = find_drafter(kind, target).model
        assert model is not None and model.parameters > 0
        step = Roofline(model, DEVICE).seconds(1, 100)
        assert float(step) < float(Roofline(target, DEVICE).seconds(1, 100)) or target.num_layers < 4


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ("block", ("drafter block has layers=0; give 1 to 64",)),
        ("block:65", ("layers=65; give 1 to 64",)),
        ({"kind": "eagle3", "vocabulary": 10**6}, ("eagle3 has vocabulary=1000000; give 1 to 128256",)),
        ({"kind": "eagle3", "hidden_size": "4096"}, ("hidden_size='4096'",)),
        ({"kind": "mtp", "vocabulary": 32000}, ("is unknown; give a model, eagle, eagle3, mtp", "block")),
        ("dflush:5", ("unknown drafter 'dflush:5'; nearest: ",)),
    ],
)
def test_drafters_that_cannot_be_are_refused(drafter: Any, words: tuple[str, ...]) -> None:
    refusal(lambda: find_drafter(drafter, find_architecture("llama-3.1-8b")), *words)


def test_a_cost_file_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    document = {
        "kind": "specsim-cost", "version": 1, "form": "roofline", "source": "datasheet", "date": "2026-11",
        "target": "deepseek-r1", "drafter": "mtp", "hardware": "h200", "tensor_parallel": 8, "weights": "float8",
        "activations": "float8",
    }  # fmt: skip
    path.write_text(json.dumps(document))
    cost = read_cost(path)
    assert isinstance(cost, RooflineCost) and cost.subject.startswith("deepseek-r1 with mtp of deepseek-r1 on 8 x h200")
    shown = json_of(call("specsim", "cost", "show", path, "--batch", 8, "--json"))
    assert 0 < shown["rows"][0]["step_ratio"] < 0.2


# So fast at computing that every operation waits for memory.
MEMORY_BOUND = Hardware("slow memory", memory_bytes_s=1e12, flops={"bfloat16": 1e20}, link_bytes_s=1e11)


def costs(drafter: str = "llama-68m", **other: float) -> RooflineCost:
    target = Roofline(find_architecture("llama-160m"), MEMORY_BOUND, derating=Derating(**other))
    return RooflineCost(target, find_drafter(drafter, target.model))


def named(cost: RooflineCost, share: float = 0.25) -> dict[str, Change]:
    return {change.constant: change for change in changes(cost, share)}


def test_memory_bound_passes_take_as_much_longer_as_memory_is_slower() -> None:
    cost = costs()
    both, target, drafter = (named(cost)[f"{whose}: memory bandwidth"] for whose in ("both", "target", "drafter"))
    for change, of_target, of_drafter in ((both, 1, 1), (target, 1, 0), (drafter, 0, 1)):
        for changed, factor in ((change.less, 0.75), (change.more, 1.25)):
            assert float(changed.verify(4, 100) / cost.verify(4, 100)) == pytest.approx(factor**-of_target)
            assert float(changed.draft(4, 100) / cost.draft(4, 100)) == pytest.approx(factor**-of_drafter)


def test_a_launch_and_an_overhead_add_what_they_are() -> None:
    cost = replace(costs(launch_s=1e-5), overheads=Overheads(step_s=0.002))
    launches = sum(operation.launches for operation in cost.target.operations(1, 100))
    changed = named(cost)
    slower = changed["target: time of a launch"].more
    assert float(slower.verify(1, 100) - cost.verify(1, 100)) == pytest.approx(0.25e-5 * launches)
    assert changed["overhead of a step"].less.round_overhead() == pytest.approx(0.0015)


def test_what_is_zero_is_not_listed_and_an_overlap_stays_a_share() -> None:
    changed = named(costs())
    of_three = {f"{whose}: {what}" for whose in ("both", "target", "drafter")
                for what in ("memory bandwidth", "matrix throughput", "overlap")}  # fmt: skip
    assert changed.keys() == of_three
    assert changed["both: overlap"].more.target.derating.overlap == 1
    assert changed["both: overlap"].less.target.derating.overlap == 0.75
    assert named(costs("prompt-lookup")).keys() == {name for name in of_three if name.startswith("target")}
    shared = replace(costs().target, tensor_parallel=2)
    assert "target: bandwidth between devices" in named(RooflineCost(shared, find_drafter("eagle", shared.model)))


@pytest.mark.parametrize(
    ("short", "long"), [("eesd:3", {"kind": "eesd", "layers": 3}), ("medusa:4", {"kind": "medusa", "heads": 4})]
)
def test_a_drafter_of_a_number_has_a_short_form(short: str, long: dict[str, object]) -> None:
    target = find_architecture("llama-2-7b")
    assert find_drafter(short, target) == find_drafter(long, target)


def test_a_short_form_without_a_fitting_number_is_refused() -> None:
    for drafter in ("eesd:x", "eesd:", "self-sd:0", "medusa"):
        with pytest.raises(InputError, match="give 1 to"):
            find_drafter(drafter, find_architecture("llama-2-7b"))
