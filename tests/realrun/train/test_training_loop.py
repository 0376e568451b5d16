"""The training loop: resuming after a kill or Ctrl-C, rows of the log, learning rate, windows, refusals."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from realrun import tensor_files
from realrun.train.common import loop as loop_module
from realrun.train.common.folder import CHECKPOINT
from realrun.train.common.loop import (
    Job,
    LoopSettings,
    LossAndParts,
    ParameterGroup,
    Tensors,
    run_loop,
    stop_asked,
    windows,
)
from specsim.io.errors import InputError, Interrupted
from tests.support.checks import refusal

VOCAB = 97
LOOP = LoopSettings(24, 4, 32, warmup_steps=3, dtype="float64", log_every=4, checkpoint_s=0.0)


def quiet(what: str, done: int, total: int) -> None:
    """Without the models' helpers, so that the process to be killed starts soon."""


class Noisy(Job):
    """A job whose loss has noise, as dropout gives it."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.seen: list[torch.Tensor] = []

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup([self.weight], 0.1)]

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        self.seen.append(batch)
        factor = batch.double().mean() / VOCAB
        loss = ((self.weight * factor + torch.randn(4, dtype=torch.float64)) ** 2).mean()
        return loss, {"half": float(loss.detach()) / 2}

    def state(self) -> Tensors:
        return {"weight": self.weight}

    def load_state(self, tensors: Tensors) -> None:
        with torch.no_grad():
            self.weight.copy_(tensors["weight"])

    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        torch.rand(3)  # disturbs nothing
        return {"mean": float(batch.double().mean())}


TEXT = np.random.default_rng(0).integers(1, VOCAB, 2000).astype(np.int32)
HELD = np.random.default_rng(1).integers(1, VOCAB, 300).astype(np.int32)


@pytest.mark.parametrize("checkpoint_s", [0.0, 1e9])
def test_stopped_anywhere_the_noise_and_the_log_are_as_without(checkpoint_s: float, tmp_path: Path) -> None:
    """With checkpoints at every step, or none before the end."""
    loop = replace(LOOP, checkpoint_s=checkpoint_s)
    whole = run_loop(Noisy(), loop, TEXT, HELD, tmp_path / "whole", {}, quiet)
    for stop in (3, 4, 11, 23):

        def kill(what: str, done: int, total: int, stop: int = stop) -> None:
            if done == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_loop(Noisy(), loop, TEXT, HELD, tmp_path / "parts", {}, kill)
    job = Noisy()
    assert run_loop(job, loop, TEXT, HELD, tmp_path / "parts", {}, quiet) == whole
    assert len(job.seen) == (1 if checkpoint_s == 0 else 24)
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) == 7
    assert all(row.means["loss"] == pytest.approx(2 * row.means["half"]) for row in whole[1:])
    assert run_loop(Noisy(), loop, TEXT, HELD, tmp_path / "parts", {}, quiet) == whole  # a finished one is read
    assert not any(name.startswith("optimizer.") for name in load_file(tmp_path / "parts" / "checkpoint.safetensors"))


def test_a_training_that_ended_by_time_can_go_on(tmp_path: Path) -> None:
    run_loop(Noisy(), LOOP, TEXT, HELD, tmp_path, {}, quiet, limit_s=1e-9)
    assert any(name.startswith("optimizer.") for name in load_file(tmp_path / "checkpoint.safetensors"))


def test_a_time_limit_ends_training_with_the_rate_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that gains a second per reading stands for the machine's."""
    readings = iter(range(10_000))
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: float(next(readings)))
    rates, original = list[float](), LoopSettings.lr_factor

    def factor(self: LoopSettings, step: int, steps: int) -> float:
        rates.append(original(self, step, steps))
        return rates[-1]

    monkeypatch.setattr(LoopSettings, "lr_factor", factor)
    long = replace(LOOP, steps=1000, checkpoint_s=1e9)
    rows = run_loop(Noisy(), long, TEXT, HELD, tmp_path, {}, quiet, limit_s=100.0)
    assert 20 < rows[-1].step < 110 and rows[-1].held_out is not None
    assert rates[-1] < 0.1 < max(rates)
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_the_rows_are_means_over_their_steps(tmp_path: Path) -> None:
    coarse, fine = (
        run_loop(Noisy(), replace(LOOP, log_every=every), TEXT, HELD, tmp_path / str(every), {}, quiet)
        for every in (8, 1)
    )
    losses = [row.means["loss"] for row in fine[1:]]
    assert [row.means["loss"] for row in coarse[1:]] == pytest.approx([np.mean(losses[i : i + 8]) for i in (0, 8, 16)])


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    loop = replace(LOOP, steps=100, warmup_steps=10)
    factors = [loop.lr_factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * k for k in range(1, 11)]) and max(factors) == 1
    assert factors[10] == 1 and factors[55] == pytest.approx(0.5) and 0 < factors[99] < 1e-3
    assert all(a > b for a, b in pairwise(factors[10:]))


def test_windows_come_from_their_sources_by_share() -> None:
    low, high = np.arange(0, 500, dtype=np.int32), np.arange(1000, 1020, dtype=np.int32)
    drawn = windows([(low, 0.25), (high, 0.75)], 4000, 18, (0, 1))
    assert drawn.shape == (4000, 19) and torch.equal(drawn.diff(), torch.ones_like(drawn[:, 1:]))
    assert float((drawn[:, 0] >= 1000).double().mean()) == pytest.approx(0.75, abs=0.03)
    assert set(drawn[drawn[:, 0] >= 1000, 0].tolist()) == {1000, 1001}  # all that fit, and no more
    assert int(drawn[drawn[:, 0] < 1000].max()) == 499 and int(drawn.min()) == 0
    assert not torch.equal(drawn, windows([(low, 0.25), (high, 0.75)], 4000, 18, (0, 2)))


KILLED = """
import os, signal
from pathlib import Path
import torch
from safetensors.torch import load_file
torch.set_num_threads(1)
from tests.realrun.train.test_training_loop import HELD, LOOP, TEXT, Noisy, run_loop
def kill(what, done, total):
    if done == 7:
        os.kill(os.getpid(), signal.SIGKILL)
run_loop(Noisy(), LOOP, TEXT, HELD, Path({out!r}), {{}}, kill)
"""


def test_a_process_killed_at_any_moment_leaves_what_can_be_gone_on_from(tmp_path: Path) -> None:
    code = KILLED.format(out=str(tmp_path / "parts"))
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=root, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert len((tmp_path / "parts" / "log.jsonl").read_text().splitlines()) == 2  # steps 0 and 4
    parts, whole = (run_loop(Noisy(), LOOP, TEXT, HELD, tmp_path / name, {}, quiet) for name in ("parts", "whole"))
    assert parts == whole and [row.step for row in whole] == [0, 4, 8, 12, 16, 20, 24]


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    run_loop(Noisy(), LOOP, TEXT, HELD, tmp_path, {}, quiet)
    path = tmp_path / "checkpoint.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:200], whole[:-3], b""):
        path.write_bytes(damaged)
        refusal(lambda: run_loop(Noisy(), LOOP, TEXT, HELD, tmp_path, {}, quiet), "damaged", "delete it")
    for tensors in ({"state.x": torch.zeros(1)}, {"x": torch.zeros(1)}):
        save_file(tensors, path)
        refusal(lambda: run_loop(Noisy(), LOOP, TEXT, HELD, tmp_path, {}, quiet), "damaged", "delete it")


def test_left_out_lengths_follow_from_the_steps() -> None:
    loop = LoopSettings(1, 8, 256, warmup_steps=None, log_every=None)
    for tokens, expected in ((2e6, (977, 40, 10)), (0.2e6, (98, 10, 9)), (0.02e6, (10, 5, 1)), (1.0, (1, 0, 1))):
        long = loop.lasting(tokens)
        assert (long.steps, long.warmup, long.row_steps) == expected
        assert [long.decisive[name] for name in ("steps", "warmup_steps", "log_every")] == list(expected)
    assert LoopSettings(977, warmup_steps=7, log_every=3).decisive["warmup_steps"] == 7


class Diverging(Noisy):
    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        return self.weight.sum() * (float("nan") if step == 5 else 1.0), {}


def test_a_loss_that_is_no_number_and_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the loss is nan at step 6; give a lower learning rate"):
        run_loop(Diverging(), LOOP, TEXT, HELD, tmp_path / "a", {}, quiet)
    with pytest.raises(InputError, match="a text of 20 tokens gives no windows of 32"):
        run_loop(Noisy(), LOOP, TEXT, HELD[:20], tmp_path / "b", {}, quiet)
    (tmp_path / "file").write_text("")
    refusal(lambda: run_loop(Noisy(), LOOP, TEXT, HELD, tmp_path / "file", {}, quiet), "is a file; give a folder")
    for changes in ({"steps": 0}, {"dtype": "float16"}, {"warmup_steps": -1}):
        with pytest.raises(InputError):
            replace(LOOP, **changes)


class Quadratic(Noisy):
    """Least at 0, where it begins; AdamW's steps are as long as the learning rate, so that the loss is known."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup([self.weight], self.lr)]

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        return (self.weight**2).mean(), {}


@pytest.mark.parametrize("row_steps", [1, 4, 24])
def test_a_loss_that_climbs_away_stops_the_training(tmp_path: Path, row_steps: int) -> None:
    """From 1 nat at weights of 1: a step of 100 takes it to about 10,000. A steady loss and a falling one go on."""
    loop = replace(LOOP, warmup_steps=0, log_every=row_steps)
    with pytest.raises(
        InputError, match=r"training diverged: the loss rose from 1 to .* lower learning rate"
    ) as caught:
        run_loop(Quadratic(100.0), loop, TEXT, HELD, tmp_path / "a", {}, quiet)
    assert "--warmup" in str(caught.value) and not list((tmp_path / "a").glob("drafter*"))
    for lr in (0.0, 0.05):
        assert run_loop(Quadratic(lr), loop, TEXT, HELD, tmp_path / f"{lr}", {}, quiet)[-1].means["loss"] <= 1.0


# Ctrl-C: the step is finished and kept, and the training goes on to the same weights.


pytestmark = pytest.mark.usefixtures("ctrl_c_is_heard")
NEVER = LOOP.__class__(24, 4, 32, warmup_steps=3, dtype="float64", log_every=4, checkpoint_s=1e9)


class Interrupting(Noisy):
    """Ctrl-C arrives in the middle of this step."""

    def __init__(self, step: int, times: int = 1):
        super().__init__()
        self.step, self.times = step, times

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
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
    assert rows[-1].step == 24


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


KILLED_IN_SAVE = """
import os, signal, sys
from pathlib import Path
import torch
from realrun import tensor_files
tensor_files.save_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
tensor_files.save_tensors(Path(sys.argv[1]), {"a": torch.zeros(2)}, {})
"""


def test_what_a_kill_left_while_tensors_were_written_is_removed_by_the_next_save(tmp_path: Path) -> None:
    path, root = tmp_path / "drafter.safetensors", Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED_IN_SAVE, str(path)], check=False, cwd=root)
    assert done.returncode == -signal.SIGKILL and any(tmp_path.iterdir()) and not path.exists()
    tensor_files.save_tensors(path, {"a": torch.ones(2)}, {})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
