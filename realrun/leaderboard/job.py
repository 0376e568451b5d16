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
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypedDict

from realrun.experiment.budget import Plan
from realrun.experiment.document import errors_of
from realrun.experiment.forecast import (
    FORECAST,
    PROFILE_SHARE,
    ForecastCosts,
    contexts_of,
    decoding_step_s,
    forecast,
    limit_s,
    probed,
    sealed_forecast,
)
from realrun.experiment.measuring import Costs, MeasuredCosts, measure_in_turns
from realrun.experiment.run import OTHER, PLAN, conditions_of
from realrun.experiment.settings import Candidate, ExperimentSettings
from realrun.experiment.timing import check_repeats, make_arm
from realrun.experiment.validate import DECODED, TUNED, candidates
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
    Entry,
    SlicedCosts,
    about,
    measured_facts,
    median_error,
    models,
    role_of,
    rows,
)
from realrun.lm.variants import expansion_of
from realrun.measure.record import RecordSettings, has_recorded
from realrun.measure.reuse import check_job, recorded_trace
from realrun.measure.sweeps import Prober
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest, prompt_facts
from specsim.cost.profile import ProfileCost
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json, write_text
from specsim.io.progress import Progress
from specsim.learn.evaluate import truncated_reason
from specsim.learn.settings import SearchSettings
from specsim.replaying.intervals import NO_SPECULATION
from specsim.replaying.prediction import summarise
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace

SETTINGS = "settings.json"


class Identity(TypedDict):
    """What the folder is the board of; the other keys are compared as they are."""

    drafters: dict[str, Any]


NULL = "null arm"  # the plain target a second time
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
    begun_s = time.monotonic()
    check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)
    _claim(out, _identity(pairs, prompts, settings), list(pairs), overwrite=overwrite)
    recorded_before = next((out / name / "trace" for name in pairs if (out / name / "trace").exists()), None)
    given = prompts
    plan = Plan(out / PLAN, settings, lambda: decoding_step_s(probed(plain, given, settings, None, progress)))
    prompts = plan.to_record(prompts, recorded_before)
    tuning, held = check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)
    sealed = not any(has_recorded(out / name / "trace", held.tolist()) for name in pairs)
    chosen, skipped = dict[str, list[Candidate]](), list[dict[str, str]]()

    def record_ahead(sequences: Ints) -> None:
        nonlocal pairs
        failed = {} if ahead is None else ahead.record(prompts, sequences)
        skipped.extend({"drafter": name, "policy": "all", "reason": reason} for name, reason in failed.items())
        pairs = {name: pair for name, pair in pairs.items() if name not in failed}
        if not pairs:
            raise InputError(f"no drafter could be recorded ({'; '.join(failed.values())}); give others")

    def recorded(sequences: Ints | None = None) -> dict[str, Trace]:
        what = "record" if sequences is None else "record tuning prompts"
        return {
            name: recorded_trace(
                pair,
                prompts,
                within(pair, settings.record),
                out / name / "trace",
                lambda done, total, name=name: progress(f"{name}: {what}", done, total),  # type: ignore[misc]
                sequences=sequences,
            )
            for name, pair in pairs.items()
        }

    record_ahead(tuning)
    trains = recorded(tuning)
    sliced = _sliced_costs(pairs, plain, prompts, settings, out)
    most_s = limit_s(math.inf, PROFILE_SHARE, settings.minutes)
    profiles = sliced.measure(lambda done, total: progress("costs", done, total), most_s)
    costs = models(profiles)
    if ahead is not None:
        ahead.tune(prompts, tuning, settings)
    for name, train in trains.items():
        tuned, left_out = tune(name, train, costs[name], settings, out, progress)
        paper = pairs[name].drafter.paper_policy
        chosen[name] = best_of_roles(tuned, paper, settings.also.get(name, ()), settings.rows)
        skipped += [{"drafter": name, "policy": policy, "reason": reason} for policy, reason in left_out]
    everyone, texts = [*chain.from_iterable(chosen.values())], [prompts[number] for number in held]
    _, decoded = plan.to_decode(everyone, texts, time.monotonic() - begun_s, least_policies=len(everyone))
    held = held[decoded]
    forecasts = _forecast(chosen, trains, profiles, len(held), settings, sealed=sealed)
    forecasts = sealed_forecast(out, forecasts)
    speedups = iter(forecasts["rows"])
    entries = [
        Entry(name, candidate.role, candidate.variant, candidate.policy, next(speedups)["forecast"])
        for name, candidates_ in chosen.items()
        for candidate in candidates_
    ]
    record_ahead(held)
    entries = [entry for entry in entries if entry.drafter in pairs]
    holdouts = {name: trace.select(held) for name, trace in recorded().items()}
    trains, costs = {name: trains[name] for name in pairs}, {name: costs[name] for name in pairs}
    profiles = {name: profiles[name] for name in pairs}
    board = Board(pairs, plain, entries, trains, holdouts, costs, profiles, None, settings.seed)
    if settings.repeats:
        board = measured(board, [prompts[number] for number in held], settings, out, progress, sliced.probers)
    table = rows(board)
    document = {
        "kind": "specsim-drafter-leaderboard",
        "version": 1,
        **about(board),
        **measured_facts(board),
        "block_expansion": expansion_of(plain.target),
        "prompts": prompt_facts(prompts, settings.record.prompts_source),
        "sequences": {"tuning": len(tuning), "holdout": len(board.looping)},
        "looping_prompts": int(board.looping.sum()),
        "rows": table,
        "skipped": skipped,
        "median_abs_error_percent": median_error(table),
        "errors": errors_of([{**row, "predicted": row["speedup"]} for row in table]) if settings.repeats else {},
        "forecast": {key: value for key, value in forecasts.items() if key != "rows"},
        "options": settings.options,
    }
    write_json(document, out / "leaderboard.json")
    from specsim.report.drafters import render_drafters, write_drafters_table  # matplotlib is slow to load

    write_drafters_table(out / "leaderboard.csv", document)
    write_text(out / "report.html", render_drafters(document))
    return document


def _forecast(
    chosen: Mapping[str, Sequence[Candidate]],
    trains: Mapping[str, Trace],
    profiles: Mapping[str, Mapping[str, Any]],
    held_out: int,
    settings: BoardSettings,
    *,
    sealed: bool,
) -> dict[str, Any]:
    """Forecast the policies of all drafters; the rows of forecast.json name the drafter ahead of the policy."""
    made: dict[str, Any] = {}
    for name, policies in chosen.items():
        costs = ForecastCosts.profiled(profiles[name], settings.seed)
        own = forecast(policies, trains[name], costs, held_out=held_out, sealed=sealed, seed=settings.seed)
        own["rows"] = [
            {**row, "drafter": name, "label": f"{name}, {candidate.variant}"}
            for row, candidate in zip(own["rows"], policies, strict=True)
        ]
        made = {**own, "rows": [*made.get("rows", []), *own["rows"]]}
    best = max(made["rows"], key=lambda row: float(row["forecast"]["estimate"]))
    deploy = best["label"] if best["forecast"]["estimate"] > 1 else NO_SPECULATION
    return {**made, "drafter": [*chosen], "deploy": deploy}


def _sliced_costs(
    pairs: Mapping[str, Pair], plain: Pair, prompts: Sequence[Prompt], settings: BoardSettings, out: Path
) -> SlicedCosts:
    """Make every drafter's costs, to measure before any of them decodes, at the contexts that prompts may meet."""
    contexts = contexts_of(prompts, settings.record.max_new_tokens)
    record, seed, how = settings.record, settings.seed, settings.costs
    return SlicedCosts(pairs, plain, out, contexts=contexts, record=record, seed=seed, how=how)


def measured(
    board: Board,
    prompts: Sequence[Prompt],
    settings: BoardSettings,
    out: Path,
    progress: Progress,
    probers: Mapping[int, Prober] | None = None,
) -> Board:
    """Decode the held-out prompts with every entry and two baselines; the board with that and the rounds' costs.

    probers : those that the costs were measured on, by their pair's id; by default others
    """
    contenders = [
        (PLAIN, PLAIN, None),
        *((entry.key, entry.drafter, entry.policy) for entry in board.entries),
        (NULL, PLAIN, None),
    ]
    pairs = {PLAIN: board.plain, **board.pairs}
    sampler, trees = settings.record.sampler, settings.record.tree is not None
    how = settings.costs or CostSettings()
    costs = {
        name: Costs(
            MeasuredCosts(
                pair,
                board.holdouts[name],
                tree_tokens=how.tree_tokens if pair.trees and trees else 0,
                sampler=sampler,
                seed=settings.seed,
                texts=math.ceil(settings.repeats * len(prompts) / len(board.pairs)),
                own_baseline=False,
                beside=board.trains[name],
                prober=(probers or {}).get(id(pair)),
                enough=how.enough,
            ),
            [arm for arm, (_, drafter, _) in enumerate(contenders) if drafter == name],
        )
        for name, pair in board.pairs.items()
    }
    measurement = measure_in_turns(
        [make_arm(label, policy, pairs[drafter], sampler) for label, drafter, policy in contenders],
        costs,
        prompts,
        next(iter(board.holdouts.values())),
        out / DECODED,
        repeats=settings.repeats,
        seed=settings.seed,
        progress=lambda done, total: progress("decode", done, total),
        limit_s=settings.decode_until - time.monotonic(),
    )
    done = measurement.sequences
    holdouts = {name: trace.select(done) for name, trace in board.holdouts.items()}
    baselines = [0, len(contenders) - 1]
    profiles = {
        name: cost.measured.document(measurement.runs([*baselines, *cost.arms]), settings.repeats)
        for name, cost in costs.items()
    }
    for name, profile in profiles.items():
        write_json(profile, out / name / "profile.json")
    return dataclasses.replace(board, measurement=measurement, profiles=profiles, holdouts=holdouts)


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
    cost: ProfileCost,
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
