"""Costs of a GPU in place of a cost file: the same answers as from a file that says the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsim.cost.calibrate import data_sheet_document
from tests.support.commands import assert_refused, call, json_of

GPU = ("--gpu", "h100", "--target", "llama-3.1-8b", "--drafter", "llama-3.2-1b", "--engine", "sglang", "--tp", "2")
TRACE = "example:lab-model"
COMMANDS = {
    "replay": ("replay", TRACE, "--policy", "fixed_k"),
    "tune": ("tune", TRACE, "--policy", "fixed_k", "--trials", "4"),
    "leaderboard": ("leaderboard", TRACE, "--policy", "fixed_k", "--trials", "4"),
    "serve schedule": ("serve", "schedule", TRACE, "--batch", "1,8", "--max-draft-tokens", "3"),
    "serve simulate": ("serve", "simulate", TRACE, "--batch", "1,8"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_gpu_is_priced_as_its_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(data_sheet_document("h100", "llama-3.1-8b", "llama-3.2-1b", None, 2, "sglang")))
    command = ("specsim", *COMMANDS[name])
    by_file, by_gpu = (json_of(call(*command, *how, "--json")) for how in (("--cost", file), GPU))
    for document in (by_file, by_gpu):
        document.pop("options", None)
        document.pop("cost", None)  # the name of the file, or of the GPU and the models
    assert by_gpu == by_file
    assert_refused(call(*command, *GPU, "--cost", file), "give costs once")
    assert_refused(call(*command), "give costs once")
    options = "--engine, --weights, --dtype, --cache and --tp describe costs on a GPU"
    for alone in (GPU[6:8], GPU[8:], ("--weights", "int4"), ("--dtype", "float32"), ("--cache", "fp8")):
        assert_refused(call(*command, "--cost", file, *alone), options)


def test_formats_are_multiplied_as_engines_do() -> None:
    for gpu, weights, products in (("h100", "float8", "float8"), ("b200", "nvfp4", "float4"), ("a100", "float8", None)):
        assert data_sheet_document(gpu, "llama-3.1-8b", "eagle", weights)["activations"] == products
    show = ("specsim", "cost", "show", "--target", "llama-3.1-8b", "--drafter", "eagle", "--gpu")
    assert_refused(call(*show, "m4-max", "--dtype", "bfloat16"), "no throughput in bfloat16", "float32")
    half, whole = (
        json_of(call(*show, "m4-max", *dtype, "--json"))["rows"][0]["autoregressive_s"]
        for dtype in ((), ("--dtype", "float32"))
    )
    assert whole > 0.05 and half < 0.6 * whole  # float16 where there is no bfloat16


def test_a_drafters_grid_needs_the_targets() -> None:
    command = ("specsim", *COMMANDS["replay"], *GPU, "--draft-cost", "draft.json")
    assert_refused(call(*command), "--draft-cost goes with the target's cost grid")


def test_costs_are_given_once_to_calibrate() -> None:
    command = ("specsim", "cost", "calibrate", "costs.json", "profile.json", *GPU, "--out", "new.json")
    assert_refused(call(*command), "costs are given twice, as a file and by --gpu")
