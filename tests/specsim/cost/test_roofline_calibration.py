"""Calibrated rooflines: known hardware is found again, real measurements are met, and what lies beyond is said.

The shares of ceilings that unmeasured hardware is assumed to reach are of passes measured on a GPU, and judged by
decoding steps that others published.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specsim
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.files import read_cost
from specsim.cost.grid import GridCost, GridPairCost, read_grid
from specsim.cost.profile import ProfileCost
from specsim.cost.roofline.architecture import find_architecture, public_shapes
from specsim.cost.roofline.calibration import calibrate, fit_passes, measured_cells, predicted_seconds, residuals
from specsim.cost.roofline.config import ModelConfig
from specsim.cost.roofline.cost import Overheads, RooflineCost, find_drafter
from specsim.cost.roofline.document import calibration_document
from specsim.cost.roofline.hardware import Derating, find_hardware, usual_derating
from specsim.cost.roofline.passes import Roofline
from tests.support import ROOT
from tests.support.checks import refusal
from tests.support.commands import call, json_of

CONTEXTS = np.array([64, 512, 2048, 6000])


def uncalibrated(drafter: Any = "llama-160m", hardware: str = "a100") -> RooflineCost:
    target = Roofline(find_architecture("llama-2-7b"), find_hardware(hardware))
    return RooflineCost(target, find_drafter(drafter, target.model))


def hidden(cost: RooflineCost) -> RooflineCost:
    """The same on hardware that reaches less than its datasheet says."""
    target = replace(cost.target, derating=Derating(0.61, 0.44, 7e-6, 0.8))
    passes = cost.draft_passes and replace(cost.draft_passes, derating=Derating(0.5, 0.6, 5e-6, 0.9))
    overheads = Overheads(round_s=2e-4, policy_step_s=3e-6, cold_start_s=4e-4, cold_start_ratio=0.5)
    return replace(cost, target=target, draft_passes=passes, overheads=overheads)


def profiled(cost: RooflineCost, noise: float = 0.0, sizes: int = 12) -> ProfileCost:
    """What profiling would have measured."""
    rng = np.random.default_rng(5)

    def rows(seconds: Any, count: int) -> Any:
        return np.stack([seconds(i) for i in range(count)]) * np.exp(noise * rng.standard_normal((count, 4)))

    return ProfileCost(
        CONTEXTS,
        rows(lambda place: cost.draft_step(place, CONTEXTS), sizes - 1),
        cost.catch_up(CONTEXTS),
        rows(lambda i: cost.verify(i + 1, CONTEXTS), sizes),
        rows(lambda _: cost.autoregressive_step(CONTEXTS), 1)[0],
        cost.policy_step(),
        cost.round_overhead(),
    )


@pytest.mark.parametrize(
    "drafter", ["llama-160m", "eagle", {"kind": "medusa", "heads": 4}, {"kind": "eesd", "layers": 8}]
)
def test_hardware_that_reaches_less_is_found_from_half_of_the_cells(drafter: Any) -> None:
    truth = hidden(uncalibrated(drafter))
    measured = profiled(truth)
    cells = measured_cells(measured)
    seen = cells.alternate
    assert abs(seen.mean() - 0.5) < 0.1
    calibrated = calibrate(uncalibrated(drafter), measured, cells.select(seen))
    unseen = cells.select(~seen)
    before, after = (residuals(cost, unseen)[-1] for cost in (uncalibrated(drafter), calibrated))
    assert before.region == after.region == "all" and before.median_abs > 0.2
    assert after.median_abs < 0.005 and after.worst < 0.03
    assert (calibrated.round_overhead(), calibrated.policy_step()) == (2e-4, 3e-6)


def test_noise_of_measurement_does_not_get_into_the_prediction() -> None:
    """3 % of noise a cell, some 40 cells: the fit stays within 2 % of what is really so."""
    truth = hidden(uncalibrated())
    calibrated = calibrate(uncalibrated(), profiled(truth, noise=0.03))
    for n in (1, 5, 12):
        assert calibrated.verify(n, CONTEXTS) == pytest.approx(truth.verify(n, CONTEXTS), rel=0.02)
    assert calibrated.draft(6, CONTEXTS) == pytest.approx(truth.draft(6, CONTEXTS), rel=0.02)


def test_batches_are_found_from_half_of_the_cells_by_one_calibration() -> None:
    """Batches 1 to 8 of a profile of batches, whose draft steps begin where the round does."""
    truth = hidden(uncalibrated())
    batches, sizes = np.array([1, 2, 4, 8]), np.array([1, 2, 3, 5])
    each = [replace(truth, batch=int(batch)) for batch in batches]
    measured = BatchProfileCost(
        batches, CONTEXTS, sizes,
        verify_s=np.array([[cost.verify(int(n), CONTEXTS) for n in sizes] for cost in each]).swapaxes(1, 2),
        draft_s=np.array([[cost.draft_step(place, CONTEXTS) for place in range(4)] for cost in each]).swapaxes(1, 2),
        catch_up_s=np.zeros((4, 4)), step_s=3e-4, round_s=1e-4,
    )  # fmt: skip
    cells = measured_cells(measured)
    assert len(cells.seconds) == 4 * 4 * (4 + 4)
    (row,) = np.flatnonzero(
        (cells.kind == "draft") & (cells.tokens == 3) & (cells.context == 2048) & (cells.batch == 8)
    )
    assert cells.seconds[row] == each[-1].draft_step(2, 2048)
    calibrated = calibrate(uncalibrated(), measured, cells.select(cells.alternate))
    after = {row.region: row for row in residuals(calibrated, cells.select(~cells.alternate))}
    assert {"batch 1", "batch 2", "batch 4", "batch 8", "all"} < set(after)
    assert max(row.median_abs for row in after.values()) < 0.005 and after["all"].worst < 0.03
    assert calibrated.covered.batches == (1, 2, 4, 8)
    assert (calibrated.step_s, calibrated.round_s) == (3e-4, pytest.approx(1e-4))
    assert replace(calibrated, batch=8).notes(3, (64, 6000)) == []


def test_steps_that_no_pass_makes_are_calibrated_too() -> None:
    truth = replace(hidden(uncalibrated("prompt-lookup")), overheads=Overheads(0, 0, 0, 2e-6, 3e-5, 0.3))
    calibrated = calibrate(uncalibrated("prompt-lookup"), profiled(truth))
    assert calibrated.draft(5, CONTEXTS) == pytest.approx(truth.draft(5, CONTEXTS), rel=0.01)


def grid(passes: Roofline, gap: bool = False) -> GridCost:
    batches, contexts, tokens = np.array([1, 4, 16]), np.array([0, 1024, 4096]), np.array([1, 2, 4, 8, 16])
    median_s = np.array([[[float(passes.seconds(n, c, b)) for n in tokens] for c in contexts] for b in batches])
    if gap:
        median_s[2, 2, 4] = np.nan
    missing = np.where(np.isnan(median_s), "out of memory", "")
    return GridCost(passes.model.name, "A100", "bfloat16", batches, contexts, tokens, median_s, missing)


def test_grids_of_two_models_at_several_batches_calibrate_both() -> None:
    truth = hidden(uncalibrated())
    pair = GridPairCost(grid(truth.target, gap=True), grid(truth.draft_passes), batch=4)
    fitted = calibrate(uncalibrated(), pair)
    cells = measured_cells(pair)
    assert len(cells.seconds) == 2 * 45 - 1
    assert predicted_seconds(fitted, cells) == pytest.approx(cells.seconds, rel=0.02)
    true_s = replace(truth, batch=16).verify(8, 3000)
    assert replace(fitted, batch=16).verify(8, 3000) == pytest.approx(true_s, rel=0.02)
    assert fitted.covered.batches == (1, 4, 16) and fitted.round_overhead() == 0


def test_a_measured_layer_of_experts_is_met_under_balanced_routing() -> None:
    """Qwen3-30B-A3B's expert layer on an H100: its time doubles with the tokens until all experts are read."""
    tokens, measured_s = np.array([1, 2, 4, 8, 16, 32]), 1e-6 * np.array([49, 75, 124, 228, 420, 422])
    shape, errors = public_shapes()["qwen3-30b-a3b"], {}
    for routing in ("balanced", "uniform"):
        layer = find_architecture(ModelConfig({**shape, "routing": routing})).first(1)
        passes = Roofline(layer, find_hardware("h100"))

        def operations(n: int, passes: Roofline = passes) -> Any:
            return [
                operation
                for operation in passes.operations(n, 0)
                if "expert" in operation.name or operation.name == "router"
            ]

        fitted = fit_passes(passes, [operations(int(n)) for n in tokens], measured_s)
        errors[routing] = [
            np.array([float(roofline.total(operations(int(n)))) for n in tokens]) / measured_s - 1
            for roofline in (passes, fitted)
        ]
    before, after = errors["balanced"]
    assert before == pytest.approx([-0.026, 0.008, 0.060, 0.066, 0.110, 0.109], abs=0.002)
    assert np.abs(after).max() < 0.02
    assert np.abs(errors["uniform"][1]).max() > 0.1  # calibration does not hide the wrong routing


def calibrated() -> RooflineCost:
    return calibrate(uncalibrated(), profiled(hidden(uncalibrated()), sizes=9))


def test_results_say_where_their_costs_are_extrapolated() -> None:
    trace = generate(IID(0.7), sequences=12, output_tokens=40, depth=8, prompt_tokens=100)
    cost = calibrated()
    assert specsim.predict(trace, cost, "fixed_k", k=3).notes == []
    early = generate(IID(0.7), sequences=12, output_tokens=40, depth=8, prompt_tokens=16)
    prediction = specsim.predict(early, cost, "fixed_k", k=3)
    assert prediction.notes == ["extrapolated: contexts 15 to 54, calibrated on 64 to 6000"]
    assert prediction.as_dict()["cost_notes"] == prediction.notes and prediction.notes[0] in repr(prediction)
    assert specsim.predict(trace, uncalibrated(), "fixed_k", k=3).notes == ["roofline, not calibrated"]
    board = specsim.leaderboard(early, cost, policies=["fixed_k", "max_confidence"], trials=4)
    assert f"costs: {prediction.notes[0]}" in board.warnings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 8}, "batch 8, calibrated on 1"),
        ({"target": replace(uncalibrated().target, hardware=find_hardware("h100"))}, "calibrated on llama-2-7b with "),
        ({}, "drafts of up to 20 tokens, calibrated to 8"),
    ],
)
def test_what_is_asked_beyond_the_calibration_is_said(change: dict[str, Any], message: str) -> None:
    cost = calibrated()
    assert cost.notes(8, (64, 6000)) == []
    asked = 8 if change else 20
    assert any(message in note for note in replace(cost, **change).notes(asked, (64, 6000)))


WRITTEN = {
    "kind": "specsim-cost",
    "version": 1,
    "form": "roofline",
    "source": "by hand",
    "date": "2026-11-22",
    "target": "llama-2-7b",
    "drafter": "llama-160m",
    "hardware": "a100",
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "cost.json"
    path.write_text(json.dumps({**WRITTEN, **changes}))
    return path


def test_a_written_roofline_is_read_with_its_calibration(tmp_path: Path) -> None:
    assert read_cost(written(tmp_path)) == uncalibrated()
    cost = calibrated()
    kept = read_cost(written(tmp_path, calibration=calibration_document(cost)))
    assert kept == cost
    batched = read_cost(written(tmp_path), batch=8)
    assert float(batched.verify(4, 1000)) == float(uncalibrated().target.seconds(4, 1000, 8))


def test_a_config_and_hardware_may_be_written_out(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    hardware = {"memory_bytes_s": 2.039e12, "flops": {"bfloat16": 312e12}}
    named = read_cost(written(tmp_path))
    for target in (config, str(tmp_path), str(tmp_path / "config.json")):
        cost = read_cost(written(tmp_path, target=target, hardware=hardware, tensor_parallel=1))
        assert cost.verify(5, CONTEXTS) == pytest.approx(named.verify(5, CONTEXTS), rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 7}, "got `int` - at `$.target`"),
        ({"hardware": "abacus"}, "unknown GPU 'abacus'"),
        ({"gpu": "h100"}, "unknown key 'gpu'"),
        ({"calibration": {"target": {"memoy": 0.5}}}, "calibration: target has an unknown key 'memoy'"),
        ({"calibration": {"targets": {}}}, "calibration has an unknown key 'targets'"),
        ({"calibration": {"overheads": {"round_s": -1.0}}}, "round_s=-1.0; give 0"),
        ({"calibration": {"covered": {"subject": "x", "draft_tokens": [], "verify_tokens": [1, 2], "contexts": [1, 2],
                                      "batches": [1]}}}, "draft_tokens"),
        ({"batch": 0}, "batch=0"),
        ({"hardware": {"memory_bytes_s": 1e12, "flops": {"bfloat16": 1e14}, "bandwidth": 1.0}}, "'bandwidth'"),
        ({"tensor_parallel": 2, "hardware": {"memory_bytes_s": 1e12, "flops": {"bfloat16": 1e14}}}, "link_bytes_s"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_written_roofline_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = written(tmp_path, **changes)
    refusal(lambda: read_cost(path), message, str(path))


def test_the_command_shows_it_and_says_that_it_is_not_measured(tmp_path: Path) -> None:
    path = str(written(tmp_path))
    shown = json_of(call("specsim", "cost", "show", path, "--contexts", "1000", "--tokens", "4", "--json"))
    assert shown["notes"] == ["roofline, not calibrated"]
    assert shown["rows"][0]["verify_s"]["4"] == pytest.approx(float(uncalibrated().verify(4, 1000)))
    assert "not calibrated" in " ".join(call("specsim", "cost", "show", path).out.split())


FORMER = Derating(0.9, 0.8, 2e-6, 1.0)  # what a large copy and a large product reach
# Milliseconds of decoding steps of dense models: target, hardware, tensor parallelism, batch, context.
PUBLISHED = {
    # gpt-fast's README, contexts of about 105 tokens
    ("llama-2-7b", "a100", 1, 1, 105): 9.53, ("llama-3.1-8b", "a100", 1, 1, 105): 10.65,
    ("llama-2-7b", "a100", 2, 1, 105): 5.92, ("llama-3.1-8b", "a100", 2, 1, 105): 6.71,
    ("llama-2-7b", "a100", 4, 1, 105): 3.94, ("llama-3.1-8b", "a100", 4, 1, 105): 4.60,
    ("llama-2-7b", "a100", 8, 1, 105): 3.04, ("llama-3.1-8b", "a100", 8, 1, 105): 3.62,
    ("llama-2-70b", "a100", 4, 1, 105): 26.3, ("llama-3.1-70b", "a100", 4, 1, 105): 26.7,
    ("llama-2-70b", "a100", 8, 1, 105): 16.0, ("llama-3.1-70b", "a100", 8, 1, 105): 17.0,
    # vllm-project/vllm#20780, #16937 and 29334; SGLang's issues
    ("llama-3.1-8b", "h100", 1, 1, 300): 7.07, ("llama-3.1-8b", "h100", 1, 1, 301): 7.52,
    ("llama-3.1-8b", "a100-40gb", 1, 1, 500): 13.36, ("llama-3.1-8b", "h100", 1, 1, 302): 6.32,
    ("llama-2-7b", "h100", 1, 1, 300): 6.41,
    # SpecDecode-Bench's fit to vLLM 0.11 (arXiv:2601.11580)
    ("llama-3.1-8b", "h100", 1, 8, 500): 7.42, ("llama-3.1-8b", "h100", 1, 8, 2000): 7.89,
    ("llama-3.1-8b", "h100", 1, 32, 500): 8.39, ("llama-3.1-8b", "h100", 1, 32, 2000): 10.28,
    ("llama-3.1-8b", "h100", 1, 128, 500): 12.29, ("llama-3.1-8b", "h100", 1, 128, 2000): 19.83,
}  # fmt: skip
SHARES = ("memory", "compute", "launch_s", "overlap")  # without all_reduce_s: these runs used one GPU
MOST_PERCENT = 12.5  # median error of these, where none of them was used


def errors_percent(derating: Derating) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    errors = []
    for (target, hardware, tp, batch, context), ms in PUBLISHED.items():
        passes = Roofline(find_architecture(target), find_hardware(hardware), tensor_parallel=tp, derating=derating)
        errors.append(1e5 * float(passes.seconds(1, context, batch)) / ms - 100)
    return np.array(errors)


def test_published_steps_of_other_machines_are_met_better_than_by_the_ceilings_that_copies_reach() -> None:
    usual, former = errors_percent(usual_derating()), errors_percent(FORMER)
    assert np.median(abs(usual)) < MOST_PERCENT < np.median(abs(former))
    assert abs(np.median(usual)) < abs(np.median(former))


def test_they_are_the_means_of_what_passes_of_two_models_reached() -> None:
    fits = []
    for model in ("llama-3.1-8b", "llama-3.2-1b"):
        grid = read_grid(ROOT / "studies" / "gpu_passes" / "recorded" / f"{model}.json")
        sizes = [(int(n), int(c), int(b)) for b in grid.batches for c in grid.contexts for n in grid.tokens]
        passes = Roofline(find_architecture(model), find_hardware("h100"), "bfloat16")
        fit = fit_passes(passes, [passes.operations(*size) for size in sizes], grid.median_s.ravel())
        fits.append([getattr(fit.derating, name) for name in SHARES])
    assert [getattr(usual_derating(), name) for name in SHARES] == pytest.approx(
        np.mean(fits, axis=0).tolist(), rel=0.02
    )
