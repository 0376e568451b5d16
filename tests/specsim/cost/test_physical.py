"""Profiles that cannot have been measured are refused, noise is not, and what is left of it is told; draws within the
stated errors of a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specsim
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.files import read_cost
from specsim.cost.profile import Profile
from specsim.trace.files import write_trace
from tests.specsim.cost.test_batch_profile import document as batch_document
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call

ROOT = Path(__file__).parents[3]
RECORDED = [*sorted((ROOT / "studies").glob("*/recorded/**/profile.json")),
            *sorted((ROOT / "specsim" / "data" / "example").glob("lab-deep-*.json"))]  # fmt: skip
STEP_MS = 10.0


def profile_of(folder: Path, verify_ms: list[Any], draft_ms: float = 0.5, **changes: Any) -> Path:
    """Two contexts; a pass takes what a number says at both, or a pair by context."""
    rows = [value if isinstance(value, list) else [value, value] for value in verify_ms]
    seconds = {
        "draft_step": [[draft_ms / 1e3] * 2] * (len(rows) - 1),
        "catch_up": [0.0, 0.0],
        "verify": [[value / 1e3 for value in row] for row in rows],
        "autoregressive": [STEP_MS / 1e3] * 2,
        "policy_step": 0.0,
        "round_overhead": 0.0,
    }
    path = folder / "profile.json"
    about = {"kind": "specsim-profile", "version": 2, "contexts": [2, 4096]}
    path.write_text(json.dumps({**about, "mean_s": {**seconds, **changes}}))
    return path


@pytest.mark.parametrize(
    ("verify_ms", "message"),
    [
        ([0.0, 0.0, 0.0, 0.0], "a round at K = 1 takes 0.05 of a step without speculation, which it contains"),
        ([10.0, 5.0, 2.5, 1.3], "a round at K = 3 takes 0.28 of a step"),
        ([10.0, 10.0, 10.0, 7.9], "a round at K = 3 takes 0.94 of a step"),
    ],
)
def test_a_round_is_not_faster_than_the_step_that_it_contains(
    tmp_path: Path, verify_ms: list[float], message: str
) -> None:
    path = profile_of(tmp_path, verify_ms)
    trace = generate(IID(0.8), sequences=2, output_tokens=30, depth=3)
    write_trace(trace, tmp_path / "trace")
    shown = call("specsim", "replay", tmp_path / "trace", "--policy", "fixed_k", "--set", "k=3", "--cost", path)
    assert_refused(shown, message, str(path), "profile again on an idle machine")


def test_trees_and_batches_are_looked_at_too(tmp_path: Path) -> None:
    tree = {"sizes": [1, 4], "wider": [[0.0, 0.0]] * 2, "verify": [[0.01, 0.01], [0.004, 0.004]]}
    path = profile_of(tmp_path, [10.0, 11.0], tree={**tree, "policy_step": 0.0, "round_overhead": 0.0})
    refusal(lambda: read_cost(path), "a round with a tree takes 0.45 of a step")
    document = batch_document()
    read = tmp_path / "batches.json"
    read.write_text(json.dumps(document))
    read_cost(read)
    document["verify_s"] = [
        [[row[0], *(value / 9 for value in row[1:])] for row in rows] for rows in document["verify_s"]
    ]
    read.write_text(json.dumps(document))
    refusal(lambda: read_cost(read), match=r"a round at K = \d+ takes 0\.\d+ of")
    read.write_text(json.dumps({**document, "noise_floor": 10.0}))  # however noisy, no round takes half of a step
    refusal(lambda: read_cost(read), match=r"a round at K = \d+ takes 0\.\d+ of")


def test_noise_is_taken_without_a_word(tmp_path: Path) -> None:
    """A lookup drafter proposes for nothing, and a pass over 2 tokens was measured 3 % faster than over 1."""
    cost = read_cost(profile_of(tmp_path, [10.0, 9.7, 9.8], draft_ms=0.0))
    assert cost.notes(2, (2, 4096)) == []


def test_a_disturbed_context_and_passes_that_fall_are_told(tmp_path: Path) -> None:
    trace = generate(IID(0.8), sequences=2, output_tokens=30, depth=2)
    prediction = specsim.predict(
        trace, read_cost(profile_of(tmp_path, [10.0, [12.0, 14.0], [7.0, 14.0]])), "fixed_k", k=2
    )
    (note,) = prediction.cost_notes
    assert "at one context a round takes 0.80 of a step without speculation, which it contains" in note
    falling = read_cost(profile_of(tmp_path, [10.0, 16.0, 12.0])).notes(2, (2, 4096))
    assert falling == ["verifying more tokens takes up to 25 % less: the profile was disturbed"]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_was_measured_here_is_taken(path: Path) -> None:
    document = json.loads(path.read_text())
    seconds = (document.get("mean_s") or document["median_s"])["autoregressive"]
    assert read_cost(path).autoregressive_step(document["contexts"]) == pytest.approx(seconds, rel=1e-12)


SECONDS: dict[str, Any] = {
    "draft_step": [[0.001, 0.002]],
    "catch_up": [0.0, 0.0],
    "verify": [[0.010, 0.011], [0.012, 0.013]],
    "autoregressive": [0.010, 0.011],
    "policy_step": 0.0,
    "round_overhead": 0.0,
}
WIDTHS = {"draft_step": [[0.04, None]], "verify": [[0.02, 0.08], [0.0, 7.0]], "autoregressive": [0.02, 0.02]}


@pytest.mark.parametrize("used", ["mean_s", "median_s"])
def test_draws_spread_as_the_intervals_say(used: str) -> None:
    """95 % of them lie within the half-width. Costs are read from medians where there are no means."""
    tables = {"median_s": SECONDS, "mean_s": None, used: SECONDS}
    document = {"contexts": [10, 20], "relative_half_width": WIDTHS, **tables}
    profile = Profile.from_json(document, "given")
    exact, drawn = profile.cost, profile.draws(3000, seed=0)
    for table in ("draft_step", "verify", "autoregressive"):
        true_s = getattr(exact, f"{table}_s")
        moved = np.abs(np.log([getattr(cost, f"{table}_s") / true_s for cost in drawn]))
        widths = np.array(WIDTHS[table], dtype=float)
        for index in np.ndindex(true_s.shape):
            share = (moved[(slice(None), *index)] <= min(widths[index], 1.0)).mean()
            if np.isnan(widths[index]) or widths[index] == 0:  # unknown errors are not drawn
                assert not moved[(slice(None), *index)].any()
            else:
                assert 0.94 < share < 0.96
