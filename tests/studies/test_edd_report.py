"""The report of the study of EDD: whole, from made-up documents, and no word that they do not carry."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from studies.costs import KNEE, PAPER
from tests.studies.test_edd_study import board_row, document, row, spread

CONFIG = {
    "repeats": 2,
    "target": "lab-deep",
    "prompts": 12,
    "max_new_tokens": 16,
    "runs": [{"name": "greedy"}],
    "paper": {"s_d": 1.1e-3, "s_t": 29.8e-3, "overhead_s": 4.9e-3, "node_s": 7e-6},
    "knee": {"tokens": 32},
}
FACTS = {"text": {"corpus": "library", "generated_share": 0.5}, "parameters": 1000, "tokens": 5e6}


def validation(drafter: str, trees: bool) -> dict[str, Any]:
    made = document("medusa" if drafter == "medusa-1" else drafter)
    if trees:
        made["rows"] += [row(name, f"{name}()", 1.1, 1.1) for name in ("vct", "cape", "hardware_pct")]
    else:
        made["rows"] = [one for one in made["rows"] if one["policy"] not in ("pct", "eagle2")]
    return {
        **made,
        "step_ratio": 0.05,
        "first_token_accepted_share": 0.6,
        "null_arm": spread(1.0),
        "load": {"others_percent": 40.0, "stolen_percent": 0.0},
        "baseline": {"tokens_per_s": 71.43, "ms_per_token": 14.0},
        "sequences": {"tuning": 8, "holdout": 4},
        "dtype": "float32",
        "environment": {"device": "a machine", "threads": 1, "date": "2026-01-01"},
        "reliability": {
            "count": [2, 0, 2],
            "mean_confidence": [0.1, None, 0.9],
            "accept_rate": [0.4, None, 1.0],
            "ece": 0.2,
        },
    }


def board(*rows: dict[str, Any], skipped: tuple[dict[str, str], ...] = ()) -> dict[str, Any]:
    for one in rows:
        one["truncated_share"] = 0.0
    return {"rows": list(rows), "baseline_s": [3.0, 2.0], "left_out": [], "skipped": list(skipped)}


def trees() -> dict[str, Any]:
    labels = {
        "vct": "vct, 3 wide, 5 deep, 10 a level",
        "cape": "cape, 7, 5, 3, 1",
        "eagle2": "eagle2, 50 nodes, depth 6",
    }
    labels |= {"pct": "pct, s_d / s_t of the costs"}
    rows = [board_row(name, label, 1 + n / 5) for n, (name, label) in enumerate(labels.items())]
    reason = "costs cover trees of up to 65 tokens, policy vct() may need 364; lower its limit"
    return board(*rows, skipped=({"policy": "vct, 3 wide, 5 deep, full", "reason": reason},))


def test_the_report_is_whole_and_says_nothing_that_is_not_in_its_tables(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = importlib.import_module("studies.edd.text")
    names = ("vdm", "medusa-1", "eagle", "edd")
    documents = {name: validation(name, name == "edd") for name in names}
    for name, one in documents.items():
        frames = [
            pd.DataFrame({"policy": r["label"], "sequence_id": [0, 0, 1], "drafted": 9, "verified": 5})
            for r in one["rows"]
        ]
        (tmp_path / "greedy" / name).mkdir(parents=True)
        pd.concat(frames).to_parquet(tmp_path / "greedy" / name / "rounds.parquet")
    boards = {"greedy": {PAPER: trees(), KNEE: trees()}}
    report = text.report_text(CONFIG, dict.fromkeys(names, FACTS), {"greedy": documents}, boards, tmp_path)
    assert "Likely" not in report and "lower bound" not in report
    assert report.count("acceptance of the trained model and the cost of a deep one") == 1
    assert "| EDD | 40 | 14.00 | 1.000 [0.990, 1.010] | 0.50 |" in report
    assert "tau at K = 5, MEDUSA-1 at 4: " in report and "which has MEDUSA-1 < VDM < EAGLE < EDD" in report
    assert "which has VDM < MEDUSA-1 < EAGLE < EDD" in report  # by speedup the paper has another order
    order = "VCT (1.00) < CAPE (1.20) < EAGLE-2 (1.40) < PCT (1.60); as in the paper."
    assert f"- The trees replayed, {PAPER}, in the paper's settings, VCT with 10 nodes a level: {order}" in report
    assert f"Not compared at {PAPER}, as they may verify more than 64 nodes: vct, 3 wide, 5 deep, full." in report
    assert report.count("not decided whether as in the paper") + report.count("not as in the paper") >= 2
