"""What every drafter of a leaderboard costs before any is decoded with: what policies are tuned under.

A slice is a short profile, taken right after one of the plain target by its own pass. Slices of the drafters
alternate, in an order shuffled anew each time. All share one autoregressive time, the mean of the plain target's, and
a drafter's costs are scaled by that over what the plain target took beside it, so that a machine that was slow for one
of them does not count against it. So do drafters whose target was tuned, as the tuned one has the plain one's
architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.own_files import read_own
from realrun.pairs.pair import Pair
from realrun.profiling.profile import profile
from realrun.profiling.slices import TREE_TOKENS
from realrun.profiling.stream import STATISTICS, Samples, Stream
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.files import write_json
from specsim.progress import Counter

SLICE_REPEATS = 5  # of every round
PROFILE = "tuning_profile.json"  # in the folder of a drafter
PLAIN = "autoregressive"  # the plain target's name among the drafters'
ANEW = "delete it to measure it again, or give another --out"


class Slices(Samples):
    """Slices so far, and all samples of them."""

    slices: int


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
        for key in (*pairs, *map(beside, pairs)):
            path = folder / key / "samples.json"
            self.slices[key], self.streams[key] = 0, Stream()
            if path.is_file():
                kept = read_own(path, Slices, again=ANEW)
                self.slices[key] = kept["slices"]
                self.streams[key].merge(kept)

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
        if self.slices[beside(name)] == self.slices[name]:  # not where that was all, before an interruption
            self._slice(beside(name), self.plain, 1, 0)
        self._slice(name, self.pairs[name], self.depth, TREE_TOKENS if self.trees else 0)

    def _slice(self, key: str, pair: Pair, depth: int, tree_tokens: int) -> None:
        """The last file written says that the slice is complete. key : a drafter's name, or `beside` it"""
        document = profile(
            pair,
            contexts=self.contexts,
            depth=depth,
            repeats=SLICE_REPEATS,
            sampler=self.sampler,
            seed=self.seed,
            tree_tokens=tree_tokens,
            stream=self.streams[key],
        )
        self.slices[key] += 1
        write_json(document, self.folder / key / PROFILE)
        kept = {"slices": self.slices[key], **self.streams[key].as_dict()}
        write_json(kept, self.folder / key / "samples.json")

    def documents(self) -> dict[str, dict[str, Any]]:
        """The profiles as they stand, by the drafter's name, all with the plain target's autoregressive time."""
        plains = {name: self._profile(beside(name)) for name in self.pairs}
        baseline = {
            statistic: np.mean([plain[statistic]["autoregressive"] for plain in plains.values()], axis=0).tolist()
            for statistic in STATISTICS
        }
        return {name: on_scale_of(self._profile(name), plains[name], baseline) for name in self.pairs}

    def _profile(self, key: str) -> dict[str, Any]:
        return read_own(self.folder / key / PROFILE, again=ANEW)


def beside(drafter: str) -> str:
    """The folder, in the leaderboard's, of the plain target's costs beside a drafter's."""
    return f"{drafter}/{PLAIN}"


def on_scale_of(document: dict[str, Any], plain: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's profile with this autoregressive time, scaled as the plain target's beside it is to be for that.

    baseline : by statistic, seconds by context
    """
    scale = float(np.mean(baseline["mean_s"]) / np.mean(plain["mean_s"]["autoregressive"]))
    tables = {name: {**_scaled(document[name], scale), "autoregressive": baseline[name]} for name in STATISTICS}
    return {**document, **tables}


def _scaled(table: Any, scale: float) -> Any:
    """All seconds in lists and objects times this; sizes are whole numbers."""
    if isinstance(table, dict):
        return {name: _scaled(one, scale) for name, one in table.items()}
    if isinstance(table, list):
        return [_scaled(one, scale) for one in table]
    return table * scale if isinstance(table, float) else table


def models(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, ProfileCost]:
    """Profiles as cost models, by the drafter's name."""
    return {name: profile_from_json(document, f"of {name}") for name, document in documents.items()}
