"""Where no policy is faster than decoding without speculation, commands say so: the baseline is a candidate."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsim.report.tuning import tuning_result
from tests.support.commands import call, json_of

TRACE = "example:lab-model"
FIXED = ("--policy", "fixed_k", "--trials", "4")
SAID = "Do not speculate here"


@pytest.fixture
def dear(tmp_path: Path) -> Path:
    """A draft step takes as long as the target's."""
    path = tmp_path / "dear.json"
    path.write_text('{"s_d": 0.01, "s_t": 0.01}')
    return path


@pytest.mark.parametrize("command", [("tune",), ("leaderboard", "--no-sensitivity")])
def test_a_command_that_names_a_best_says_not_to_speculate(command: tuple[str, ...], dear: Path) -> None:
    name, *more = command
    out = call("specsim", name, TRACE, "--cost", str(dear), *FIXED, *more).out
    assert SAID in " ".join(out.split())


def test_the_page_of_a_tuning_says_so(dear: Path) -> None:
    document = json_of(call("specsim", "tune", TRACE, "--cost", str(dear), *FIXED, "--json"))
    assert document["holdout"]["speedup"]["high"] < 1 and SAID in tuning_result(document).verdict


def test_a_sweep_says_so_of_each_cell(dear: Path) -> None:
    cheap = dear.with_name("cheap.json")
    cheap.write_text('{"s_d": 0.0001, "s_t": 0.01}')
    out = call("specsim", "sweep", TRACE, "--cost", str(dear), "--cost", str(cheap), *FIXED).out
    lines = {path.name: next(line for line in out.splitlines() if path.stem in line) for path in (dear, cheap)}
    assert "slower" in lines["dear.json"] and "faster" in lines["cheap.json"]
