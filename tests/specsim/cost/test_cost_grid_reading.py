"""Grids of measured passes: exact where measured, refused where not, and enough for a prediction."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.cost.files import read_cost
from specsim.cost.grid import GridCost, GridPairCost, grid_from_json, read_grid, read_grid_pair
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.table import cost_table
from tests.support.checks import refusal
from tests.support.reference import small_trace

BATCHES, CONTEXTS, TOKENS = [1, 4], [0, 64, 256], [1, 2, 4, 16]


def times(scale: float = 1.0) -> list[list[list[float | None]]]:
    """10 ms and more: 1 ms a sequence beyond the first, 1 ms per 64 tokens of context, 0.1 ms per new token."""
    return [[[scale * 1e-3 * (9 + b + c / 64 + 0.1 * n) for n in TOKENS] for c in CONTEXTS] for b in BATCHES]


def document(model: str = "target", scale: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "specsim-cost-grid",
        "version": 1,
        "model": model,
        "batches": BATCHES,
        "contexts": CONTEXTS,
        "tokens": TOKENS,
        "median_s": times(scale),
        "missing": [],
        "provenance": {"device": "a device", "dtype": "bfloat16"},
        **changes,
    }


def grid(**changes: Any) -> GridCost:
    return grid_from_json(document(**changes), "here")


def with_hole(b: int, c: int, n: int, reason: str = "memory: too small") -> dict[str, Any]:
    median = times()
    median[b][c][n] = None
    missing = [{"batch": BATCHES[b], "context": CONTEXTS[c], "tokens": [TOKENS[n]], "reason": reason}]
    return document(median_s=median, missing=missing)


def test_a_grid_is_exact_where_it_was_measured() -> None:
    cost_grid = grid()
    for b, batch in enumerate(BATCHES):
        for n, tokens in enumerate(TOKENS):
            np.testing.assert_array_equal(cost_grid.pass_s(batch, tokens, CONTEXTS), np.array(times())[b, :, n])


@given(st.sampled_from(BATCHES), st.integers(1, 16), st.lists(st.floats(0, 256), min_size=1))
def test_a_linear_time_is_met_everywhere(batch: int, n: int, context: list[float]) -> None:
    expected = 1e-3 * (9 + batch + np.array(context) / 64 + 0.1 * n)
    np.testing.assert_allclose(grid().pass_s(batch, n, context), expected, rtol=1e-12)


@given(st.lists(st.floats(1e-6, 1.0), min_size=24, max_size=24), st.integers(0, 256))
def test_time_never_falls_with_more_tokens(values: list[float], context: int) -> None:
    noisy = grid(median_s=np.reshape(values, (2, 3, 4)).tolist())
    spent = [float(noisy.pass_s(4, n, context)) for n in range(1, 17)]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(spent))
    column = np.reshape(values, (2, 3, 4))[1, 1]
    assert float(noisy.pass_s(4, 16, 64)) == column.max()  # the running maximum, not the last value


@pytest.mark.parametrize(
    ("batch", "n", "context", "message"),
    [
        (2, 1, 0, "batch sizes 1, 4, asked for 2"),
        (1, 17, 0, "covers passes over 1 to 16 new tokens, asked for 17"),
        (1, 0, 0, "asked for 0"),
        (1, 1, [0, 257], "covers contexts of 0 to 256 tokens, asked for 0 to 257"),
        (1, 1, -1, "asked for -1"),
        (1, 1, np.nan, "asked for nan"),
    ],
)
def test_outside_the_grid_is_an_error(batch: int, n: int, context: Any, message: str) -> None:
    refusal(lambda: grid().pass_s(batch, n, context), match=f"cost grid of target .*{message}")


def test_a_hole_in_the_grid_is_an_error_with_its_reason_and_only_where_it_is_needed() -> None:
    cost_grid = grid_from_json(with_hole(1, 2, 3), "here")
    for batch, n, context in ((1, 16, 256), (4, 16, 64), (4, 4, 256), (4, 4, 200), (4, 3, [0, 256])):
        np.testing.assert_array_equal(cost_grid.pass_s(batch, n, context), grid().pass_s(batch, n, context))
    for n, context in ((16, 256), (16, 65), (5, 256), (9, [0, 100])):
        with pytest.raises(InputError, match=r"no time for batch 4, context 256, 16 tokens \(memory: too small\)"):
            cost_grid.pass_s(4, n, context)


def test_a_hole_below_does_not_reach_the_sizes_above() -> None:
    cost_grid = grid_from_json(with_hole(0, 1, 1), "here")
    assert cost_grid.pass_s(1, 4, 64) == grid().pass_s(1, 4, 64)
    refusal(lambda: cost_grid.pass_s(1, 3, 64), "64, 2 tokens")


def test_no_context_asked_is_no_error() -> None:
    assert grid().pass_s(1, 1, []).shape == (0,)


def write(tmp_path: Path, **grids: dict[str, Any]) -> list[Path]:
    paths = []
    for name, content in grids.items():
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


def test_two_files_drive_a_prediction(tmp_path: Path) -> None:
    paths = write(tmp_path, target=document(), draft=document("draft", scale=0.1))
    cost = read_grid_pair(*paths)
    policy = AdaEDL(lambda0=0.1, max_draft_tokens=6)
    prediction = predict_policy(PricedTrace(small_trace(), cost), policy)
    assert prediction.speedup.low < prediction.speedup.estimate < prediction.speedup.high
    table = cost_table(small_trace(), cost)
    context = np.array([8.0, 40.0])
    np.testing.assert_allclose(table.verify_s[3, [0, 2]], cost.verify(3, context))
    np.testing.assert_allclose(table.draft_s[1, [0, 2]], 0.1e-3 * (10 + context / 64 + 0.1))
    np.testing.assert_allclose(table.catch_up_s[[0, 2]], 0.1e-3 * 0.1)
    np.testing.assert_allclose(table.autoregressive_s[[0, 2]], 1e-3 * (10 + context / 64 + 0.1))


def test_a_flat_grid_predicts_what_constants_do(tmp_path: Path) -> None:
    flat = np.full((2, 3, 4), 1e-2)
    paths = write(tmp_path, target=document(median_s=flat.tolist()), draft=document(median_s=(flat / 8).tolist()))
    prediction = predict_policy(PricedTrace(small_trace(), read_grid_pair(*paths, batch=4)), FixedK(k=3))
    constant = predict_policy(PricedTrace(small_trace(), ConstantCost(1.25e-3, 1e-2)), FixedK(k=3))
    assert prediction.speedup.estimate == pytest.approx(constant.speedup.estimate, rel=1e-12)


def test_grids_that_do_not_belong_together_are_refused() -> None:
    other = grid(model="draft", provenance={"device": "another", "dtype": "bfloat16"})
    refusal(lambda: GridPairCost(grid(), other), "target (a device, bfloat16) and draft (another, bfloat16)")
    single = grid(model="draft", batches=[1], median_s=times()[:1])
    refusal(lambda: GridPairCost(grid(), single, batch=4), "cost grid of draft has batch sizes 1, asked for 4")


def test_a_single_grid_is_no_cost_file_and_says_so(tmp_path: Path) -> None:
    (path,) = write(tmp_path, target=document())
    assert read_grid(path).model == "target"
    refusal(lambda: read_cost(path), "specsim-cost-grid of the target only", "--draft-cost")


@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        '{"kind": "specsim-profile"}',
        json.dumps(document(version=2)),
        json.dumps(document(contexts=[64, 0, 256])),
        json.dumps(document(tokens=["a", 1, 2, 3])),
        json.dumps(document(median_s=[[[1.0]], [1.0]])),
        json.dumps(document(median_s=[[[1.0]]])),
        json.dumps(document(median_s=(-np.array(times())).tolist())),
        json.dumps(document(missing=[{"batch": 1}])),
        json.dumps(document(provenance=None)),
    ],
)
def test_a_damaged_grid_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "grid.json"
    path.write_text(content)
    refusal(lambda: read_grid(path), str(path))
    refusal(lambda: read_grid(tmp_path / "none.json"), "does not exist")


def test_an_infinite_time_is_refused() -> None:
    median = np.array(times())
    median[0, 0, 0] = np.inf
    refusal(lambda: grid(median_s=median.tolist()), "not positive or not finite")


def test_a_point_without_time_or_reason_is_called_not_measured() -> None:
    cost_grid = grid_from_json({**with_hole(0, 0, 0), "missing": []}, "here")
    refusal(lambda: cost_grid.pass_s(1, 1, 0), "1 tokens (not measured)")


def test_the_result_of_a_stage_holds_many_grids(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"kind": "specsim-gpu-stage", "grids": {"a-7b": document("a-7b"), "b": document("b")}}))
    assert read_grid(f"{path}:a-7b").model == "a-7b"
    for asked in (path, f"{path}:c"):
        with pytest.raises(InputError, match=r"holds the grids of a-7b, b; name a model, as .*profile\.json:MODEL"):
            read_grid(asked)
    refusal(lambda: read_grid(f"{tmp_path}/nothing.json:a"), "does not exist")
