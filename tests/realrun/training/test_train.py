"""Training the lab: resuming changes nothing, and what is exported loads."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import realrun.lab.train as training
from realrun.lab.train import DECAY_SHARE, Trainer, TrainSettings, export, lr_factor, windows
from tests.support.tiny import tiny_model, tiny_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 97, 6000).astype(np.int32)


@pytest.fixture(autouse=True)
def tiny_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(role: str, size: str) -> LlamaConfig:
        return tiny_model({"target": 2, "draft": 1}[role], seed=0).config

    monkeypatch.setattr(training, "lab_config", config)
    monkeypatch.setattr(training, "held_out_nats", lambda *args: 0.0)


def settings(steps: int = 8, **changes: object) -> TrainSettings:
    values = {"tokens": 512 * steps, "batch_tokens": 512, "window_tokens": 32, "warmup_steps": 2}
    return TrainSettings("draft", **{**values, "checkpoint_s": 1e9, **changes})  # type: ignore[arg-type]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.master.state_dict().items()}


def run(trainer: Trainer) -> None:
    trainer.run(TOKENS, TOKENS, Console(file=io.StringIO()))


def test_a_time_limit_ends_training_with_the_rate_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that gains one second a reading stands for the machine's."""
    readings = iter(range(10_000))
    monkeypatch.setattr(training.time, "monotonic", lambda: float(next(readings)))
    trainer = Trainer(settings(steps=1000, limit_s=100.0), tmp_path, None)
    rates = []
    original = training.lr_factor

    def factor(step: int, steps: int, warmup_steps: int) -> float:
        rates.append(original(step, steps, warmup_steps))
        return rates[-1]

    monkeypatch.setattr(training, "lr_factor", factor)
    run(trainer)
    assert 20 < trainer.step < 110
    assert rates[-1] < 0.1 < max(rates)
    assert (tmp_path / "draft" / training.CHECKPOINT).exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("distill", [False, True])
@pytest.mark.parametrize("interrupt_at", [1, 3, 7])
def test_a_resumed_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt_at: int, distill: bool
) -> None:
    """Killed between two steps, some after the last checkpoint, in every phase of the learning rate."""
    teacher = tiny_model(2, seed=5, dtype=torch.bfloat16) if distill else None
    options = {"distill_after_tokens": 512 * 4} if distill else {}
    whole = Trainer(settings(**options), tmp_path / "whole", teacher)
    untrained = weights(whole)
    run(whole)

    killed = Trainer(settings(**options, checkpoint_s=0.0), tmp_path / "parts", teacher)
    step, save = Trainer.train_step, Trainer.checkpoint

    def die(self: Trainer, batch: torch.Tensor) -> float:
        if self.step == interrupt_at:
            raise Killed
        return step(self, batch)

    def sparse(self: Trainer) -> None:
        if self.step % 2:
            save(self)

    monkeypatch.setattr(Trainer, "train_step", die)
    monkeypatch.setattr(Trainer, "checkpoint", sparse)
    with pytest.raises(Killed):
        run(killed)
    monkeypatch.setattr(Trainer, "train_step", step)
    monkeypatch.setattr(Trainer, "checkpoint", save)
    torch.manual_seed(999)  # whatever happened in between
    resumed = Trainer(settings(**options), tmp_path / "parts", teacher)
    assert 0 < resumed.step <= interrupt_at
    run(resumed)
    assert resumed.step == whole.step == 8
    for name, value in weights(resumed).items():
        assert torch.equal(value, weights(whole)[name]), name
    assert not torch.equal(untrained["model.embed_tokens.weight"], weights(whole)["model.embed_tokens.weight"])
    for low, high in zip(resumed.compute.parameters(), resumed.master.parameters(), strict=True):
        assert low.dtype == torch.bfloat16 and torch.equal(low, high.to(torch.bfloat16))


def test_a_finished_training_is_not_trained_on(tmp_path: Path) -> None:
    first = Trainer(settings(4), tmp_path, None)
    run(first)
    again = Trainer(settings(4), tmp_path, None)
    run(again)
    assert again.step == 4
    assert all(torch.equal(value, weights(first)[name]) for name, value in weights(again).items())


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    text = np.tile(np.arange(97, dtype=np.int32), 60)
    trainer = Trainer(settings(40), tmp_path, None)
    losses = [trainer.train_step(windows(text, 16, 32, (0, step))) for step in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    steps, warmup = 100, 10
    factors = [lr_factor(step, steps, warmup) for step in range(steps + 1)]
    assert factors[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    decay_start = round(steps * (1 - DECAY_SHARE))
    assert factors[warmup : decay_start + 1] == [1.0] * (decay_start + 1 - warmup)
    assert np.diff(factors[decay_start:]) == pytest.approx(-1 / (steps - decay_start))
    assert factors[-1] == 0.0 and lr_factor(steps + 5, steps, warmup) == 0.0


def test_the_constant_phase_does_not_depend_on_the_total() -> None:
    assert [lr_factor(step, 100, 10) for step in range(70)] == [lr_factor(s, 1000, 10) for s in range(70)]


def test_distillation_begins_at_the_stated_tokens(tmp_path: Path) -> None:
    teacher = tiny_model(2, seed=5, dtype=torch.bfloat16)
    trainer = Trainer(settings(8, distill_after_tokens=512 * 3), tmp_path, teacher)
    assert not Trainer(settings(8), tmp_path, None).distilling
    calls = []
    teacher.register_forward_hook(lambda *args: calls.append(trainer.step))
    run(trainer)
    assert calls == [3, 4, 5, 6, 7]


def test_distillation_moves_the_student_toward_the_teacher(tmp_path: Path) -> None:
    teacher = tiny_model(1, seed=5, dtype=torch.bfloat16)
    trainer = Trainer(settings(60), tmp_path, teacher)

    def divergence() -> float:
        batch = windows(TOKENS, 8, 32, (77,))[:, :-1]
        with torch.no_grad():
            p, q = (m(input_ids=batch).logits.float().log_softmax(-1) for m in (teacher, trainer.compute))
        return float((p.exp() * (p - q)).sum(-1).mean())

    before = divergence()
    run(trainer)
    assert divergence() < 0.7 * before


def test_windows_are_keyed_and_inside_the_text() -> None:
    text = np.arange(50, dtype=np.int32)
    batch = windows(text, 200, 8, (1, 2))
    assert batch.shape == (200, 9) and batch.dtype == torch.int64
    assert (batch.diff(dim=1) == 1).all() and batch.min() >= 0 and batch.max() <= 49
    assert torch.equal(batch, windows(text, 200, 8, (1, 2)))
    assert not torch.equal(batch, windows(text, 200, 8, (1, 3)))


def test_a_failed_checkpoint_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(settings(4), tmp_path, None)
    trainer.train_step(windows(TOKENS, 16, 32, (0,)))
    trainer.checkpoint()
    path = tmp_path / "draft" / "checkpoint.safetensors"
    before = path.read_bytes()

    def half_written(tensors: object, name: Path, **options: object) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("no space left")

    trainer.train_step(windows(TOKENS, 16, 32, (1,)))
    monkeypatch.setattr("realrun.tensor_files.save_file", half_written)
    with pytest.raises(OSError, match="no space"):
        trainer.checkpoint()
    assert path.read_bytes() == before
    assert Trainer(settings(4), tmp_path, None).step == 1


def test_an_exported_model_loads_with_its_tokenizer(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    trainer = Trainer(settings(2), tmp_path, None)
    run(trainer)
    export(tmp_path, "draft", tmp_path / "out")
    folder = tmp_path / "out" / "draft"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert isinstance(model, LlamaForCausalLM) and model.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights(trainer)[name].to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tiny_tokenizer().get_vocab()
    assert not [name for name in os.listdir(folder) if name.endswith((".bin", ".pt", ".py"))]


def test_fewer_tokens_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="less than one batch"):
        settings(0)
