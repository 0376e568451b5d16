"""Training EESD and MEDUSA-1: what is trained and on what loss, resuming after a kill, refusals."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.pairs.drafter_files import load_drafter, read_drafter
from realrun.pairs.pair import Pair
from realrun.training.common.distill import DistillSettings, TextSettings
from realrun.training.common.loop import LoopSettings, Tensors, run_loop, windows
from realrun.training.eesd import EarlyExitTraining, EesdSettings, train_eesd
from realrun.training.medusa import HeadsTraining, MedusaSettings, train_medusa
from specsim.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from tests.support import ROOT
from tests.support.small_targets import ARCHITECTURES, alone, quiet, small_target, text_folder
from tests.support.tiny import VOCAB, random_prompts

LOOP = LoopSettings(24, 4, 32, warmup_steps=3, dtype="float64", log_every=4, checkpoint_s=0.0)
TRAINED: dict[str, tuple[Any, Any, float]] = {
    "eesd": (train_eesd, EesdSettings(layers=1, lr=1e-2), 1e-2),
    "medusa": (train_medusa, MedusaSettings(heads=3, lr=1e-2), 1e-2),
}


def texts(folder: Path, share: float = 0.5) -> TextSettings:
    return TextSettings(text_folder(folder), share, 600, DistillSettings(8, 16, 4))


def train(kind: str, pair: Pair, out: Path, loop: LoopSettings = LOOP, **changes: Any) -> dict[str, Any]:
    run, settings, _ = TRAINED[kind]
    result: dict[str, Any] = run(
        pair, replace(settings, text=texts(out.parent / "text"), **changes), loop, out, quiet, cache=out.parent / "c"
    )
    return result


# What is learned


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", TRAINED)
def test_training_learns_and_the_drafter_decodes_what_its_target_would(
    kind: str, architecture: str, tmp_path: Path
) -> None:
    target = small_target(architecture)
    before = copy.deepcopy(target.state_dict())
    document = train(kind, alone(target), tmp_path / "out")
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())  # it is frozen
    assert all(parameter.grad is None for parameter in target.parameters())
    start, end = document["held_out"]["start"], document["held_out"]["end"]
    for name in ("nats",) if kind == "eesd" else ("head_1", "head_2", "head_3"):
        assert end[name] < start[name] - 0.5
    assert document["tokens"] == 24 * 4 * 32 and document["tokens_per_second"] > 0
    _, loaded = load_drafter(tmp_path / "out", target)
    pair = replace(alone(target), drafter=loaded)
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    plain = Decoder(target, DraftModel(target, ()), (), Sampler())
    for prompt in random_prompts(3):
        run = decoder.decode(prompt, 20, FixedK(3))
        assert run.tokens == plain.decode(prompt, 20, None).tokens


def test_eesd_agrees_more_with_its_target_when_trained_on_what_it_wrote(tmp_path: Path) -> None:
    """A random target has nothing to do with the text: its own words alone teach the exit its choices."""
    pair = alone(small_target())
    for name, share in (("text", 0.0), ("own", 1.0)):
        source = replace(texts(tmp_path / "t", share), generated_tokens=6000, distill=DistillSettings(8, 24, 32, 1.0))
        settings = EesdSettings(2, lr=1e-2, text=source)
        train_eesd(pair, settings, replace(LOOP, steps=60), tmp_path / name, quiet, cache=tmp_path / "c")
    held = [json.loads((tmp_path / name / "log.jsonl").read_text().split("\n")[-2]) for name in ("text", "own")]
    assert held[1]["held_out"]["agreement"] > held[0]["held_out"]["agreement"] + 0.05


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
    trained = dict(job.exit.named_parameters())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained.values())
    assert {id(p) for group in job.parameter_groups() for p in group["params"]} == {id(p) for p in trained.values()}
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


@pytest.mark.parametrize("kind", TRAINED)
def test_bfloat16_trains_float32_masters_on_a_bfloat16_target(kind: str, tmp_path: Path) -> None:
    target = small_target(dtype=torch.bfloat16)
    document = train(kind, alone(target), tmp_path / "out", replace(LOOP, dtype="bfloat16"))
    name = "nats" if kind == "eesd" else "head_1"
    assert document["held_out"]["end"][name] < document["held_out"]["start"][name] - 0.5
    masters = load_file(tmp_path / "out" / "checkpoint.safetensors")
    state = [value.dtype for key, value in masters.items() if key.startswith("state.")]
    assert state and set(state) == {torch.float32} and target.dtype == torch.bfloat16
    assert {value.dtype for value in read_drafter(tmp_path / "out").tensors.values()} == {torch.bfloat16}


# The loop

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.support.small_targets import alone, small_target
from tests.realrun.training.test_training import LOOP, TRAINED, train
job = {job}
at, real = {at}, job.loss
def loss(self, batch, step):
    if step == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, batch, step)
job.loss = loss
train({kind!r}, alone(small_target()), Path({out!r}))
"""


@pytest.mark.parametrize("kind", TRAINED)
def test_a_killed_process_started_again_ends_with_the_same_curve_and_weights(kind: str, tmp_path: Path) -> None:
    name = {"eesd": "eesd.EarlyExitTraining", "medusa": "medusa.HeadsTraining"}[kind]
    job = f"__import__('realrun.training.{kind}', fromlist=['x']).{name.split('.')[1]}"
    out = tmp_path / "a" / "out"

    def start(at: int) -> int:
        code = KILLED.format(job=job, at=at, kind=kind, out=str(out))
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, env={**os.environ}).returncode

    assert start(7) == -9 and len((out / "log.jsonl").read_text().splitlines()) == 2  # steps 0 and 4
    assert start(17) == -9  # goes on, and is killed again
    assert not (out / "drafter.safetensors").exists()
    assert start(-1) == 0
    whole = train(kind, alone(small_target()), tmp_path / "b" / "out")
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert rows == whole["history"] and [row["step"] for row in rows] == [0, 4, 8, 12, 16, 20, 24]
    there, here = (load_file(path / "checkpoint.safetensors") for path in (out, tmp_path / "b" / "out"))
    assert there.keys() == here.keys() and all(torch.equal(there[key], here[key]) for key in here)
    assert any(key.startswith("optimizer.") for key in here)


class Noisy:
    """A job whose loss has noise, as dropout gives it."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.seen: list[torch.Tensor] = []

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": [self.weight], "lr": 0.1}]

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        self.seen.append(batch)
        factor = batch.double().mean() / VOCAB
        loss = ((self.weight * factor + torch.randn(4, dtype=torch.float64)) ** 2).mean()
        return loss, {"half": float(loss.detach()) / 2}

    def state(self) -> Tensors:
        return {"weight": self.weight}

    def load_state(self, tensors: Tensors) -> None:
        with torch.no_grad():
            self.weight.copy_(tensors["weight"])

    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
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
    assert all(row["loss"] == pytest.approx(2 * row["half"]) for row in whole[1:])
    assert run_loop(Noisy(), loop, TEXT, HELD, tmp_path / "parts", {}, quiet) == whole  # a finished one is read


def test_the_rows_are_means_over_their_steps(tmp_path: Path) -> None:
    coarse, fine = (
        run_loop(Noisy(), replace(LOOP, log_every=every), TEXT, HELD, tmp_path / str(every), {}, quiet)
        for every in (8, 1)
    )
    losses = [row["loss"] for row in fine[1:]]
    assert [row["loss"] for row in coarse[1:]] == pytest.approx([np.mean(losses[i : i + 8]) for i in (0, 8, 16)])


def test_pieces_of_a_batch_give_the_whole_batchs_step(tmp_path: Path) -> None:
    pair = alone(small_target())
    whole = train("eesd", pair, tmp_path / "a")
    pieces = train("eesd", pair, tmp_path / "b", replace(LOOP, micro_windows=3))  # 3 and 1 windows of 4
    for one, other in zip(whole["history"][1:], pieces["history"][1:], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    loop = replace(LOOP, steps=100, warmup_steps=10)
    factors = [loop.lr_factor(step) for step in range(100)]
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


# Refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": 0.02}, "lr=0.01, asked for 0.02"),
        ({"layers": 2}, "layers=1, asked for 2"),
        ({"loop": replace(LOOP, steps=25)}, "steps=24, asked for 25"),
        ({"loop": replace(LOOP, seed=1)}, "seed=0, asked for 1"),
        ({"pair": alone(small_target("qwen3"))}, "LlamaForCausalLM"),
    ],
)
def test_a_folder_of_another_training_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    pair = alone(small_target())
    train("eesd", pair, tmp_path / "out")
    with pytest.raises(InputError, match=r"give another --out$") as caught:
        train("eesd", **{"pair": pair, "out": tmp_path / "out", **changes})
    assert says in str(caught.value) and "\n" not in str(caught.value)
    train("eesd", pair, tmp_path / "out", replace(LOOP, checkpoint_s=5.0))  # has no influence on the result


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    train("eesd", alone(small_target()), tmp_path / "out")
    path = tmp_path / "out" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(InputError, match="damaged.*delete it"):
        train("eesd", alone(small_target()), tmp_path / "out")
    save_file({"state.x": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="damaged.*delete it"):
        train("eesd", alone(small_target()), tmp_path / "out")


class Diverging(Noisy):
    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        return self.weight.sum() * (float("nan") if step == 5 else 1.0), {}


def test_a_loss_that_is_no_number_and_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the loss is nan at step 6; give a lower learning rate"):
        run_loop(Diverging(), LOOP, TEXT, HELD, tmp_path / "a", {}, quiet)
    with pytest.raises(InputError, match="a text of 20 tokens gives no windows of 32"):
        run_loop(Noisy(), LOOP, TEXT, HELD[:20], tmp_path / "b", {}, quiet)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; give a folder"):
        run_loop(Noisy(), LOOP, TEXT, HELD, tmp_path / "file", {}, quiet)
    for changes in ({"steps": 0}, {"dtype": "float16"}, {"warmup_steps": -1}):
        with pytest.raises(InputError):
            replace(LOOP, **changes)
    with pytest.raises(InputError, match="too short for 3 heads"):
        train("medusa", alone(small_target()), tmp_path / "c", replace(LOOP, window_tokens=3))
