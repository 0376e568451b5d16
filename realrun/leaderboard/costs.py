"""What every drafter of a leaderboard costs, measured in turn on one machine, and the plain target beside them.

A slice is a short profile. Slices of the drafters alternate, in an order shuffled anew each time, so
that a machine that drifts drifts for all of them alike. All share one autoregressive time, that
of the plain target by its own pass, whatever pass their own rounds run in; it is measured beside every
slice. So do drafters whose target was tuned, as the tuned one has the plain one's architecture.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.profiling.profile import profile
from realrun.profiling.trees import Samples
from realrun.validation.profile_slices import SLICE_REPEATS, TREE_TOKENS
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.files import write_json
from specsim.progress import Counter

PLAIN = "autoregressive"  # the plain target's name among the drafters'
QUANTILES = ("median_s", "p25_s", "p75_s")


class Costs:
    """Profiles that grow by slices, kept in FOLDER/NAME as profile.json and samples.json, where a second start goes on.

    pairs : by the drafter's name
    plain : the plain target with a drafter that leaves its pass alone
    """

    def __init__(
        self,
        pairs: Mapping[str, Pair],
        plain: Pair,
        folder: Path,
        *,
        contexts: Sequence[int],
        depth: int,
        trees: bool,
        sampler: Sampler,
        seed: int,
    ):
        self.pairs, self.plain = pairs, plain
        self.folder, self.contexts, self.depth, self.trees = folder, contexts, depth, trees
        self.sampler, self.seed = sampler, seed
        self.slices: dict[str, int] = {}
        self.samples: dict[str, Samples] = {}
        for name in (PLAIN, *pairs):
            path = folder / name / "samples.json"
            kept: dict[str, Any] = {"slices": 0, "samples": []}
            if path.is_file():
                kept = json.loads(path.read_text())
            self.slices[name] = kept["slices"]
            self.samples[name] = defaultdict(list)
            for key, seconds in kept["samples"]:
                self.samples[name][tuple(key) if isinstance(key, list) else key] = seconds

    def measure(self, wanted: int, progress: Counter) -> None:
        """Measure until there are so many slices of every drafter."""
        names = list(self.pairs)
        while (number := self.least) < wanted:
            for at in np.random.default_rng((self.seed, number)).permutation(len(names)).tolist():
                if self.slices[names[at]] == number:
                    self._measure(names[at])
                    progress(sum(self.slices[name] for name in names), wanted * len(names))

    @property
    def least(self) -> int:
        """Slices that there are of every drafter."""
        return min(self.slices[name] for name in self.pairs)

    def _measure(self, name: str) -> None:
        """One slice more of this drafter, after one of the plain target."""
        self._slice(PLAIN, self.plain, 1, 0)
        self._slice(name, self.pairs[name], self.depth, TREE_TOKENS if self.trees else 0)

    def _slice(self, name: str, pair: Pair, depth: int, tree_tokens: int) -> None:
        """The last file written says that the slice is complete."""
        document = profile(
            pair,
            contexts=self.contexts,
            depth=depth,
            repeats=SLICE_REPEATS,
            sampler=self.sampler,
            seed=self.seed,
            tree_tokens=tree_tokens,
            samples=self.samples[name],
        )
        self.slices[name] += 1
        write_json(document, self.folder / name / "profile.json")
        kept = [[key, seconds] for key, seconds in self.samples[name].items() if seconds]
        write_json({"slices": self.slices[name], "samples": kept}, self.folder / name / "samples.json")

    def documents(self) -> dict[str, dict[str, Any]]:
        """The profiles as they stand, by the drafter's name, all with the plain target's autoregressive time."""
        plain, *others = (
            json.loads((self.folder / name / "profile.json").read_text()) for name in (PLAIN, *self.pairs)
        )
        found = dict(zip(self.pairs, others, strict=True))
        for document in found.values():
            for quantile in QUANTILES:
                document[quantile]["autoregressive"] = plain[quantile]["autoregressive"]
        return found

    def models(self) -> dict[str, ProfileCost]:
        """`documents` as cost models."""
        return {name: profile_from_json(document, f"of {name}") for name, document in self.documents().items()}
