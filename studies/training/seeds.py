"""A training repeated with other seeds, each replayed on the same prompts: what the tables say of it.

The mean over seeds of a ratio of sums over prompts, such as the speedup, varies with the seeds that were drawn and with
the prompts; intervals cover both (`studies.training.over_seeds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from specsim.io.arrays import Floats
from specsim.replaying.intervals import Estimate
from studies.training.over_seeds import linear_parts, mean_over_seeds


@dataclass(frozen=True)
class Replayed:
    """Replay of a policy on one trained drafter's trace: totals per prompt [S].

    baseline_s, seconds : time without speculation, and under the policy
    tokens, rounds, drafted, accepted : counts; truncated, rounds that asked for nodes that were not recorded
    """

    baseline_s: Floats
    seconds: Floats
    tokens: Floats
    rounds: Floats
    drafted: Floats
    accepted: Floats
    truncated: Floats


Seeds = Mapping[int, Replayed]  # by seed


def as_document(value: Any) -> Any:
    """Replays, however deep in mappings, as JSON."""
    if isinstance(value, Replayed):
        return {name: values.tolist() for name, values in vars(value).items()}
    return {str(name): as_document(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def from_document(document: Any) -> Any:
    """What `as_document` was given; keys that are whole numbers are so again."""
    if not isinstance(document, Mapping):
        return document
    if document.keys() == {field.name for field in fields(Replayed)}:
        return Replayed(**{name: np.array(values) for name, values in document.items()})
    return {int(name) if name.isdigit() else name: from_document(inner) for name, inner in document.items()}


def share(runs: Seeds, of: str, over: str) -> float:
    """One count over another, each summed over seeds and prompts."""
    top, bottom = (sum(float(getattr(run, name).sum()) for run in runs.values()) for name in (of, over))
    return top / bottom


def speedup(runs: Seeds) -> Estimate:
    """Mean over seeds of the speedup."""
    return mean_over_seeds(linear_parts(*_seconds(runs)))


def tau(runs: Seeds) -> Estimate:
    """Mean over seeds of the acceptance length, tokens a round."""
    return mean_over_seeds(linear_parts(*_lengths(runs)))


def speedup_difference(a: Seeds, b: Seeds) -> Estimate:
    """Mean over seeds of the speedup of a less that of b; the same seeds and prompts."""
    return mean_over_seeds(linear_parts(*_seconds(a)) - linear_parts(*_seconds(b)))


def tau_difference(a: Seeds, b: Seeds) -> Estimate:
    """Mean over seeds of the acceptance length of a less that of b; the same seeds and prompts."""
    return mean_over_seeds(linear_parts(*_lengths(a)) - linear_parts(*_lengths(b)))


def _seconds(runs: Seeds) -> tuple[Floats, Floats]:
    return np.array([run.baseline_s for run in runs.values()]), np.array([run.seconds for run in runs.values()])


def _lengths(runs: Seeds) -> tuple[Floats, Floats]:
    return np.array([run.tokens for run in runs.values()]), np.array([run.rounds for run in runs.values()])
