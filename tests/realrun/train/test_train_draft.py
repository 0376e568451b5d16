"""Training a draft model: whose layers it starts from, what its loss is, and that the folder is a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from realrun.train.common.loop import LoopSettings
from realrun.train.common.on_text import TextRun
from realrun.train.draft import DraftModelSettings, DraftModelTraining, train_draft_model, with_fewer_layers
from tests.support.checks import refusal
from tests.support.small_targets import alone, small_target
from tests.support.tiny import VOCAB
from tests.support.trainings import word_text


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
    trained = [parameter for group in job.parameter_groups() for parameter in group["params"]]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained)
    assert {id(p) for p in trained}.isdisjoint({id(job.model.get_input_embeddings().weight)})


def test_the_folder_is_a_model_that_agrees_with_its_target(tmp_path: Path) -> None:
    target = small_target()
    pair = replace(alone(target), tokenizer=WithTokenizer())
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    loop = LoopSettings(60, 4, 32, warmup_steps=3, dtype="float64", log_every=4)
    run = TextRun(word_text(), loop, tmp_path, stored=torch.float64)
    document = train_draft_model(pair, DraftModelSettings(1, lr=1e-2), run)
    held = [row["held_out"] for row in document["history"] if "held_out" in row]
    assert held[-1]["nats"] < 0.8 * held[0]["nats"] and document["drafter"] == str(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    draft = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert draft.config.num_hidden_layers == 1
    assert torch.equal(draft.get_input_embeddings().weight, target.get_input_embeddings().weight)
    again = train_draft_model(pair, DraftModelSettings(1, lr=1e-2), run)  # finished: nothing is trained again
    assert again["history"] == document["history"]
