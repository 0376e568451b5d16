"""`--recipe paper`: the settings of trainings are those that the papers print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from realrun.cli.train import command_of
from realrun.train.common.loop import LoopSettings
from realrun.train.registry import TRAININGS
from specsim.io.errors import InputError
from studies.papers.tables import hyperparameters, read_table

PRINTED = {training.name: training.printed for training in TRAININGS if training.printed is not None}


def recipe(name: str, **given: Any) -> dict[str, Any]:
    return PRINTED[name](**{"joint": False, "backbone_loss": "text", **given})


def stated(paper: str, system: str, *names: str) -> list[float]:
    return [float(hyperparameters(paper)[system, name].replace("0.8^k", "0.8")) for name in names]


def test_eesd_as_printed() -> None:
    names = ("learning_rate", "train_batch_size", "train_seq_len_13b", "epochs_13b")
    ours = recipe("eesd")
    assert [ours[name] for name in ("lr", "batch", "window", "epochs")] == stated("eesd", "EESD", *names)
    row = read_table("eesd_9").row("Vicuna-13B", "EESD")  # the same, as the table has it
    assert [ours[name] for name in ("lr", "batch", "epochs")] == [
        row.number(name) for name in ("learning_rate", "batch_size", "epochs")
    ]
    assert len(ours) == 4


@pytest.mark.parametrize("name", ["edd", "vdm"])
def test_edd_as_printed(name: str) -> None:
    blocks = {"shortest_block": "train_block_length_min", "longest_block": "train_block_length_max"}
    names = {"lr": "learning_rate", "batch": "batch_size", "epochs": "epochs", **(blocks if name == "edd" else {})}
    assert list(recipe(name).values()) == stated("edd", "EDD", *names.values()) and list(recipe(name)) == list(names)


def test_space_as_printed() -> None:
    ours = recipe("space")
    assert [ours["masks"], ours["p_ar"]] == stated("space", "SPACE", "mask_tokens", "ar_loss_probability")
    names = ("learning_rate", "epochs")
    assert [ours["lr"], ours["epochs"]] == stated("space", "SAR-SFT", *names)
    assert list(ours["betas"]) == stated("space", "SAR-SFT", "adam_beta1", "adam_beta2")
    each, gpus = stated("space", "SAR-SFT", "per_device_batch_size", "gpus_below_14b")
    assert ours["batch"] == each * gpus
    assert ours["window"] == sum(stated("space", "SAR-SFT", "max_source_tokens", "max_target_tokens"))
    assert ours["full"] and len(ours) == 8


def test_medusa_as_printed() -> None:
    plain, text, own = (
        recipe("medusa", joint=joint, backbone_loss=loss)
        for joint, loss in ((False, "distill"), (True, "text"), (True, "distill"))
    )
    for ours in (plain, text, own):
        assert [ours["heads"], ours["decay"]] == stated("medusa", "MEDUSA", "heads_trained", "head_loss_weight")
    vicuna = {
        "lr": "head_learning_rate",
        "warmup": "warmup_steps",
        "batch": "global_batch_size",
        "window": "seq_len",
        "epochs": "epochs",
    }
    for ours in (plain, text):
        assert [ours[name] for name in vicuna] == stated("medusa", "MEDUSA (Vicuna 7B/13B)", *vicuna.values())
    assert [text["backbone_lr"]] == stated("medusa", "MEDUSA (Vicuna 7B/13B)", "backbone_learning_rate")
    assert [text["lambda_0"]] == stated("medusa", "MEDUSA-2 (Vicuna 7B/13B)", "heads_loss_weight")
    names = {
        "lambda_0": "heads_loss_weight",
        "backbone_lr": "backbone_lora_learning_rate",
        "warmup": "warmup_steps",
        "batch": "batch_size",
        "window": "seq_len",
    }
    assert [own[name] for name in names] == stated("medusa", "MEDUSA-2 (self-distillation)", *names.values())
    assert [text["rank"], own["rank"]] == stated("medusa", "MEDUSA-2", "lora_rank") * 2
    assert [len(ours) for ours in (plain, text, own)] == [7, 10, 9]


@pytest.mark.parametrize("typed", [[], ["--lr", "0.5", "--tokens", "3"]])
def test_the_recipe_fills_in_what_is_not_given(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    (training,) = (training for training in TRAININGS if training.name == "space")
    monkeypatch.setattr("realrun.cli.train.load_alone", lambda *_: type("Pair", (), {"core": None}))

    def start(self: Any, run: Any, pair: Any, settings: Any, *_: Any) -> Any:
        seen.extend([self, settings])
        raise InputError("enough")

    monkeypatch.setattr(training.shared, "start", start)
    app = typer.Typer()
    app.command()(command_of(training))
    CliRunner().invoke(app, ["--out", str(tmp_path / "o"), "--recipe", "paper", *typed])
    shared, settings = seen
    assert (shared.betas, shared.batch, shared.window, settings.full) == ((0.9, 0.999), 32, 4096, True)
    assert (settings.lr, shared.epochs, shared.tokens) == ((0.5, None, 3.0) if typed else (5e-5, 2.0, 2.0))


def test_betas_out_of_range_are_refused() -> None:
    for betas in ((0.9,), (0.9, 1.0)):
        with pytest.raises(InputError, match="give two numbers from 0 to below 1"):
            LoopSettings(3, betas=betas)
