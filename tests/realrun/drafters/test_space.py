"""SPACE: its pass and its logits against plain passes, decoding that is the tuned target's own, traces and costs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.decode.verify import rejection_verifier
from realrun.drafters.space import MaskedTarget, SpaceKind, pass_layout, with_mask
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.lm.llama import FusedLlama
from realrun.lm.static.llama import StaticLlama
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.model import SpaceCost
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.policy.registry import POLICIES, make_policy
from specsim.policy.tree.base import TreePolicy
from specsim.trace.trace import Trace
from tests.support.clock import SetClock
from tests.support.exact_distribution import distance
from tests.support.pairs.medusa import own_texts
from tests.support.pairs.space import CHOICES, MASKS, masked_target, space_pair, untrained_pair, word_prompts
from tests.support.sampling_distribution import (
    EXACT,
    FedChoice,
    Tables,
    emitted_distribution,
    exact_distribution,
    warped,
)
from tests.support.tiny import POSITIONS, VOCAB, random_predictor, random_prompts, tiny_model

CLOSE = {"rtol": 0.0, "atol": 1e-10}


def plain(target: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [n, V] of one pass over these tokens, without a cache, by the library."""
    with torch.inference_mode():
        return target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


# The model with a mask token


@pytest.mark.parametrize("tied", [True, False])
def test_a_mask_token_changes_nothing_else(tied: bool) -> None:
    model = tiny_model(2, seed=1)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    masked = with_mask(model, torch.full((32,), 0.5))
    assert masked.config.vocab_size == VOCAB == len(masked.lm_head.weight)
    assert len(masked.model.embed_tokens.weight) == VOCAB + 1
    assert torch.equal(masked.model.embed_tokens.weight[VOCAB], torch.full((32,), 0.5).double())
    tokens = random_prompts(1)[0]
    assert torch.equal(plain(masked, tokens), plain(model, tokens))
    assert len(model.model.embed_tokens.weight) == VOCAB  # the model itself is as it was
    assert plain(masked, [*tokens, VOCAB]).shape[1] == VOCAB  # fed, and never chosen
    again = copy.deepcopy(masked)
    again.tie_weights()  # what the library does at times
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    for masks in (0, 17):
        with pytest.raises(InputError, match=f"{masks} masks of SPACE; choose 1 to 16"):
            SpaceKind(masks)


# The layout


def paper_tokens(context: int, k: int) -> tuple[list[int | None], list[int]]:
    """Eq. 5, 1-based: the group of each mask token, None for others; and each token's node, -1 for the context.

    The paper's l real tokens are the context and the pending token.
    """
    group: list[int | None] = [None] * (context + 1)
    node = [-1] * context + [0]
    for g in range(k + 1):
        if g:
            group.append(None)
            node.append(g)
        group += [g] * k
        node += range(1 + k + g * k, 1 + k + (g + 1) * k)
    return group, node


def paper_mask(group: list[int | None], k: int, *, literal: bool) -> torch.Tensor:
    """Eq. 6 [i, j]. Literally, i - j < k joins mask tokens; the text says those of the same group."""
    length = len(group)
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            masks = group[i] is not None and group[j] is not None
            mask[i, j] = group[j] is None or (masks and (i - j < k if literal else group[i] == group[j]))
    return mask


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("context", [0, 1, 6])
def test_mask_and_positions_are_the_papers(k: int, context: int) -> None:
    """Eqs. 5 to 7, the mask as the text means it."""
    group, node = paper_tokens(context, k)
    assert len(group) == context + 1 + k * (k + 2)
    mask = paper_mask(group, k, literal=False)
    positions = mask.sum(1) - 1  # Eq. 7
    in_pass = torch.tensor(node[context:])
    depths, visible = pass_layout(k + 1, k)
    assert mask[context:, :context].all()  # all of the context, which attention adds to the pass's mask
    assert torch.equal(visible[in_pass][:, in_pass], mask[context:, context:])
    assert (depths[in_pass] + context).tolist() == positions[context:].tolist()


@pytest.mark.parametrize(("k", "links_too_many"), [(1, 0), (2, 0), (3, 3), (4, 12), (5, 30)])
def test_equation_6_taken_literally_joins_groups(k: int, links_too_many: int) -> None:
    """Why the layout follows the text: i - j < k also reaches masks of the group before."""
    group, _ = paper_tokens(3, k)
    literal, meant = paper_mask(group, k, literal=True), paper_mask(group, k, literal=False)
    assert int((literal & ~meant).sum()) == links_too_many
    assert not (meant & ~literal).any()


def test_figure_3() -> None:
    """The paper's example: k = 2, "LLMs are" the input, "auto" and "model" the candidates."""
    rows = ["1", "11", "111", "1111", "11001", "110011", "1100111", "11001001", "110010011", "1100100111"]
    group, node = paper_tokens(1, 2)
    figure = torch.tensor([[int(bit) for bit in row.ljust(10, "0")] for row in rows], dtype=torch.bool)
    assert torch.equal(paper_mask(group, 2, literal=True), figure)
    in_pass = torch.tensor(node[1:])
    assert torch.equal(pass_layout(3, 2)[1][in_pass][:, in_pass], figure[1:, 1:])


@pytest.mark.parametrize(("tokens", "masks"), [(1, 1), (1, 5), (4, 5), (6, 5), (3, 2)])
def test_no_group_sees_another(tokens: int, masks: int) -> None:
    """C2, with k = 5 too, where Eq. 6 as printed lets masks through to the group before."""
    depths, visible = pass_layout(tokens, masks)
    assert torch.equal(visible[:tokens], torch.ones(tokens, tokens * (masks + 1), dtype=torch.bool).tril())
    for group in range(tokens):
        for j in range(masks):
            row = tokens + group * masks + j
            seen = {*range(group + 1), *range(row - j, row + 1)}
            assert set(visible[row].nonzero().flatten().tolist()) == seen
            assert depths[row] == group + 1 + j  # C7: where the token would stand that it follows


# One pass against many


def check_pass(target: MaskedTarget, context: list[int], tokens: list[int]) -> None:
    """A pass over `tokens` behind `context`: its logits, and those of every group of masks."""
    model, k = target.model, target.masks
    together = target.forward(tokens)
    assert target.length == target.inner.length == len(context) + len(tokens) and target.inner.nodes == 0
    whole = plain(model, [*context, *tokens])
    torch.testing.assert_close(together, whole[len(context) :], **CLOSE)
    assert target.mask_logits is not None and target.mask_logits.shape == (len(tokens), k, VOCAB)
    for group in range(len(tokens)):
        prefix = [*context, *tokens[: group + 1]]
        torch.testing.assert_close(
            target.mask_logits[group], plain(model, [*prefix, *[VOCAB] * k])[len(prefix) :], **CLOSE
        )


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@torch.inference_mode()
def test_every_row_is_what_a_pass_of_its_own_says(data: st.DataObject) -> None:
    """Over k, accepted counts, and the cache as several rounds leave it: candidates, and groups of masks."""
    k = data.draw(st.integers(1, 8), label="k")
    target = masked_target(8)
    target.warm(range(1, k + 2), 120)
    rng = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    context = rng.integers(0, VOCAB, data.draw(st.integers(0, 9), label="context")).tolist()
    target.prefill(context)
    target.ask()
    target.truncate(len(context))  # which is all, so that what was said still holds
    torch.testing.assert_close(target.proposals()[0], plain(target.model, [*context, *[VOCAB] * k])[-k:], **CLOSE)
    for _ in range(data.draw(st.integers(1, 4), label="rounds")):
        drafted = data.draw(st.integers(0, k), label="drafted")
        accepted = data.draw(st.integers(0, drafted), label="accepted")
        tokens = rng.integers(0, VOCAB, drafted + 1).tolist()
        check_pass(target, context, tokens)
        context += tokens[: accepted + 1]
        target.truncate(len(context))
        assert target.length == target.inner.length == len(context)
        behind = plain(target.model, [*context, *[VOCAB] * k])[-k:]
        torch.testing.assert_close(target.proposals()[0], behind, **CLOSE)


@torch.inference_mode()
def test_the_library_and_the_static_cache_give_the_same_pass() -> None:
    from realrun.lm.cached import CachedLM

    for inner in (CachedLM, StaticLlama):
        target = masked_target()
        target.inner = inner(target.model)
        target.warm(range(1, MASKS + 2), 60)
        context = random_prompts(1)[0]
        target.prefill(context)
        for tokens, keep in (([3, 4, 5, 6, 7, 8], 2), ([9, 10], 2), ([11, 12, 13], 1)):
            check_pass(target, context, tokens)
            context = [*context, *tokens[:keep]]
            target.truncate(len(context))


@torch.inference_mode()
def test_a_run_has_as_many_masks_as_its_longest_draft_and_the_baseline_has_none() -> None:
    target = masked_target()
    widths = []
    run = target.inner.forward_nodes

    def counted(tokens: Any, depths: Any, visible: torch.Tensor) -> torch.Tensor:
        widths.append(len(tokens))
        return run(tokens, depths, visible)

    target.inner.forward_nodes = counted  # type: ignore[method-assign]
    for sizes, masks in (([1, 2, 3], 2), ([*range(1, 20)], MASKS), ([1], 0)):
        target.warm(sizes)
        assert target.masks == masks
        target.prefill([1, 2, 3])
        target.forward([4, 5])
    assert widths == [2 * 3, 2 * 6]  # (m + 1)(k + 1)
    assert target.mask_logits is None and target.group is None


# Decoding


def test_decoding_reaches_the_models_last_position() -> None:
    """Masks beyond it stand at it, and nothing that is output depends on them."""
    pair = untrained_pair()
    prompt = (word_prompts()[0].tokens * 12)[: POSITIONS - 40]
    (expected,) = own_texts(pair, Sampler(), 40, [Prompt("all", prompt)])
    for k in (MASKS, 3):
        decoder = Decoder(*pair.make_drafter(), (), Sampler())
        assert decoder.decode(prompt, 40, make_policy("fixed_k", {"k": k})).tokens == expected


def test_a_single_token_of_output_needs_no_masks() -> None:
    pair, policy = untrained_pair(), make_policy("fixed_k", {"k": MASKS})
    run = Decoder(*pair.make_drafter(), (), Sampler()).decode([5, 6], 1, policy)
    assert run.log() == [(0, 0, 0)]


def test_what_it_cannot_do_is_refused() -> None:
    decoder = Decoder(*untrained_pair().make_drafter(), (), Sampler())
    with pytest.raises(InputError, match="5 masks of SPACE draft at most 5 tokens; lower the policy's limit"):
        decoder.decode([1, 2], 30, make_policy("fixed_k", {"k": 6}))
    with pytest.raises(InputError, match="SPACE drafts chains only; choose a policy that does not draft trees"):
        decoder.decode([1, 2], 30, make_policy("vct", {"width": 2, "depth": 2}))


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
                    offered, own = sampler.probs(logits[i : i + 1])[0], text[first + t + i]
                    with torch.inference_mode():
                        ids = torch.tensor([text[: first + t + i]])
                        judged = sampler.probs(pair.target(input_ids=ids).logits[0, -1:])[0]
                    assert trace.prob[row, i] == pytest.approx(float(offered[drafted[i]]), rel=1e-5)
                    assert trace.text_prob is not None and trace.text_accept is not None
                    assert trace.text_prob[row, i] == pytest.approx(float(offered[own]), rel=1e-5)
                    accept = min(1.0, float(offered[own] / judged[own]))
                    assert trace.text_accept[row, i] == pytest.approx(accept, rel=1e-5)


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
    document = validate(space_pair(), prompts, settings, tmp_path, lambda *step: None).as_dict()
    assert document["drafter_kind"] == "space" and document["k_curve"]["k"] == [*range(1, MASKS + 1)]
    served = {row["policy"] for row in document["rows"]}
    assert served == {name for name in names if not issubclass(POLICIES[name], TreePolicy)} - {"cali_ts"}
    for row in document["rows"]:
        assert row["rounds_identical_percent"] == row["output_identical_percent"] == 100.0, row["label"]
    skipped = {entry["policy"]: entry["reason"] for entry in document["skipped"]}
    assert skipped["vct"] == "the drafter of this trace drafts chains only"
    with pytest.raises(InputError, match="drafts chains only; record it with --tree-nodes 0"):
        record(space_pair(), prompts, RecordSettings(4, 8, tree_nodes=20))
