"""A trace tells how its drafter was trained: every setting that decides a training changes what it says."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import LAB_DRAFTERS, has_lab_drafter, load_drafter, training_recipe
from realrun.pairs.pair import Pair, load_pair
from realrun.train.common.loop import LoopSettings
from tests.support.tiny import tiny_prompts
from tests.support.trainings import CASES, LOOP, word_text

SHORT = replace(LOOP, steps=2)
OTHER_LOOP: dict[str, Any] = {
    "steps": 3, "batch_windows": 2, "window_tokens": 20, "warmup_steps": 2, "seed": 1, "dtype": "float32",
    "micro_windows": 2, "log_every": 1,
}  # fmt: skip


def recipe_of(case: str, folder: Path, loop: LoopSettings = SHORT, **options: Any) -> dict[str, Any]:
    """What a file says after a training that ran."""
    CASES[case].run(folder, loop=loop, **options)
    return training_recipe(folder)


def test_every_setting_that_decides_a_training_is_in_its_recipe(tmp_path: Path) -> None:
    whole = {field.name for field in dataclasses.fields(LoopSettings)} - {"checkpoint_s", "device"}
    assert set(OTHER_LOOP) == whole  # the device is the only one here, the time between checkpoints decides nothing
    recipes = [recipe_of("eesd", tmp_path / "as it is")]
    recipes += [recipe_of("eesd", tmp_path / n, replace(SHORT, **{n: v})) for n, v in OTHER_LOOP.items()]
    recipes += [
        recipe_of("eesd", tmp_path / n, **{n: v}) for n, v in {"lr": 0.02, "layers": 2, "exit_layers": 0}.items()
    ]
    recipes += [recipe_of("eesd", tmp_path / "other text", text=word_text(3))]
    assert len({json.dumps(recipe, sort_keys=True) for recipe in recipes}) == len(recipes)
    assert all(recipe["not_recorded"] == [] for recipe in recipes)
    assert recipe_of("eesd", tmp_path / "saved less often", replace(SHORT, checkpoint_s=60.0)) == recipes[0]


def test_the_optimizer_is_the_one_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[torch.optim.Optimizer] = []
    really, clipped = torch.optim.AdamW, list[float]()
    monkeypatch.setattr(torch.optim, "AdamW", lambda *given, **named: ran.append(really(*given, **named)) or ran[-1])
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda parameters, norm: clipped.append(norm) or clip(parameters, norm)
    )
    recipe = recipe_of("medusa direct", tmp_path)
    (optimizer,) = ran
    optimizer_facts, group = recipe["optimizer"], optimizer.param_groups[0]
    assert optimizer_facts["name"] == type(optimizer).__name__ and set(clipped) == {
        optimizer_facts["max_gradient_norm"]
    }
    assert (
        tuple(optimizer_facts["betas"]) == group["betas"] and optimizer_facts["weight_decay"] == group["weight_decay"]
    )
    assert recipe["learning_rates"] == [0.01, 0.04] and recipe["settings"]["schedule"] == "constant"


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.on_text])
def test_a_trace_tells_the_recipe_of_its_drafter(case: str, tmp_path: Path) -> None:
    pair = CASES[case].target()
    recipe = recipe_of(case, tmp_path, pair=pair)
    target, drafter = load_drafter(tmp_path, pair.target)
    trained = Pair(target, drafter, pair.tokenizer, "tiny", case, (), training=recipe)
    trace = record(trained, tiny_prompts(2), RecordSettings(3, 6))
    assert trace.meta["drafter_facts"] == {**drafter.facts, "training": recipe}
    assert recipe["objective"] and recipe["text_digests"] and recipe["not_recorded"] == []


def test_two_stages_tell_both(tmp_path: Path) -> None:
    both, direct = (recipe_of(f"medusa {name}", tmp_path / name) for name in ("two stages", "direct"))
    first = both["first_stage"]
    assert first["method"] == "medusa-1" and first["learning_rates"] == [0.01] and first["heads"] == 3
    assert first == training_recipe(tmp_path / "two stages" / "heads")
    assert direct["first_stage"] is None and not (tmp_path / "direct" / "heads").exists()


@pytest.mark.parametrize("name", [*filter(has_lab_drafter, LAB_DRAFTERS)])
def test_older_weights_say_what_is_not_known_of_them(name: str) -> None:
    pair = load_pair("lab", drafter=name)
    assert pair.training is not None and pair.drafter_facts["training"]["not_recorded"]
    assert "training" not in pair.drafter.facts  # else older predictors would be of another pair
