"""The verdict errs as rarely as it says, and finds what it shall, on restarts with a known slowdown."""

from __future__ import annotations

import numpy as np
import pytest

from realrun.versions.compare import (
    LOOKS,
    CompareSettings,
    RestartFile,
    change_percent,
    confidence_of_a_look,
    finished,
    over_restarts,
    rows_of,
)
from specsim.policy.registry import make_policy

SETTINGS = CompareSettings({}, [make_policy("fixed_k", {"k": 3})], minutes=1e9)
PROMPTS, PROCESSES = 4, 3
CLUSTER = 0.02  # a process is this much slower than others, or not, for as long as it lives
DRIFT = 0.05  # standard deviation of the machine's speed between restarts
NOISE = 0.01  # standard deviation of a prompt's seconds within a restart


def simulated(rng: np.random.Generator, slowdown: tuple[float, float], unsteady: float = 0.0) -> RestartFile:
    """Simulate a restart. slowdown, unsteady : of the head, in the baseline and the policy; of the head's process"""
    cluster = np.exp(CLUSTER * rng.integers(2, size=PROCESSES))
    cluster[1] *= np.exp(unsteady * rng.standard_normal())
    machine = np.exp(DRIFT * rng.standard_normal())
    runs = []
    for slower in slowdown:
        seconds = np.exp(NOISE * rng.standard_normal((PROCESSES, PROMPTS))) * cluster[:, None] * machine
        seconds[1] *= 1 + slower
        runs.append(
            [[{"tokens": 48, "rounds": 20, "text": "a", "log": "a", "seconds": s} for s in own] for own in seconds]
        )
    return {"spent_s": 1.0, "ticks": [0.0] * 4, "runs": runs}  # type: ignore[typeddict-item]


def verdicts(
    rng: np.random.Generator, slowdown: tuple[float, float], most: int, unsteady: float = 0.0
) -> tuple[list[str], int]:
    """Compare until it is decided, or up to `most` restarts; return the rows' verdicts and the restarts."""
    restarts: list[RestartFile] = []
    while not restarts or not (finished(restarts, SETTINGS) or len(restarts) >= most):
        restarts.append(simulated(rng, slowdown, unsteady))
    return [row["verdict"] for row in rows_of(restarts, SETTINGS)], len(restarts)


def shares(slowdown: tuple[float, float], most: int, times: int, unsteady: float = 0.0) -> dict[str, float]:
    """Return the shares of comparisons that call the policy slower, and that see any change in any row."""
    rng = np.random.default_rng(0)
    results = [verdicts(rng, slowdown, most, unsteady)[0] for _ in range(times)]
    return {
        "slower": float(np.mean([policy == "slower" for _, policy in results])),
        "any": float(np.mean([bool({"slower", "faster"} & {*result}) for result in results])),
    }


LEVEL = 0.05
DEFAULT, MANY = 200, 6000


@pytest.mark.parametrize("times", [DEFAULT, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unsteady", [0.0, 0.01])
def test_equal_versions_are_rarely_told_apart(unsteady: float, times: int) -> None:
    """However many looks, rows and restarts, and if the head's processes vary twice as much as the base's."""
    assert shares((0, 0), LOOKS[-1], times, unsteady)["any"] < LEVEL


@pytest.mark.parametrize("times", [DEFAULT, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slowdown", [(0.03, 0.03), (0, 0.03)], ids=["whole", "drafter"])
def test_a_slowdown_of_3_percent_is_found_in_6_restarts(slowdown: tuple[float, float], times: int) -> None:
    assert shares(slowdown, 6, times)["slower"] > 0.93


def test_more_restarts_find_a_smaller_slowdown() -> None:
    found = [shares((0.015, 0.015), most, 100)["slower"] for most in (4, LOOKS[-1])]
    assert found[0] < 0.3 and found[1] > 0.6


def test_intervals_hold_the_truth_at_every_look_at_once() -> None:
    """In two rows of the same processes."""
    rng, missed, times = np.random.default_rng(1), 0, 1000
    for _ in range(times):
        cluster = CLUSTER * rng.integers(2, size=(PROCESSES, LOOKS[-1]))
        intervals = []
        for _row in range(2):
            base, head, null = cluster + NOISE / 2 * rng.standard_normal(cluster.shape)
            for look in LOOKS:
                spread, _ = over_restarts(head[:look], base[:look], null[:look])
                log_ratio = float((head - (base + null) / 2)[:look].mean())
                intervals.append(change_percent(log_ratio, [spread], confidence_of_a_look(2)))
        missed += any(not interval.low <= 0 <= interval.high for interval in intervals)
    assert missed / times < LEVEL


def test_prompts_are_the_sample_of_a_change_of_rounds() -> None:
    """A change that half of the prompts gain by and the others lose by is one of these prompts only."""
    restarts = [simulated(np.random.default_rng(seed), (0, 0)) for seed in range(LOOKS[-1])]
    for restart in restarts:
        for prompt, run in enumerate(restart["runs"][1][1]):
            run["seconds"] *= (0.8, 1.1)[prompt % 2]
    same_rounds = rows_of(restarts, SETTINGS)[1]
    for restart in restarts:
        for run in restart["runs"][1][1]:
            run["log"] = "other"
    other_rounds = rows_of(restarts, SETTINGS)[1]
    assert (same_rounds["verdict"], other_rounds["verdict"]) == ("faster", "not decidable")
    assert same_rounds["slowdown_percent"]["estimate"] == other_rounds["slowdown_percent"]["estimate"]


def test_rounds_are_the_same_only_if_they_are_in_every_restart() -> None:
    restarts = [simulated(np.random.default_rng(seed), (0, 0)) for seed in range(2)]
    restarts[1]["runs"][1][1][0]["log"] = "other"
    baseline, policy = rows_of(restarts, SETTINGS)
    assert (baseline["rounds_identical_percent"], policy["rounds_identical_percent"]) == (100, 100 * 7 / 8)
