"""Measure what every part of a round costs on this machine, through the real loop.

Rounds of every draft length and, if requested, trees of many sizes run with scripted acceptance, so that the timed code
is the code that decodes. They take turns (`realrun.measure.sweeps`) until every time is known precisely enough.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.machine_load import load_from, watch
from realrun.measure.stream import Stream
from realrun.measure.sweeps import Sweeps, imprecise
from realrun.pairs.pair import Pair
from specsim.cost.profile import LEAST_CONTEXT, Profile
from specsim.io.errors import InputError
from specsim.io.progress import Counter, no_progress

NUM_CONTEXTS = 4  # of a range
PRECISION, LIMIT_S = 0.01, 120.0
LEAST_SWEEPS = 5  # before an interval is believed
FULL_EVERY = 5  # sweeps: then precise times are measured, too; odd, because draft caches lag in every other sweep
TREE_TOKENS = 65  # largest tree that is profiled, the pending token included


def profile(
    pair: Pair,
    *,
    contexts: Sequence[int],
    depth: int = 16,
    precision: float = PRECISION,
    limit_s: float = LIMIT_S,
    sampler: Sampler | None = None,
    seed: int = 0,
    tree_tokens: int = TREE_TOKENS,
    progress: Counter = no_progress,
) -> dict[str, Any]:
    """Measure what every part of a round costs, through the real loop.

    Parameters
    ----------
    pair : Pair
    contexts : sequence of int
        Cached tokens before a round, increasing. The text is random, or repetitive for prompt lookup.
    depth : int
        Maximum draft length to measure, in tokens; less if the drafter drafts less.
    precision : float
        Half-width of the 95 % interval, relative to the time, at which a time is precise enough: of every decoding
        step, draft step and pass of the target.
    limit_s : float
        Seconds after which no further sweep begins. `LEAST_SWEEPS` sweeps are made in any case.
    sampler, seed
        How tokens are chosen; seed of the order of the rounds and of their acceptance.
    tree_tokens : int
        Largest tree, the pending token included; 0 for no trees.
    progress : callable, optional
        Called after every sweep with the times that are precise, or the share of them by which the limit is over if
        that is more, and all times.

    Returns
    -------
    dict
        JSON document of a cost profile, in seconds: means (robust, see `realrun.measure.curve`), medians and quartiles;
        relative half-widths of the means' 95 % intervals. `specsim.read_cost` reads its file.

    Raises
    ------
    InputError
        If the contexts do not fit the models, or the precision or the limit is out of range.

    Examples
    --------
    >>> import realrun
    >>> pair = realrun.load_pair(drafter="prompt-lookup")
    >>> document = realrun.profile(pair, contexts=[8, 16], depth=2, limit_s=0)
    >>> document["contexts"], len(document["median_s"]["verify"])
    ([8, 16], 3)
    """
    if not 0 < precision < 1:
        raise InputError(f"precision={precision}; give a share between 0 and 1, such as 0.01")
    if not limit_s >= 0:
        raise InputError(f"limit_s={limit_s}; give 0 seconds or more")
    load, begun_s, longest_s = watch(), time.monotonic(), 0.0
    sampler, wanted = sampler or Sampler(), None
    sweeps = Sweeps(pair, contexts, [], depth=depth, tree_tokens=tree_tokens, sampler=sampler, seed=seed)
    while True:
        last_s, number = sweeps.run(wanted), len(sweeps.done)
        longest_s, spent_s = max(longest_s, last_s), time.monotonic() - begun_s
        means = sweeps.means()
        wide, total = imprecise(means, contexts, precision), len(means) * len(contexts)
        over = min(1.0, spent_s / limit_s) if limit_s else 1.0
        progress(max(total - len(wide), int(over * total)), total)
        full = number < LEAST_SWEEPS or (number + 1) % FULL_EVERY == 0
        wanted = None if full else wide
        if number >= LEAST_SWEEPS and (not wide or spent_s + (longest_s if full else last_s) > limit_s):
            break
    widths = np.concatenate([mean.relative_half_width for mean in means.values()])
    widths = widths[np.isfinite(widths)]  # a time that a single sweep has is of unknown precision
    reached = {
        "asked": precision,
        "times": total,
        "precise": total - len(wide),
        "median": float(np.median(widths)) if widths.size else None,
        "largest": float(widths.max()) if widths.size else None,
    }
    return sweeps.profile(precision=reached, spent_s=spent_s, load=load_from([load()])._asdict()).as_dict()


def profile_slice(
    pair: Pair,
    done: list[Stream],
    count: int,
    *,
    contexts: Sequence[int],
    depth: int,
    sampler: Sampler,
    seed: int,
    tree_tokens: int,
    progress: Counter = no_progress,
) -> Profile:
    """Add this many sweeps to those that were made before; return the profile of all.

    progress : called with the sweeps of this slice that were made, and their number
    """
    load = watch()
    sweeps = Sweeps(pair, contexts, done, depth=depth, tree_tokens=tree_tokens, sampler=sampler, seed=seed)
    for number in range(1, count + 1):
        sweeps.run()
        progress(number, count)
    return sweeps.profile(load=load_from([load()])._asdict())  # of the last slice


def contexts_between(low: int, high: int) -> list[int]:
    """Choose contexts to profile, in cached tokens, spread evenly over the range that rounds meet."""
    spread = np.linspace(max(low, LEAST_CONTEXT), max(high, LEAST_CONTEXT), NUM_CONTEXTS)
    return sorted({int(context) for context in spread.round()})
