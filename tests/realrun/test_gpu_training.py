"""Trainings at once: their time, what they need of each other, and how a second start goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from realrun.gpu.training import RECIPES, RESULT, needs, spans, train_all
from realrun.pairs.pair import load_pair
from realrun.train.common.distill import read_text, save_text
from specsim.io.errors import InputError
from tests.support.trainings import word_text

SMALL = ("--batch", "2", "--window", "32")
RECIPES_HERE: Mapping[str, tuple[str, ...]] = {
    "EESD": ("eesd", *SMALL, "--tokens", "0.002", "--draft-vocabulary", "64"),
    "EAGLE": ("eagle", *SMALL, "--tokens", "0.02"),
    "predictor": ("predictor", "--drafter", "{EESD}", "--num-prompts", "10", "--max-new-tokens", "4"),
    "broken": ("eesd", "--layers", "99"),
    "after it": ("predictor", "--drafter", "{broken}"),
}


@pytest.mark.parametrize("at_once", [1, 3, 9, 14])
def test_no_more_run_at_once_than_may_and_what_is_needed_is_done_before(at_once: int) -> None:
    plan = spans(RECIPES, at_once)
    for span in plan.values():
        middle = (span.begin + min(span.end, 0.7)) / 2 if span.begin < 0.7 else 0.9
        assert 0 <= span.begin < span.end <= 1
        assert sum(other.begin < middle < other.end for other in plan.values()) <= max(at_once, 3)
    for name, recipe in RECIPES.items():
        assert all(plan[need].end <= plan[name].begin for need in needs(recipe))
    if at_once == 14:
        assert plan["EAGLE"] == (0, 1) and plan["EESD"] == (0, 0.7)


def test_a_text_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    text, path = word_text(), tmp_path / "text.npz"
    save_text(text, path)
    again = read_text(path)
    assert again.facts == text.facts and again.held_out.tolist() == text.held_out.tolist()
    assert [(a.tolist(), share) for a, share in again.sources] == [(a.tolist(), share) for a, share in text.sources]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"text\.npz is no training text"):
        read_text(path)


@pytest.mark.slow  # processes that load torch
def test_a_second_start_repeats_nothing_and_goes_on_with_what_was_cut_off(tmp_path: Path) -> None:
    save_text(word_text(), tmp_path / "text.npz")
    out = tmp_path / "out"

    def start(minutes: float, stop: Any = lambda *a: None) -> dict[str, Any]:
        machine = {"device": "cpu", "dtype": "float32", "at_once": 2, "target": "lab"}
        text = tmp_path / "text.npz"
        return train_all(RECIPES_HERE, text=text, out=out, minutes=minutes, progress=stop, **machine)

    def no_time(stage: str, done: int, total: int) -> None:
        if (out / "EESD" / RESULT).exists():
            raise TimeoutError

    with pytest.raises(TimeoutError):
        start(2, no_time)
    first = json.loads((out / "EESD" / RESULT).read_text())
    results = start(4)
    assert results["EESD"] == first and first["tokens"] == first["curve"][-1][0] == 31 * 64
    assert results["EAGLE"]["tokens"] == 312 * 64
    assert "early exit after 99" in results["broken"]["error"] and "broken failed" in results["after it"]["error"]
    assert results["predictor"]["samples"] > 0
    pair = load_pair("lab", drafter=str(out / "EESD"), predictor=str(out / "predictor"))
    assert pair.predictor is not None
