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

from realrun import tensor_files
from realrun.train.common.folder import CHECKPOINT
from realrun.train.common.loop import run_loop, stop_asked
from specsim.io.errors import Interrupted
from tests.realrun.train.test_training_loop import HELD, LOOP, TEXT, Noisy, quiet

pytestmark = pytest.mark.usefixtures("ctrl_c_is_heard")
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
    message = rf"step {step + 1} of 24 is kept in .*parts; the same command goes on"
    with pytest.raises(Interrupted, match=message):
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
    answers: list[bool] = []

    def ask() -> None:
        with stop_asked() as stopping:
            answers.append(stopping())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [False]


def test_where_signals_are_ignored_they_stay_so(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        rows = run_loop(Interrupting(3), NEVER, TEXT, HELD, tmp_path, {}, quiet)
    finally:
        signal.signal(signal.SIGINT, before)
    assert rows[-1]["step"] == 24


def test_a_full_disk_is_said_by_safetensors_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what safetensors writes meanwhile is not left beside the file."""
    path = tmp_path / "drafter.safetensors"
    tensor_files.save_tensors(path, {"a": torch.zeros(2)}, {"format": "x"})
    (plain := tmp_path.parent / "plain").touch()
    assert path.stat().st_mode == plain.stat().st_mode  # others may read it as any other file

    def full(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Any) -> None:
        path.with_name(".tmpabc").write_text("half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        tensor_files.save_tensors(path, {"a": torch.ones(2)}, {"format": "x"})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert torch.equal(load_file(path)["a"], torch.zeros(2))
