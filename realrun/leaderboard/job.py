"""`realrun board` from end to end: every drafter with its best policies, at equal cost accounting.

The same prompts and the same split for all; policies tuned on the tuning prompts under costs measured in turn
(`realrun.leaderboard.rows`), the best of each role by its speedup there, which is its forecast; all of them really
decoded on the held-out prompts at once, ranked by that, and decomposed by what those rounds cost
(`realrun.experiment.measuring`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict

from realrun.experiment.document import errors_of
from realrun.experiment.forecast import FORECAST, PROFILE_SHARE, ForecastCosts, contexts_of, limit_s
from realrun.experiment.pipeline import (
    DECODED,
    OTHER,
    TUNED,
    Contender,
    Entry,
    Experiment,
    candidates,
    conditions_of,
)
from realrun.experiment.settings import Candidate, ExperimentSettings
from realrun.experiment.timing import check_repeats
from realrun.kept_files import claim, read_own
from realrun.leaderboard.rows import (
    ADAPTIVE,
    ANEW,
    FIXED,
    PAPER,
    PLAIN,
    TREE,
    Board,
    CostSettings,
    SlicedCosts,
    about,
    measured_facts,
    median_error,
    role_of,
    rows,
)
from realrun.lm.variants import expansion_of
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import check_job
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest, prompt_facts
from specsim.cost.model import CostModel
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json, write_text
from specsim.io.progress import Progress
from specsim.learn.evaluate import truncated_reason
from specsim.learn.settings import SearchSettings
from specsim.replaying.prediction import summarise
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace

SETTINGS = "settings.json"


class Identity(TypedDict):
    """What the folder is the board of; the other keys are compared as they are."""

    drafters: dict[str, Any]


RESERVED = (PLAIN, DECODED)  # names of folders that no drafter can have


@dataclass(frozen=True)
class BoardSettings(ExperimentSettings):
    """How to record, tune and decode for a leaderboard.

    Depth and trees are cut to what each drafter can do.

    repeats : 0 to predict only; 1 on a machine that nothing interrupts, where more prompts tell more
    rows : most rows of a drafter, its paper's policy and those of `also` first; 0: one for each role
    also : policies that are among a drafter's rows whatever is faster, by the drafter's name
    costs : how much of costs is measured, None for the usual amount
    decode_until : time.monotonic() at which decoding ends; held-out prompts that do not fit are left out
    """

    rows: int = 0
    also: Mapping[str, Sequence[str]] = field(default_factory=dict)
    costs: CostSettings | None = None
    decode_until: float = math.inf

    def __post_init__(self) -> None:
        if self.repeats > 1:
            check_repeats(self.repeats)


class Ahead(Protocol):
    """Records and tunes in other processes; the board then reads the results from its folder."""

    def record(self, prompts: Sequence[Prompt], sequences: Ints) -> Mapping[str, str]:
        """Record these prompts with all drafters; return the reason of every drafter that failed."""

    def tune(self, prompts: Sequence[Prompt], sequences: Ints, settings: BoardSettings) -> None:
        """Tune the policies of all drafters on these prompts, at the costs of the profiles in the folder."""


def run_leaderboard(
    pairs: Mapping[str, Pair],
    plain: Pair,
    prompts: Sequence[Prompt],
    settings: BoardSettings,
    out: Path,
    progress: Progress,
    *,
    overwrite: bool = False,
    ahead: Ahead | None = None,
) -> dict[str, Any]:
    """Record, measure, tune, rank and decode; return the document of leaderboard.json.

    pairs : by the name that the drafter has in the leaderboard; plain : the target with a drafter that leaves its pass
    alone. What is in the folder already, made with the same settings, is used; more repeats may be asked for.
    ahead : records and tunes in other processes; drafters that fail there are left out
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
    experiment.ahead = ahead
    outcome = experiment.run()
    profiles = {name: profile for name, (profile,) in outcome.profiles.items()} or experiment.tuning_profiles
    for name, profile in profiles.items():
        if outcome.measurement is not None:
            write_json(profile, out / name / "profile.json")
    board = Board(outcome, plain, profiles, settings.seed)
    table = rows(board)
    document = {
        "kind": "specsim-drafter-leaderboard",
        "version": 1,
        **about(board),
        **measured_facts(board),
        "block_expansion": expansion_of(plain.target),
        "prompts": prompt_facts(experiment.prompts, settings.record.prompts_source),
        "sequences": {"tuning": outcome.tuning_prompts, "holdout": len(board.looping)},
        "looping_prompts": int(board.looping.sum()),
        "rows": table,
        "skipped": [{"drafter": name, "policy": policy, "reason": reason} for name, policy, reason in outcome.skipped],
        "median_abs_error_percent": median_error(table),
        "errors": errors_of([{**row, "predicted": row["speedup"]} for row in table]) if settings.repeats else {},
        "forecast": {key: value for key, value in outcome.forecast.items() if key != "rows"},
        "options": settings.options,
    }
    write_json(document, out / "leaderboard.json")
    from specsim.report.drafters import render_drafters, write_drafters_table  # matplotlib is slow to load

    write_drafters_table(out / "leaderboard.csv", document)
    write_text(out / "report.html", render_drafters(document))
    return document


class _Ranking(Experiment):
    """An experiment with several drafters, whose costs are measured in turns, in the folder of its result."""

    settings: BoardSettings
    ahead: Ahead | None = None

    def claim(self) -> None:
        pass  # `_claim` compares all prompts, of which the minutes choose some

    @property
    def pairs(self) -> dict[str, Pair]:
        return {name: contender.pair for name, contender in self.contenders.items()}

    def record(self, sequences: Ints, what: str, *, whole: bool = False) -> dict[str, Trace]:
        failed = {} if self.ahead is None else self.ahead.record(self.prompts, sequences)
        self.skipped += [(name, "all", reason) for name, reason in failed.items()]
        for name in failed:
            self.contenders.pop(name, None)
        if not self.contenders:
            raise InputError(f"no drafter could be recorded ({'; '.join(failed.values())}); give others")
        return super().record(sequences, what, whole=whole)

    @cached_property
    def sliced(self) -> SlicedCosts:
        """Make every drafter's costs, at the contexts that prompts may meet."""
        settings = self.settings
        contexts = contexts_of(self.prompts, settings.record.max_new_tokens)
        record, seed, how = settings.record, settings.seed, settings.costs
        return SlicedCosts(self.pairs, self.plain, self.folder, contexts=contexts, record=record, seed=seed, how=how)

    def costs(self) -> Mapping[str, ForecastCosts]:
        most_s = limit_s(math.inf, PROFILE_SHARE, self.settings.minutes)
        self.tuning_profiles = self.sliced.measure(lambda done, total: self.progress("costs", done, total), most_s)
        if self.ahead is not None:
            self.ahead.tune(self.prompts, self.split[0], self.settings)
        seed = self.settings.seed
        return {name: ForecastCosts.profiled(profile, seed) for name, profile in self.tuning_profiles.items()}

    def tune(self, name: str, train: Trace, cost: CostModel) -> list[Candidate]:
        tuned, left_out = tune(name, train, cost, self.settings, self.folder, self.progress)
        self.skipped += [(name, policy, reason) for policy, reason in left_out]
        paper = self.contenders[name].pair.drafter.paper_policy
        return best_of_roles(tuned, paper, self.settings.also.get(name, ()), self.settings.rows)

    def arm_name(self, entry: Entry) -> str:
        return f"{entry.name}: {entry.candidate.role}"

    def limit_s(self) -> float:
        return self.settings.decode_until - time.monotonic()

    def probing(self, pair: Pair) -> dict[str, Any]:
        how = self.settings.costs or CostSettings()
        return {"prober": (self.sliced.probers or {}).get(id(pair)), "enough": how.enough}


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
    jobs: int | None = None,
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Tune all policies of a drafter, best first, with (policy, reason) of those left out. jobs : threads"""
    search = SearchSettings(trials=settings.trials, seed=settings.seed, jobs=jobs)
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


def best_of_roles(
    tuned: Sequence[Candidate], paper_policy: str | None, also: Sequence[str] = (), rows: int = 0
) -> list[Candidate]:
    """Choose the best policy of each role, that of the drafter's paper, and the best of each policy in `also`.

    tuned : best first; those that are returned have the role that they are compared as, and none is there twice
    rows : most that are chosen, 0 for all: the paper's and those of `also`, then the fastest
    """
    best = dict[str, Candidate]()
    for candidate in tuned:
        name = type(candidate.policy).name
        roles = (role_of(type(candidate.policy)), PAPER * (name == paper_policy), name * (name in also))
        for role in filter(None, roles):
            best.setdefault(role, dataclasses.replace(candidate, role=role))
    every = [best[role] for role in (FIXED, ADAPTIVE, TREE, PAPER, *also) if role in best]
    chosen = [one for at, one in enumerate(every) if one.policy not in [other.policy for other in every[:at]]]
    wanted = [best[role].policy for role in (PAPER, *also) if role in best]
    first = sorted(chosen, key=lambda one: (one.policy not in wanted, -(one.train_speedup or 0.0)))
    return [one for one in chosen if not rows or one in first[:rows]]


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
