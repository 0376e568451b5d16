"""SPACE's traces: what is recorded, sampling by rejection, and the main job."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.decode.verify import rejection_verifier
from realrun.drafters.space import MaskedTarget, with_mask
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.lm.llama import FusedLlama
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from specsim.cost.model import SpaceCost
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.policy.registry import POLICIES, make_policy
from specsim.policy.tree.base import TreePolicy
from specsim.trace.trace import Trace
from tests.support.clock import SetClock
from tests.support.exact_distribution import distance
from tests.support.pairs.scores import random_predictor
from tests.support.pairs.space import CHOICES, MASKS, space_pair, word_prompts
from tests.support.sampling_distribution import (
    EXACT,
    FedChoice,
    Tables,
    emitted_distribution,
    exact_distribution,
    warped,
)
from tests.support.tiny import VOCAB

TOKENS = 40
REJECTION = Sampler("rejection", 0.8, seed=4)
slow = pytest.mark.slow


def scoring() -> Pair:
    return replace(space_pair(), predictor=random_predictor(space_pair()))


@cache
@torch.inference_mode(False)
def recorded(mode: str) -> Trace:
    sampler = REJECTION if mode == "rejection" else CHOICES[mode]
    return record(scoring(), word_prompts(), RecordSettings(16, TOKENS, sampler))


def mask_logits(pair: Pair, before: list[int]) -> torch.Tensor:
    """Logits [k, V] of the masks behind these tokens, by a plain pass."""
    with torch.inference_mode():
        ids = torch.tensor([[*before, *[VOCAB] * MASKS]])
        return pair.target(input_ids=ids, use_cache=False).logits[0, len(before) :]


# What is recorded


@pytest.mark.parametrize("mode", ["greedy", "gumbel", "rejection"])
def test_every_position_holds_what_the_masks_before_its_pending_token_say(mode: str) -> None:
    trace, pair, prompts = recorded(mode), scoring(), word_prompts()
    sampler = Sampler(**trace.meta["decoding"])
    assert trace.depth == MASKS and trace.meta["drafter_kind"] == "space"
    assert trace.meta["drafter_facts"] == {"masks": MASKS} and trace.tree is None
    assert trace.true_rank is not None
    for number, (start, end) in enumerate(itertools.pairwise(trace.offsets.tolist())):
        text = [*prompts[number].tokens, *trace.token[start:end].tolist()]
        first = len(prompts[number].tokens)
        for t in range(0, end - start, 7):
            logits = mask_logits(pair, text[: first + t - 1])
            row = start + t
            drafted = trace.draft_token[row].tolist()
            for i in range(MASKS):
                if mode != "rejection":
                    described = sampler.statistics(logits[i : i + 1], number, t + i)[0].tolist()
                    assert drafted[i] == described[0]
                    assert trace.prob[row, i] == pytest.approx(described[1], rel=1e-6)
                    assert trace.confidence[row, i] == pytest.approx(described[2], rel=1e-6)
                    assert trace.entropy_nats[row, i] == pytest.approx(described[3], rel=1e-5, abs=1e-9)
                elif t + i < end - start:
                    offered = sampler.probs(logits[i : i + 1])[0]
                    with torch.inference_mode():
                        ids = torch.tensor([[*text[: first + t], *drafted[:i]]])
                        judged = sampler.probs(pair.target(input_ids=ids).logits[0, -1:])[0]
                    assert trace.prob[row, i] == pytest.approx(float(offered[drafted[i]]), rel=1e-5)
                    accept = min(1.0, float(judged[drafted[i]] / offered[drafted[i]]))
                    assert trace.accept_prob is not None
                    assert trace.accept_prob[row, i] == pytest.approx(accept, rel=1e-5)


# Rejection sampling


def tables_of_a_model(vocabulary: int, depth: int) -> Tables:
    """What a tiny target says after every path, and its masks, whatever the path, behind all but the pending token."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    torch.manual_seed(5)
    model = with_mask(LlamaForCausalLM(config).double().eval(), torch.randn(16))
    context, pending = [2, 0, 1], 1
    paths = [path for n in range(depth + 1) for path in itertools.product(range(vocabulary), repeat=n)]
    target = MaskedTarget(model, depth)
    with torch.inference_mode():
        target.prefill(context)
        target.ask()
        proposed = target.proposals()[0].clone()
        own = {path: model(input_ids=torch.tensor([[*context, pending, *path]])).logits[0, -1] for path in paths}
    return Tables(own, {path: proposed[len(path)] for path in paths if len(path) < depth})


def from_target(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Algorithm 1 as printed: in the place of a rejected candidate a token is drawn from Q itself (C1)."""
    sampler, sequence, position, *_ = context
    probs = sampler.probs(logits)
    for place, token in enumerate(draft.tokens):
        ratio = float(probs[place, token] / draft.probs[place][token])
        if not sampler.uniform("judge", sequence, position, place + 1) < ratio:
            break
    else:
        place = len(draft.tokens)
    last = torch.searchsorted(probs[place].cumsum(0), sampler.uniform("last", sequence, position, 0), right=True)
    return [*draft.tokens[:place], min(int(last), len(probs[place]) - 1)]


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (0.95, 2)])
def test_candidates_from_masks_are_judged_to_the_exact_distribution(top_p: float, top_k: int) -> None:
    """Temperature, top-k and top-p warp both distributions (C12); the paper's replacement from Q stands out (C1)."""
    tables = tables_of_a_model(3, 2)
    sampler = FedChoice("rejection", 0.9, top_p=top_p, top_k=top_k)
    distribution = exact_distribution(tables, 2, sampler)
    assert distance(emitted_distribution(tables, 2, sampler, rejection_verifier), distribution) < EXACT
    assert distance(emitted_distribution(tables, 2, sampler, from_target), distribution) > 0.01
    if top_p < 1:
        unwarped = emitted_distribution(tables, 2, sampler, rejection_verifier, judged_by=Sampler("rejection", 0.9))
        assert distance(unwarped, distribution) > 0.003


def test_what_a_real_round_is_judged_by_is_what_its_candidates_were_drawn_from() -> None:
    """The drafter's distributions of a real round are those of the masks, in whole."""
    pair, prompt = space_pair(), word_prompts()[0].tokens
    decoder, policy = Decoder(*pair.make_drafter(), (), REJECTION), make_policy("fixed_k", {"k": MASKS})
    drafts: list[tuple[int, Draft]] = []
    text: list[int] = []

    def judged(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        drafts.append((context.position, draft))
        return rejection_verifier(logits, draft, context)

    decoder.verifier = judged
    text = decoder.decode(prompt, TOKENS, policy).tokens
    assert len(drafts) > 5
    for position, draft in drafts:
        logits = mask_logits(pair, [*prompt, *text[:position]][:-1])
        for i, (token, probs) in enumerate(zip(draft.tokens, draft.probs, strict=True)):
            expected = warped(logits[i].tolist(), REJECTION.temperature, 1.0)
            np.testing.assert_allclose(probs.numpy(), expected, rtol=0, atol=1e-10)
            assert probs[token] > 0


# Costs and the main job


def test_a_profile_prices_every_pass_with_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes (m + 1)(k + 1) of full drafts of every k, and of shorter ones of the largest; rows take a time each."""
    clock, forward, nodes = SetClock(monkeypatch), FusedLlama.forward, FusedLlama.forward_nodes

    def timed_forward(lm: FusedLlama, tokens: Sequence[int]) -> torch.Tensor:
        clock.take(1e-3 * len(tokens))
        return forward(lm, tokens)

    def timed_nodes(lm: FusedLlama, tokens: Sequence[int], *shape: Any) -> torch.Tensor:
        clock.take(1e-3 * len(tokens))
        return nodes(lm, tokens, *shape)

    monkeypatch.setattr(FusedLlama, "forward", timed_forward)
    monkeypatch.setattr(FusedLlama, "forward_nodes", timed_nodes)
    document = profile(scoring(), contexts=[8, 40], depth=16, limit_s=0)
    tree = document["mean_s"]["tree"]
    assert tree["sizes"] == [1, 4, 6, 9, 12, 16, 18, 24, 25, 30, 36]
    assert not np.any(tree["wider"])
    for size, at in zip(tree["sizes"], tree["verify"], strict=True):
        np.testing.assert_allclose(at, 1e-3 * size, rtol=0.1)
    assert len(document["median_s"]["draft_step"]) == MASKS and len(document["median_s"]["verify"]) == MASKS + 1
    assert document["median_s"]["catch_up"] == [0.0, 0.0]
    cost = profile_from_json(document, "just measured")
    for k in (2, MASKS):
        for drafted in range(k + 1):
            priced = SpaceCost(cost, k, draft_steps=True).verify(drafted + 1, 20)
            assert priced == cost.tree_verify((drafted + 1) * (k + 1), 20)
    assert SpaceCost(cost, MASKS).verify(6, 8) >= tree["verify"][-1][0] * (1 - 1e-12)  # but for rounding
    assert cost.verify(1, 8) == document["mean_s"]["verify"][0][0] < tree["verify"][-1][0]


NAMES = ("fixed_k", "adaedl", "vct")


@pytest.mark.parametrize("names", [pytest.param(NAMES, id="some"), pytest.param(tuple(POLICIES), id="all", marks=slow)])
def test_the_main_job(names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = tuple(POLICIES[name] for name in names)
    settings = ValidationSettings(RecordSettings(16, 16, CHOICES["gumbel"]), kinds=kinds, trials=2, repeats=3)
    prompts = [prompt for prompt in word_prompts() if len(prompt.tokens) > 2] * 2
    document = validate(space_pair(), prompts, settings, tmp_path, lambda *step: None)
    assert document["drafter_kind"] == "space" and document["k_curve"]["k"] == [*range(1, MASKS + 1)]
    served = {row["policy"] for row in document["rows"]}
    assert served == {name for name in names if not issubclass(POLICIES[name], TreePolicy)} - {"cali_ts"}
    for row in document["rows"]:
        assert row["rounds_identical_percent"] == row["output_identical_percent"] == 100.0, row["label"]
    skipped = {entry["policy"]: entry["reason"] for entry in document["skipped"]}
    assert skipped["vct"] == "the drafter of this trace drafts chains only"
    with pytest.raises(InputError, match="drafts chains only; record it with --tree-nodes 0"):
        record(space_pair(), prompts, RecordSettings(4, 8, tree_nodes=20))
