"""The study of what training decides: what it trains and asks of models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from realrun.train.edd import EddSettings  # noqa: E402
from studies.training import heads, heat, sizes  # noqa: E402
from studies.training.heat import Tuning  # noqa: E402
from tests.support.tiny import VOCAB, tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model(2, seed=1)


def random_head(target: Any, blocks: int = 1, layers: int = 0) -> heads.Head:
    generator = torch.Generator().manual_seed(3)
    residual = torch.randn(32, 32, generator=generator, dtype=torch.float64) / 8
    return heads.Head(target, residual, target.get_output_embeddings().weight.detach(), blocks, layers)


@torch.no_grad()
def test_marginal_guesses_are_those_of_a_pass_for_every_next_token(target: Any) -> None:
    tokens = torch.randint(1, VOCAB, (12,), generator=torch.Generator().manual_seed(0))
    places = torch.tensor([0, 3, 10])
    guesses, mass = heads.marginal_guesses(target, tokens, places, VOCAB)
    assert mass.tolist() == pytest.approx([1.0] * 3, abs=1e-6)
    for at, guess in zip(places.tolist(), guesses.tolist(), strict=True):
        probs = target(input_ids=tokens[None, : at + 1]).logits[0, -1].softmax(-1)
        texts = torch.cat([tokens[: at + 1].expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)
        later = target(input_ids=texts).logits[:, -1].softmax(-1)
        assert guess == int((probs @ later).argmax())


@torch.no_grad()
def test_every_form_of_a_head_starts_as_the_same_function(target: Any) -> None:
    hidden = target.model(input_ids=torch.arange(1, 13)[None]).last_hidden_state
    plain = random_head(target)(hidden)
    block = hidden + torch.nn.functional.silu(hidden @ random_head(target).residual[0].T)
    assert torch.allclose(plain, block @ target.get_output_embeddings().weight.T)
    for blocks, layers in heads.FORMS.values():
        assert torch.equal(random_head(target, blocks, layers)(hidden), plain)


def test_what_is_added_to_a_head_learns_and_sees_no_later_state(target: Any) -> None:
    rich = random_head(target, 2, 1)
    batch = torch.randint(1, VOCAB, (2, 13), generator=torch.Generator().manual_seed(4))
    loss, _ = heads.HeadTraining(target, rich, 1e-3).loss(batch, 0)
    loss.backward()
    layer = rich.layers[0]
    added = [rich.residual.grad[1], *(last.weight.grad for last in (layer.self_attn.o_proj, layer.mlp.down_proj))]
    assert all(bool(gradient.any()) for gradient in added) and target.lm_head.weight.grad is None
    with torch.no_grad():
        layer.self_attn.o_proj.weight.normal_()
        hidden = torch.randn(1, 8, 32, dtype=torch.float64)
        assert torch.allclose(rich(hidden)[:, :5], rich(hidden[:, :5]))


def test_agreement_is_counted_at_the_token_after_the_next(target: Any) -> None:
    class Ahead(torch.nn.Module):
        """Says at each state what the target says at the next state, except at the first."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = target.get_output_embeddings()(hidden).roll(-1, dims=1)
            logits[:, 0] = -logits[:, 0]
            return logits

    batch = torch.randint(1, VOCAB, (3, 11), generator=torch.Generator().manual_seed(5))
    assert heads.correct(target, Ahead(), batch) == [8, 8, 8]  # of 9 places in 10 tokens
    attainable_ = heads.attainable(target, Ahead(), batch, 3, VOCAB)
    assert attainable_["places"] == [3, 3, 3] and attainable_["head"] == [2, 2, 2]


def made_up_heads(same: int, richer: int) -> dict[str, Any]:
    def form(after: int) -> dict[str, Any]:
        counts = [after + (-1) ** n for n in range(12)]
        return {"parameters": 10, "tokens": 1e6, "before": {"correct": [20] * 12}, "after": {"correct": counts}}

    best = {"places": [10] * 12, "attainable": [6] * 12, "head": [2, 3] * 6, "mass": [9.0] * 12}
    forms = {heads.SAME: form(same), heads.BLOCKS: form(20), heads.LAYER: form(richer)}
    return {"shipped_tokens": 5e6, "places": [100] * 12, "attainable": best, "forms": forms}


def test_heads_are_compared_at_the_same_places() -> None:
    rows = {row["variant"]: row for row in heads.rows(made_up_heads(21, 40))}
    further, richer = rows["trained further, as it is"], rows["trained further, a layer below the block"]
    assert further["agreement_difference"]["estimate"] == pytest.approx(0.01)
    assert richer["over_training_alone"]["estimate"] == pytest.approx(0.19) and richer["tokens"] == 6e6
    best = rows["attainable by the target itself"]
    assert best["agreement"]["estimate"] == pytest.approx(0.6)
    assert best["agreement_difference"]["estimate"] == pytest.approx(0.35)


def tuned(nats: float, agreement: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, 12)
    before = {"original": [2.0] * 12, "tuned": [2.0] * 12, "mask_1_agreement": [0.1] * 12}
    after = {**before, "tuned": (2 + nats + noise).tolist(), "mask_1_agreement": (agreement + noise).tolist()}
    return {"before": before, "after": after, "parameters": 5}


def test_tunings_are_set_against_the_target_before_them() -> None:
    tunings = {Tuning(False, 1.0, True, 3e-3): tuned(0.05, 0.1), Tuning(True, 0.1, False, 3e-4): tuned(0.0, 0.3)}
    plain, sar = heat.rows(tunings)
    assert plain["variant"] == "adapter, SFT, 1 of the recipe's learning rate" and plain["cost_nats"]["low"] > 0
    assert sar["variant"] == "all weights, SAR-SFT, 0.1 of the recipe's learning rate"
    assert sar["cost_nats"]["low"] <= 0 <= sar["cost_nats"]["high"] and sar["agreement_difference"]["low"] > 0.1


def test_the_layer_alone_is_trained_and_counted() -> None:
    job = sizes.LayerTraining(tiny_model(3, seed=2), EddSettings(states_after=1), seed=0)
    (group,) = job.parameter_groups()
    layer = sum(parameter.numel() for parameter in job.decoder.model.layers.parameters())
    assert sum(parameter.numel() for parameter in group["params"]) == layer
    batch = torch.randint(1, VOCAB, (1, 33), generator=torch.Generator().manual_seed(6))
    job.loss(batch, 0)[0].backward()
    assert all(parameter.grad is not None for parameter in group["params"])
    assert job.decoder.get_input_embeddings().weight.grad is None
