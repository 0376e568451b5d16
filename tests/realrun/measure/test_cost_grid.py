"""Cost grids: every point measured or its absence explained, and a file that predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realrun.decode.sampling import Sampler
from realrun.experiment.scripted import with_prefix
from realrun.measure import cost_grid
from realrun.measure.cost_grid import Axes, MeasuredGrid, fitting, measure_grid, run_cost_grid
from realrun.measure.record import RecordSettings, record
from realrun.pairs.shapes import kv_bytes_per_token, random_model, shape_config
from specsim.cost.grid import GridPairCost, grid_from_json, read_grid, read_grid_pair
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.policy.registry import make_policy
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from tests.support.checks import refusal
from tests.support.tiny import tiny_pair, tiny_prompts

AXES = Axes(tokens=(1, 2, 4, 7), contexts=(8, 32, 64), batches=(1, 3))
SHAPE = (2, 3, 4)


def measure(name: str, **options: Any) -> dict[str, Any]:
    return run_cost_grid(
        name, **{"axes": AXES, "repeats": 3, "device": "cpu", "dtype": "float32", "smoke": True, **options}
    ).as_dict()


def test_a_point_is_its_samples_quartiles_and_too_few_are_missing() -> None:
    """Of 1, 2, 3, 4 and 100 s, quartiles are 2, 3 and 4; of 5 and 9 s they are 6, 7 and 8."""
    grid = MeasuredGrid("m", AXES, {}, 3, 0, None, {})
    grid.add(3, {(32, 2): [100.0, 1.0, 4.0, 2.0, 3.0], (32, 7): [5.0, 9.0], (64, 1): [1.0]})
    assert [grid.tables[name][1, 1, 1] for name in ("p25_s", "median_s", "p75_s")] == [2.0, 3.0, 4.0]
    assert [grid.tables[name][1, 1, 3] for name in ("p25_s", "median_s", "p75_s")] == [6.0, 7.0, 8.0]
    assert grid.samples[1, 1].tolist() == [0, 5, 0, 2] and grid.samples.sum() == 7
    assert grid.missing == [(3, 64, [1], "time: the minutes given were over")]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return measure("llama-3.1-8b")


def test_every_point_is_measured(document: dict[str, Any]) -> None:
    low, middle, high = (np.array(document[name], dtype=float) for name in ("p25_s", "median_s", "p75_s"))
    assert low.shape == SHAPE and (low > 0).all() and (low <= middle).all() and (middle <= high).all()
    assert np.array_equal(document["samples"], np.full(SHAPE, 3)) and document["missing"] == []
    assert document["model"] == "llama-3.1-8b (reduced)" and document["shape"]["architecture"] == "llama"
    assert document["provenance"]["dtype"] == "float32" and document["provenance"]["date"]


def test_the_simulator_reads_the_files_and_predicts_from_them(document: dict[str, Any], tmp_path: Path) -> None:
    write_json(document, tmp_path / "target.json")
    write_json(measure("llama-3.2-1b"), tmp_path / "draft.json")
    assert json.loads((tmp_path / "target.json").read_text()) == document
    grid = read_grid(tmp_path / "target.json")
    assert float(grid.pass_s(3, 4, 32)) >= float(np.array(document["median_s"])[1, 1, 2])
    trace = record(tiny_pair(), tiny_prompts(), RecordSettings(6, 24, Sampler("gumbel", 0.8)))
    for batch in AXES.batches:
        cost = read_grid_pair(tmp_path / "target.json", tmp_path / "draft.json", batch=batch)
        prediction = predict_policy(
            PricedTrace(with_prefix(trace, 8), cost), make_policy("adaedl", {"max_draft_tokens": 6})
        )
        assert 0 < prediction.speedup.low <= prediction.speedup.estimate <= prediction.speedup.high
    with pytest.raises(InputError, match=r"llama-3.[12]-.b \(reduced\) covers contexts of 8 to 64"):
        predict_policy(PricedTrace(with_prefix(trace, 80), cost), make_policy("fixed_k", {"k": 2}))
    assert isinstance(cost, GridPairCost)


@pytest.mark.parametrize("name", ["llama-2-7b", "one-layer-7b", "qwen3-8b", "qwen3-0.6b"])
def test_other_shapes_and_types_are_measured(name: str) -> None:
    axes = Axes(tokens=(1, 3), contexts=(0, 9), batches=(2,))
    grid = measure(name, axes=axes, repeats=2, dtype="bfloat16")
    assert (np.array(grid["median_s"], dtype=float) > 0).all()


def test_every_sample_is_the_second_of_two_equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int, int, int]] = []

    class Spy(cost_grid.StaticLlama):
        def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            log.append(("step", *tokens.shape, int(lengths[0])))
            assert (lengths == lengths[0]).all() and self.keys.std() > 0.5  # no cache of zeros
            return super().step(tokens, lengths)

    monkeypatch.setattr(cost_grid, "StaticLlama", Spy)
    monkeypatch.setattr(
        cost_grid, "device_clock", lambda device: lambda: log.append(("clock", 0, 0, 0)) or 1e-9 * len(log)
    )
    measure("llama-2-7b", repeats=2)
    groups = [log[i : i + 4] for i in range(0, len(log), 4)]
    assert len(groups) == 2 * 24
    for warm, start, timed, end in groups:
        assert warm == timed and warm[0] == "step" and start[0] == end[0] == "clock"
    points = {(b, c, n) for b in AXES.batches for c in AXES.contexts for n in AXES.tokens}
    assert {(b, c, n) for (_, b, n, c), *_ in groups} == points
    assert [g[0][1] for g in groups] == [1] * 24 + [3] * 24  # one batch size after another
    orders = [[g[0] for g in groups[i : i + 12]] for i in (0, 12)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_what_does_not_fit_the_memory_is_null_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(shape_config("llama-2-7b", smoke=True), "cpu", torch.float32, 0)
    monkeypatch.setattr(cost_grid, "FIXED_BYTES", 0.0)

    def free_for(batch: int, tokens: tuple[int, ...], context: int) -> float:
        """Just enough for these passes behind this context."""
        low, high = 0.0, 1e9
        for _ in range(60):
            middle = (low + high) / 2
            contexts, fits = fitting(model.config, torch.float32, batch, AXES, middle)
            if len(fits) >= len(tokens) and contexts and contexts[-1] >= context:
                high = middle
            else:
                low = middle
        return high

    free = free_for(1, (1, 2, 4, 7), 32)
    monkeypatch.setattr(cost_grid, "free_bytes", lambda device: free / cost_grid.MEMORY_MARGIN)
    grid = measure_grid(model, "small", axes=AXES, repeats=2).as_dict()
    median = np.array(grid["median_s"], dtype=float)
    assert np.isfinite(median[0, :2]).all() and np.isnan(median[0, 2]).all()
    assert np.isnan(median[1]).any()
    first = grid["missing"][0]
    assert (first["batch"], first["context"], first["tokens"]) == (1, 64, [1, 2, 4, 7])
    assert {m["reason"].split(":")[0] for m in grid["missing"]} == {"memory"}
    json.dumps(grid, allow_nan=False)
    listed = sum(len(m["tokens"]) for m in grid["missing"])
    assert listed == np.isnan(median).sum()
    with pytest.raises(InputError, match=r"no time for batch 1, context 64, 1 tokens \(memory: does not fit"):
        grid_from_json(grid, "here").pass_s(1, 1, 64)


def test_the_plan_gives_up_long_passes_first_then_long_contexts() -> None:
    config, kv = shape_config("llama-2-7b"), kv_bytes_per_token(shape_config("llama-2-7b"))
    axes = Axes()
    for batch in axes.batches:
        for free in np.geomspace(1e8, 2e11, 12):
            contexts, tokens = fitting(config, torch.bfloat16, batch, axes, free)
            assert contexts == list(axes.contexts[: len(contexts)]) and tokens == list(axes.tokens[: len(tokens)])
            assert bool(contexts) == bool(tokens)
            if contexts:
                assert batch * kv * (contexts[-1] + tokens[-1]) < free
    # 139 GiB less 13.5 GB of weights holds 8 sequences of 16k tokens but not 16 of them.
    free = 0.9 * (139 * 2**30 - 13.5e9)
    assert fitting(config, torch.bfloat16, 8, axes, free)[0][-1] == 16384
    assert fitting(config, torch.bfloat16, 16, axes, free)[0][-1] == 8192
    assert fitting(config, torch.bfloat16, 64, axes, free) == (list(axes.contexts[:6]), list(axes.tokens))


def test_a_grid_prices_prompts_of_any_length_unless_told() -> None:
    assert Axes().contexts[0] == 0


def test_what_does_not_fit_the_time_is_null_with_the_reason() -> None:
    grid = measure("llama-2-7b", minutes=1e-4, repeats=200)
    median = np.array(grid["median_s"], dtype=float)
    assert np.isnan(median).any()
    assert {m["reason"] for m in grid["missing"]} == {"time: the minutes given were over"}
    assert sum(len(m["tokens"]) for m in grid["missing"]) == np.isnan(median).sum()
    assert grid["spent_minutes"] < 0.1
    samples = np.array(grid["samples"])
    assert ((samples >= cost_grid.LEAST_SAMPLES) == np.isfinite(median)).all()


def test_memory_that_runs_out_against_the_estimate_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cost_grid._measure_batch

    def too_large(model: Any, batch: int, *rest: Any) -> None:
        if batch > 1:
            raise torch.OutOfMemoryError("no memory")
        real(model, batch, *rest)

    monkeypatch.setattr(cost_grid, "_measure_batch", too_large)
    grid = measure("llama-2-7b")
    median = np.array(grid["median_s"], dtype=float)
    assert np.isfinite(median[0]).all() and np.isnan(median[1]).all()
    assert {m["reason"] for m in grid["missing"]} == {"memory: ran out of it in spite of the estimate"}


def test_progress_rises_to_its_end() -> None:
    steps: list[tuple[str, int, int]] = []
    measure("llama-2-7b", progress=lambda *step: steps.append(step))
    assert {what for what, _, _ in steps} == {"cost grid llama-2-7b (reduced)"}
    done = [d for _, d, _ in steps]
    assert done == sorted(done) and steps[-1][1:] == (6, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ()}, "tokens"),
        ({"tokens": (0, 1)}, "start at 1"),
        ({"contexts": (64, 32)}, "contexts"),
        ({"batches": (1, 1)}, "batches"),
    ],
)
def test_axes_that_cannot_be_measured_are_refused(options: dict[str, Any], message: str) -> None:
    refusal(lambda: Axes(**options), match=message)


def test_other_bad_input_is_refused() -> None:
    refusal(lambda: measure("llama-2-7b", repeats=1), "repeats=1")
    refusal(lambda: measure("x"), "shape 'x' is unknown")
    refusal(lambda: measure("llama-2-7b", dtype="x"), "dtype 'x' is unknown")
    model = random_model(shape_config("llama-68m", smoke=True), "cpu", torch.float32, 0)
    with pytest.raises(InputError, match="context 4096 and 1 tokens exceed the 2048 positions of m"):
        measure_grid(model, "m", axes=Axes(tokens=(1,), contexts=(4096,), batches=(1,)))


@pytest.mark.gpu
def test_a_true_shape_is_measured_on_cuda_near_the_time_of_reading_its_weights() -> None:
    axes = Axes(tokens=(1, 8, 64), contexts=(128, 8192), batches=(1, 4))
    grid = run_cost_grid("llama-3.1-8b", axes=axes, repeats=5).as_dict()
    median = np.array(grid["median_s"], dtype=float)
    assert grid["missing"] == [] and (median[1] >= 0.9 * median[0]).all() and (median[:, 1] >= 0.9 * median[:, 0]).all()
    bandwidth = grid["shape"]["pass_weight_bytes"] / median[0, 0, 0]
    assert 0.5e12 < bandwidth < 20e12  # bytes per second: a data-centre GPU's, and no faster than any
