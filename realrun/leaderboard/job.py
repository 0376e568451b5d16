"""`realrun board` from end to end: every drafter with its best policies, at equal cost accounting.

The same prompts and the same split for all; policies tuned on the tuning prompts, the best of each role by its speedup
there, which is its forecast; all of them really decoded on the held-out prompts at once, ranked by that, and decomposed
by what those rounds cost (`realrun.experiment.measuring`).

Costs to tune under are measured before anything is decoded, in slices. A slice is a short profile. The drafters and the
plain target take turns slice by slice, in an order shuffled anew each time, so that a machine that was slow for a while
was slow for a slice or two of any of them. Costs are the medians over all slices, against the same autoregressive time,
the plain target's by its own pass. So are those of drafters whose target was tuned, because it has the plain target's
architecture. Impossible costs (a round that takes less than the step that it contains) are measured further, and
refused if that does not help.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from realrun.experiment.forecast import FORECAST, PROFILE_SHARE, ForecastCosts, contexts_of, limit_s, speedups_on
from realrun.experiment.pipeline import (
    DECODED,
    OTHER,
    TUNED,
    Contender,
    Entry,
    Experiment,
    Outcome,
    about_prompts,
    candidates,
    conditions_of,
)
from realrun.experiment.settings import Candidate, ExperimentSettings
from realrun.experiment.timing import check_repeats
from realrun.experiment.validate import MeasuredFacts, Promise, compared, errors_of, measured_facts, median_error
from realrun.kept_files import claim, read_own
from realrun.lm.variants import expansion_of
from realrun.measure.profile import TREE_TOKENS, profile_slice
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import check_job
from realrun.measure.stream import STATISTICS, Samples, Stream
from realrun.pairs.drafter_files import weights_digest
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest
from specsim.acceptance.formulas import distinct_trigrams
from specsim.cost.model import CostModel
from specsim.cost.profile import Profile, ProfileDocument
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json, write_text
from specsim.io.progress import Counter, Progress
from specsim.learn.evaluate import truncated_reason
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.intervals import Estimate, ratio_interval, simultaneous
from specsim.replaying.prediction import summarise
from specsim.replaying.priced import PricedTrace
from specsim.report.experiment import (
    BoardDrafter,
    BoardRow,
    Difference,
    DrafterBoard,
    Parts,
    PartSeconds,
    Skipped,
)
from specsim.trace.trace import Trace

SETTINGS = "settings.json"  # in the folder of the board
LEAST_SLICES, SLICES = 3, 5  # of each; the least if time is short
MOST_SLICES = 15  # where costs still cannot be
SLICE_SWEEPS = 2
SAMPLES, PROFILE = "samples.json", "tuning_profile.json"  # in the folder of a drafter
PLAIN = "autoregressive"  # how a leaderboard names decoding without a drafter
RESERVED = (PLAIN, DECODED)  # names of folders that no drafter can have
ANEW = "delete it to measure it again, or give another --out"
FIXED, ADAPTIVE, TREE, PAPER = "fixed K", "adaptive chain", "tree", "its paper's"
MEASURED = (
    *("measured", "error_percent", "rounds_identical_percent", "output_identical_percent"),
    "same_text_rounds_identical_percent",
    "measured_sequence_seconds",
)  # of a row, where something was decoded
LOOPS = 0.5  # share of distinct trigrams up to which a text repeats itself


class Slices(TypedDict):
    """Slices so far, the samples of their sweeps, and the profile that follows."""

    slices: int
    sweeps: list[Samples]
    profile: ProfileDocument


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
        self.profiles: dict[str, Profile] = {}
        for name in self.pairs:
            if (folder / name / SAMPLES).is_file():
                kept = read_own(folder / name / SAMPLES, Slices, again=ANEW)
                self.slices[name] = kept["slices"]
                self.profiles[name] = Profile.from_json(kept["profile"], str(folder / name / SAMPLES))
                self.sweeps[name] = [Stream.of(samples) for samples in kept["sweeps"]]

    def measure(self, progress: Counter, limit_s: float = math.inf) -> dict[str, Profile]:
        """Take turns until there are enough slices of all; the drafters' profiles, by name, also written to PROFILE.

        limit_s : seconds after which the least number of slices is enough

        Raises InputError where even the most slices give costs that cannot be.
        """
        wanted, end = SLICES, time.monotonic() + limit_s
        while True:
            self._take_turns(wanted, progress, end)
            profiles = {name: by_medians(self.profiles[name], self.profiles[PLAIN]) for name in self.drafters}
            try:
                for name, profile in profiles.items():
                    profile.cost.check(f"tuning costs of {name}")
            except InputError:
                if wanted >= MOST_SLICES:
                    raise
                wanted += SLICES
            else:
                break
        for name, profile in profiles.items():
            write_json(profile.as_dict(), self.folder / name / PROFILE)
        return profiles

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
        document = {"slices": self.slices[name], "sweeps": sweeps, "profile": self.profiles[name].as_dict()}
        write_json(document, self.folder / name / SAMPLES)


def by_medians(profile: Profile, plain: Profile) -> Profile:
    """A drafter's profile without means, with the plain target's autoregressive time."""
    document, of_plain = profile.as_dict(), plain.as_dict()
    quantiles = [name for name in STATISTICS if name != "mean_s" and name in document]
    tables = {name: {**document[name], "autoregressive": of_plain[name]["autoregressive"]} for name in quantiles}
    return Profile.from_json({**document, **tables, "mean_s": None}, "by medians")


def role_of(kind: type[Policy]) -> str:
    """Name the group in which policies of this kind are compared."""
    if issubclass(kind, TreePolicy):
        return TREE
    return FIXED if kind in (FixedK, SpaceK) else ADAPTIVE


class Identity(TypedDict):
    """What the folder is the board of; the other keys are compared as they are."""

    drafters: dict[str, Any]


@dataclass(frozen=True)
class BoardSettings(ExperimentSettings):
    """How to record, tune and decode for a leaderboard.

    Depth and trees are cut to what each drafter can do.

    repeats : 0 to predict only; 1 on a machine that nothing interrupts, where more prompts tell more
    """

    def __post_init__(self) -> None:
        if self.repeats > 1:
            check_repeats(self.repeats)


def run_leaderboard(
    pairs: Mapping[str, Pair],
    plain: Pair,
    prompts: Sequence[Prompt],
    settings: BoardSettings,
    out: Path,
    progress: Progress,
    *,
    overwrite: bool = False,
) -> DrafterBoard:
    """Record, measure, tune, rank and decode; return what leaderboard.json holds.

    pairs : by the name that the drafter has in the leaderboard; plain : the target with a drafter that leaves its pass
    alone. What is in the folder already, made with the same settings, is used; more repeats may be asked for.
    """
    if settings.record.sampler.mode == "rejection":
        raise InputError(
            "the leaderboard compares real runs with replays round by round, but under rejection sampling every run "
            "draws its own text; choose --mode greedy-draft"
        )
    check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)
    contenders = {
        name: Contender(pair, {out / name / "trace": pair}, within(pair, settings.record))
        for name, pair in pairs.items()
    }
    _claim(out, _identity(pairs, prompts, settings), list(pairs), overwrite=overwrite)
    experiment = _Ranking(contenders, plain, prompts, settings, out, progress, overwrite=False)
    outcome = experiment.run()
    profiles = {name: profile for name, (profile,) in outcome.profiles.items()} or experiment.tuning_profiles
    for name, profile in profiles.items():
        if outcome.measurement is not None:
            write_json(profile.as_dict(), out / name / "profile.json")
    board = Board(outcome, plain, profiles, settings.seed)
    table = rows(board)
    facts = dict.fromkeys(MeasuredFacts._fields) if outcome.measurement is None else _facts(board)._asdict()
    measured = [row.measured for row in table if row.measured is not None]
    errors_percent = [row.error_percent for row in table if row.error_percent is not None]
    first = next(iter(outcome.holdouts.values()))
    steps = {name: priced.table() for name, priced in board.priced.items()}
    result = DrafterBoard(
        version=1,
        target=plain.target_name,
        device=plain.device.type,
        dtype=str(plain.dtype).removeprefix("torch."),
        decoding=first.meta["decoding"],
        environment=plain.environment,
        output_tokens=int(first.output_tokens.sum()),
        autoregressive_token_seconds=float(next(iter(steps.values())).autoregressive_s.mean()),
        drafters=[
            BoardDrafter(
                name=name,
                kind=pair.drafter.name,
                facts=pair.drafter.facts,
                trees=outcome.holdouts[name].tree is not None,
                own_target=has_own_target(pair, plain),
                depth=outcome.holdouts[name].depth,
                first_token_accepted_share=float((outcome.holdouts[name].match_len > 0).mean()),
                step_ratio=steps[name].step_ratio,
                contexts=profiles[name].cost.contexts.tolist(),
            )
            for name, pair in pairs.items()
        ],
        **facts,
        baseline_sequence_seconds=outcome.measurement.seconds[0].tolist() if outcome.measurement else None,
        block_expansion=expansion_of(plain.target),
        prompts=about_prompts(experiment.prompts, settings),
        sequences=Parts(outcome.tuning_prompts, len(board.looping)),
        looping_prompts=int(board.looping.sum()),
        rows=table,
        skipped=[Skipped(drafter=name, policy=policy, reason=reason) for name, policy, reason in outcome.skipped],
        median_abs_error_percent=median_error(errors_percent) if errors_percent else None,
        errors=errors_of(table, measured, [row.speedup for row in table]) if measured else {},
        forecast=outcome.forecast.facts,
        options=settings.options(outcome.measurement.repeats if outcome.measurement else 0),
    )
    write_json(result.as_dict(), out / "leaderboard.json")
    from specsim.report.drafters import render_drafters, write_drafters_table  # matplotlib is slow to load

    write_drafters_table(out / "leaderboard.csv", result)
    write_text(out / "report.html", render_drafters(result))
    return result


class _Ranking(Experiment):
    """An experiment with several drafters, whose costs are measured in turns, in the folder of its result."""

    settings: BoardSettings

    def claim(self) -> None:
        pass  # `_claim` compares all prompts, of which the minutes choose some

    @property
    def pairs(self) -> dict[str, Pair]:
        return {name: contender.pair for name, contender in self.contenders.items()}

    def costs(self) -> Mapping[str, ForecastCosts]:
        settings, seed = self.settings, self.settings.seed
        pairs = {name: contender.pair for name, contender in self.contenders.items()}
        contexts = contexts_of(self.prompts, settings.record.max_new_tokens)  # that prompts may meet
        sliced = SlicedCosts(pairs, self.plain, self.folder, contexts=contexts, record=settings.record, seed=seed)
        most_s = limit_s(math.inf, PROFILE_SHARE, settings.minutes)
        self.tuning_profiles = sliced.measure(lambda done, total: self.progress("costs", done, total), most_s)
        return {name: ForecastCosts.profiled(profile, seed) for name, profile in self.tuning_profiles.items()}

    def tune(self, name: str, train: Trace, cost: CostModel) -> list[Candidate]:
        tuned, left_out = tune(name, train, cost, self.settings, self.folder, self.progress)
        self.skipped += [(name, policy, reason) for policy, reason in left_out]
        paper = self.contenders[name].pair.drafter.paper_policy
        return best_of_roles(tuned, paper)

    def arm_name(self, entry: Entry) -> str:
        return f"{entry.name}: {entry.candidate.role}"


def within(pair: Pair, settings: RecordSettings) -> RecordSettings:
    """Select the sampling settings that this drafter can be recorded with."""
    return settings if pair.trees else dataclasses.replace(settings, tree_nodes=0)


def _identity(pairs: Mapping[str, Pair], prompts: Sequence[Prompt], settings: BoardSettings) -> dict[str, Any]:
    """Return all that must be the same for a job to be resumed."""
    first, record = next(iter(pairs.values())), settings.record
    return {
        "drafters": {name: pair.fingerprint for name, pair in pairs.items()},
        **conditions_of(first, settings),
        "dtype": str(first.dtype).removeprefix("torch."),
        "decoding": record.sampler.as_dict(),
        "max_new_tokens": record.max_new_tokens,
        "depth": record.max_draft_tokens,
        "trees": None if record.tree is None else record.tree._asdict(),
        "prompts": prompt_digest(prompts),
    }


def _claim(out: Path, identity: dict[str, Any], names: Sequence[str], *, overwrite: bool) -> None:
    """Make the folder this job's; InputError if it is another's."""
    path = out / SETTINGS
    if path.is_file():
        if overwrite:
            for name in (DECODED, PLAIN, *names, *read_own(path, Identity, again=ANEW)["drafters"]):
                remove_folder(out / name)
            (out / FORECAST).unlink(missing_ok=True)
            write_json(identity, path)
    elif out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out} holds other files than a leaderboard's; give another --out")
    claim(path, identity, f"{out} was made", OTHER, Identity)


def tune(
    name: str,
    train: Trace,
    cost: CostModel,
    settings: BoardSettings,
    out: Path,
    progress: Progress,
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Tune all policies of a drafter, best first, with (policy, reason) of those left out."""
    search = SearchSettings(trials=settings.trials, seed=settings.seed)
    tuned, left_out = candidates(
        train,
        cost,
        search,
        kinds=settings.policies,
        progress=lambda what, done, total: progress(f"{name}: {what}", done, total),
        kept=out / name / TUNED,
    )
    kept = []
    for candidate in tuned:
        replayed = PricedTrace(train, cost).replay(candidate.policy, seed=settings.seed)
        if reason := truncated_reason(train, summarise(replayed).truncated_share):
            left_out.append((candidate.variant, reason))
        else:
            kept.append(candidate)
    return sorted(kept, key=lambda candidate: -(candidate.train_speedup or 0.0)), left_out


def best_of_roles(tuned: Sequence[Candidate], paper_policy: str | None) -> list[Candidate]:
    """Choose the best policy of each role, and that of the drafter's paper.

    tuned : best first; those that are returned have the role that they are compared as, and none is there twice
    """
    best = dict[str, Candidate]()
    for candidate in tuned:
        kind = type(candidate.policy)
        for role in filter(None, (role_of(kind), PAPER * (kind.name == paper_policy))):
            best.setdefault(role, dataclasses.replace(candidate, role=role))
    every = [best[role] for role in (FIXED, ADAPTIVE, TREE, PAPER) if role in best]
    return [one for at, one in enumerate(every) if one.policy not in [other.policy for other in every[:at]]]


def named(drafters: str | None, target: str) -> dict[str, str]:
    """Name the drafters that were asked for, by a folder's own name or else the drafter's; sources by name."""
    from realrun.pairs.drafter_files import LAB_DRAFTERS, LAB_PREFIX, has_lab_drafter
    from realrun.pairs.pair import LOOKUP, is_lab

    if drafters is None:
        if not is_lab(target):
            raise InputError(
                f"name the drafters of {target}: --drafters model,{LOOKUP},FOLDER,... with folders of `realrun train`"
            )
        return {
            name: f"{LAB_PREFIX}{name}" if name in LAB_DRAFTERS else name
            for name in ("model", *LAB_DRAFTERS, LOOKUP)
            if name not in LAB_DRAFTERS or has_lab_drafter(name)
        }
    sources: dict[str, str] = {}
    for source in (part.strip() for part in drafters.split(",") if part.strip()):
        name = Path(source.removeprefix(LAB_PREFIX)).name.removesuffix(".py")
        if name in RESERVED:
            raise InputError(f"a drafter cannot be called {name} here; rename its folder")
        if name in sources:
            raise InputError(f"two drafters are called {name}; give each once, and folders of different names")
        sources[name] = source
    if not sources:
        raise InputError(f"--drafters {drafters!r} names none; write for example model,{LOOKUP}")
    return sources


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
    profiles: Mapping[str, Profile]
    seed: int

    @property
    def pairs(self) -> dict[str, Pair]:
        """Return the pairs by the drafter's name."""
        return {name: contender.pair for name, contender in self.outcome.contenders.items()}

    @cached_property
    def priced(self) -> dict[str, PricedTrace]:
        """Held-out traces with their costs, by the drafter's name."""
        return {name: PricedTrace(trace, self.profiles[name].cost) for name, trace in self.outcome.holdouts.items()}

    @cached_property
    def looping(self) -> npt.NDArray[np.bool_]:
        """Whether each held-out text of a drafter over the plain target repeats itself [S]."""
        return np.array([share <= LOOPS for share in trigram_shares(self.outcome.holdouts[self.drafter_of_plain])])

    @property
    def drafter_of_plain(self) -> str:
        """The first drafter that shares the plain target."""
        shared = (name for name in self.outcome.holdouts if not has_own_target(self.pairs[name], self.plain))
        return next(shared, next(iter(self.outcome.holdouts)))


def rows(board: Board) -> list[BoardRow]:
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
    known = {} if measurement is None else {name: board.outcome.partly_known(name) for name in board.pairs}
    order = np.argsort([own_s.sum() for own_s in ranked_by], kind="stable").tolist()
    by_replay, ranking = simultaneous(baseline_s, seconds), simultaneous(against, ranked_by)
    best = {name: max(entry.speedup for entry in entries if entry.name == name) for name in board.pairs}
    table = []
    for number in order:
        entry, replayed = entries[number], replays[number]
        policy, predicted = entry.candidate.policy, summarise(replayed)
        behind = None if number == order[0] else ranking.difference(order[0], number)
        token_s = replayed.seconds.sum(axis=0) / replayed.output_tokens.sum()
        comparison = dict.fromkeys(MEASURED)
        if measurement is not None:
            speedup = float(baseline_s.sum() / seconds[number].sum())
            holdout, measured = board.outcome.holdouts[entry.name], ranking.speedups[number]
            comparison = {
                **compared(measurement, 1 + number, measured, speedup, replayed, holdout)._asdict(),
                "measured_sequence_seconds": ranked_by[number].tolist(),
                **speedups_on(known[entry.name], policy, board.seed),
            }
        table.append(
            BoardRow(
                label=entry.title,
                drafter=entry.name,
                role=entry.candidate.role,
                policy=policy.name,
                form=entry.candidate.variant,
                settings=str(policy).removeprefix(policy.name)[1:-1],
                params=policy.settings,
                own_target=has_own_target(board.pairs[entry.name], board.plain),
                best_of_drafter=entry.speedup == best[entry.name],
                train_speedup=entry.speedup,
                forecast=entry.forecast.forecast,
                speedup=by_replay.speedups[number],
                leader_minus_this=None if behind is None else Difference.of(behind),
                tied_with_leader=behind is not None and not behind.significant,
                without_loops=_over(~board.looping, against, ranked_by[number]),
                tau=predicted.tau,
                v_d=predicted.v_d,
                r_d=predicted.r_d,
                hm=predicted.hm,
                truncated_share=predicted.truncated_share,
                token_seconds=PartSeconds(*token_s.tolist()),
                sequence_seconds=seconds[number].tolist(),
                **comparison,
            )
        )
    return table


def trigram_shares(trace: Trace) -> list[float]:
    """Compute the share of distinct trigrams in every output."""
    return [distinct_trigrams([text]) for text in np.split(trace.token, trace.offsets[1:-1])]


def _over(chosen: npt.NDArray[np.bool_], baseline_s: Floats, own_s: Floats) -> Estimate | None:
    """Compute the speedup over the chosen prompts; None if there are fewer than two of them."""
    return ratio_interval(baseline_s[chosen], own_s[chosen]) if chosen.sum() > 1 else None


def _facts(board: Board) -> MeasuredFacts:
    """Summarise the baselines' runs and the forecast's choice."""
    measurement = board.outcome.measured
    promises = [
        Promise(entry.title, entry.speedup, own_s)
        for entry, own_s in zip(board.outcome.entries, measurement.seconds[1:-1], strict=True)
    ]
    return measured_facts(measurement, promises)


def has_own_target(pair: Pair, plain: Pair) -> bool:
    """Whether the drafter came with a target of its own, tuned with it."""
    return pair.target is not plain.target and weights_digest(pair.target) != weights_digest(plain.target)
