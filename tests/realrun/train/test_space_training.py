"""SAR-SFT: losses as the paper has them after its errata, one pass for many examples, and a file that loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from realrun.drafters.space import SpaceKind, mask_token, with_mask
from realrun.lm.cached import CachedLM
from realrun.pairs.drafter_files import load_drafter, read_drafter
from realrun.train.common.loop import HELD_OUT_WINDOWS, windows
from realrun.train.common.lora import AdapterSettings
from realrun.train.space import CUTS, MaskTraining, SpaceSettings
from tests.realrun.train.test_lora import logits, perturbed, target, tokens
from tests.support.families import family_model
from tests.support.pairs.space import FAST, LOOP, MASKS, train, words

EXACT = replace(FAST, masks=3, examples=4)


def job_on(model: Any, settings: SpaceSettings = EXACT) -> MaskTraining:
    job = MaskTraining(model, settings)
    if job.adapter is not None:
        for layer in job.adapter._layers.values():  # in float32 unless told otherwise, which is less than the tests ask
            layer.lora_A.double(), layer.lora_B.double()
        perturbed(job.adapter)
    return job


def fed(job: MaskTraining, real: list[int], masks: int) -> torch.Tensor:
    """Log-probabilities [n, V] of a pass over these tokens and so many masks, and nothing else."""
    embedded = torch.cat([job.model.get_input_embeddings()(torch.tensor(real)), job.mask.expand(masks, -1)])
    return job.model(inputs_embeds=embedded[None], use_cache=False).logits[0].log_softmax(-1)


def separate_loss(job: MaskTraining, window: list[int], m: int) -> torch.Tensor:
    """L_AR (m = 0) or L_SAR of one example in the paper's letters: X = window[0], y_i = window[i]."""
    y, n, k = window, len(window) - 1, job.settings.masks
    real = fed(job, y[:-1], 0)
    if m == 0:
        return -torch.stack([real[t - 1, y[t]] for t in range(1, n + 1)]).sum()
    masked = fed(job, y[:m], k)  # X, y_1 .. y_{m-1}, k masks
    before = [real[t - 1, y[t]] for t in range(1, m + 1)]
    ahead = [masked[m - 1 + j, y[m + j]] for j in range(1, k + 1)]
    return -torch.stack([*before, *ahead]).sum()


# The loss


@pytest.mark.parametrize("full", [False, True])
def test_one_pass_is_the_sum_of_separate_examples(full: bool) -> None:
    """Loss and gradients, of m at both of its ends too."""
    settings, batch = replace(EXACT, full=full), tokens(rows=2, length=11)
    job = job_on(target(), settings)
    cuts = torch.tensor([[1, 7, 0, 4], [0, 7, 7, 2]])
    job._draw = lambda *_: cuts  # type: ignore[method-assign]
    total, parts = job.loss(batch, 0)
    state = {name: value for name, value in job.state().items() if value.requires_grad}
    ours = torch.autograd.grad(total, list(state.values()))
    separate = sum(
        (separate_loss(job, batch[b].tolist(), int(m)) for b in range(2) for m in cuts[b]), torch.zeros(())
    ) / (8 * 10)
    theirs = torch.autograd.grad(separate, list(state.values()))
    assert float(total.detach()) == pytest.approx(float(separate.detach()), abs=1e-12)
    for name, a, b in zip(state, ours, theirs, strict=True):  # the library's norms compute in float32
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(b.abs().max()), msg=name)
    assert float(ours[list(state).index("mask")].abs().max()) > 1e-4
    masked = [
        -fed(job, batch[b, :m].tolist(), 3)[m - 1 + j, batch[b, m + j]]
        for b in range(2)
        for m in cuts[b].tolist()
        for j in (1, 2, 3)
        if m
    ]
    assert parts["masks"] == pytest.approx(float(torch.stack(masked).mean().detach()), abs=1e-12)


def test_p_ar_of_one_is_plain_fine_tuning() -> None:
    batch = tokens(rows=3, length=11)
    job = job_on(target(), replace(EXACT, p_ar=1.0))
    total, parts = job.loss(batch, 0)
    plain = F.cross_entropy(job.model(input_ids=batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
    assert float(total.detach()) == pytest.approx(float(plain.detach()), abs=1e-12)
    assert parts == {"text": pytest.approx(float(plain.detach()))}
    state = [value for name, value in job.state().items() if name != "mask"]
    for ours, theirs in zip(torch.autograd.grad(total, state), torch.autograd.grad(plain, state), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("p_ar", [0.0, 0.3, 1.0])
def test_m_is_drawn_from_all_of_its_range_and_per_example(p_ar: float) -> None:
    """1 .. N - k, evenly (C4); an example is autoregressive with chance p_ar (C5)."""
    torch.manual_seed(1)
    drawn = job_on(target(), replace(EXACT, p_ar=p_ar))._draw(3000, total=9)
    assert float((drawn == 0).double().mean()) == pytest.approx(p_ar, abs=0.02)
    both = float(((drawn == 0).any(1) & (drawn > 0).any(1)).double().mean())
    assert both == pytest.approx(1 - p_ar**4 - (1 - p_ar) ** 4, abs=0.04)
    counts = np.bincount(drawn.flatten().numpy(), minlength=7)[1:]
    assert len(counts) == 6  # 9 - 3
    if p_ar < 1:
        np.testing.assert_allclose(counts / counts.sum(), 1 / 6, atol=0.02)


# The training


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_file_gives_the_tuned_target_and_leaves_the_original_alone(full: bool, tmp_path: Path) -> None:
    model, untouched = target(), target()
    settings = replace(FAST, full=full, lr=2e-2 if not full else 5e-3)
    facts = train(tmp_path, model, settings, replace(LOOP, steps=30))
    assert all(torch.equal(value, untouched.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    file, (tuned, loaded) = read_drafter(tmp_path), load_drafter(tmp_path, model)
    assert isinstance(loaded, SpaceKind) and loaded.masks == MASKS == file.facts["masks"]
    assert {name.split(".")[0] for name in file.tensors} == {"mask", "tuned" if full else "adapter"}
    assert {value.dtype for value in file.tensors.values()} == {torch.bfloat16}
    assert tuned.config.vocab_size == len(tuned.lm_head.weight) == len(tuned.model.embed_tokens.weight) - 1
    assert torch.equal(tuned.model.embed_tokens.weight[-1], file.tensors["mask"].double())
    # The held-out figures in the file are of that very model.
    batch = windows([(words(1), 1.0)], HELD_OUT_WINDOWS, LOOP.window_tokens, (LOOP.seed, 1, 0))
    losses = []
    for each in (model, tuned):
        given = logits(each, batch[:, :-1])
        losses.append(float(F.cross_entropy(given.flatten(0, 1), batch[:, 1:].flatten())))
    start, end = (facts["held_out"][at] for at in ("start", "end"))
    assert [end["original"], end["tuned"]] == pytest.approx(losses, abs=1e-9)
    assert end["tuned"] < 0.7 * start["tuned"] and start["original"] == end["original"]
    preferred = logits(tuned, batch[:, :-1]).argmax(-1)
    places = torch.linspace(1, LOOP.window_tokens - MASKS, CUTS).round().long().unique().tolist()
    same, right = np.zeros(MASKS), np.zeros(MASKS)
    for m in places:
        asked = torch.cat([batch[:, :m], torch.full((len(batch), MASKS), tuned.config.vocab_size)], dim=1)
        guesses = logits(tuned, asked)[:, m:].argmax(-1)
        same += (guesses == preferred[:, m : m + MASKS]).double().mean(0).numpy() / len(places)
        right += (guesses == batch[:, m + 1 : m + 1 + MASKS]).double().mean(0).numpy() / len(places)
    assert [end[f"mask_{j}_agreement"] for j in range(1, MASKS + 1)] == pytest.approx(same.tolist())
    assert [end[f"mask_{j}_text"] for j in range(1, MASKS + 1)] == pytest.approx(right.tolist())
    assert end["mask_1_text"] > 2 * start["mask_1_text"]


def test_an_adapters_rank_decides_nothing_where_all_is_trained() -> None:
    wide = replace(FAST, adapter=AdapterSettings(rank=16))
    assert FAST.decisive != wide.decisive
    assert replace(FAST, full=True).decisive == replace(wide, full=True).decisive


def test_the_rate_follows_from_what_is_trained() -> None:
    assert (SpaceSettings().lr, SpaceSettings(full=True).lr, SpaceSettings(full=True, lr=3e-3).lr) == (1e-3, 2e-4, 3e-3)


@pytest.mark.parametrize("family", ["Gemma", "Mistral, with a window"])
@torch.no_grad()
def test_masks_say_in_training_what_they_say_in_drafting(family: str) -> None:
    """Where embeddings are scaled, and where the text is longer than the window."""
    target, text, cut = family_model(family), [*range(1, 21)], 15
    job = MaskTraining(target, SpaceSettings(3, full=True), seed=2)
    logits, masked = job._pass(torch.tensor([text]), torch.tensor([[cut]]))
    assert masked is not None
    tuned = with_mask(job.model, job.mask)
    whole = tuned(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    torch.testing.assert_close(whole, target(input_ids=torch.tensor([text]), use_cache=False).logits[0])
    torch.testing.assert_close(logits[0], whole)
    lm = CachedLM(tuned)
    lm.prefill(text[:cut])
    chain = torch.ones(3, 3, dtype=torch.bool).tril()
    torch.testing.assert_close(lm.forward_nodes([mask_token(tuned)] * 3, range(3), chain), masked[0, 0])
