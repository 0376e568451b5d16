"""Steps that an engine or a profile recorded, as `specsim.cost.step_times` is fitted to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost
from specsim.cost.model import MAX_SECONDS, MIN_SECONDS
from specsim.cost.step_times import Steps
from specsim.errors import InputError
from specsim.files import read_csv


def profile_steps(profile: BatchProfileCost) -> Steps:
    """The passes of the target that a batch profile measured, each with what a step takes beside its pass."""
    axes = np.meshgrid(profile.batches, profile.contexts, profile.tokens, indexing="ij")
    batch, context, tokens = (axis.ravel() for axis in axes)
    held = BatchTokens.alike(batch, tokens, context)
    return Steps(held.sequences, held.new, held.cached, profile.verify_s.ravel() + profile.step_s)


def read_steps(path: Path) -> Steps:
    """Steps of a CSV file with the columns sequences, tokens, cached_tokens and seconds, or of a batch profile (.json).

    Raises InputError for another file, and for values that are none.
    """
    name = f"steps {path}"
    if path.suffix.lower() == ".json":
        return profile_steps(_profile(path))
    import pandas as pd  # slow to import

    wanted = f"give a CSV file with the columns {','.join(Steps._fields)}, or a batch profile (.json)"
    frame = read_csv(path, name, wanted)
    if not set(Steps._fields) <= set(frame.columns):
        raise InputError(f"{name} has the columns {', '.join(map(str, frame.columns))}; {wanted}")
    steps = Steps(*(pd.to_numeric(frame[field], errors="coerce").to_numpy(np.float64) for field in Steps._fields))
    bounds = {"tokens": (1, 2**40), "sequences": (1, steps.tokens), "cached_tokens": (0, 2**40),
              "seconds": (MIN_SECONDS, MAX_SECONDS)}  # fmt: skip
    for field, (low, high) in bounds.items():
        values = getattr(steps, field)
        wrong = ~((low <= values) & (values <= high))  # also where it is no number
        if wrong.any():
            row = int(wrong.argmax())
            raise InputError(
                f"{name}: line {row + 2} has {field}={frame[field][row]}; give a pass's sequences, of which each has a "
                "token at least, cached tokens of 0 or more, and positive seconds"
            )
    return steps


def _profile(path: Path) -> BatchProfileCost:
    profile = read_cost(path)
    if not isinstance(profile, BatchProfileCost):
        raise InputError(
            f"steps {path} are no batch profile; make one with `realrun batch-profile`, or give a CSV file"
        )
    return profile
