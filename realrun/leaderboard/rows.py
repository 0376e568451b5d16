"""The rows of `realrun board`, a policy of a drafter each, and the costs that they are tuned under and forecast by.

Costs are measured before anything is decoded, in slices. A slice is a short profile. The drafters and the plain target
take turns slice by slice, in an order shuffled anew each time, so that a machine that was slow for a while was slow for
a slice or two of any of them. Costs are the medians over all slices, against the same autoregressive time, the plain
target's by its own pass. So are those of drafters whose target was tuned, because it has the plain target's
architecture. Impossible costs (a round that takes less than the step that it contains) are measured further, and
refused if that does not help.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from realrun.experiment.document import Forecast, choice_of, rate_of
from realrun.experiment.forecast import speedups_on
from realrun.experiment.pipeline import Entry, Outcome
from realrun.experiment.validate import compared
from realrun.kept_files import read_own
from realrun.measure.profile import TREE_TOKENS, profile_slice
from realrun.measure.record import RecordSettings
from realrun.measure.stream import STATISTICS, Samples, Stream
from realrun.measure.sweeps import Prober
from realrun.pairs.drafter_files import weights_digest
from realrun.pairs.pair import Pair
from specsim.acceptance.formulas import distinct_trigrams
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.progress import Counter
from specsim.policy.base import Policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.intervals import ratio_interval, simultaneous
from specsim.replaying.prediction import summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.replaying.rounds import PARTS
from specsim.trace.trace import Trace

LEAST_SLICES, SLICES = 3, 5  # of each; the least if time is short
MOST_SLICES = 15  # where costs still cannot be
SLICE_SWEEPS = 2
SAMPLES, PROFILE = "samples.json", "tuning_profile.json"  # in the folder of a drafter
PLAIN = "autoregressive"  # the plain target's name among the drafters'
ANEW = "delete it to measure it again, or give another --out"
FIXED, ADAPTIVE, TREE, PAPER = "fixed K", "adaptive chain", "tree", "its paper's"
MEASURED = (
    *("measured", "error_percent", "rounds_identical_percent", "output_identical_percent"),
    "same_text_rounds_identical_percent",
    "measured_sequence_seconds",
)  # of a row, where something was decoded
LOOPS = 0.5  # share of distinct trigrams up to which a text repeats itself


@dataclass(frozen=True)
class CostSettings:
    """How much of costs is measured: slices of each drafter, at least where time is short and normally.

    sweeps : of a slice; tree_tokens : largest tree
    enough : samples of each part beside the arms' rounds, None for the usual number
    one_prober : whether all measurements of a drafter run on the same caches, which saves recording their graphs anew
    """

    least_slices: int = field(default_factory=lambda: LEAST_SLICES)  # read when made
    slices: int = field(default_factory=lambda: SLICES)
    sweeps: int = SLICE_SWEEPS
    tree_tokens: int = field(default_factory=lambda: TREE_TOKENS)
    enough: int | None = None
    one_prober: bool = False


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
    how : how much is measured
    probers : those that are kept, by their pair's id; None if none are
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
        how: CostSettings | None = None,
    ):
        how = how or CostSettings()
        self.pairs, self.drafters = {**pairs, PLAIN: plain}, list(pairs)
        self.how, self.probers = how, dict[int, Prober]() if how.one_prober else None
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
        wanted, end = self.how.slices, time.monotonic() + limit_s
        while True:
            self._take_turns(wanted, progress, end)
            documents = {name: by_medians(self.profiles[name], self.profiles[PLAIN]) for name in self.drafters}
            try:
                for name, cost in models(documents).items():
                    cost.check(f"tuning costs of {name}")
            except InputError:
                if wanted >= MOST_SLICES:
                    raise
                wanted += self.how.slices
            else:
                break
        for name, document in documents.items():
            write_json(document, self.folder / name / PROFILE)
        return documents

    def _take_turns(self, wanted: int, progress: Counter, end: float) -> None:
        names = list(self.pairs)
        while (number := min(self.slices.values())) < wanted:
            if wanted == self.how.slices and number >= self.how.least_slices and time.monotonic() > end:
                return
            for at in np.random.default_rng((self.seed, number)).permutation(len(names)).tolist():
                if self.slices[names[at]] == number:
                    self._slice(names[at])
                    progress(sum(self.slices.values()), wanted * len(names))

    def _slice(self, name: str) -> None:
        """Measure another slice."""
        alone = name == PLAIN
        kept: dict[str, Any] = {} if self.probers is None else {"probers": self.probers}
        self.profiles[name] = profile_slice(
            self.pairs[name],
            self.sweeps[name],
            self.how.sweeps,
            contexts=self.contexts,
            depth=1 if alone else self.record.max_draft_tokens,
            sampler=self.record.sampler,
            seed=self.seed,
            tree_tokens=self.how.tree_tokens if self.record.tree is not None and not alone else 0,
            **kept,
        )
        self.slices[name] += 1
        sweeps = [samples.as_dict() for samples in self.sweeps[name]]
        document = {"slices": self.slices[name], "sweeps": sweeps, "profile": self.profiles[name]}
        write_json(document, self.folder / name / SAMPLES)


def by_medians(document: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's profile without means, with the plain target's autoregressive time."""
    quantiles = [name for name in STATISTICS if name != "mean_s" and name in document]
    tables = {name: {**document[name], "autoregressive": plain[name]["autoregressive"]} for name in quantiles}
    return {**document, **tables, "mean_s": None}


def models(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, ProfileCost]:
    """Profiles as cost models, by the drafter's name."""
    return {name: profile_from_json(document, f"of {name}") for name, document in documents.items()}


def role_of(kind: type[Policy]) -> str:
    """Name the group in which policies of this kind are compared."""
    if issubclass(kind, TreePolicy):
        return TREE
    return FIXED if kind in (FixedK, SpaceK) else ADAPTIVE


@dataclass(frozen=True)
class Board:
    """Everything that a leaderboard's document is made of.

    Parameters
    ----------
    outcome : of the experiment
    plain : the target with a drafter that leaves its pass alone
    profiles : of the run by drafter, or of the forecast if nothing was decoded
    seed : of the policies' uniforms
    """

    outcome: Outcome
    plain: Pair
    profiles: Mapping[str, Mapping[str, Any]]
    seed: int

    @property
    def pairs(self) -> dict[str, Pair]:
        """Return the pairs by the drafter's name."""
        return {name: contender.pair for name, contender in self.outcome.contenders.items()}

    @property
    def holdouts(self) -> Mapping[str, Trace]:
        """Return the traces of the held-out prompts by the drafter's name."""
        return self.outcome.holdouts

    @cached_property
    def priced(self) -> dict[str, PricedTrace]:
        """Held-out traces with their costs, by the drafter's name."""
        costs = models(self.profiles)
        return {name: PricedTrace(trace, costs[name]) for name, trace in self.holdouts.items()}

    @cached_property
    def known(self) -> dict[str, dict[str, PricedTrace]]:
        """Held-out texts at the costs of the forecast and tuning texts at those of the run, by the drafter's name."""
        return {
            name: {
                "text_known": PricedTrace(self.holdouts[name], self.outcome.costs[name].cost),
                "costs_known": PricedTrace(self.outcome.trains[name], priced.cost),
            }
            for name, priced in self.priced.items()
        }

    @cached_property
    def looping(self) -> npt.NDArray[np.bool_]:
        """Whether each held-out text of a drafter over the plain target repeats itself [S]."""
        return np.array([share <= LOOPS for share in trigram_shares(self.holdouts[self.drafter_of_plain])])

    @property
    def drafter_of_plain(self) -> str:
        """The first drafter that shares the plain target."""
        shared = (name for name in self.holdouts if not has_own_target(self.pairs[name], self.plain))
        return next(shared, next(iter(self.holdouts)))


def rows(board: Board) -> list[dict[str, Any]]:
    """Make the board's rows, by measured speedup, or by the predicted speedup if nothing was measured.

    A drafter's seconds on a prompt are taken for as much text as the baseline's: a tuned target may write more or less
    than the plain target, and in low precision another pass of the same target may, too.
    """
    entries, measurement = board.outcome.entries, board.outcome.measurement
    replays = [board.priced[entry.name].replay(entry.candidate.policy, seed=board.seed, log=True) for entry in entries]
    baseline_s = next(
        replayed.autoregressive_s
        for entry, replayed in zip(entries, replays, strict=True)
        if entry.name == board.drafter_of_plain
    )
    seconds = [replayed.speculative_s * baseline_s / replayed.autoregressive_s for replayed in replays]
    ranked_by, against = seconds, baseline_s
    if measurement is not None:
        against, *ranked_by, _ = measurement.seconds
    order = np.argsort([own_s.sum() for own_s in ranked_by], kind="stable").tolist()
    by_replay, ranking = simultaneous(baseline_s, seconds), simultaneous(against, ranked_by)
    table = []
    for number in order:
        entry, replayed = entries[number], replays[number]
        behind = None if number == order[0] else ranking.difference(order[0], number)
        comparison: dict[str, Any] = dict.fromkeys(MEASURED)
        if measurement is not None:
            predicted = float(baseline_s.sum() / seconds[number].sum())
            holdout, measured = board.holdouts[entry.name], ranking.speedups[number]
            comparison = compared(measurement, 1 + number, measured, predicted, replayed, holdout)
            comparison["measured_sequence_seconds"] = ranked_by[number].tolist()
            comparison |= speedups_on(board.known[entry.name], entry.candidate.policy, board.seed)
        table.append(
            {
                **_settings(entry, board),
                "speedup": by_replay.speedups[number].as_dict(),
                "leader_minus_this": None if behind is None else behind.as_dict(),
                "tied_with_leader": behind is not None and not behind.significant,
                "without_loops": _over(~board.looping, against, ranked_by[number]),
                **_predicted(replayed),
                "sequence_seconds": seconds[number].tolist(),
                **comparison,
            }
        )
    return table


def _settings(entry: Entry, board: Board) -> dict[str, Any]:
    """A row's policy and drafter, and the forecast."""
    best = max(other.speedup for other in board.outcome.entries if other.name == entry.name)
    return {
        "label": entry.title,
        "drafter": entry.name,
        "role": entry.candidate.role,
        "policy": entry.candidate.policy.name,
        "form": entry.candidate.variant,
        "settings": str(entry.candidate.policy).removeprefix(entry.candidate.policy.name)[1:-1],
        "params": entry.candidate.policy.settings,
        "own_target": has_own_target(board.pairs[entry.name], board.plain),
        "best_of_drafter": entry.speedup == best,
        "train_speedup": entry.speedup,
        "forecast": dict(entry.forecast["forecast"]),
    }


def _predicted(replayed: Replay) -> dict[str, Any]:
    """A row's rates, and seconds per token by part of a round."""
    predicted, token_s = summarise(replayed), replayed.seconds.sum(axis=0) / replayed.output_tokens.sum()
    rates = {key: getattr(predicted, key) for key in ("tau", "v_d", "r_d", "hm", "truncated_share")}
    return {**rates, "token_seconds": dict(zip(PARTS, token_s.tolist(), strict=True))}


def trigram_shares(trace: Trace) -> list[float]:
    """Compute the share of distinct trigrams in every output."""
    return [distinct_trigrams([text]) for text in np.split(trace.token, trace.offsets[1:-1])]


def _over(chosen: npt.NDArray[np.bool_], baseline_s: Floats, own_s: Floats) -> dict[str, float] | None:
    """Compute the speedup over the chosen prompts; None if there are fewer than two of them."""
    return ratio_interval(baseline_s[chosen], own_s[chosen]).as_dict() if chosen.sum() > 1 else None


def measured_facts(board: Board) -> dict[str, Any]:
    """Summarise the baselines' runs and the forecast's choice; None everywhere if nothing was measured."""
    measurement = board.outcome.measurement
    if measurement is None:
        keys = ("load", "null_arm", "noise_floor_percent", "baseline", "baseline_sequence_seconds", "choice")
        return dict.fromkeys(keys)
    baseline_s, *entries_s, _ = measurement.seconds
    forecasts = [
        Forecast(entry.title, entry.speedup, own_s)
        for entry, own_s in zip(board.outcome.entries, entries_s, strict=True)
    ]
    floor = measurement.noise_floor_percent
    return {
        "load": measurement.load._asdict(),
        "null_arm": measurement.null_arm.as_dict(),
        "noise_floor_percent": floor,
        "baseline": rate_of(baseline_s, measurement.baseline_tokens),
        "baseline_sequence_seconds": baseline_s.tolist(),
        "choice": choice_of(forecasts, baseline_s, floor),
    }


def has_own_target(pair: Pair, plain: Pair) -> bool:
    """Whether the drafter came with a target of its own, tuned with it."""
    return pair.target is not plain.target and weights_digest(pair.target) != weights_digest(plain.target)


def about(board: Board) -> dict[str, Any]:
    """Describe what was compared, and how fast the plain target is alone."""
    plain, holdouts = board.plain, board.holdouts
    tables = {name: priced.table() for name, priced in board.priced.items()}
    first, table = next(iter(holdouts.values())), next(iter(tables.values()))
    return {
        "target": plain.target_name,
        "device": plain.device.type,
        "dtype": str(plain.dtype).removeprefix("torch."),
        "decoding": first.meta["decoding"],
        "environment": plain.environment,
        "output_tokens": int(first.output_tokens.sum()),
        "autoregressive_token_seconds": float(table.autoregressive_s.mean()),
        "drafters": [
            {
                "name": name,
                "kind": pair.drafter.name,
                "facts": pair.drafter.facts,
                "trees": holdouts[name].tree is not None,
                "own_target": has_own_target(pair, plain),
                "depth": holdouts[name].depth,
                "first_token_accepted_share": float((holdouts[name].match_len > 0).mean()),
                "step_ratio": tables[name].step_ratio,
                "contexts": board.profiles[name]["contexts"],
            }
            for name, pair in board.pairs.items()
        ],
    }


def median_error(table: Sequence[Mapping[str, Any]]) -> float | None:
    """Compute the median absolute error of the rows' predictions, in percent."""
    errors = [abs(row["error_percent"]) for row in table if row["error_percent"] is not None]
    return float(np.median(errors)) if errors else None
