"""The study of all drafters: its board has the ladder, the noise floor and the truncated rounds of every row."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from specsim.cost.profile import ProfileCost
from specsim.policy.registry import make_policy
from specsim.speedup.prediction import ladder
from studies.common import parts
from tests.support.tree_traces import tree_trace

CONFIG = {"repeats": 2, "target": "lab-deep", "prompts": 6, "max_new_tokens": 60, "tuning_share": 0.5, "seed": 0}


def board_row(**params: Any) -> dict[str, Any]:
    spread = {"estimate": 1.5, "low": 1.4, "high": 1.6}
    return {
        "drafter": "eagle", "policy": "fixed_k", "params": params, "form": "fixed_k, tuned", "settings": "k=3",
        "speedup": spread, "measured": {**spread, "estimate": 1.25}, "leader_minus_this": None,
        "tied_with_leader": False, "best_of_drafter": True, "own_target": False, "error_percent": 20.0,
        "tau": 2.5, "v_d": 0.5, "hm": 0.5, "without_loops": {**spread, "estimate": 1.125},
    }  # fmt: skip


def test_every_row_has_its_ladder_and_the_report_its_noise_floor() -> None:
    pytest.importorskip("torch")
    run = importlib.import_module("studies.board.run")
    contexts = np.array([1, 400])
    cost = ProfileCost(contexts, np.ones((5, 2)), np.zeros(2), np.full((6, 2), 12.0), np.full(2, 10.0), 0.0, 0.5)
    trace = tree_trace(4, sequences=6, depth=5, width=2, nodes=5)
    document = {
        "rows": [board_row(k=3)],
        "null_arm": {"estimate": 1.0, "low": 0.98, "high": 1.02},
        "noise_floor_percent": 2.5,
        "load": {"others_percent": 40.0, "stolen_percent": 0.0},
        "baseline": {"tokens_per_s": 71.43, "ms_per_token": 14.0},
        "sequences": {"tuning": 3, "holdout": 3},
        "looping_prompts": 1,
        "dtype": "float32",
        "environment": {"device": "a machine", "threads": 1, "date": "2026-01-01"},
        "drafters": [{"name": "eagle", "first_token_accepted_share": 0.5, "step_ratio": 0.1, "depth": 5}],
    }
    made = run.with_replays(document, {"eagle": trace}, {"eagle": cost}, CONFIG)
    steps = ladder(parts(trace, CONFIG)[1], make_policy("fixed_k", {"k": 3}), cost)
    rungs = {"eq14": steps.eq14, "constant": steps.constant, "profile": 1.5, "measured": 1.25}
    assert made["rows"][0]["ladder"] == rungs and made["rows"][0]["truncated_share"] == 0
    report = run.report_text(CONFIG, {"greedy": made})
    assert (
        "| greedy | 40 | 14.00 | 1.000 [0.980, 1.020] | 2.50, too noisy to tell policies apart | 20.00, missed |"
        in report
    )
    assert f"| eagle, fixed_k, tuned | {steps.eq14:.3f} | {steps.constant:.3f} | 1.500 | 1.250 |" in report
    assert "cost of a deep one. EESD's speedups are withdrawn" in report
    board = {**made, "rows": [*made["rows"], {**made["rows"][0], "drafter": "eesd"}]}
    assert "| eesd |" not in run.report_text(CONFIG, {"greedy": board})
    board["block_expansion"] = {"core_layers": 8}
    again = run.report_text(CONFIG, {"greedy": board})
    assert "| eesd |" in again and "withdrawn" not in again
    assert "| 1.125 [1.400, 1.600] |" in report and "The text of 1 of the 3 prompts loops" in report
    rows = [{**made["rows"][0], "without_loops": None}]
    assert "Too few are left" in run.report_text(CONFIG, {"greedy": {**made, "rows": rows, "looping_prompts": 2}})
