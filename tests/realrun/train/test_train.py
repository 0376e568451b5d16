"""Training the lab: its schedule, its time limit, distillation, resuming, and what is exported loads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import realrun.lab.train as training
from realrun.lab.train import DECAY_SHARE, LabLoop, LabTraining, TrainSettings, export, train
from realrun.train.common import loop as loop_module
from realrun.train.common.folder import CHECKPOINT
from realrun.train.common.loop import Row, run_loop
from tests.support.tiny import tiny_model, tiny_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 97, 6000).astype(np.int32)
LOOP = LabLoop(100, 32, 256, warmup_steps=10)


@pytest.fixture(autouse=True)
def tiny_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(role: str, size: str) -> LlamaConfig:
        return tiny_model({"target": 2, "draft": 1}[role], seed=0).config

    monkeypatch.setattr(training, "lab_config", config)


def settings(steps: int = 8, **changes: object) -> TrainSettings:
    values = {"tokens": 512 * steps, "batch_tokens": 512, "window_tokens": 32, "warmup_steps": 2}
    return TrainSettings("draft", **{**values, "checkpoint_s": 1e9, **changes})  # type: ignore[arg-type]


def run(folder: Path, chosen: TrainSettings, teacher: LlamaForCausalLM | None = None, stop: int = -1) -> list[Row]:
    """Train in this folder; Ctrl-C comes twice after `stop` steps."""

    def progress(what: str, done: int, total: int) -> None:
        if done == stop:
            raise KeyboardInterrupt

    job = LabTraining(chosen, teacher)
    return run_loop(job, chosen.loop, TOKENS, TOKENS, folder, chosen.plan, progress, chosen.limit_s)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    stored = load_file(folder / CHECKPOINT)
    return {name: value for name, value in stored.items() if name.startswith("state.")}


def test_a_time_limit_ends_training_with_the_rate_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that gains a second per reading stands for the machine's."""
    readings = iter(range(10_000))
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: float(next(readings)))
    rates, original = list[float](), LabLoop.lr_factor

    def factor(self: LabLoop, step: int, steps: int) -> float:
        rates.append(original(self, step, steps))
        return rates[-1]

    monkeypatch.setattr(LabLoop, "lr_factor", factor)
    rows = run(tmp_path, settings(steps=1000, limit_s=100.0))
    assert 20 < rows[-1]["step"] < 110 and "held_out" in rows[-1]
    assert rates[-1] < 0.1 < max(rates)
    assert (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize("distill", [False, True])
def test_a_resumed_training_ends_with_the_same_weights(tmp_path: Path, distill: bool) -> None:
    """Killed in every phase of the learning rate, and asked for more steps in the constant phase."""
    teacher = tiny_model(2, seed=5, dtype=torch.bfloat16) if distill else None
    options = {"distill_after_tokens": 512 * 4 if distill else 0, "checkpoint_s": 0.0}
    chosen = settings(**options)
    run(tmp_path / "whole", chosen, teacher)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", settings(20, **options), teacher, 3)
    for stop in (5, 7):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", chosen, teacher, stop)
    run(tmp_path / "parts", chosen, teacher)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole and all(torch.equal(value, parts[name]) for name, value in whole.items())


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    text = np.tile(np.arange(97, dtype=np.int32), 60)
    chosen = settings(40)
    job = LabTraining(chosen, None)
    rows = run_loop(job, chosen.loop, text, text, tmp_path, chosen.plan, lambda what, done, total: None)
    assert rows[-1]["held_out"]["nats"] < 0.5 * rows[0]["held_out"]["nats"]


def test_the_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    factors = [LOOP.lr_factor(step, 100) for step in range(101)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    decay_start = round(100 * (1 - DECAY_SHARE))
    assert factors[10 : decay_start + 1] == [1.0] * (decay_start + 1 - 10)
    assert np.diff(factors[decay_start:]) == pytest.approx(-1 / (100 - decay_start))
    assert factors[-1] == 0.0 and LOOP.lr_factor(105, 100) == 0.0
    assert factors[:70] == [LOOP.lr_factor(step, 1000) for step in range(70)]


def test_the_last_windows_are_twice_as_long() -> None:
    assert [LOOP.batch_shape(step, 100) for step in (0, 84, 85, 99)] == [(32, 256)] * 2 + [(16, 512)] * 2


def test_distillation_begins_at_the_stated_tokens_and_moves_the_student_toward_the_teacher(tmp_path: Path) -> None:
    teacher = tiny_model(1, seed=5, dtype=torch.bfloat16)
    chosen = settings(60, distill_after_tokens=512 * 3)
    job, passes = LabTraining(chosen, teacher), list[int]()
    batch = torch.from_numpy(TOKENS[:256].reshape(8, 32).astype(np.int64))

    def divergence() -> float:
        with torch.no_grad():
            p, q = (model(input_ids=batch).logits.float().log_softmax(-1) for model in (teacher, job.model))
        return float((p.exp() * (p - q)).sum(-1).mean())

    before = divergence()
    hook = teacher.register_forward_hook(lambda *args: passes.append(1))
    run_loop(job, chosen.loop, TOKENS, TOKENS, tmp_path, chosen.plan, lambda what, done, total: None)
    hook.remove()
    assert len(passes) == 60 - 3
    assert divergence() < 0.7 * before


def test_an_exported_model_loads_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(training, "encode_split", lambda *args: TOKENS)
    assert train(settings(2), tmp_path) == 2
    export(tmp_path, "draft", tmp_path / "out")
    folder = tmp_path / "out" / "draft"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert isinstance(model, LlamaForCausalLM) and model.dtype == torch.bfloat16
    stored = {name.removeprefix("state."): value for name, value in weights(tmp_path / "draft").items()}
    for name, value in stored.items():
        assert torch.equal(model.state_dict()[name], value.to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tiny_tokenizer().get_vocab()
    assert not [name for name in os.listdir(folder) if name.endswith((".bin", ".pt", ".py"))]


def test_fewer_tokens_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="less than a batch"):
        settings(0)
