"""Recorded steps of an engine or a batch profile, to which `specsim.cost.step_times` is fitted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost
from specsim.cost.model import MAX_SECONDS, MIN_SECONDS
from specsim.cost.step_times import Steps
from specsim.io.errors import InputError
from specsim.io.files import read_csv


def profile_steps(profile: BatchProfileCost) -> Steps:
    """Target passes of a batch profile, each with the step's overhead added."""
    axes = np.meshgrid(profile.batches, profile.contexts, profile.tokens, indexing="ij")
    batch, context, tokens = (axis.ravel() for axis in axes)
    batches = BatchTokens.alike(batch, tokens, context)
    return Steps(batches.sequences, batches.new, batches.cached, profile.verify_s.ravel() + profile.step_s)


def read_steps(path: Path) -> Steps:
    """Read steps from a CSV file (sequences, tokens, cached_tokens, seconds) or from a batch profile (.json).

    Raises InputError for another file and for invalid values.
    """
    name = f"steps {path}"
    if path.suffix.lower() == ".json":
        return profile_steps(_profile(path))
    import pandas as pd  # slow to import

    expected = f"give a CSV file with the columns {','.join(Steps._fields)}, or a batch profile (.json)"
    frame = read_csv(path, name, expected)
    if not set(Steps._fields) <= set(frame.columns):
        raise InputError(f"{name} has the columns {', '.join(map(str, frame.columns))}; {expected}")
    steps = Steps(*(pd.to_numeric(frame[field], errors="coerce").to_numpy(np.float64) for field in Steps._fields))
    bounds = {"tokens": (1, 2**40), "sequences": (1, steps.tokens), "cached_tokens": (0, 2**40),
              "seconds": (MIN_SECONDS, MAX_SECONDS)}  # fmt: skip
    for field, (low, high) in bounds.items():
        values = getattr(steps, field)
        invalid = ~((low <= values) & (values <= high))  # also of NaN
        if invalid.any():
            row = int(invalid.argmax())
            raise InputError(
                f"{name}: line {row + 2} has {field}={frame[field][row]}; give sequences with at least 1 token each, "
                "cached tokens of 0 or more, and positive seconds"
            )
    return steps


def _profile(path: Path) -> BatchProfileCost:
    profile = read_cost(path)
    if not isinstance(profile, BatchProfileCost):
        raise InputError(f"steps {path} are not a batch profile; run `realrun batch-profile`, or give a CSV file")
    return profile
