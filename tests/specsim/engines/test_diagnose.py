"""Why speculation is slow: times of known parts come apart into these parts, and the command says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specsim.acceptance.sources import Counters
from specsim.cost.linear import LinearCost, LinearPass
from specsim.cost.model import ConstantCost
from specsim.engines.diagnose import diagnose
from specsim.io.errors import InputError
from tests.support.commands import assert_refused, call, json_of

COUNTED = Counters(np.array([300_000] * 4), np.array([240_000, 168_000, 84_000, 16_800]))
EMITTED = 1 + 0.8 + 0.56 + 0.28 + 0.056


def rate(round_s: float) -> float:
    return EMITTED / round_s


def test_a_round_of_known_parts_comes_apart() -> None:
    """10 ms a token; drafting 4 x 2 ms, a target pass of 5 tokens 4 x 0.5 ms more, and 3 ms of the engine's own."""
    cost = LinearCost(target=LinearPass(0.0095, 0.0005), drafter=LinearPass(0.002))
    round_s = 0.010 + 0.008 + 0.002 + 0.003
    diagnosis = diagnose(COUNTED, baseline_tokens_per_s=100, tokens_per_s=rate(round_s), cost=cost)
    assert diagnosis.draft_tokens == 4 and diagnosis.round_tokens == pytest.approx(2.3, rel=1e-3)
    assert diagnosis.tokens_per_round.estimate == pytest.approx(EMITTED, rel=1e-3)
    assert diagnosis.speedup == pytest.approx(EMITTED / 2.3, rel=1e-3)
    assert [*diagnosis.parts.values()] == pytest.approx([1.0, 0.8, 0.2, 0.3], abs=5e-3)
    ((assumed, advice),) = diagnosis.advice
    assert assumed == "at these costs"
    # By hand: tokens over time of K = 1 to 4, at 10 + 3 ms a round and 2.5 ms a drafted token.
    speeds = [1.8 / 1.55, 2.36 / 1.8, 2.64 / 2.05, 2.696 / 2.3]
    assert [length.speedup.estimate for length in advice.lengths[1:]] == pytest.approx(speeds, rel=2e-3)
    assert advice.k == 2 and advice.sure


def test_costs_scale_to_the_measured_baseline() -> None:
    """The same shapes, on a machine twice as slow as the costs'."""
    cost = LinearCost(target=LinearPass(0.0095, 0.0005), drafter=LinearPass(0.002))
    diagnosis = diagnose(COUNTED, baseline_tokens_per_s=50, tokens_per_s=rate(2 * 0.020), cost=cost)
    assert [*diagnosis.parts.values()] == pytest.approx([1.0, 0.8, 0.2, 0.0], abs=5e-3)


def test_without_costs_both_ends_are_given() -> None:
    diagnosis = diagnose(COUNTED, baseline_tokens_per_s=100, tokens_per_s=rate(0.030))
    (grows, with_k), (fixed, without) = diagnosis.advice
    assert grows.startswith("best case") and fixed.startswith("worst case") and diagnosis.parts == {}
    # 5 ms a drafted token, or 20 ms a round: a round at K = 1 takes 15 or 30 ms.
    assert with_k.lengths[1].speedup.estimate == pytest.approx(1.8 / 1.5, rel=2e-3) and with_k.k == 1
    assert without.lengths[1].speedup.estimate == pytest.approx(1.8 / 3.0, rel=2e-3) and without.k == 0
    for advice in (with_k, without):  # both know the measured K
        assert advice.lengths[4].speedup.estimate == pytest.approx(diagnosis.speedup, rel=2e-3)


def test_rates_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="would be faster than a normal decode step"):
        diagnose(COUNTED, baseline_tokens_per_s=10, tokens_per_s=30)
    with pytest.raises(InputError, match=r"0 tokens per second without speculation; give a positive rate"):
        diagnose(COUNTED, baseline_tokens_per_s=0, tokens_per_s=30)
    with pytest.raises(InputError, match="nan tokens per second with speculation"):
        diagnose(COUNTED, baseline_tokens_per_s=10, tokens_per_s=float("nan"), cost=ConstantCost(0.001, 0.01))


def test_the_command_says_it_in_the_first_line(tmp_path: Path) -> None:
    counters = tmp_path / "counters.json"
    counters.write_text(json.dumps({"drafted": [1000] * 3, "accepted": [700, 400, 200]}))
    args = ["doctor", counters, "--baseline-tokens-per-second", 52, "--tokens-per-second", 41]
    shown = call("specsim", *args)
    assert (
        shown.code == 0
        and "0.79x (21 % slower): each step yields 2.30 tokens but costs as much as 2.92" in " ".join(shown.out.split())
    )
    assert "worst case (all overhead is fixed per round): turn speculation off" in shown.out
    document = json_of(call("specsim", *args, "--cost", "vllm-llama3.1-8b-eagle-h100", "--json"))
    assert len(document["parts"]) == 4 and document["advice"][0]["assumed"] == "at these costs"
    assert sum(document["parts"].values()) == pytest.approx(document["round_tokens"])
    assert_refused(call("specsim", *args[:-1], -3), "-3.0 tokens per second with speculation")
    assert_refused(call("specsim", *args[:-2]), "counters need --tokens-per-second and --baseline-tokens-per-second")
    assert_refused(call("specsim", *args, "--out", tmp_path / "page.html"), "do not go with counters")
    assert_refused(call("specsim", *args, "--concurrency", 4), "do not go with counters")
    assert_refused(call("specsim", "doctor", "http://localhost:1", *args[2:]), "go with counters; give a file")
