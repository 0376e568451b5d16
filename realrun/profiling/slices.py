"""A cost profile measured in slices between the repeats of a job: a machine that drifts is seen as it is meanwhile."""

from __future__ import annotations

import time
from typing import Any

from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.profiling.profile import contexts_between, profile
from realrun.profiling.stream import Stream
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.progress import Counter

SLICE_REPEATS = 10  # of every measured size, in one slice
TREE_TOKENS = 65  # largest tree that is profiled, the pending token included


class ProfileSlices:
    """Each slice is added to those before, and the profile made of all.

    document : the profile as it stands, JSON
    longest_s : seconds of the longest slice so far
    """

    def __init__(
        self,
        pair: Pair,
        context_range: tuple[int, int],
        *,
        depth: int,
        sampler: Sampler,
        seed: int,
        tree_tokens: int,
        slices: int,
        progress: Counter,
    ):
        self.contexts = contexts_between(*context_range)
        self.pair, self.depth, self.sampler, self.seed, self.tree_tokens = pair, depth, sampler, seed, tree_tokens
        self.progress, self.total, self.done = progress, slices * len(self.contexts), 0
        self.stream = Stream()
        self.document: dict[str, Any] = {}
        self.longest_s = 0.0

    def measure(self) -> ProfileCost:
        """One slice more; the profile that follows from all."""
        start, before = time.monotonic(), self.done
        self.document = profile(
            self.pair,
            contexts=self.contexts,
            depth=self.depth,
            repeats=SLICE_REPEATS,
            sampler=self.sampler,
            seed=self.seed,
            tree_tokens=self.tree_tokens,
            stream=self.stream,
            progress=lambda done, _: self.progress(before + done, self.total),
        )
        self.done += len(self.contexts)
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        return profile_from_json(self.document, "just measured")
