"""Ctrl-C during a training: the step is finished and kept, and the training goes on to the same weights."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import Olmo2Config, Olmo2ForCausalLM

from realrun import tensor_files
from realrun.training.common import on_text
from realrun.training.common.distill import TextSettings
from realrun.training.common.folder import CHECKPOINT
from realrun.training.common.interrupt import stop_asked
from realrun.training.common.loop import run_loop
from realrun.training.common.on_text import TextRun
from realrun.training.eagle import EagleSettings, train_eagle
from realrun.training.edd import EddSettings, train_edd
from realrun.training.eesd import EesdSettings, train_eesd
from specsim.errors import Interrupted
from tests.realrun.training.test_training_loop import HELD, LOOP, TEXT, Noisy, quiet
from tests.support.checks import refusal
from tests.support.small_targets import alone
from tests.support.tiny import POSITIONS, VOCAB

NEVER = LOOP.__class__(24, 4, 32, warmup_steps=3, dtype="float64", log_every=4, checkpoint_s=1e9)


class Interrupting(Noisy):
    """Ctrl-C arrives in the middle of this step."""

    def __init__(self, step: int, times: int = 1):
        super().__init__()
        self.step, self.times = step, times

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        if step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        return super().loss(batch, step)


@pytest.mark.parametrize("step", [0, 7, 23])
def test_ctrl_c_keeps_the_step_at_hand(tmp_path: Path, step: int) -> None:
    """Though the next checkpoint was far away."""
    before = signal.getsignal(signal.SIGINT)
    whole = run_loop(Noisy(), NEVER, TEXT, HELD, tmp_path / "whole", {}, quiet)
    said = rf"step {step + 1} of 24 is kept in .*parts; the same command goes on"
    with pytest.raises(Interrupted, match=said):
        run_loop(Interrupting(step), NEVER, TEXT, HELD, tmp_path / "parts", {}, quiet)
    assert signal.getsignal(signal.SIGINT) is before
    job = Noisy()
    assert run_loop(job, NEVER, TEXT, HELD, tmp_path / "parts", {}, quiet) == whole
    assert len(job.seen) == 24 - step - 1
    weights = [load_file(tmp_path / name / CHECKPOINT)["state.weight"] for name in ("whole", "parts")]
    assert torch.equal(*weights)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_loop(Interrupting(3, times=2), NEVER, TEXT, HELD, tmp_path, {}, quiet)
    assert not (tmp_path / CHECKPOINT).exists()


def test_in_a_thread_there_are_no_signals() -> None:
    found: list[bool] = []

    def ask() -> None:
        with stop_asked() as stopping:
            found.append(stopping())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_full_disk_is_said_by_safetensors_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what safetensors writes meanwhile is not left beside the file."""
    path = tmp_path / "drafter.safetensors"
    tensor_files.save_tensors(path, {"a": torch.zeros(2)}, {"format": "x"})

    def full(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Any) -> None:
        path.with_name(".tmpabc").write_text("half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        tensor_files.save_tensors(path, {"a": torch.ones(2)}, {"format": "x"})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert torch.equal(load_file(path)["a"], torch.zeros(2))


def olmo2() -> Any:
    """Norms behind its sublayers, not before: its parts are joined otherwise than a Llama's."""
    config = Olmo2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(3)
    return Olmo2ForCausalLM(config).to(torch.float64).eval()


TRAININGS = {
    "eesd": lambda pair, run: train_eesd(pair, EesdSettings(layers=1), run),
    "edd": lambda pair, run: train_edd(pair, EddSettings(), run),
    "eagle": lambda pair, run: train_eagle(pair, EagleSettings(), run),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_target_whose_drafter_could_not_be_used_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_work(*args: Any) -> None:
        raise AssertionError("text was made")

    monkeypatch.setattr(on_text, "training_text", no_work)
    run = TextRun(TextSettings(), LOOP, tmp_path / "out")
    refusal(lambda: TRAININGS[name](alone(olmo2()), run), "Olmo2ForCausalLM")
    assert not (tmp_path / "out").exists()
