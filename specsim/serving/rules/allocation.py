"""Hand out drafted tokens over requests: the likeliest first, as many as fit or as pay."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import FloatArray, Floats, Ints, Seconds


def likeliest(survival: FloatArray, drafted: Ints) -> tuple[Floats, Ints]:
    """Survival of all drafted tokens, largest first, and the request of each. survival : [R, i]; drafted : [R]

    Of tokens that are as likely, the earlier of a draft comes first, so that any first few are prefixes of drafts.
    """
    by_depth = np.minimum.accumulate(survival, axis=1).T
    made = np.arange(len(by_depth))[:, None] < drafted
    chances = by_depth[made].astype(np.float64)
    order = np.argsort(-chances, kind="stable")
    return chances[order], np.nonzero(made)[1][order]


def hand_out(survival: FloatArray, drafted: Ints, count: int) -> Ints:
    """Tokens of each draft [R] among the `count` likeliest of all drafts."""
    _, request = likeliest(survival, drafted)
    return np.bincount(request[:count], minlength=len(drafted))


def best_count(chances: npt.ArrayLike, added_s: Seconds, value_s: float) -> int:
    """How many of these chances to take, in order, so that value_s x their sum - added_s is the most.

    chances : [n], largest first; added_s : [n + 1], seconds that 0..n of them add; value_s : of a token
    """
    gained = np.concatenate([[0.0], np.cumsum(chances)])
    return int(np.argmax(value_s * gained - added_s))
