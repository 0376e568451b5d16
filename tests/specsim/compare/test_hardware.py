"""Devices compared: what is tuned where, what is reported, and tornadoes against hardware written down by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specsim
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.compare.hardware import CONTEXTS, Comparison, compare_devices
from specsim.cost.roofline.cost import RooflineCost
from specsim.cost.roofline.document import roofline_from_document
from specsim.cost.table import CostTable, compile_table
from specsim.io.errors import InputError
from specsim.learn.settings import SearchSettings
from specsim.policy.registry import find_policies
from specsim.trace.files import write_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from tests.support.commands import assert_refused, call, json_of


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(IID(0.7), sequences=12, output_tokens=40, depth=6)


def cost(hardware: str | dict[str, Any] = "h100", batch: int = 1) -> RooflineCost:
    given = {"target": "llama-3.1-8b", "drafter": "llama-3.2-1b", "hardware": hardware, "batch": batch}
    return roofline_from_document(given)


def compared(trace: Trace, costs: list[RooflineCost], *policies: str) -> Comparison:
    return compare_devices(trace, costs, find_policies(policies or ("fixed_k",)), SearchSettings(trials=6))


def test_what_is_reported_did_not_tune(trace: Trace) -> None:
    (device,) = compared(trace, [cost()]).devices
    tuning, rest = split_sequences(trace)
    k = device.prediction.policy.settings["k"]
    speedups = [specsim.replay(trace.select(tuning), cost(), "fixed_k", k=n) for n in range(1, 7)]
    gains = [run.autoregressive_s.sum() / run.speculative_s.sum() for run in speedups]
    assert k == 1 + int(np.argmax(gains)) and device.train_speedup == max(gains)
    other = specsim.replay(trace.select(rest), cost(), "fixed_k", k=k)
    assert device.prediction.speedup.estimate == pytest.approx(other.autoregressive_s.sum() / other.speculative_s.sum())


def test_of_several_policies_the_best_on_the_tuning_part_counts(trace: Trace) -> None:
    alone = {name: compared(trace, [cost()], name).devices[0] for name in ("fixed_k", "beta_ts")}
    (found,) = compared(trace, [cost()], "fixed_k", "beta_ts").devices
    best = max(alone.values(), key=lambda device: device.train_speedup)
    assert found.prediction == best.prediction and found.train_speedup == best.train_speedup


def test_a_tornado_is_hardware_of_those_ceilings(trace: Trace) -> None:
    """Bandwidth a fifth less and more for both models is another device, which can be written down."""
    (device,) = compared(trace, [cost()]).devices
    base = cost().target.hardware
    swing = next(swing for swing in device.swings if swing.constant == "both: memory bandwidth")
    _, rest = split_sequences(trace)
    for factor, speedup in ((0.8, swing.less), (1.2, swing.more)):
        given = {"memory_bytes_s": factor * base.memory_bytes_s, "flops": dict(base.flops)}
        run = specsim.replay(trace.select(rest), cost(given), "fixed_k", **device.prediction.policy.settings)
        assert speedup == pytest.approx(run.autoregressive_s.sum() / run.speculative_s.sum(), rel=1e-12)
    widths = [swing.width for swing in device.swings]
    assert widths == sorted(widths, reverse=True) and widths[0] > 0


def test_tornadoes_of_a_chain_policy_price_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    trees: list[bool] = []

    def counted(*args: Any, **how: Any) -> CostTable:
        trees.append(how["trees"])
        return compile_table(*args, **how)

    monkeypatch.setattr("specsim.replaying.table.compile_table", counted)
    (device,) = compared(specsim.read_trace("example:lab-eagle").select(np.arange(6)), [cost()]).devices
    assert trees.count(False) == 2 * len(device.swings) > 0 and trees.count(True) == 2  # the tuning part's, the other's


def test_curves_are_a_draft_step_over_a_token(trace: Trace) -> None:
    for device in compared(trace, [cost(), cost("l40s", 8)]).devices:
        at = int(CONTEXTS[20])
        assert device.step_ratio[20] == pytest.approx(device.cost.draft(1, at) / device.cost.verify(1, at))
        document = device.as_dict()
        assert document["step_ratio"] == pytest.approx(document["draft_step_s"] / document["token_s"])
        assert device.step_ratio.min() * 0.9 < document["step_ratio"] < 1.1 * device.step_ratio.max()


def test_policies_that_the_trace_cannot_serve_are_named(trace: Trace) -> None:
    with pytest.raises(InputError, match="serves none of the policies .pct: needs recorded trees"):
        compared(trace, [cost()], "pct")


@pytest.fixture(scope="module")
def folder(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "trace"
    write_trace(trace, path)
    return path


def arguments(folder: Path, *others: object) -> list[object]:
    return ["specsim", "cost", "compare", "--trace", folder, "--policy", "fixed_k", "--trials", 4, *others]


def test_the_command_prints_a_row_a_gpu_and_writes_a_page_with_three_figures(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("--target", "llama-2-70b", "--drafter", "llama-68m", "--gpus", "a100,h200", "--batch", "1,4")
    done = json_of(call(*arguments(folder, *given, "--out", out, "--json")))
    assert [(row["gpu"], row["batch"]) for row in done["rows"]] == [("h200", 1), ("h200", 4)]
    assert done["rows"][0]["cost_notes"] == ["roofline, not calibrated"]
    (skipped,) = done["skipped"]
    assert skipped["gpu"] == "a100" and "138 GB" in skipped["reason"]
    assert json.loads((out / "comparison.json").read_text()) == done
    page = (out / "report.html").read_text()
    assert page.count("<svg ") == 3 and "both: memory bandwidth" in page and "138 GB" in page


def test_the_table_says_what_moves_most(folder: Path) -> None:
    shown = call(*arguments(folder, "--target", "llama-2-7b", "--drafter", "eagle", "--gpus", "h100"))
    assert shown.code == 0 and "most sensitive to" in shown.out and "not calibrated" in shown.out
    packed = arguments(folder, "--target", "llama-2-7b", "--drafter", "eagle", "--gpus", "h100", "--weights", "int4")
    full = json_of(call(*arguments(folder, "--target", "llama-2-7b", "--drafter", "eagle", "--gpus", "h100", "--json")))
    assert json_of(call(*packed, "--json"))["rows"][0]["token_s"] < 0.5 * full["rows"][0]["token_s"]


def test_what_cannot_be_compared_is_refused_in_one_line(folder: Path) -> None:
    given = {"--target": "llama-2-7b", "--drafter": "eagle", "--gpus": "h100"}
    for option, value, words in [
        ("--gpus", "h100,h900", ("h900", "known")),
        ("--target", "llama-9", ("llama-9", "config.json")),
        ("--target", "llama-2-70b", ("138 GB", "fewer bits")),
        ("--drafter", "eesd:99", ("eesd", "give 1 to 31")),
        ("--batch", "many", ("--batch", "1,8")),
        ("--batch", "0", ("batch=0",)),
    ]:
        changed = [part for pair in {**given, option: value}.items() for part in pair]
        assert_refused(call(*arguments(folder, *changed)), *words)
