"""The verdict errs as rarely as it says, and finds what it shall, on restarts with a known slowdown."""

from __future__ import annotations

import numpy as np

from realrun.versions.compare import CompareSettings, RestartFile, finished, rows_of
from specsim.policy.registry import make_policy

SETTINGS = CompareSettings({}, [make_policy("fixed_k", {"k": 3})], minutes=1e9)
PROMPTS, PROCESSES = 4, 3
CLUSTER = 0.02  # a process is this much slower than others, or not, for as long as it lives
DRIFT = 0.05  # standard deviation of the machine's speed between restarts
NOISE = 0.01  # standard deviation of a prompt's seconds within a restart


def simulated(rng: np.random.Generator, slowdown: tuple[float, float]) -> RestartFile:
    """Simulate a restart. slowdown : of the head, in the baseline and the policy"""
    cluster = np.exp(CLUSTER * rng.integers(2, size=PROCESSES))
    machine = np.exp(DRIFT * rng.standard_normal())
    runs = []
    for slower in slowdown:
        seconds = np.exp(NOISE * rng.standard_normal((PROCESSES, PROMPTS))) * cluster[:, None] * machine
        seconds[1] *= 1 + slower
        runs.append(
            [[{"tokens": 48, "rounds": 20, "text": "a", "log": "a", "seconds": s} for s in own] for own in seconds]
        )
    return {"spent_s": 1.0, "ticks": [0.0] * 4, "runs": runs}  # type: ignore[typeddict-item]


def verdicts(rng: np.random.Generator, slowdown: tuple[float, float], most: int) -> tuple[list[str], int]:
    """Compare until it is decided, or up to `most` restarts; return the rows' verdicts and the restarts."""
    restarts: list[RestartFile] = []
    while not restarts or not (finished(restarts, SETTINGS) or len(restarts) >= most):
        restarts.append(simulated(rng, slowdown))
    return [row["verdict"] for row in rows_of(restarts, SETTINGS)], len(restarts)


def share(slowdown: tuple[float, float], row: int | None, verdict: str, most: int, times: int) -> float:
    """Return the share of comparisons in which a row, or any, has this verdict."""
    rng = np.random.default_rng(0)
    results = [verdicts(rng, slowdown, most)[0] for _ in range(times)]
    return float(np.mean([verdict in (result if row is None else [result[row]]) for result in results]))
