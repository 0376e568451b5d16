"""Drafters of rooflines: parameters counted by hand or in released drafters, and what their steps take of a round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost
from specsim.cost.roofline.architecture import find_architecture, public_shapes
from specsim.cost.roofline.cost import RooflineCost, find_drafter
from specsim.cost.roofline.hardware import Derating, Hardware
from specsim.cost.roofline.passes import Roofline
from tests.support.checks import refusal
from tests.support.commands import call, json_of

# Memory alone counts, and no launches.
DEVICE = Hardware("plain", memory_bytes_s=1e12, flops={"bfloat16": 1e18}, link_bytes_s=1e11)


def priced(target: str, drafter: Any, batch: int = 1) -> RooflineCost:
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
        operation.name: operation for operation in priced("llama-3.1-8b", "eagle3").draft_passes.operations(1, 0)
    }
    assert operations["head"].bytes == (32000 * 4096 + 4096 + 32000) * 2
    assert operations["queries, keys, values"].flops == 2 * (queries + kv)


@pytest.mark.parametrize(
    ("target", "sizes", "hidden", "heads", "kv_heads", "head_dim", "inner"),
    [
        # configs of SpecForge
        ("kimi-k2", {}, 7168, 64, 64, 128, 18432),
        ("llama-4-scout", {"intermediate_size": 32768}, 5120, 40, 8, 128, 32768),
        ("qwen3-30b-a3b", {}, 2048, 32, 4, 128, 6144),
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


def test_multi_token_prediction_is_a_layer_of_the_target_and_a_projection() -> None:
    """DeepSeek-V3: latent attention, 257 experts, and a projection of 14336 numbers to 7168. Its README_WEIGHTS prints
    11.5 billion weights beside embedding and head, which are those of the layer."""
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 257 * 3 * 7168 * 2048
    assert matrices("deepseek-v3", "mtp") == attention + experts + 14336 * 7168
    assert (attention + experts) / 1e9 == pytest.approx(11.5, abs=0.05)
    hybrid = find_drafter("mtp", find_architecture("qwen3-next-80b-a3b")).model
    assert hybrid is not None and (hybrid.attention_layers, hybrid.expert_layers, hybrid.vocab_size) == (1, 1, 151936)
    dense = find_drafter("mtp", find_architecture("qwen3.5-27b")).model
    assert dense is not None and dense.experts is None


def test_block_drafters_draft_in_one_pass_of_as_many_rows() -> None:
    """DFlash of Qwen3-8B: 5 layers of the target's shape, and its head."""
    layer = 4096 * (32 + 2 * 8 + 32) * 128 + 3 * 4096 * 12288
    assert matrices("qwen3-8b", "block:5") == 5 * layer
    cost = priced("qwen3-8b", {"kind": "block", "layers": 5}, batch=8)
    for drafts in (1, 4, 15):
        assert cost.draft(drafts, 1000) == pytest.approx(float(cost.draft_passes.seconds(drafts, 1000, 8)))
    assert float(cost.catch_up(1000)) == float(cost.wider(9, 1000)) == 0
    assert float(cost.draft(15, 1000)) < 1.1 * float(cost.draft(1, 1000))


def test_the_first_pass_of_eagle_3_reads_all_verified_tokens_and_projects_states() -> None:
    """A draft of 3 tokens: a pass over 4 tokens that were verified, of whose last one a token is drafted; then two
    steps without the projection of states."""
    cost = priced("llama-3.1-8b", "eagle3", batch=4)
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
    cost = priced("deepseek-v3", "mtp")
    read = [256 * (1 - (1 - 8 / 256) ** rows) for rows in (4, 1, 1)]
    other = matrices("deepseek-v3", "mtp") - 256 * 3 * 7168 * 2048 + 129280 * 7168
    expected = 2 * (sum(read) * 3 * 7168 * 2048 + 3 * other) / 1e12
    assert float(cost.draft(3, 100)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "block:2", "medusa:3"])
def test_steps_of_ragged_batches_are_those_of_lockstep(kind: str) -> None:
    cost = priced("qwen3-30b-a3b", kind, batch=6)
    places = np.arange(4)
    together = cost.batch_draft(places, BatchTokens.alike(6, 1, 500.0 + places))
    assert together == pytest.approx([float(cost.draft_step(int(place), 500)) for place in places], rel=1e-12)
    assert together.sum() == pytest.approx(float(cost.draft(4, 500)))


def test_a_smaller_vocabulary_shortens_the_head() -> None:
    whole, part = (priced("llama-3.1-8b", {"kind": "eagle", "vocabulary": size}) for size in (128256, 32064))
    saved = 3 * 32064 * (4096 + 2) * 2  # weights, and scores that are written and read
    assert float(whole.draft(1, 0) - part.draft(1, 0)) == pytest.approx(saved / 1e12, rel=1e-2)
    assert priced("llama-3.1-8b", "eagle").drafter == whole.drafter


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
        ("dflash:5", ("architecture 'dflash:5' is neither",)),
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
