"""What every drafter of a leaderboard costs before any is decoded with: what policies are tuned under, and forecast by.

A slice is a short profile. The drafters and the plain target take turns slice by slice, in an order shuffled anew each
time, so that a machine that was slow for a while was slow for a slice or two of any of them. Costs are the medians
over all slices, against the same autoregressive time, the plain target's by its own pass. So are those of drafters
whose target was tuned, because it has the plain target's architecture. Impossible costs (a
round that takes less than the step that it contains) are measured further, and refused if that does not help.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from realrun.kept_files import read_own
from realrun.measure.profile import TREE_TOKENS, profile_slice
from realrun.measure.record import RecordSettings
from realrun.measure.stream import STATISTICS, Samples, Stream
from realrun.pairs.pair import Pair
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.progress import Counter

LEAST_SLICES, SLICES = 3, 5  # of each; the least if time is short
MOST_SLICES = 15  # where costs still cannot be
SLICE_SWEEPS = 2
SAMPLES, PROFILE = "samples.json", "tuning_profile.json"  # in the folder of a drafter
PLAIN = "autoregressive"  # the plain target's name among the drafters'
ANEW = "delete it to measure it again, or give another --out"


class Slices(TypedDict):
    """Slices so far, the samples of their sweeps, and the profile that follows."""

    slices: int
    sweeps: list[Samples]
    profile: dict[str, Any]


class SlicedCosts:
    """Profiles that grow by slices, kept in FOLDER/NAME, where a second start goes on.

    pairs : by the drafter's name
    plain : the plain target with a drafter that leaves its pass alone
    contexts : at which costs are measured
    record : what is recorded of the drafters, and how tokens are chosen
    """

    def __init__(
        self,
        pairs: Mapping[str, Pair],
        plain: Pair,
        folder: Path,
        *,
        contexts: Sequence[int],
        record: RecordSettings,
        seed: int,
    ):
        self.pairs, self.drafters = {**pairs, PLAIN: plain}, list(pairs)
        self.folder, self.contexts, self.record, self.seed = folder, contexts, record, seed
        self.slices: dict[str, int] = dict.fromkeys(self.pairs, 0)
        self.sweeps: dict[str, list[Stream]] = {name: [] for name in self.pairs}
        self.profiles: dict[str, dict[str, Any]] = {}
        for name in self.pairs:
            if (folder / name / SAMPLES).is_file():
                kept = read_own(folder / name / SAMPLES, Slices, again=ANEW)
                self.slices[name], self.profiles[name] = kept["slices"], kept["profile"]
                self.sweeps[name] = [Stream.of(samples) for samples in kept["sweeps"]]

    def measure(self, progress: Counter, limit_s: float = math.inf) -> dict[str, dict[str, Any]]:
        """Take turns until there are enough slices of all; the drafters' profiles, by name, also written to PROFILE.

        limit_s : seconds after which the least number of slices is enough

        Raises InputError where even the most slices give costs that cannot be.
        """
        wanted, end = SLICES, time.monotonic() + limit_s
        while True:
            self._take_turns(wanted, progress, end)
            documents = {name: by_medians(self.profiles[name], self.profiles[PLAIN]) for name in self.drafters}
            try:
                for name, cost in models(documents).items():
                    cost.check(f"tuning costs of {name}")
            except InputError:
                if wanted >= MOST_SLICES:
                    raise
                wanted += SLICES
            else:
                break
        for name, document in documents.items():
            write_json(document, self.folder / name / PROFILE)
        return documents

    def _take_turns(self, wanted: int, progress: Counter, end: float) -> None:
        names = list(self.pairs)
        while (number := min(self.slices.values())) < wanted:
            if wanted == SLICES and number >= LEAST_SLICES and time.monotonic() > end:
                return
            for at in np.random.default_rng((self.seed, number)).permutation(len(names)).tolist():
                if self.slices[names[at]] == number:
                    self._slice(names[at])
                    progress(sum(self.slices.values()), wanted * len(names))

    def _slice(self, name: str) -> None:
        """Measure another slice."""
        alone = name == PLAIN
        self.profiles[name] = profile_slice(
            self.pairs[name],
            self.sweeps[name],
            SLICE_SWEEPS,
            contexts=self.contexts,
            depth=1 if alone else self.record.max_draft_tokens,
            sampler=self.record.sampler,
            seed=self.seed,
            tree_tokens=TREE_TOKENS if self.record.tree is not None and not alone else 0,
        )
        self.slices[name] += 1
        sweeps = [samples.as_dict() for samples in self.sweeps[name]]
        kept = {"slices": self.slices[name], "sweeps": sweeps, "profile": self.profiles[name]}
        write_json(kept, self.folder / name / SAMPLES)


def by_medians(document: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's profile without means, with the plain target's autoregressive time."""
    quantiles = [name for name in STATISTICS if name != "mean_s" and name in document]
    tables = {name: {**document[name], "autoregressive": plain[name]["autoregressive"]} for name in quantiles}
    return {**document, **tables, "mean_s": None}


def models(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, ProfileCost]:
    """Profiles as cost models, by the drafter's name."""
    return {name: profile_from_json(document, f"of {name}") for name, document in documents.items()}
