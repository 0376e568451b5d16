"""Measured costs of batches: between what was measured, beyond it, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.batch_profile import BATCH_PROFILE_KIND, BATCH_PROFILE_VERSION, BatchProfileCost
from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost
from tests.support.checks import refusal
from tests.support.commands import call, json_of

BATCHES, CONTEXTS, TOKENS = np.array([1, 2, 8]), np.array([100, 300]), np.array([1, 2, 5])


def verify_s(batch: Any, context: Any, tokens: Any) -> Any:
    """Linear in each, so that interpolation is exact."""
    return 0.01 + 1e-3 * batch * tokens + 1e-6 * batch * context


def draft_s(batch: Any, context: Any, place: Any) -> Any:
    return 0.002 + 1e-4 * batch - 5e-4 * place + 1e-7 * context


def document(**changes: Any) -> dict[str, Any]:
    def table(cost: Any, last: Any) -> Any:
        return cost(*np.meshgrid(BATCHES, CONTEXTS, last, indexing="ij")).tolist()

    return {
        "kind": BATCH_PROFILE_KIND, "version": BATCH_PROFILE_VERSION, "batches": BATCHES.tolist(),
        "contexts": CONTEXTS.tolist(), "tokens": TOKENS.tolist(), "verify_s": table(verify_s, TOKENS),
        "draft_s": table(draft_s, np.arange(3)), "catch_up_s": [[1e-4, 1e-4], [2e-4, 2e-4], [8e-4, 8e-4]],
        "step_s": 1e-3, "round_s": 5e-4, **changes,
    }  # fmt: skip


def read(folder: Path, batch: int | None = None, **changes: Any) -> Any:
    path = folder / "batches.json"
    path.write_text(json.dumps(document(**changes)))
    return read_cost(path, batch=batch)


def test_costs_are_linear_between_what_was_measured(tmp_path: Path) -> None:
    """A batch of 4 with 150 cached tokens each on average, and 3 of 5 tokens a sequence: 12 new ones."""
    cost = read(tmp_path)
    assert isinstance(cost, BatchProfileCost)
    tokens = BatchTokens.of(np.array([5, 5, 1, 1]), np.array([100, 200, 100, 200]))
    assert cost.batch_verify(tokens) == pytest.approx(verify_s(4, 150, 3), rel=1e-12)
    step = BatchTokens.of(np.array([1, 1]), np.array([101, 301]))
    assert cost.batch_draft(1, step) == pytest.approx(draft_s(2, 200, 1), rel=1e-12)
    behind = BatchTokens.of(np.array([2, 1]), np.array([100, 300]))
    assert cost.batch_draft(0, behind) == pytest.approx(draft_s(2, 200, 0) + 0.5 * 2e-4, rel=1e-12)


def test_many_rounds_are_priced_at_once(tmp_path: Path) -> None:
    cost = read(tmp_path)
    sequences, contexts = np.array([1.0, 3.0, 8.0]), np.array([100.0, 222.0, 300.0])
    tokens = BatchTokens.alike(sequences, np.array([1, 2, 4]), contexts)
    assert cost.batch_verify(tokens) == pytest.approx(verify_s(sequences, contexts, np.array([1, 2, 4])), rel=1e-12)
    places = np.arange(5)  # the last measured place stands for those behind it
    drafts = cost.batch_draft(places, BatchTokens.alike(2, 1, 200 + places))
    assert drafts == pytest.approx(draft_s(2, 200, np.minimum(places, 2)), rel=1e-12)


def test_sequences_in_lockstep_are_a_cost_model_like_any_other(tmp_path: Path) -> None:
    cost = read(tmp_path, batch=4)
    assert cost.verify(3, [100, 250]) == pytest.approx(verify_s(4, np.array([100, 250]), 3), rel=1e-12)
    assert cost.draft(3, 300) == pytest.approx(sum(draft_s(4, 300, place) for place in range(3)), rel=1e-12)
    assert cost.catch_up(200) == pytest.approx(4e-4, rel=1e-12)
    assert cost.autoregressive_step(200) == pytest.approx(verify_s(4, 200, 1) + 1e-3, rel=1e-12)
    assert cost.round_overhead() == pytest.approx(1.5e-3)
    shown = json_of(call("specsim", "cost", "show", tmp_path / "batches.json", "--json"))
    assert [list(row["verify_s"]) for row in shown["rows"]] == [["1", "2", "4"]] * 2
    shown = json_of(call("specsim", "cost", "show", tmp_path / "batches.json", "--tokens", "1,5", "--json"))
    assert [row["context"] for row in shown["rows"]] == [100, 300]
    assert shown["rows"][0]["verify_s"]["5"] == pytest.approx(verify_s(1, 100, 5))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (BatchTokens.alike(9, 1, 200), "covers batches 1 to 8, asked for 9 to 9"),
        (BatchTokens.alike(4, 6, 200), "covers tokens 1 to 5"),
        (BatchTokens.alike(4, 1, 301), "covers contexts 100 to 300"),
    ],
)
def test_beyond_what_was_measured_there_is_no_price(tmp_path: Path, tokens: BatchTokens, message: str) -> None:
    refusal(lambda: read(tmp_path).batch_verify(tokens), match=message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 7}, "version 7"),
        ({"batches": [2, 3, 8]}, "do not begin with 1"),
        ({"contexts": [300, 100]}, "contexts are not an increasing list"),
        ({"tokens": [1, 2]}, "verify_s does not fit"),
        ({"draft_s": [[[0.1], [0.1]], [[0.1], [0.1]], [[0.1]]]}, "rows of several lengths"),
        ({"catch_up_s": [[0.0, 0.0]]}, "catch_up_s does not fit"),
        ({"draft_s": [[[]] * 2] * 3}, "draft_s does not fit"),
        ({"round_s": -1.0}, "a time is negative"),
        ({"verify_s": [[[0.0] * 3] * 2] * 3}, "verify_s: a time is not positive"),
        ({"step_s": None}, "malformed"),
        # A slow second draft step is no part of a round of a single draft, which here takes half of a decoding step.
        (
            {"verify_s": [[[0.02, 0.01, 0.03]] * 2] * 3, "draft_s": [[[1e-4, 0.05, 1e-4]] * 2] * 3},
            "a round at K = 1 takes 0.55 of a step",
        ),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refusal(lambda: read(tmp_path, **changes), message)
