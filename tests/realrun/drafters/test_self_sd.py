"""Self-SD: what is skipped, and what it records, by the library's own models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.self_sd import SkippingLM
from realrun.lm.split_target import SplitTarget
from realrun.lm.variants import NOTHING, SkippedSublayers
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.proposals.recorder import RecordRequest
from realrun.proposals.target_cache import target_cache_columns
from specsim.policy.registry import make_policy
from tests.support.dense_records import output_of
from tests.support.drafting import SKIPS, self_sd_pair
from tests.support.small_targets import small_target
from tests.support.tiny import random_prompts, tiny_prompts

UNLIKE = SkippedSublayers(frozenset({1}), frozenset({1, 2}))
CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
mode = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())
architectures = pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "mistral"]
)  # lean, and the library's modules


@cache
def zeroed(architecture: str) -> Any:
    """The library's model whose skipped sublayers add nothing."""
    model = copy.deepcopy(small_target(architecture, layers=4))
    with torch.no_grad():
        for layer in SKIPS.attention:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in SKIPS.mlp:
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


@torch.inference_mode()
def plain_logits(architecture: str, context: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
    """What the drafter knows after context and what it drafted, [1, V], by the library alone.

    The target fills the cache up to the pending token, from which on the zeroed model takes over.
    """
    past = DynamicCache()
    if len(context) > 1:
        small_target(architecture, layers=4)(input_ids=torch.tensor([context[:-1]]), past_key_values=past)
    fed = torch.tensor([[context[-1], *drafted]])
    return zeroed(architecture)(input_ids=fed, past_key_values=past).logits[0, -1:]


def skipping(pair: Pair) -> SkippingLM:
    return SkippingLM(SplitTarget(pair.target, 0), pair.drafter.skips)


@torch.inference_mode()
def test_skipped_sublayers_are_not_run() -> None:
    pair = self_sd_pair("qwen2", skips=UNLIKE)
    pair = replace(pair, target=copy.deepcopy(pair.target))
    ran: list[tuple[str, int]] = []
    for number, layer in enumerate(pair.target.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, n=number: ran.append(("attention", n)))
        layer.mlp.register_forward_pre_hook(lambda *_, n=number: ran.append(("mlp", n)))
    target, drafter = pair.make_drafter()
    target.prefill([5, 6, 7])
    ran.clear()
    drafter.begin([5, 6, 7])
    assert ran == []  # what the target has fed is not fed again
    drafter.propose([5, 6, 7, 8], RoundContext(Sampler(), 0, 0, 2), lambda step, depth: True)
    assert ran == 2 * [("attention", 0), ("mlp", 0), ("attention", 2), ("attention", 3), ("mlp", 3)]


def test_ranks_depend_on_where_the_round_began() -> None:
    """Those of an independent model do not, so that a shifted column would be wrong."""
    (prompt,) = random_prompts(1)
    output = output_of(self_sd_pair(), prompt, 60, Sampler(), 0)
    lm = skipping(self_sd_pair())
    ranks = target_cache_columns(lm.target, lm, RecordRequest(prompt, output, 2, Sampler()))["true_rank"]
    assert (ranks[1:, 0] != ranks[:-1, 1]).sum() > 5


@mode
@architectures
def test_with_nothing_skipped_every_draft_is_accepted(sampler: Sampler, architecture: str) -> None:
    pair = self_sd_pair(architecture, skips=NOTHING)
    decoder = Decoder(*pair.make_drafter(), (), sampler)
    for policy in (make_policy("fixed_k", {"k": 4}), make_policy("vct", {"width": 2, "depth": 4})):
        decoded = decoder.decode(random_prompts(1, seed=3)[0], 31, policy)
        assert [r.accepted for r in decoded.rounds] == [4] * 6 + [0]  # the last token leaves no room for a draft
    trace = record(pair, tiny_prompts(2), RecordSettings(4, 20, sampler))
    assert (
        trace.match_len == np.minimum(4, np.repeat(trace.output_tokens, trace.output_tokens) - trace.position)
    ).all()


def test_a_round_starts_with_the_pending_token_alone_and_catching_up_costs_nothing() -> None:
    document = profile(self_sd_pair(), contexts=[4, 30], depth=3, limit_s=0, tree_tokens=0)
    for table in ("median_s", "p25_s", "p75_s"):
        assert document[table]["catch_up"] == [0.0, 0.0]
    target, drafter = self_sd_pair().make_drafter()
    fed: list[int] = []
    forward = drafter.lm.forward
    drafter.lm.forward = lambda tokens: fed.append(len(tokens)) or forward(tokens)  # type: ignore[func-returns-value, method-assign]
    Decoder(target, drafter, (), Sampler()).decode([4, 5], 40, make_policy("fixed_k", {"k": 2}))
    assert set(fed) == {1}
