"""The study of ablations: comparisons by hand, printed cells, and one row from training options to a real run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from specsim.replaying.intervals import Estimate
from studies.__main__ import HOME
from studies.ablations import run as study

CONFIG = tomllib.loads((HOME / "ablations" / "config.toml").read_text())


def run(baseline_s: list[float], **rows: Any) -> dict[str, Any]:
    return {"baseline_s": baseline_s, "rows": rows}


def row(seconds: list[float], rounds: list[int]) -> dict[str, Any]:
    return {"seconds": seconds, "rounds": rounds, "tokens": [12, 12]}


def test_two_rows_are_compared_over_the_baselines_of_their_own_runs() -> None:
    """A speedup of 4 / 2 against one of 8 / 5; 12 tokens in 4 rounds against 12 in 6."""
    runs = {"a": run([2.0, 2.0], p=row([1.0, 1.0], [4, 4])), "b": run([4.0, 4.0], p=row([2.5, 2.5], [6, 6]))}
    speedup, tau = (study.ratio(runs, "a: p", "b: p", of) for of in ("speedup", "tau"))
    assert speedup is not None and tau is not None
    assert speedup.estimate == pytest.approx(2.0 / 1.6) and tau.estimate == pytest.approx(3.0 / 2.0)
    assert study.ratio(runs, "a: p", "c: p", "tau") is None


def test_arms_with_texts_of_their_own_add_their_spreads() -> None:
    """Half-widths of 20 % and 10 % on the logarithm: hypot(log 1.2, log 1.1) = log 1.2282."""
    arms = {
        "x": {"acceleration_rate": {"estimate": 3.0, "low": 3.0 / 1.2, "high": 3.0 * 1.2}},
        "y": {"acceleration_rate": {"estimate": 2.0, "low": 2.0 / 1.1, "high": 2.0 * 1.1}},
    }
    ratio = study.ratio({"typical": {"arms": arms}}, "typical: x", "typical: y", "tau")
    assert ratio is not None
    assert ratio.as_dict() == pytest.approx({"estimate": 1.5, "low": 1.5 / 1.2282, "high": 1.5 * 1.2282}, rel=1e-3)


@pytest.mark.parametrize(
    ("papers", "low", "high", "verdict"),
    [(5, 1, 3, "agrees"), (-5, 1, 3, "disagrees"), (-5, -3, -1, "agrees"), (5, -1, 3, "not significant")],
)
def test_a_sign_is_judged_where_the_interval_excludes_none(papers: int, low: int, high: int, verdict: str) -> None:
    assert study.verdict(papers, Estimate((low + high) / 2, low, high)) == verdict
    assert study.verdict(papers, None) == "not run"


def test_papers_are_read_where_the_lines_say() -> None:
    """EDD's table 3: 2.58 without the encoding, 3.04 with it; EESD's table 11 with r_d."""
    (line,) = [line for line in CONFIG["ablations"]["rows"] if line[1] == "no encoding (VDM)"]
    assert study.ablation({}, line).paper_percent == pytest.approx(100 * (2.58 / 3.04 - 1))
    assert all(isinstance(line[5], int) or len([study.cell(place) for place in line[5]]) == 2 for line in rows())
    assert study.cell("eesd_4 | w/o TS, K = 10 | xsum | speedup") == 1.58


def rows() -> list[Any]:
    return list(CONFIG["ablations"]["rows"])


def test_every_line_compares_rows_that_some_run_has() -> None:
    pytest.importorskip("torch")
    from studies.ablations.run import policies

    made = {f"{name}: {policy}" for name, one in CONFIG["runs"].items() for policy in one.get("policies", [])}
    made |= {f"typical: {arm}" for arm in ("sampling", "epsilon = 0.01", "epsilon = 0.09", "epsilon = 0.25")}
    asked = {line[place] for line in rows() for place in (2, 3)} | {one["row"] for one in CONFIG["systems"].values()}
    sizes = {name: [one.get(key) for key in ("prompts", "max_new_tokens")] for name, one in CONFIG["runs"].items()}
    assert all(sizes[line[2].partition(": ")[0]] == sizes[line[3].partition(": ")[0]] for line in rows())
    assert asked <= made and set(CONFIG["later"]) <= set(CONFIG["runs"])
    for one in CONFIG["runs"].values():
        assert sum(len(kind.variants) for kind in policies(one.get("policies", []))) == len(one.get("policies", []))


@pytest.mark.slow
def test_a_line_is_trained_forecast_and_really_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from studies.ablations.run import decoded

    small = {"decoded": "lab", "prompts": 4, "tuning_share": 0.5, "max_new_tokens": 8, "depth": 2, "clock": "wall"}
    training = {"shared": "--smoke-test", "predictor": ""}
    line = {"drafter": "eesd", "policies": ["fixed_k, k = 2"]}
    document = decoded(tmp_path, "EESD", line, {**CONFIG, **small, "training": training}, lambda *_: None)
    (policy,) = document["rows"].values()
    assert policy["rounds_identical_percent"] == 100 and policy["forecast"]["estimate"] > 0
    assert json.loads((tmp_path / "drafters/eesd/training.json").read_text())["options"].startswith("eesd --layers 1")
