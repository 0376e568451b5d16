"""Training EDD, VDM and EAGLE: what each place sees and is judged by, and that it is what drafting does."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realrun.drafters.eagle import EagleLM
from realrun.drafters.edd import EffectiveDraftDecoderLM, one_layer_model
from realrun.lm.split_target import SplitTarget
from realrun.train.eagle import EagleSettings, EagleTraining, feature_pass
from realrun.train.edd import (
    DecoderTraining,
    EddSettings,
    VdmSettings,
    block_logits,
    dual_block_mask,
    states_and_logits,
)
from tests.support.small_targets import small_target
from tests.support.split_targets import target_of
from tests.support.tiny import VOCAB

CLOSE = {"rtol": 0.0, "atol": 1e-10}


def batch_of(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


# --- What a place sees ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 26), block=st.integers(1, 12), place=st.integers(0, 25), seed=st.integers(0, 99))
def test_a_place_sees_what_it_will_see_in_drafting_and_nothing_else(
    count: int, block: int, place: int, seed: int
) -> None:
    """By changing a token or state, and by the gradient of what is said at a place.

    Token i of a block that starts with token b is drafted in a round with b pending: b and all before it are
    verified, and of those before it the target has states.
    """
    place %= count
    decoder = untied_decoder()
    generator = torch.Generator().manual_seed(seed)
    tokens = (1 + torch.randperm(VOCAB - 1, generator=generator))[None, :count]
    states = torch.randn(1, count, 32, generator=generator, dtype=torch.float64)
    first = place // block * block  # pending when the place is drafted from

    def logits_of(tokens: torch.Tensor = tokens, states: torch.Tensor = states) -> torch.Tensor:
        return block_logits(decoder, tokens, states, block)[0]

    before = logits_of()
    changed_tokens, changed_states = tokens.clone(), states.clone()
    changed_tokens[0, place], changed_states[0, place] = 0, changed_states[0, place] + 1.0
    by_token = (logits_of(tokens=changed_tokens) - before).detach().abs().amax(-1)
    by_state = (logits_of(states=changed_states) - before).detach().abs().amax(-1)
    starts = [i // block * block for i in range(count)]
    sees_token = [start <= place <= i for i, start in enumerate(starts)]
    sees_state = [place < start for start in starts]
    assert (by_token > 1e-9).tolist() == (by_token > 0).tolist() == sees_token
    assert (by_state > 1e-9).tolist() == (by_state > 0).tolist() == sees_state
    states.requires_grad_(True)
    decoder.model.embed_tokens.weight.grad = None
    logits_of(states=states)[place].logsumexp(-1).backward()
    assert states.grad is not None
    assert states.grad[0].any(-1).tolist() == [number < first for number in range(count)]
    reached = decoder.model.embed_tokens.weight.grad.any(-1).nonzero()[:, 0].tolist()
    assert sorted(reached) == sorted(tokens[0, first : place + 1].tolist())


@cache
def untied_decoder() -> Any:
    decoder = one_layer_model(small_target("qwen2"), seed=4)
    decoder.requires_grad_(False).model.embed_tokens.weight.requires_grad_(True)
    return decoder


def test_the_mask_of_an_example_by_hand() -> None:
    """Five tokens in blocks of two: states on the left, tokens on the right."""
    rows = dual_block_mask(5, 2)[5:].int().tolist()
    assert rows == [
        [0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 1, 1, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 1],
    ]
    assert torch.equal(dual_block_mask(5, 2)[:5, :5], torch.eye(5, dtype=torch.bool))
    assert not dual_block_mask(5, 2)[:5, 5:].any()


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-sdpa", "mistral-sdpa"])
@pytest.mark.parametrize("block", [2, 5, 7])
@torch.inference_mode()
def test_training_edd_makes_the_rows_of_drafting(name: str, block: int) -> None:
    """Round by round, each of one block; in one pass of the drafter, and token by token."""
    target_model = target_of(name)
    decoder, tokens = one_layer_model(target_model, seed=4), batch_of(1, 23)
    states, logits = states_and_logits(target_model, tokens, 2)
    torch.testing.assert_close(logits, target_model(input_ids=tokens, use_cache=False).logits, **CLOSE)
    trained, text = block_logits(decoder, tokens, states, block)[0], tokens[0].tolist()
    for step in (block, 1):
        target = SplitTarget(target_model, 2)
        lm = EffectiveDraftDecoderLM(target, decoder)
        for start in range(0, len(text), block):
            target.prefill(text[target.length : start])
            lm.truncate(start)
            end, rows = min(start + block, len(text)), []
            while lm.length < end:
                upto = min(max(lm.length, start) + step, end)
                rows.append(lm.forward(text[lm.length : upto]))
            torch.testing.assert_close(torch.cat(rows), trained[start:end], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-sdpa", "mistral-sdpa"])
@torch.inference_mode()
def test_training_eagle_makes_the_rows_of_drafting(name: str) -> None:
    """Of first drafted tokens, wherever the round begins."""
    target_model, tokens = target_of(name), batch_of(1, 15)
    job = EagleTraining(target_model, EagleSettings(), seed=2)
    features = target_model.model(input_ids=tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(job._features(torch.cat([tokens, tokens[:, :1]], 1)), features, **CLOSE)
    trained, text = feature_pass(job.eagle, target_model, tokens, features)[0], tokens[0].tolist()
    for starts in (range(15), (0, 4, 5, 11, 14)):
        target = SplitTarget(target_model, len(target_model.model.layers))
        lm = EagleLM(target, job.eagle)
        for pending in starts:
            target.prefill(text[target.length : pending])
            logits = lm.forward(text[lm.length : pending + 1])
            torch.testing.assert_close(lm.feature, trained[pending], **CLOSE)
            torch.testing.assert_close(logits[-1], target.head(trained[pending]), **CLOSE)


# --- What it is judged by ---------------------------------------------------------------------------


def kl_by_hand(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    p, q = (torch.softmax(x.detach().double(), -1).numpy() for x in (theirs, ours))
    return float(sum(p[v] * (np.log(p[v]) - np.log(q[v])) for v in range(VOCAB)))


@pytest.mark.parametrize("loss_of", ["kl", "text"])
@pytest.mark.parametrize("split", [0, 1, 2])
def test_edds_loss_by_hand(loss_of: Any, split: int) -> None:
    target = small_target()
    job = DecoderTraining(target, (EddSettings(split, loss=loss_of) if split else VdmSettings(loss=loss_of)), seed=1)
    batch, ends = batch_of(), set()
    for step in range(6):
        loss, parts = job.loss(batch, step)
        tokens = batch[:, :-1]
        theirs = target(input_ids=tokens).logits
        if split:
            block = int(parts["block"])
            states = target(input_ids=tokens, output_hidden_states=True).hidden_states[split]
            ours = block_logits(job.decoder, tokens, states, block)
        else:  # an independent model, which drafts every token
            assert parts == {}
            block, ours = 10**6, job.decoder(input_ids=tokens).logits
        nats = []
        for b in range(2):
            for i in range(23):
                if (i + 1) % block == 0:  # what follows is a block's first token, which the target itself predicts
                    ends.add(i)
                    continue
                if loss_of == "kl":
                    nats.append(kl_by_hand(theirs[b, i], ours[b, i]))
                else:
                    nats.append(-float(ours[b, i].log_softmax(-1)[batch[b, i + 1]].detach()))
        assert float(loss.detach()) == pytest.approx(np.mean(nats), rel=1e-9)
        figures = job.held_out(batch)
        if split == 0:
            assert set(figures) == {"divergence", "agreement"}
        else:
            assert {f"agreement_{i}" for i in range(1, 6)} < set(figures)
    assert bool(ends) == bool(split)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in job.decoder.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())


def test_held_out_agreement_is_by_place_of_the_draft() -> None:
    target = small_target()
    job = DecoderTraining(target, EddSettings(1, 3, 4), seed=1)
    batch = batch_of(4, 22)
    states, theirs = states_and_logits(target, batch[:, :-1], 1)
    same = (block_logits(job.decoder, batch[:, :-1], states, 4).argmax(-1) == theirs.argmax(-1)).double()
    figures = job.held_out(batch)
    for place in (1, 2, 3):  # after the pending token, at rows 0, 4, 8, ...
        rows = [i for i in range(21) if i % 4 == place - 1]
        assert figures[f"agreement_{place}"] == pytest.approx(float(same[:, rows].mean()))
    assert "agreement_4" not in figures  # the target's own token is no draft
    rows = [i for i in range(21) if i % 4 != 3]
    assert figures["agreement"] == pytest.approx(float(same[:, rows].mean()))


def test_block_lengths_are_even_from_five_to_ten_and_depend_on_seed_and_step() -> None:
    target = small_target()
    job, again, other = (DecoderTraining(target, EddSettings(), seed=seed) for seed in (0, 0, 1))

    def lengths(job: DecoderTraining, batch: torch.Tensor, steps: Any) -> list[float]:
        with torch.no_grad():
            return [job.loss(batch, step)[1]["block"] for step in steps]

    drawn = lengths(job, batch_of(1, 12), range(90))
    assert set(drawn) == {5.0, 6.0, 7.0, 8.0, 9.0, 10.0} and min(drawn.count(x) for x in set(drawn)) > 5
    assert lengths(again, batch_of(3, 20, seed=5), reversed(range(90))) == drawn[::-1]
    assert lengths(other, batch_of(1, 12), range(90)) != drawn
    fixed = DecoderTraining(target, EddSettings(shortest_block=6, longest_block=6), seed=0)
    assert set(lengths(fixed, batch_of(1, 12), range(9))) == {6.0}


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_eagles_loss_by_hand(noise: float) -> None:
    target = small_target("qwen2")
    job, batch = EagleTraining(target, EagleSettings(0.3, noise), seed=1), batch_of()
    torch.manual_seed(5)
    loss, parts = job.loss(batch, 0)
    features = target.model(input_ids=batch[:, :-1]).last_hidden_state
    torch.manual_seed(5)
    added = 2 * noise * torch.rand(features.shape, dtype=torch.float64) - noise
    assert float(added.abs().max()) <= noise
    ours = feature_pass(job.eagle, target, batch[:, :-1], features + added)
    distance = (ours - features).abs().detach().numpy()
    regression = float(np.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean())
    p, q = (target.lm_head(x).softmax(-1).detach() for x in (features, ours))
    classification = float(-(p * q.log()).sum(-1).mean())
    assert parts == pytest.approx({"regression": regression, "classification": classification}, rel=1e-9)
    assert float(loss.detach()) == pytest.approx(regression + 0.3 * classification, rel=1e-9)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in job.eagle.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())
    figures = job.held_out(batch)
    theirs, drafted = (
        target.lm_head(x).flatten(0, 1) for x in (features, feature_pass(job.eagle, target, batch[:, :-1], features))
    )
    divergence = np.mean([kl_by_hand(p, q) for p, q in zip(theirs, drafted, strict=True)])
    assert figures["divergence"] == pytest.approx(divergence, rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 14), place=st.integers(0, 13))
def test_eagles_rows_see_the_tokens_so_far_and_the_features_before_them(count: int, place: int) -> None:
    place %= count
    job = eagle_job()
    tokens, features = batch_of(1, count), torch.randn(1, count, 32, dtype=torch.float64)
    before = feature_pass(job.eagle, job.target, tokens, features)[0]
    changed = tokens.clone()
    changed[0, place] = (changed[0, place] + 1) % VOCAB
    shifted = features.clone()
    shifted[0, place] += 1.0
    by_token = (feature_pass(job.eagle, job.target, changed, features)[0] - before).abs().amax(-1)
    by_feature = (feature_pass(job.eagle, job.target, tokens, shifted)[0] - before).abs().amax(-1)
    assert (by_token > 1e-9).tolist() == [i >= place for i in range(count)] and not by_token[:place].any()
    assert (by_feature > 1e-9).tolist() == [i > place for i in range(count)] and not by_feature[: place + 1].any()


@cache
def eagle_job() -> EagleTraining:
    job = EagleTraining(small_target(), EagleSettings(), seed=1)
    job.eagle.requires_grad_(False)
    return job
