"""The study of chain policies: the best of several is picked on the tuning prompts, and the report says so."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from specsim.cost.model import ConstantCost
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.renewal_stop import RenewalStop
from specsim.ranking.leaderboard import Board, leaderboard
from studies.chain_policies import questions
from tests.support.tree_traces import tree_trace


@pytest.fixture(scope="module")
def board() -> Board:
    kinds = [FixedK, MaxConfidence, AdaEDL, BetaTS, RenewalStop]
    trace = tree_trace(2, sequences=8, depth=5, width=2, nodes=5)
    options: dict[str, Any] = {"kinds": kinds, "trials": 2, "replays": 1, "sensitivity": False, "jobs": 1}
    return leaderboard({"t": trace}, [ConstantCost(1.0, 10.0)], **options)[0]


def rowed(board: Board, **train: float) -> Board:
    """The board with these speedups on the tuning sequences, by label with _ for what is no letter."""
    rows = [
        dataclasses.replace(row, train_speedup=train.get(row.label.replace(", ", "_").replace(" ", "_"), 0.0))
        for row in board.rows
    ]
    return dataclasses.replace(board, rows=rows)


def test_the_best_of_several_is_picked_on_the_tuning_sequences(board: Board) -> None:
    forms = [row for row in board.rows if row.policy.name == "beta_ts"]  # best on the reported sequences first
    last = forms[-1].label
    assert len(forms) > 1
    turned = rowed(board, **{last.replace(", ", "_").replace(" ", "_"): 9.0})
    found = questions.best(turned, "beta_ts")
    assert found is not None and found.label == last != forms[0].label
    asked = dict(questions.questions(turned))
    renewal = questions.row(turned, "renewal_stop, fitted")
    answer = questions.verdict(questions.compare(turned, renewal, found))
    assert asked["RenewalStop against the best of all others"] == answer
    assert asked["RenewalStop against the best Thompson sampling"] == answer


def test_the_rules_of_adaedls_table_are_ordered_only_where_they_differ(board: Board) -> None:
    text = questions.rule_order(board)
    assert all(name in text for name in questions.RULES.values())
    alike = dataclasses.replace(
        board, rows=[dataclasses.replace(row, speculative_s=board.rows[0].speculative_s) for row in board.rows]
    )
    order = "not decided whether as in the paper, which has Base-SPD < Max-Confidence < AdaEDL"
    assert order in questions.rule_order(alike)


def test_the_report_is_whole(board: Board) -> None:
    pytest.importorskip("torch")
    run = importlib.import_module("studies.chain_policies.run")
    rows = [
        {
            "label": str(one.policy),
            "policy": one.policy.name,
            "params": one.policy.settings,
            "role": "tuned",
            "predicted": one.prediction.speedup.as_dict(),
            "measured": one.prediction.speedup.as_dict(),
            "error_percent": 1.0,
            "rounds_identical_percent": 100.0,
            "sequence_seconds": one.speculative_s.tolist(),
            "ladder": {"eq14": 1.0, "constant": 1.1, "profile": 1.2, "measured": 1.25},
        }
        for one in board.rows
    ]
    document = {
        "rows": rows,
        "autoregressive_sequence_seconds": board.baseline_s.tolist(),
        "null_arm": {"estimate": 1.0, "low": 0.99, "high": 1.01},
        "noise_floor_percent": 1.0,
        "load": {"others_percent": 40.0, "stolen_percent": 0.0},
        "baseline": {"tokens_per_s": 71.43, "ms_per_token": 14.0},
        "sequences": {"tuning": 4, "holdout": 4},
        "dtype": "float32",
        "environment": {"device": "a machine", "threads": 1, "date": "2026-01-01"},
    }
    config = {"target": "lab-deep", "prompts": 8, "max_new_tokens": 60, "cost_ratio": 0.05, "repeats": 2}
    boards = {"greedy": {run.MEASURED: [board], run.CHEAP: [board]}}
    report = run.report_text(config, {"greedy": document}, boards)
    assert "picked on the tuning sequences" in report and "cost of a deep one" in report
    assert "| greedy | 40 | 14.00 | 1.000 [0.990, 1.010] | 1.00 | 1.00, met | 1.00, met |" in report
    assert "| median error | 20.00 % | 12.00 % | 4.00 % |  |" in report
    assert report.count(questions.rule_order(board)) == 2
