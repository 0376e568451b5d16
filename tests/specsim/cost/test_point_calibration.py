"""Rooflines calibrated on a few times of an engine: against published times that the fit has not seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specsim.cost.calibrate import data_sheet_document, document_on_points
from specsim.cost.files import read_cost
from specsim.cost.roofline.cost import Overheads, RooflineCost
from specsim.cost.roofline.passes import Roofline
from specsim.cost.roofline.point_calibration import Point, calibrated_on_points, predicted_s, read_point
from specsim.io.errors import InputError
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of

# vllm-project/vllm#20780: Llama-3.1-8B-Instruct at batch 1, TPOT in ms without speculation, and with K = 2 to 7 (mean
# acceptance length, TPOT). The contexts are not told.
PLAIN_MS = 7.07
EAGLE = dict(enumerate([(2.1, 4.37), (2.29, 4.29), (2.39, 4.48), (2.43, 4.71), (2.45, 4.94), (2.47, 5.20)], start=2))
EAGLE3 = dict(enumerate([(2.36, 4.32), (2.79, 4.09), (3.08, 4.05), (3.32, 4.13), (3.46, 4.20), (3.54, 4.29)], start=2))
SHEET = data_sheet_document("h100", "llama-3.1-8b", "eagle")


def roofline() -> RooflineCost:
    cost = read_cost(SHEET)
    assert isinstance(cost, RooflineCost)
    return cost


def points_of(published: dict[int, tuple[float, float]]) -> dict[int, Point]:
    points = {k: Point(ms, k=k, acceptance=tau) for k, (tau, ms) in published.items()}
    return {0: Point(PLAIN_MS), **points}


@pytest.mark.parametrize(
    ("published", "seen", "most_percent"),
    [(EAGLE, (3,), 2.3), (EAGLE, (2, 7), 1.0), (EAGLE3, (2, 7), 4.0)],
    ids=["EAGLE, a point", "EAGLE, two points", "EAGLE-3, two points"],
)
def test_published_times_of_other_draft_lengths_are_predicted(
    published: dict[int, tuple[float, float]], seen: tuple[int, ...], most_percent: float
) -> None:
    points = points_of(published)
    fitted = calibrated_on_points(roofline(), [points[k] for k in (0, *seen)])
    speedups = {}
    for k, (tau, ms) in published.items():
        predicted_ms = 1e3 * predicted_s(fitted.cost, points[k]) / tau
        assert predicted_ms == pytest.approx(ms, rel=most_percent / 100)
        speedups[k] = PLAIN_MS / predicted_ms
    best = max(speedups, key=speedups.__getitem__)
    assert published[best][1] <= 1.01 * min(ms for _, ms in published.values())
    assert predicted_s(fitted.cost, points[0]) == pytest.approx(PLAIN_MS / 1e3, rel=1e-6)


def passes_of_slower_hardware(passes: Roofline, factor: float) -> Roofline:
    sheet = passes.hardware
    flops = {dtype: value / factor for dtype, value in sheet.flops.items()}
    sheet = replace(sheet, memory_bytes_s=sheet.memory_bytes_s / factor, flops=flops)
    launch = replace(passes.derating, launch_s=passes.derating.launch_s * factor)
    return replace(passes, hardware=sheet, derating=launch)


@pytest.mark.parametrize("drafter", ["eagle", "llama-3.2-1b", "medusa:3", "prompt-lookup"])
def test_what_made_the_points_is_found_again(drafter: str) -> None:
    bare = read_cost(data_sheet_document("h100", "llama-3.1-8b", drafter))
    assert isinstance(bare, RooflineCost)
    made = Overheads(step_s=8e-4, round_s=3e-4, draft_step_s=2e-4)
    parts = {name: getattr(bare, name) for name in ("target", "draft_passes") if getattr(bare, name) is not None}
    slower = {name: passes_of_slower_hardware(passes, 1.3) for name, passes in parts.items()}
    truth = replace(bare, overheads=made, **slower)
    sizes = [(1, 500, 0), (1, 8000, 0), (1, 500, 2), (1, 500, 3), (1, 8000, 3)]
    points = []
    for batch, context, k in sizes:
        at = Point(1.0, batch, context, k, 1.0 + k / 2)
        points.append(replace(at, tpot_ms=1e3 * predicted_s(truth, at) / at.acceptance))
    fitted = calibrated_on_points(bare, points)
    assert np.abs(fitted.errors_percent).max() < 1e-6 and fitted.factor == pytest.approx(1.3, rel=1e-6)
    assert vars(fitted.cost.overheads) == pytest.approx(vars(made), abs=1e-9)


def test_what_no_point_tells_stays() -> None:
    cost = replace(roofline(), overheads=Overheads(round_s=5e-4, draft_step_s=1e-4))
    fitted = calibrated_on_points(cost, [Point(7.07)])
    assert fitted.cost.overheads == cost.overheads
    assert fitted.held_out_percent == [None]
    of_round = calibrated_on_points(cost, [Point(7.07), Point(4.29, k=3, acceptance=2.29)])
    assert of_round.cost.overheads.draft_step_s == 0 and of_round.held_out_percent == [None, None]


def test_an_engines_overheads_that_no_point_tells_stay() -> None:
    sheet = data_sheet_document("h100", "llama-3.1-70b", "eagle3", None, 8, "vllm")
    cost = read_cost(sheet)
    assert isinstance(cost, RooflineCost)
    at = Point(1.0, batch=32, context=2000)
    point = replace(at, tpot_ms=1.2e3 * predicted_s(cost, at))
    fitted = calibrated_on_points(cost, [point]).cost
    assert predicted_s(fitted, at) == pytest.approx(point.tpot_ms / 1e3, rel=1e-6)
    names = "sequence_s", "verified_sequence_s", "round_s", "draft_step_s"
    assert [getattr(fitted.overheads, name) for name in names] == [getattr(cost.overheads, name) for name in names]
    ratio = fitted.target.derating.all_reduce_s / cost.target.derating.all_reduce_s
    assert ratio == pytest.approx(fitted.target.derating.launch_s / cost.target.derating.launch_s) and ratio > 1.2


def test_a_point_is_judged_by_the_fit_of_the_others() -> None:
    points = points_of(EAGLE)
    chosen = [points[k] for k in (0, 2, 4, 7)]
    fitted = calibrated_on_points(roofline(), chosen)
    without = calibrated_on_points(roofline(), [points[k] for k in (0, 2, 7)])
    expected = 100 * (predicted_s(without.cost, points[4]) / points[4].round_s - 1)
    assert fitted.held_out_percent[0] is None and fitted.held_out_percent[2] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rounds_ms", [(14.4, 15.2), (14.5, 16.5)])
def test_two_rounds_are_fitted_whether_drafting_is_slower_or_faster_than_the_roofline(
    rounds_ms: tuple[float, float],
) -> None:
    cost = read_cost(data_sheet_document("h100", "llama-3.1-8b", "eagle3", engine="vllm"))
    assert isinstance(cost, RooflineCost)
    points = [Point(7.5), *(Point(ms / k, k=k, acceptance=k) for k, ms in zip((2, 6), rounds_ms, strict=True))]
    fitted = calibrated_on_points(cost, points)
    assert np.abs(fitted.errors_percent).max() < 1e-6 and not fitted.contradictions
    of_k = {k: fitted.cost.round_seconds(k, 1000) for k in (2, 4, 6)}
    assert of_k[2] < of_k[4] < of_k[6] and (fitted.cost.overheads.draft_step_s < 0) == (rounds_ms[0] == 14.4)


def test_points_that_contradict_each_other_are_named() -> None:
    points = [Point(7.07), Point(8.4), Point(4.29, k=3, acceptance=2.29)]
    (text,) = calibrated_on_points(roofline(), points).contradictions
    assert "tpot_ms=7.07" in text and "tpot_ms=8.4" in text and "k=3" not in text


def test_points_that_cannot_be_are_refused() -> None:
    for text in ("tpot=7", "tpot_ms=x", "k=3 tpot_ms=4", "acceptance=2 tpot_ms=4", "tpot_ms=4 tpot_ms=5 batch=1", ""):
        with pytest.raises(InputError, match="write it as"):
            read_point(text)
    refusal(lambda: Point(4.0, k=3, acceptance=5.0), "with k=3 give 1 to 4")
    refusal(lambda: Point(0.0), "give tpot_ms above 0")
    refusal(
        lambda: calibrated_on_points(roofline(), [Point(4.0, k=3, acceptance=2.0)]), "no point is without speculation"
    )
    refusal(lambda: calibrated_on_points(roofline(), [Point(70.0)]), "take 10.93 times the roofline", "check model")
    refusal(lambda: document_on_points({"s_d": 1e-3, "s_t": 1e-2}, [Point(7.0)]), "no form roofline")


def test_the_command_writes_costs_and_says_how_far_they_are_off(tmp_path: Path) -> None:
    out, command = tmp_path / "vllm.json", ("specsim", "cost", "calibrate")
    gpu = ["--gpu", "h100", "--target", "llama-3.1-8b", "--drafter", "eagle"]
    points = ["context=500 tpot_ms=7.07", "context=500 k=3 acceptance=2.29 tpot_ms=4.29"]
    measured = [option for point in points for option in ("--measured", point)]
    document = json_of(call(*command, *gpu, *measured, "--out", out, "--json"))
    cost = read_cost(out)
    assert isinstance(cost, RooflineCost) and cost.covered is not None and cost.covered.draft_tokens == (3, 3)
    assert float(cost.autoregressive_step(500)) == pytest.approx(7.07e-3, rel=1e-6)
    assert "calibrated on 2 measured points" in document["source"] and cost.notes(3, (500, 500)) == []
    table = call(*command, *gpu, *measured, "--out", out, "--overwrite").out
    assert "passes take 1.11 times the data sheet's" in " ".join(table.split())
    new = ["--out", tmp_path / "new.json"]
    assert_refused(call(*command, "--gpu", "h100", *measured, *new), "--gpu, --target and --drafter")
    assert_refused(call(*command, out, *gpu, *measured, *new), "give costs once")
    assert_refused(call(*command, *gpu, *new), "give what was measured")
