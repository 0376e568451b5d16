"""Advice on engines that size drafts themselves, from counts alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from specsim.cost.files import as_cost
from specsim.cost.linear import LinearCost, LinearPass
from specsim.engines import self_sizing
from specsim.engines.by_load import ByLoad
from specsim.engines.self_sizing import adaptive_verification, schedule_line
from specsim.serving.rules.adaptive_verification import AdaptiveVerification, log_odds, observations, refitted
from specsim.trace.files import read_plain_trace
from tests.support.commands import call, json_of

SURVIVAL = [0.8, 0.6, 0.4, 0.3, 0.2]
COUNTS = {"drafted": [9000] * 4, "accepted": [7200, 5000, 2000, 400]}


def test_confidence_tells_as_much_as_that_of_the_shipped_trace() -> None:
    """The deviation of calibrated log odds, over tokens all before which are accepted."""
    trace, k = read_plain_trace("example:smollm2-eagle"), 4
    feature, whole = log_odds(trace.confidence[:, :k]), np.full(len(trace.token), k)
    state = AdaptiveVerification(LinearCost(LinearPass(1.0), LinearPass(1.0)), max_draft_tokens=k).initial_state()
    for _ in range(30):
        foretold = expit(state.slope * feature + state.intercepts).astype(np.float32)
        state = refitted(state._replace(statistics=observations(feature, foretold, whole, trace.match_len.astype(int))))
    seen = np.arange(k) <= trace.match_len[:, None]
    assert (state.slope * feature + state.intercepts)[seen].std() == pytest.approx(self_sizing.INFORMED_SD, abs=0.05)


def test_it_gains_what_is_not_verified_where_verification_is_all_that_costs() -> None:
    """Drafts are free, a verified token is not: what does not pay is left out, and no K knows which that is."""
    cost = LinearCost(LinearPass(0.010, 0.0005), LinearPass(1e-9))
    told = adaptive_verification(SURVIVAL, cost, 16, 1000, "eagle3")
    assert told is not None and told.gain > 0.05 > 0.01 > told.gain_uninformed > -0.05
    assert '"enable_adaptive_verification": true' in told.text("eagle3") and "switch it on" in told.text("eagle3")
    # Where verifying is free and drafting is not, it verifies all, and is as fast as its ceiling.
    drafting = LinearCost(LinearPass(0.010), LinearPass(0.002))
    off = adaptive_verification(SURVIVAL, drafting, 1, 1000, "eagle3")
    fixed = [(1 + sum(SURVIVAL[:k])) / (0.010 + 0.002 * k) for k in range(6)]
    assert off is not None and off.k == int(np.argmax(fixed)) and off.gain <= 0 and "leave it off" in off.text("eagle3")


def test_what_is_not_known_is_not_said() -> None:
    cost = LinearCost(LinearPass(0.010, 0.004), LinearPass(0.001))
    assert adaptive_verification(SURVIVAL, cost, 16, 1000, None) is None
    assert adaptive_verification(SURVIVAL, cost, 16, 1000, "prompt-lookup") is None
    assert adaptive_verification(SURVIVAL, as_cost("vllm-llama3.1-8b-eagle3-h100"), 1, 1000, "eagle3") is None
    assert schedule_line("sglang", None, "eagle3") is None
    assert schedule_line("sglang", ByLoad([1, 2], {"0": [1, 1], "1": [2, 2]}), "eagle3") is None


def test_advise_says_it_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "counters.json").write_text(json.dumps(COUNTS))
    args = ("advise", tmp_path / "counters.json", "--gpu", "h100", "--target", "llama-3.1-8b", "--drafter", "eagle3")
    shown = call("specsim", *args, "--engine", "vllm")
    assert shown.out.splitlines()[-3].startswith("adaptive verification (vLLM 0.32): ")
    assert json_of(call("specsim", *args, "--engine", "vllm", "--json"))["self_sizing"]["requests"] == 1
    average = ("advise", "--accept-length", "2.4", "--k", "3", *args[2:])
    assert "adaptive verification" not in call("specsim", *average, "--engine", "vllm").out  # nothing by position
    by_load = call("specsim", *args, "--engine", "tensorrt-llm").out.splitlines()[-3]
    assert by_load.startswith("K by requests at once 1:") and "draft_len_schedule: {" in by_load
