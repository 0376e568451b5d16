"""Probe the machine's state: seconds of small passes, draft steps and decoding steps, in less than half a minute.

With a probe, a profile from before holds for the machine as it is now (`specsim.cost.probe`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.machine_load import load_from, watch
from realrun.measure.curve import Influences, half_width
from realrun.measure.profile import LEAST_SWEEPS
from realrun.measure.stream import Key
from realrun.measure.sweeps import Sweeps, measurement_facts
from realrun.pairs.pair import Pair
from specsim.cost.probe import PROBE_KIND, PROBE_VERSION
from specsim.io.errors import InputError
from specsim.io.progress import Counter, no_progress

CONTEXTS = (64, 128)
PASS_TOKENS = 5  # of the longest pass: the state of a machine moves small passes most
LIMIT_S = 15.0


def probe(
    pair: Pair,
    *,
    contexts: Sequence[int] = CONTEXTS,
    limit_s: float = LIMIT_S,
    sampler: Sampler | None = None,
    seed: int = 0,
    progress: Counter = no_progress,
) -> dict[str, Any]:
    """Measure the state of the machine: passes over one to five tokens, draft steps and decoding steps, in turns.

    Parameters
    ----------
    pair : Pair
    contexts : sequence of int
        Cached tokens before a round, increasing; within those of the profile that is to be rescaled.
    limit_s : float
        Seconds after which no further sweep begins. `realrun.measure.profile.LEAST_SWEEPS` sweeps are made in any case.
    sampler, seed
        How tokens are chosen; seed of the order of the rounds and of their acceptance.
    progress : callable, optional
        Called with (seconds, limit) after every sweep.

    Returns
    -------
    dict
        JSON document: seconds by context, relative half-widths of 95 % intervals, the machine's load.

    Raises
    ------
    InputError
        If the contexts do not fit the models, or the limit is negative.

    Examples
    --------
    >>> import realrun
    >>> document = realrun.probe(realrun.load_pair(drafter="prompt-lookup"), contexts=[16], limit_s=0)
    >>> len(document["mean_s"]["verify"])
    5
    """
    if not limit_s >= 0:
        raise InputError(f"limit_s={limit_s}; give 0 seconds or more")
    since, begun_s, last_s, spent_s = watch(), time.monotonic(), 0.0, 0.0
    sampler = sampler or Sampler()
    sweeps = Sweeps(pair, contexts, [], depth=PASS_TOKENS - 1, tree_tokens=0, sampler=sampler, seed=seed)
    wanted = {(key, context) for key in sweeps.keys if key[0] != "tree verify" for context in contexts}
    while len(sweeps.done) < LEAST_SWEEPS or spent_s + last_s <= limit_s:
        last_s = sweeps.run(wanted)
        spent_s = time.monotonic() - begun_s
        progress(min(round(spent_s), round(limit_s)), round(limit_s))
    parts = sweeps.means()
    passes = [("verify", tokens) for tokens in range(1, sweeps.prober.depth + 2)]
    drafts = [key for key in parts if key[0] == "draft"]
    return {
        "kind": PROBE_KIND,
        "version": PROBE_VERSION,
        **measurement_facts(sweeps.prober, contexts, seed),
        "sweeps": len(sweeps.done),
        "spent_s": spent_s,
        "mean_s": {
            "verify": [parts[key].values.tolist() for key in passes],
            "draft_step": [parts[key].values.tolist() for key in drafts] or [[0.0] * len(contexts)],
            "autoregressive": parts["autoregressive",].values.tolist(),
        },
        "relative_half_width": {
            "verify": [_half_width(parts, [key]) for key in passes],
            "draft_step": _half_width(parts, drafts) if drafts else None,
            "autoregressive": _half_width(parts, [("autoregressive",)]),
        },
        "load": load_from([since()])._asdict(),
    }


def _half_width(parts: dict[Key, Influences], keys: Sequence[Key]) -> float:
    """Compute the relative half-width of the sum of these times, over all contexts (on the logarithm)."""
    seconds = np.sum([parts[key].values for key in keys], axis=0)
    moved = np.sum([parts[key].moved for key in keys], axis=0)
    return half_width(np.mean(moved / seconds, axis=1))
