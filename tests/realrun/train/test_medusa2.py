"""MEDUSA-2: an adapter that can be taken off, losses as in the paper, and decoding that is the tuned backbone's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.medusa import MedusaHeads
from realrun.pairs.drafter_files import load_drafter, read_drafter
from realrun.pairs.pair import Pair
from realrun.train.common.loop import HELD_OUT_WINDOWS, LoopSettings, windows
from realrun.train.common.lora import AdapterSettings, adapted_modules
from realrun.train.common.on_text import TextRun, kl_nats
from realrun.train.medusa import JointTraining, Medusa2Settings, train_medusa2
from specsim.policy.registry import make_policy
from tests.realrun.train.test_lora import logits, perturbed, target, tokens
from tests.support.checks import refusal
from tests.support.small_targets import alone
from tests.support.tiny import random_prompts, tiny_tokenizer
from tests.support.trainings import word_text, words

LOOP = LoopSettings(steps=80, batch_windows=8, window_tokens=24, warmup_steps=3, dtype="float64", log_every=5)
FAST = Medusa2Settings(
    "text", lambda_0=0.5, backbone_lr=2e-2, heads_lr_factor=2.0, adapter=AdapterSettings(rank=8, alpha=16)
)


@dataclass(frozen=True)
class Trained:
    original: LlamaForCausalLM
    folder: Path
    facts: dict[str, Any]
    pair: Pair


def train(folder: Path, model: Any, settings: Medusa2Settings = FAST, loop: LoopSettings = LOOP, **options: Any) -> Any:
    heads = options.pop("heads", None) or MedusaHeads(model, 3)
    return train_medusa2(alone(model), heads, settings, TextRun(word_text(), loop, folder, **options)).as_dict()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A drafter in bfloat16, loaded for a target in float64."""
    folder, model = tmp_path_factory.mktemp("medusa2"), target()
    facts = train(folder, model)
    pair = Pair(*load_drafter(folder, model), tiny_tokenizer(), "tiny", "medusa-2", ())
    return Trained(model, folder, facts, pair)


# The loss


def job_on(model: Any, settings: Medusa2Settings, heads: int = 3, dropout: float = 0.0) -> JointTraining:
    settings = replace(settings, adapter=replace(settings.adapter, dropout=dropout))
    start = MedusaHeads(model, heads)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        start.residual.copy_(0.1 * torch.randn(start.residual.shape, generator=generator))
    return JointTraining(model, start, settings, steps=10)


def test_the_loss_is_the_papers_combination() -> None:
    settings, batch = replace(FAST, lambda_0=0.3, decay=0.7), tokens(length=12)
    job = job_on(target(), settings)
    perturbed(job.adapter)
    total, parts = job.loss(batch, step=4)
    given = logits(job.target, batch[:, :-1]).log_softmax(-1)
    states: list[torch.Tensor] = []
    hook = job.target.lm_head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    logits(job.target, batch[:, :-1])
    hook.remove()
    backbone = -np.mean([float(given[b, t, batch[b, t + 1]]) for b in range(3) for t in range(11)])
    assert parts["backbone"] == pytest.approx(backbone, abs=1e-12)
    expected = backbone
    for k in (1, 2, 3):  # head k at t predicts token t + k + 1
        at = [job.heads(state.reshape(-1, 32))[k - 1].log_softmax(-1) for state in states[0]]
        nats = -np.mean([float(at[b][t, batch[b, t + k + 1]].detach()) for b in range(3) for t in range(11 - k)])
        assert parts[f"head_{k}"] == pytest.approx(nats, abs=1e-12)
        expected += 0.3 * 0.7**k * nats
    assert float(total.detach()) == pytest.approx(expected, abs=1e-12)


def test_heads_of_a_draft_vocabulary_learn_from_all_tokens_and_draft_theirs(tmp_path: Path) -> None:
    model, some = target(), torch.arange(0, 80, 2)
    facts = train(tmp_path, model, heads=MedusaHeads(model, 3, True, some), loop=replace(LOOP, steps=4))
    assert facts["held_out"]["start"]["head_1"] == pytest.approx(
        JointTraining(target(), MedusaHeads(target(), 3), FAST, 4).held_out(
            windows([(word_text().held_out, 1.0)], HELD_OUT_WINDOWS, LOOP.window_tokens, (LOOP.seed, 1, 0))
        )["head_1"],
        rel=1e-3,  # of a head that is not shared, the file rounds W_2
    )
    _, kind = load_drafter(tmp_path, target())
    assert kind.heads.tokens.tolist() == some.tolist() and kind.heads.vocabulary.shape[:2] == (1, 40)


def test_distillation_starts_at_zero_and_is_the_divergence_from_the_original() -> None:
    batch = tokens(length=12)
    job = job_on(target(), Medusa2Settings("distill", adapter=FAST.adapter), dropout=0.05)
    assert job.loss(batch, step=0)[1]["backbone"] == 0.0
    job = job_on(target(), Medusa2Settings("distill", adapter=FAST.adapter))
    perturbed(job.adapter)
    original = logits(target(), batch[:, :-1]).log_softmax(-1)
    tuned = logits(job.target, batch[:, :-1]).log_softmax(-1)
    expected = float((original.exp() * (original - tuned)).sum(-1).mean())
    reverse = float((tuned.exp() * (tuned - original)).sum(-1).mean())
    divergence = job.loss(batch, step=0)[1]["backbone"]
    assert divergence == pytest.approx(expected, abs=1e-12) and abs(expected - reverse) > 1e-4


def test_the_gradient_of_the_divergence_leads_back_to_the_original() -> None:
    """At the logits it is p - p_original; by descent the adapter finds the way, and the heads do not move."""
    generator = torch.Generator().manual_seed(0)
    original, leaf = (torch.randn(2, 3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    kl_nats(original, leaf.requires_grad_()).backward()
    pull = (leaf.detach().softmax(-1) - original.softmax(-1)) / 6
    torch.testing.assert_close(leaf.grad, pull, rtol=0, atol=1e-14)
    batch = tokens(length=12)
    job = job_on(target(), Medusa2Settings("distill", lambda_0=1e-12, adapter=FAST.adapter))
    perturbed(job.adapter, 0.05)
    parameters = list(job.adapter.tensors().values())
    total, parts = job.loss(batch, step=0)
    total.backward()
    assert all(p.grad.abs().max() < 1e-10 for p in job.heads.parameters() if p.grad is not None)
    last = start = parts["backbone"]
    for _ in range(40):
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        total, parts = job.loss(batch, step=0)
        total.backward()
        assert parts["backbone"] < last
        last = parts["backbone"]
    assert last < 0.5 * start


def test_heads_pull_at_the_backbone() -> None:
    """The gradient of the heads' loss reaches the adapter; that of MEDUSA-1 would end at the states."""
    job = job_on(target(), Medusa2Settings("distill", adapter=FAST.adapter))
    total, _ = job.loss(tokens(), step=0)  # the divergence is at its least, so its own gradient is zero
    total.backward()
    pulls = [float(v.grad.abs().max()) for name, v in job.adapter.tensors().items() if name.endswith(".B")]
    assert min(pulls) > 1e-6
    assert all(p.grad is None for name, p in job.target.named_parameters() if "lora" not in name)


def test_settings_that_follow_from_the_loss() -> None:
    text, distill = Medusa2Settings("text"), Medusa2Settings("distill")
    assert (text.lambda_0, text.backbone_lr, distill.lambda_0, distill.backbone_lr) == (0.2, 5e-4, 0.01, 1e-4)
    assert text.adapter == AdapterSettings(rank=32, alpha=16, dropout=0.05)
    assert [text.heads_weight(step, 4) for step in range(4)] == [0.2] * 4
    sine = [replace(text, schedule="sine").heads_weight(step, 4) for step in range(4)]
    assert sine == pytest.approx([0.2 * np.sin(np.pi / 8 * i) for i in (1, 2, 3, 4)]) and sine[-1] == 0.2
    backbone, heads = job_on(target(), text).parameter_groups()
    assert (backbone.lr, heads.lr) == pytest.approx((5e-4, 2e-3))


# Training


def test_only_adapter_and_heads_change(tmp_path: Path) -> None:
    model, untouched = target(), target()
    heads = MedusaHeads(model, 3)
    train(tmp_path, model, heads=heads, loop=replace(LOOP, steps=4))
    assert all(torch.equal(value, untouched.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(heads.residual, torch.zeros_like(heads.residual))
    assert torch.equal(heads.vocabulary[2], untouched.lm_head.weight)
    file = read_drafter(tmp_path)
    assert {name.split(".")[0] for name in file.tensors} == {"adapter", "residual", "vocabulary"}
    assert all(bool(value.any()) for value in file.tensors.values())
    assert {value.dtype for value in file.tensors.values()} == {torch.bfloat16}


def test_the_tuned_backbone_is_what_the_file_says(trained: Trained) -> None:
    """W + alpha / r B A of the stored, rounded values; the held-out figures in the file are of that very model."""
    file, tuned = read_drafter(trained.folder), trained.pair.target
    assert file.facts["adapter"] == {"rank": 8, "alpha": 16} and trained.pair.drafter.name == "medusa"
    for name in adapted_modules(trained.original):
        low, high = (file.tensors[f"adapter.{name}.{part}"].double().numpy() for part in "AB")
        expected = trained.original.get_submodule(name).weight.detach().numpy() + 16 / 8 * high @ low
        np.testing.assert_allclose(tuned.get_submodule(name).weight.detach().numpy(), expected, rtol=0, atol=1e-12)
    batch = windows([(words(1), 1.0)], HELD_OUT_WINDOWS, LOOP.window_tokens, (LOOP.seed, 1, 0))
    losses, (start, end) = [], (file.facts["held_out"][at] for at in ("start", "end"))
    for model in (trained.original, tuned):
        given = logits(model, batch[:, :-1])
        losses.append(float(torch.nn.functional.cross_entropy(given.flatten(0, 1), batch[:, 1:].flatten())))
    assert [end["original"], end["backbone"]] == pytest.approx(losses, abs=1e-9)
    assert start["original"] == start["backbone"] == end["original"]
    states = tuned.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
    guess = trained.pair.drafter.heads(states.reshape(-1, 32)).argmax(-1).view(3, HELD_OUT_WINDOWS, -1)
    preferred = logits(tuned, batch[:, :-1]).argmax(-1)
    for k in (1, 2, 3):
        at = guess[k - 1, :, : LOOP.window_tokens - k]
        assert end[f"head_{k}_text"] == pytest.approx(float((at == batch[:, k + 1 :]).double().mean()))
        assert end[f"head_{k}_agreement"] == pytest.approx(float((at == preferred[:, k:]).double().mean()))


def test_training_learns(trained: Trained) -> None:
    start, end = (trained.facts["held_out"][at] for at in ("start", "end"))
    assert end["backbone"] < 0.6 * start["backbone"]
    assert all(end[f"head_{k}_text"] > 2 * start[f"head_{k}_text"] for k in (1, 2, 3))
    assert end["divergence"] > 0 and end["agreement"] < 1


@pytest.mark.slow
def test_distillation_keeps_the_backbone_nearer_than_the_text_does(trained: Trained, tmp_path: Path) -> None:
    facts = train(tmp_path, target(), replace(FAST, loss="distill", lambda_0=0.01))
    distilled, drifted = facts["held_out"]["end"], trained.facts["held_out"]["end"]
    assert distilled["divergence"] < 0.25 * drifted["divergence"]
    assert distilled["head_1_text"] > 2 * facts["held_out"]["start"]["head_1_text"]


def outputs(decoder: Decoder, policy: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [decoder.decode(prompt, 40, policy, sequence=i).tokens for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler("gumbel", 0.8, seed=4)], ids=["greedy", "gumbel"])
def test_decoding_is_the_tuned_backbones_own(trained: Trained, sampler: Sampler) -> None:
    """Chain and tree; and not the original's, or the claim would say little."""
    prompts = [*random_prompts(2), *(words(2)[i : i + 24].tolist() for i in (0, 30, 60, 90, 120))]
    alone = outputs(Decoder(trained.pair.target, None, (), sampler), None, prompts)
    original = outputs(Decoder(trained.original, None, (), sampler), None, prompts)
    assert sum(a != b for a, b in zip(alone, original, strict=True)) >= len(prompts) // 2
    decoder = Decoder(*trained.pair.make_drafter(), (), sampler)
    for name, settings in (
        ("fixed_k", {"k": 3}),
        ("adaedl", {"max_draft_tokens": 3}),
        ("vct", {"width": 3, "depth": 3}),
        ("pct", {"width": 4, "max_depth": 3}),
    ):
        policy = make_policy(name, settings)
        assert outputs(decoder, policy, prompts) == alone, name
        rounds = [r for i, p in enumerate(prompts) for r in decoder.decode(p, 40, policy, sequence=i).rounds]
        assert sum(r.accepted for r in rounds) > 0.1 * len(rounds), name


def test_dropout_decides_the_curve(tmp_path: Path) -> None:
    curves = []
    for dropout in (0.2, 0.0):
        settings = replace(FAST, adapter=replace(FAST.adapter, dropout=dropout))
        curves.append(
            train(tmp_path / str(dropout), target(), settings, replace(LOOP, steps=2, log_every=1))["history"]
        )
    assert curves[0][2]["loss"] != curves[1][2]["loss"] and curves[0][0] == curves[1][0]


def test_another_start_in_the_same_folder_is_refused(trained: Trained) -> None:
    heads = MedusaHeads(trained.original, 3)
    with torch.no_grad():
        heads.residual.fill_(0.1)
    refusal(lambda: train(trained.folder, target(), heads=heads), "holds a training with start=", "give another --out")


def test_a_drafter_is_loaded_without_peft(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    loaded, _ = load_drafter(trained.folder, target())
    ids = tokens()
    assert torch.equal(logits(loaded, ids), logits(trained.pair.target, ids))
