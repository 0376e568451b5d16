"""What every drafter of a leaderboard costs before any is decoded with: what policies are tuned under.

A slice is a short profile. Slices of the drafters alternate, in an order shuffled anew each time, so
that a machine that drifts drifts for all of them alike. All share one autoregressive time, that
of the plain target by its own pass, whatever pass their own rounds run in; it is measured beside every
slice. So do drafters whose target was tuned, as the tuned one has the plain one's architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.profiling.profile import profile
from realrun.profiling.stream import STATISTICS, Stream
from realrun.validation.profile_slices import TREE_TOKENS
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.files import write_json
from specsim.progress import Counter

SLICE_REPEATS = 5  # of every round
PROFILE = "tuning_profile.json"  # in the folder of a drafter
PLAIN = "autoregressive"  # the plain target's name among the drafters'


class Costs:
    """Profiles that grow by slices, kept in FOLDER/NAME, where a second start goes on.

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
        self.streams: dict[str, Stream] = {}
        for name in (PLAIN, *pairs):
            path = folder / name / "samples.json"
            self.slices[name], self.streams[name] = 0, Stream()
            if path.is_file():
                kept = json.loads(path.read_text())
                self.slices[name] = kept["slices"]
                self.streams[name].merge(kept)

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
            stream=self.streams[name],
        )
        self.slices[name] += 1
        write_json(document, self.folder / name / PROFILE)
        kept = {"slices": self.slices[name], **self.streams[name].as_dict()}
        write_json(kept, self.folder / name / "samples.json")

    def documents(self) -> dict[str, dict[str, Any]]:
        """The profiles as they stand, by the drafter's name, all with the plain target's autoregressive time."""
        plain, *others = (json.loads((self.folder / name / PROFILE).read_text()) for name in (PLAIN, *self.pairs))
        return {name: with_baseline(document, plain) for name, document in zip(self.pairs, others, strict=True)}


def with_baseline(document: dict[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """A profile with the autoregressive time of another."""
    changed = {name: {**document[name], "autoregressive": plain[name]["autoregressive"]} for name in STATISTICS}
    return {**document, **changed}


def models(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, ProfileCost]:
    """Profiles as cost models, by the drafter's name."""
    return {name: profile_from_json(document, f"of {name}") for name, document in documents.items()}
