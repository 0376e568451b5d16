"""SPACE's pass: its layout, its logits against plain passes, and decoding that is the tuned target's own."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.space import MaskedTarget, SpaceKind, pass_layout, with_mask
from realrun.lm.static.llama import StaticLlama
from realrun.pairs.prompts import Prompt
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from tests.support.pairs.medusa import own_texts
from tests.support.pairs.space import MASKS, masked_target, untrained_pair, word_prompts
from tests.support.tiny import POSITIONS, VOCAB, random_prompts, tiny_model

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
