"""What rules of a server see in tests: running requests before a step, and the rounds of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.serving.draft_length import DraftRounds, Running


def running(cached: npt.ArrayLike, **known: Any) -> Running:
    """Requests with these contexts, of which nothing else is known unless given by name."""
    contexts = np.asarray(cached, dtype=np.int64)
    none = np.zeros_like(contexts)
    facts = {"request": np.arange(len(contexts)), "cached": contexts, "remaining": none + 1000}
    facts |= dict.fromkeys(("verified", "accepted", "behind"), none)
    return Running(**{**facts, "sequences": len(contexts), **known})


def rounds(verified: npt.ArrayLike, accepted: npt.ArrayLike) -> DraftRounds:
    """Rounds whose drafts were verified whole."""
    drafted, right = np.asarray(verified), np.asarray(accepted)
    return DraftRounds(drafted, drafted, right, right + 1, 0 * right, 0 * right, bool(drafted.any()))
