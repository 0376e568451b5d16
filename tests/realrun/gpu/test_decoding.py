"""The board of the GPU's stage, on the CPU: drafters that fail are left out, and a second call goes on."""

from dataclasses import replace
from pathlib import Path

import pytest

from realrun.decode.sampling import Sampler
from realrun.gpu.decoding import REDUCED, decode


@pytest.mark.slow
def test_drafters_that_fail_are_left_out_and_a_second_call_goes_on(tmp_path: Path) -> None:
    sources = {"small": "model", "lookup": "prompt-lookup", "missing": str(tmp_path / "missing")}
    sizes, how = replace(REDUCED, record_s=300.0, tune_s=300.0), {"device": "cpu", "dtype": "float32"}
    first, again = (decode(sources, "lab", Sampler(), tmp_path, minutes=5, sizes=sizes, **how) for _ in range(2))
    assert list(first["left_out"]) == ["missing"] and "missing" in first["left_out"]["missing"]
    assert {(row["drafter"], row["policy"]) for row in first["rows"]} >= {("small", "adaedl"), ("small", "beta_ts")}
    assert {row["rounds_identical_percent"] for row in first["rows"]} == {100.0}
    assert first["forecast"]["sealed"] and first["rows"] == again["rows"]
