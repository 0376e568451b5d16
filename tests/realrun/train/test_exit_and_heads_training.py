"""Training EESD, MEDUSA-1 and draft models: what is trained, and on what loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import load_drafter
from realrun.train.common.distill import DistillSettings, TextSettings
from realrun.train.common.loop import LoopSettings
from realrun.train.common.on_text import TextRun
from realrun.train.draft import DraftModelSettings, DraftModelTraining, train_draft_model, with_fewer_layers
from realrun.train.eesd import EarlyExitTraining, EesdSettings, train_eesd
from realrun.train.medusa import HeadsTraining, MedusaCommand, MedusaSettings, train_either
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from tests.support.checks import refusal
from tests.support.small_targets import alone, small_target, text_folder
from tests.support.tiny import VOCAB, tiny_prompts
from tests.support.trainings import word_text

LOOP = LoopSettings(60, 4, 32, warmup_steps=3, dtype="float64", log_every=4)


@pytest.mark.slow
def test_eesd_agrees_more_with_its_target_when_trained_on_what_it_wrote(tmp_path: Path) -> None:
    """A random target has nothing to do with the text: its own words alone teach the exit its choices."""
    pair = alone(small_target())
    for name, share in (("text", 0.0), ("own", 1.0)):
        text = TextSettings(text_folder(tmp_path / "t" / "text"), share, 6000, DistillSettings(8, 24, 32, 1.0))
        train_eesd(pair, EesdSettings(2, lr=1e-2), TextRun(text, LOOP, tmp_path / name, tmp_path / "c"))
    held = [json.loads((tmp_path / name / "log.jsonl").read_text().split("\n")[-2]) for name in ("text", "own")]
    assert held[1]["held_out"]["agreement"] > held[0]["held_out"]["agreement"] + 0.05


def test_a_training_that_its_time_ends_says_how_far_it_came(tmp_path: Path) -> None:
    run = TextRun(word_text(), replace(LOOP, steps=100_000), tmp_path, limit_s=1.0)
    document = train_eesd(alone(small_target()), EesdSettings(1), run).as_dict()
    steps = document["history"][-1]["step"]
    assert 0 < steps < 100_000 and document["tokens"] == steps * LOOP.batch_windows * LOOP.window_tokens
    assert "held_out" in document["history"][-1]


@pytest.mark.parametrize(("layers", "exit_layers"), [(1, 1), (2, 1), (1, 2), (2, 0)])
def test_a_step_of_eesd_runs_the_first_layers_and_no_more(layers: int, exit_layers: int) -> None:
    target = small_target()
    job = EarlyExitTraining(target, EesdSettings(layers, exit_layers))
    ran: list[int] = []
    for number, layer in enumerate(target.model.layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    batch = torch.randint(1, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    loss, _ = job.loss(batch, 0)
    assert ran == list(range(layers))
    loss.backward()
    trained = dict(job.module.named_parameters())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained.values())
    assert {id(p) for group in job.parameter_groups() for p in group.params} == {id(p) for p in trained.values()}
    assert any(name.startswith("layers.") for name in trained) == (exit_layers > 0)
    # The loss is that of the next token, by hand.
    log_probs = job.model(input_ids=batch[:, :-1]).logits.log_softmax(-1)
    expected = -np.mean([[float(log_probs[b, t, batch[b, t + 1]].detach()) for t in range(10)] for b in range(2)])
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)


def test_medusas_loss_by_hand() -> None:
    target = small_target("qwen2")
    job = HeadsTraining(target, MedusaSettings(heads=3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in job.heads.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    batch = torch.randint(1, VOCAB, (2, 13), generator=generator)
    loss, parts = job.loss(batch, 0)
    expected = []
    for k in (1, 2, 3):
        nats = []
        for row in batch:
            hidden = target.model(input_ids=row[None, :-1]).last_hidden_state[0].detach()
            for t in range(12):  # t counts tokens read: row[t] is the last one, row[t + 1] the target's own
                if t + k + 1 <= 12:
                    nats.append(-float(job.heads(hidden[t : t + 1]).log_softmax(-1)[k - 1, 0, row[t + k + 1]].detach()))
        expected.append(np.mean(nats))
    assert [parts[f"head_{k}"] for k in (1, 2, 3)] == pytest.approx(expected, rel=1e-12)
    assert float(loss.detach()) == pytest.approx(sum(0.8 ** (k + 1) * x for k, x in enumerate(expected)), rel=1e-12)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in job.heads.parameters())


def test_medusas_heads_start_as_the_targets_own_head() -> None:
    target = small_target()
    job = HeadsTraining(target, MedusaSettings(heads=2))
    batch = torch.randint(1, VOCAB, (2, 13), generator=torch.Generator().manual_seed(1))
    hidden = target.model(input_ids=batch[:, :-1]).last_hidden_state[0]
    expected = target(input_ids=batch[:1, :-1]).logits[0]
    assert torch.allclose(job.heads(hidden), expected.expand(2, -1, -1), rtol=0, atol=1e-12)
    figures = job.held_out(batch)
    greedy = target(input_ids=batch[:, :-1]).logits.argmax(-1)
    for k in (1, 2):
        share = float((greedy[:, :-k] == greedy[:, k:]).double().mean())
        assert figures[f"head_{k}_agreement"] == pytest.approx(share)


@torch.inference_mode(False)
def test_five_heads_are_the_default_and_the_default_tree_uses_four(tmp_path: Path) -> None:
    """As in the paper (4.0.1 and figure 3; errata E9): a trace is recorded to depth 5."""
    pair = alone(small_target())
    loop = LoopSettings(3, 4, 24, warmup_steps=1, dtype="float64", log_every=2)
    train_either(pair, MedusaCommand(), TextRun(word_text(), loop, tmp_path))
    target, drafter = load_drafter(tmp_path, pair.target)
    trained, prompts = replace(pair, target=target, drafter=drafter), tiny_prompts(3)
    trace = record(trained, prompts, RecordSettings(8, 16, tree_nodes=31))
    assert drafter.facts == {"heads": 5} and trace.depth == 5
    assert make_policy("sparse_tree").max_draft_tokens == 4


def test_stages_of_medusa_2_exclude_each_other() -> None:
    for options, message in (
        ({"direct": True}, "go with --joint"),
        ({"joint": True, "direct": True, "one_stage": True}, "give only one"),
        ({"joint": True, "direct": True, "heads_from": Path("heads")}, "--direct starts from fresh heads; leave out"),
    ):
        with pytest.raises(InputError, match=message):
            MedusaCommand(**options)  # type: ignore[arg-type]


# Draft models: whose layers they start from, and that the folder is a model.


class WithTokenizer:
    """Stands in for a tokenizer, which is only written."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_all_layers_are_the_target_and_fewer_are_its_own() -> None:
    target = small_target()
    total = target.config.num_hidden_layers
    tokens = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(with_fewer_layers(target, total)(tokens).logits, target(tokens).logits)
        # By the library's own layers: two of them, the first and the last.
        two = with_fewer_layers(target, 2)
        kept = target.model.layers
        target.model.layers = torch.nn.ModuleList([kept[0], kept[-1]])
        target.config.num_hidden_layers = 2
        assert torch.equal(two(tokens).logits, target(tokens, use_cache=False).logits)
    refusal(lambda: with_fewer_layers(target, 3), "--layers 3 is more than the target's 2")


def test_the_loss_is_the_divergence_from_the_target() -> None:
    target = small_target()
    job = DraftModelTraining(target, DraftModelSettings(1))
    batch = torch.randint(1, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    loss, _ = job.loss(batch, 0)
    p, q = (model(batch[:, :-1]).logits.softmax(-1).detach().double().numpy() for model in (target, job.model))
    assert float(loss.detach()) == pytest.approx(np.mean((p * np.log(p / q)).sum(-1)), rel=1e-9)
    loss.backward()
    trained = [parameter for group in job.parameter_groups() for parameter in group.params]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained)
    assert {id(p) for p in trained}.isdisjoint({id(job.model.get_input_embeddings().weight)})


def test_the_folder_is_a_model_that_agrees_with_its_target(tmp_path: Path) -> None:
    target = small_target()
    pair = replace(alone(target), tokenizer=WithTokenizer())
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    loop = LoopSettings(60, 4, 32, warmup_steps=3, dtype="float64", log_every=4)
    run = TextRun(word_text(), loop, tmp_path, stored=torch.float64)
    document = train_draft_model(pair, DraftModelSettings(1, lr=1e-2), run).as_dict()
    held = [row["held_out"] for row in document["history"] if "held_out" in row]
    assert held[-1]["nats"] < 0.8 * held[0]["nats"] and document["drafter"] == str(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    draft = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert draft.config.num_hidden_layers == 1
    assert torch.equal(draft.get_input_embeddings().weight, target.get_input_embeddings().weight)
    again = train_draft_model(pair, DraftModelSettings(1, lr=1e-2), run)  # finished: nothing is trained again
    assert again.as_dict()["history"] == document["history"] and "worse" not in again.summary().title


def test_a_drafter_that_got_worse_is_called_so(tmp_path: Path) -> None:
    """With all of its target's layers it agrees before the first step, so that noisy steps can only make it worse."""
    target = small_target()
    pair = replace(alone(target), tokenizer=WithTokenizer())
    loop = LoopSettings(4, 2, 8, warmup_steps=1, dtype="float64", log_every=1)
    settings = DraftModelSettings(len(target.model.layers), lr=0.05)
    trained = train_draft_model(pair, settings, TextRun(word_text(), loop, tmp_path, stored=torch.float64))
    figures = {name: (float(start), float(end)) for name, start, end in trained.summary().rows}
    assert figures["agreement"][0] == 1.0 > figures["agreement"][1]
    assert trained.summary().title.endswith("the drafter drafts worse than it began")
