"""A target with identity blocks has the same output, and its drafters draft the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from realrun.drafters.registry import DRAFTERS
from realrun.lm.cached import CachedLM
from realrun.lm.choice import make_lm
from realrun.lm.variants import core_of, expand, expansion_of, layers_below
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import LAB_DRAFTERS, has_lab_drafter, weights_digest
from realrun.pairs.pair import LAB_DEEP, LAB_DEEP_LAYERS, Pair, load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.io.errors import InputError
from specsim.trace.trace import Trace
from tests.support.drafting import Case, case_pair, prompts_of
from tests.support.small_targets import ARCHITECTURES, small_target

TOKENS = torch.tensor([[5, 9, 3, 44, 17, 2, 60, 8]])


def differing(trace: Trace, other: Trace) -> list[str]:
    arrays = [name for name, value in vars(trace).items() if isinstance(value, np.ndarray)]
    return [name for name in arrays if not np.array_equal(getattr(trace, name), getattr(other, name))]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_logits_and_states_are_equal_to_the_last_bit(architecture: str) -> None:
    core = small_target(architecture)
    deep = expand(core, 9)
    assert deep.config.block_expansion == {"core_layers": 3} and expansion_of(core) is None
    assert len(deep.model.layers) == deep.config.num_hidden_layers == 9 and core.config.num_hidden_layers == 3
    output, repeated = (model(input_ids=TOKENS, output_hidden_states=True) for model in (core, deep))
    assert (output.logits - repeated.logits).abs().max() == 0.0
    for layers in range(4):
        after = repeated.hidden_states[layers_below(deep, layers)]
        assert (output.hidden_states[layers] - after).abs().max() == 0.0
    assert sum(p.numel() for p in deep.parameters()) > 1.5 * sum(p.numel() for p in core.parameters())
    back = core_of(deep)
    assert weights_digest(back) == weights_digest(core) and back.config.num_hidden_layers == 3
    assert (back(input_ids=TOKENS).logits - output.logits).abs().max() == 0.0


@torch.inference_mode()
def test_caches_of_core_and_deep_target_do_not_mix() -> None:
    core = small_target("llama")
    deep, plain = make_lm(expand(core, 9)), make_lm(core)
    for lm in (deep, plain):
        lm.prefill([5, 9, 3])
    for token in (44, 17):
        torch.testing.assert_close(deep.forward([token]), plain.forward([token]), rtol=0, atol=1e-12)


@pytest.fixture
def recorded_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording leaves the identity blocks out, which the following is to justify."""
    monkeypatch.setattr(Pair, "core", property(lambda pair: pair))


@pytest.mark.parametrize("kind", [name for name in DRAFTERS if name != "prompt-lookup"])
def test_drafters_draft_as_they_did(kind: str, recorded_deep: None) -> None:
    pair = case_pair(Case(kind))
    deep = replace(pair, target=expand(pair.target, int(pair.target.config.num_hidden_layers) + 3))
    settings = RecordSettings(max_draft_tokens=3, max_new_tokens=10)
    traces = [record(each, prompts_of(kind)[:2], settings) for each in (pair, deep)]
    assert differing(*traces) == [] and (traces[0].match_len > 0).any()
    assert deep.fingerprint == pair.fingerprint  # a predictor of the one serves the other


def passes_its_input_on(layer: Any) -> bool:
    """Whether a layer adds nothing to its input, by its own parameters alone."""
    return all(not parameter.any() for parameter in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight))


@pytest.mark.parametrize("layers", [4, 7, 8, 13, 40])
def test_identity_blocks_are_spread_evenly(layers: int) -> None:
    """Any number of the first layers does the share of the work that it has of the depth, to within one block."""
    core = small_target("llama")
    stack = expand(core, layers).model.layers
    working = [number for number, layer in enumerate(stack) if not passes_its_input_on(layer)]
    assert len(stack) == layers and len(working) == len(core.model.layers) == 3
    for depth in range(layers + 1):
        share = sum(number < depth for number in working)
        assert abs(share - 3 * depth / layers) <= 1


@torch.inference_mode()
def operations(lm: CachedLM, *before: CachedLM) -> int:
    """Floating-point operations of a pass over one token behind three, as torch counts them."""
    for each in (*before, lm):
        each.reset()
        each.prefill([5, 9, 3])
    with FlopCounterMode(display=False) as counter:
        lm.forward([44])
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("kind", "share"), [("eesd", 1 / 4), ("self-sd", 3 / 4)])
def test_a_drafter_of_a_share_of_the_core_runs_that_share_of_the_deep_target(kind: str, share: float) -> None:
    """An exit after one of four layers, or a draft without one attention and one MLP of four layers."""
    pair = case_pair(Case(kind))
    deep = replace(pair, target=expand(pair.target, 3 * int(pair.target.config.num_hidden_layers)))
    draft_steps, target_steps = [], []
    for each in (pair, deep):
        target, drafter = each.make_drafter()
        draft_steps.append(operations(drafter.lm, target))
        target_steps.append(operations(make_lm(each.target)))
    more = [after - before for before, after in (draft_steps, target_steps)]
    assert more[0] == pytest.approx(share * more[1], rel=1e-9)


def test_no_more_layers_than_there_are_is_refused() -> None:
    pair = case_pair(Case("self-sd"))
    with pytest.raises(InputError, match="4 layers are no more than the 4"):
        expand(pair.target, 4)


def test_targets_of_the_lab_are_named_by_their_depth() -> None:
    deep, less = load_pair(LAB_DEEP), load_pair(f"{LAB_DEEP}:10", drafter="eagle")
    assert deep.target_name == f"{LAB_DEEP}:{LAB_DEEP_LAYERS}" and less.target_name == f"{LAB_DEEP}:10"
    assert expansion_of(deep.target) == expansion_of(less.target) == {"core_layers": 8}
    assert layers_below(deep.target, 2) == 10  # of 40, where EESD exits after 2 of 8
    assert deep.predictor is not None
    for wrong in (f"{LAB_DEEP}:", f"{LAB_DEEP}:deep", f"{LAB_DEEP}:8"):
        with pytest.raises(InputError, match="lab-deep:40|no more than the 8"):
            load_pair(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "prompt-lookup", *filter(has_lab_drafter, LAB_DRAFTERS)])
def test_traces_of_the_lab_and_of_lab_deep_are_identical(drafter: str, recorded_deep: None) -> None:
    pairs = [load_pair(target, drafter=drafter, dtype="float64") for target in ("lab", LAB_DEEP)]
    settings = RecordSettings(max_draft_tokens=4, max_new_tokens=32)
    traces = [record(pair, lab_prompts(pair.tokenizer, 4), settings) for pair in pairs]
    assert differing(*traces) == []
