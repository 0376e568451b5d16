"""Training the acceptance predictor: samples, resuming, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from realrun.decode.acceptance_predictor import load_predictor, pending_token_states
from realrun.measure.record import RecordSettings, record
from realrun.pairs.library_text import SourceFile
from realrun.pairs.prompts import lab_prompts
from realrun.train.predictor import PredictorSettings, Tensors, Trainer, compare, joined, quality, train_predictor
from tests.realrun.drafters.test_predictor import CPU
from tests.support.checks import refusal
from tests.support.small_targets import quiet
from tests.support.tiny import tiny_pair, tiny_prompts, tiny_tokenizer


def test_producing_states_of_a_one_token_prompt_begin_with_zeros() -> None:
    states = pending_token_states(tiny_pair().target, [7], [4, 5, 6])
    assert states.shape == (3, 32) and not states[0].any() and states[1].any()
    longer = pending_token_states(tiny_pair().target, [3, 7], [4, 5, 6])
    assert longer.shape == (3, 32) and longer[0].any()


def learnable(sequences: int = 30, length: int = 60) -> list[Tensors]:
    """A token is right with a chance that both models' states at its own position tell of."""
    rng, samples = np.random.default_rng(1), []
    for _ in range(sequences):
        target, draft = rng.standard_normal((length, 12)), rng.standard_normal((length, 8))
        logit = 2.0 * draft[:, 0] - draft[:, 3] + 1.5 * target[:, 2] + 1
        match = rng.random(length) < 1 / (1 + np.exp(-logit))
        judged = [
            (t, i)
            for t in range(length)
            for i in range(1, min(SETTINGS.max_draft_tokens, length - t) + 1)
            if match[t : t + i - 1].all()
        ]
        rounds, depths = torch.tensor(judged).T
        samples.append(
            {
                "target_hidden": torch.tensor(target).half(),
                "draft_hidden": torch.tensor(draft).half()[rounds + depths - 1],
                "confidence": torch.full((len(judged),), 0.5) + 0.01 * torch.rand(len(judged)),
                "round": rounds,
                "depth": depths,
                "label": torch.tensor(match)[rounds + depths - 1],
            }
        )
    return samples


SETTINGS = PredictorSettings(max_draft_tokens=4, epochs=12, patience=3, batch=64, lr=3e-3)


def test_training_learns_what_there_is_to_learn(tmp_path: Path) -> None:
    samples = joined(learnable())
    trainer = Trainer(samples, SETTINGS, tmp_path / "c.safetensors", CPU)
    before = trainer.loss("validation")
    trainer.run(quiet)
    result = compare(samples, trainer.folded({}))
    assert result["predictor"]["log_loss_nats"] < result["base rate"]["log_loss_nats"] - 0.08
    assert result["predictor"]["log_loss_nats"] < result["confidence"]["log_loss_nats"] - 0.08
    assert result["predictor"]["auc"] > 0.75 and 0.4 < result["confidence"]["auc"] < 0.6
    assert min(row["validation_nats"] for row in trainer.history) < before
    parts = [samples.part(name) for name in ("train", "validation", "held out")]
    assert all(len(part) > 0 for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(samples.label)))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("interrupt_at", [5])
def test_a_resumed_training_has_the_same_loss_curve(tmp_path: Path, interrupt_at: int) -> None:
    samples = joined(learnable(12, 40))
    whole = Trainer(samples, SETTINGS, tmp_path / "whole.safetensors", CPU)
    whole.run(quiet)
    assert len(whole.history) > interrupt_at

    def kill(what: str, done: int, total: int) -> None:
        if done == interrupt_at:
            raise Killed

    with pytest.raises(Killed):
        Trainer(samples, SETTINGS, tmp_path / "parts.safetensors", CPU).run(kill)
    resumed = Trainer(samples, SETTINGS, tmp_path / "parts.safetensors", CPU)
    assert len(resumed.history) == interrupt_at
    resumed.run(quiet)
    assert resumed.history == whole.history
    assert resumed.folded({}).digest == whole.folded({}).digest


SMALL = PredictorSettings(max_new_tokens=10, max_draft_tokens=4, temperatures=(0.0, 0.8), epochs=2, batch=64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("predictor") / "out"
    return out, train_predictor(tiny_pair(), tiny_prompts(20), SMALL, out, quiet)


@pytest.mark.parametrize(("what", "done"), [("decode", 3), ("decode", 16), ("decode", 18), ("train", 1)])
def test_killed_while_collecting_or_training_it_goes_on(
    what: str, done: int, trained: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    calls: list[int] = []

    def kill(now: str, number: int, total: int) -> None:
        if (now, number) == (what, done):
            raise Killed

    def count(now: str, number: int, total: int) -> None:
        calls.append(number)

    with pytest.raises(Killed):
        train_predictor(tiny_pair(), tiny_prompts(20), SMALL, tmp_path / "out", kill)
    document = train_predictor(tiny_pair(), tiny_prompts(20), SMALL, tmp_path / "out", count)
    expected = trained[1]
    assert document["history"] == expected["history"] and document["held_out"] == expected["held_out"]
    assert load_predictor(tmp_path / "out").digest == load_predictor(trained[0]).digest
    if (what, done) in (("decode", 18), ("train", 1)):
        assert 1 not in calls[: calls.index(16)]  # the first file of states was not made again


def test_what_was_trained_can_be_used(trained: tuple[Path, dict[str, object]]) -> None:
    out, document = trained
    predictor = load_predictor(out)
    pair = tiny_pair()
    predictor.check(pair.target.config, pair.draft_config, pair.fingerprint)
    assert predictor.target_weight.shape == (4, 32)  # as many matrices as depths were seen
    assert predictor.facts["sequences"] == 20 and predictor.facts["held_out"] == document["held_out"]
    trace = record(replace(pair, predictor=predictor), tiny_prompts(2), RecordSettings(6, 10))
    assert trace.score is not None and np.isfinite(trace.score).all()


def test_quality_of_known_scores() -> None:
    figures = quality([0.8] * 10 + [0.2] * 5, [1] * 8 + [0] * 2 + [1] + [0] * 4)
    assert figures["ece"] == pytest.approx(0, abs=1e-12)
    assert figures["auc"] == pytest.approx((8 * 4 + 0.5 * (8 * 2 + 1 * 4)) / (9 * 6))
    assert figures["log_loss_nats"] == pytest.approx(-(0.8 * np.log(0.8) + 0.2 * np.log(0.2)))


def test_too_few_prompts_and_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    refusal(lambda: train_predictor(tiny_pair(), tiny_prompts(9), SMALL, tmp_path / "x", quiet), "too few")
    for bad in ({"max_draft_tokens": 0}, {"temperatures": ()}, {"epochs": 0}):
        refusal(lambda bad=bad: PredictorSettings(**bad), "redictor")
    refusal(lambda: PredictorSettings(temperatures=(-1.0,)), "temperature=-1")


def test_the_lab_learns_from_training_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def files(split: str) -> list[SourceFile]:
        asked.append(split)
        return [SourceFile(f"{split}_{i}.py", f"{split} number {i}\n" * 40) for i in range(6)]

    monkeypatch.setattr("realrun.pairs.prompts.library_files", files)
    for split, word in (("train", "t r a i n"), ("held_out", "h e l d")):
        prompts = lab_prompts(tiny_tokenizer(), 4, 40, split=split)  # type: ignore[arg-type]
        assert all(word in tiny_tokenizer().decode(prompt.tokens) for prompt in prompts)
    assert asked == ["train", "held_out"]
