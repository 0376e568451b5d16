"""The study of all drafters: its board has the prediction ladder and the truncated rounds of every row."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from specsim.cost.profile import ProfileCost
from specsim.policy.registry import make_policy
from specsim.replaying.prediction import ladder
from studies.common import parts
from tests.support.tree_traces import tree_trace

CONFIG = {"tuning_share": 0.5, "seed": 0}


def test_every_row_has_its_prediction_ladder() -> None:
    pytest.importorskip("torch")
    run = importlib.import_module("studies.board.run")
    contexts = np.array([1, 400])
    cost = ProfileCost(contexts, np.ones((5, 2)), np.zeros(2), np.full((6, 2), 12.0), np.full(2, 10.0), 0.0, 0.5)
    trace = tree_trace(4, sequences=6, depth=5, width=2, nodes=5)
    row = {"drafter": "eagle", "policy": "fixed_k", "params": {"k": 3}}
    row |= {"speedup": {"estimate": 1.5}, "measured": {"estimate": 1.25}}
    board = run.with_replays({"rows": [row]}, {"eagle": trace}, {"eagle": cost}, CONFIG)
    steps = ladder(parts(trace, CONFIG)[1], make_policy("fixed_k", {"k": 3}), cost)
    rungs = {"eq14": steps.eq14, "constant": steps.constant, "profile": 1.5, "measured": 1.25}
    assert board["rows"][0]["ladder"] == rungs and board["rows"][0]["truncated_share"] == 0
