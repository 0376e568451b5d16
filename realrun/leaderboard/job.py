"""`realrun leaderboard` from end to end: every drafter with its best policies, at equal cost accounting.

The same prompts and the same split for all; policies tuned on one part of the prompts under costs measured in turn
(`realrun.leaderboard.costs`), one of each role taken by what it reaches there, which is its forecast; all of them
really decoded on the other part at once, ranked by that, and decomposed by what those rounds cost
(`realrun.leaderboard.measure`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from realrun.experiment.document import rate_of
from realrun.experiment.measured_costs import MeasuredCosts
from realrun.experiment.timing import check_repeats
from realrun.leaderboard.costs import ANEW, PLAIN, Costs, models
from realrun.leaderboard.measure import Contender, Measured, measure, runs_of
from realrun.leaderboard.rows import (
    ADAPTIVE,
    FIXED,
    LOOPS,
    PAPER,
    TREE,
    Entry,
    about,
    choice_from,
    median_error,
    replays,
    role_of,
    rows,
    trigram_shares,
)
from realrun.lm.clock import clock_name
from realrun.lm.variants.block_expansion import expansion_of
from realrun.machine_load import Load
from realrun.measure.profile import TREE_TOKENS, contexts_between
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import check_job, recorded_trace
from realrun.own_files import read_own, refuse_other
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest, prompt_facts
from realrun.provenance import device_name
from speckernels import backend_for
from specsim.compare.leaderboard import leaderboards
from specsim.cost.contexts import context_range
from specsim.cost.profile import ProfileCost
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json, write_text
from specsim.io.progress import Progress
from specsim.learn.journal import source_digest
from specsim.policy.base import Policy, build_policy
from specsim.replaying.intervals import noise_floor_percent, ratio_interval
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

SETTINGS, FORECAST, DECODED = "settings.json", "forecast.json", "decoded"


class Identity(TypedDict):
    """What the folder is the board of; the other keys are compared as they are."""

    drafters: dict[str, Any]


class TunedRow(TypedDict):
    """A tuned policy."""

    policy: str
    label: str
    params: dict[str, Any]
    train_speedup: float


class Tuned(TypedDict):
    """The board on the tuning prompts, of one drafter."""

    rows: list[TunedRow]
    skipped: list[dict[str, str]]


NULL = "null arm"  # the plain target a second time
RESERVED = (PLAIN, DECODED)  # names of folders that no drafter can have


@dataclass(frozen=True)
class Settings:
    """Settings of the job.

    record : depth and trees are cut to what each drafter can do
    kinds : policies to tune; repeats : timed runs of every prompt and policy, an odd number from 3 on, or 0 to predict
        only
    """

    record: RecordSettings
    kinds: tuple[type[Policy], ...]
    trials: int = 100
    repeats: int = 3
    tuning_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats:
            check_repeats(self.repeats)


def run_leaderboard(
    pairs: Mapping[str, Pair],
    plain: Pair,
    prompts: Sequence[Prompt],
    settings: Settings,
    out: Path,
    progress: Progress,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Record, measure, tune, rank and decode; the result as written to leaderboard.json.

    pairs : by the name that the drafter has in the leaderboard; plain : the target with a drafter that leaves its pass
    alone. What is in the folder already, made with the same settings, is used; more repeats may be asked for.
    """
    if settings.record.sampler.mode == "rejection":
        raise InputError("the leaderboard replays exactly, in greedy and Gumbel mode; choose one of them")
    check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)
    _claim(out, _identity(pairs, prompts, settings), list(pairs), overwrite=overwrite)
    traces = {
        name: recorded_trace(
            pair,
            prompts,
            _within(pair, settings.record),
            out / name / "trace",
            lambda done, total, name=name: progress(f"{name}: record", done, total),  # type: ignore[misc]
        )
        for name, pair in pairs.items()
    }
    ranges = np.array([context_range(trace) for trace in traces.values()])
    costs = Costs(
        pairs,
        plain,
        out,
        contexts=contexts_between(ranges[:, 0].min(), ranges[:, 1].max()),
        depth=settings.record.max_draft_tokens,
        trees=settings.record.tree is not None,
        sampler=settings.record.sampler,
        seed=settings.seed,
    )
    documents = costs.measure(lambda done, total: progress("costs", done, total))
    tuning_costs = models(documents)
    tuned = {
        name: _tuned(
            name,
            trace,
            tuning_costs[name],
            pairs[name].drafter.paper_policy,
            settings,
            out / name / "tuned.json",
            progress,
        )
        for name, trace in traces.items()
    }
    entries = [entry for name in traces for entry in tuned[name][0]]
    write_json({entry.title: entry.train_speedup for entry in entries}, out / FORECAST)  # before any is decoded with
    tuning, held = split_sequences(next(iter(traces.values())), tuning_share=settings.tuning_share, seed=settings.seed)
    holdouts = {name: trace.select(held) for name, trace in traces.items()}
    measured: list[Measured] | None = None
    load: Load | None = None
    if settings.repeats:
        texts = [prompts[sequence] for sequence in held.tolist()]
        expected = replays(entries, holdouts, tuning_costs, settings.seed)
        contenders = [Contender(PLAIN, PLAIN)]
        for one, replayed in zip(entries, expected, strict=True):
            contenders.append(Contender(one.key, one.drafter, one.policy, replayed, holdouts[one.drafter]))
        contenders.append(Contender(NULL, PLAIN))
        meanwhile = {
            name: MeasuredCosts(
                pair,
                holdouts[name],
                tree_tokens=TREE_TOKENS if pair.drafter.trees and settings.record.tree is not None else 0,
                sampler=settings.record.sampler,
                seed=settings.seed,
                texts=math.ceil(settings.repeats * len(texts) / len(pairs)),
                own_baseline=False,
            )
            for name, pair in pairs.items()
        }
        measured, load = measure(
            {PLAIN: plain, **pairs},
            contenders,
            texts,
            next(iter(holdouts.values())),
            meanwhile,
            out / DECODED,
            repeats=settings.repeats,
            seed=settings.seed,
            progress=lambda done, total: progress("decode", done, total),
        )
        baseline = [*runs_of(PLAIN, contenders, measured, texts)]
        documents = {
            name: own.document([*baseline, *runs_of(name, contenders, measured, texts)], settings.repeats)
            for name, own in meanwhile.items()
        }
        for name, profile in documents.items():
            write_json(profile, out / name / "profile.json")
    null_arm = baseline_s = alone = None
    floor = 0.0
    if measured is not None:
        wanted = measured[0].tokens
        baseline_s = measured[0].seconds_for(wanted).tolist()
        null_arm = ratio_interval(measured[0].seconds_for(wanted), measured[-1].seconds_for(wanted))
        floor = noise_floor_percent(null_arm)
        alone = rate_of(measured[0].seconds, int(wanted.sum()))
    board = rows(entries, pairs, plain, holdouts, models(documents), measured, settings.seed, floor)
    document = {
        "kind": "specsim-drafter-leaderboard",
        "version": 1,
        **about(pairs, plain, holdouts, documents),
        "block_expansion": expansion_of(plain.target),
        "load": None if load is None else load._asdict(),
        "prompts": prompt_facts(prompts, settings.record.prompts_source),
        "sequences": {"tuning": len(tuning), "holdout": len(held)},
        "null_arm": None if null_arm is None else null_arm.as_dict(),
        "noise_floor_percent": None if null_arm is None else floor,
        "baseline": alone,
        "baseline_sequence_seconds": baseline_s,
        "choice": choice_from(entries, measured, floor),
        "looping_prompts": sum(share <= LOOPS for share in trigram_shares(next(iter(holdouts.values())))),
        "rows": board,
        "skipped": [{"drafter": name, **one} for name in traces for one in tuned[name][1]],
        "median_abs_error_percent": median_error(board),
        "options": {
            "trials": settings.trials,
            "repeats": settings.repeats,
            "tuning_share": settings.tuning_share,
            "seed": settings.seed,
        },
    }
    write_json(document, out / "leaderboard.json")
    from specsim.report.drafters import render_drafters, write_drafters_table  # matplotlib is slow to load

    write_drafters_table(out / "leaderboard.csv", document)
    write_text(out / "report.html", render_drafters(document))
    return document


def _within(pair: Pair, settings: RecordSettings) -> RecordSettings:
    """What this drafter can be recorded with."""
    return settings if pair.drafter.trees else dataclasses.replace(settings, tree_nodes=0)


def _identity(pairs: Mapping[str, Pair], prompts: Sequence[Prompt], settings: Settings) -> dict[str, Any]:
    """What must be the same where a job goes on."""
    first, record = next(iter(pairs.values())), settings.record
    return {
        "drafters": {name: pair.fingerprint for name, pair in pairs.items()},
        "layers": first.target.config.num_hidden_layers,  # identity blocks are in no fingerprint, but take time
        "block_expansion": expansion_of(first.target),
        "device": device_name(first.device),
        "threads": torch.get_num_threads(),
        "clock": clock_name(),
        "dtype": str(first.dtype).removeprefix("torch."),
        "kernels": backend_for(first.device),
        "decoding": record.sampler.as_dict(),
        "max_new_tokens": record.max_new_tokens,
        "depth": record.max_draft_tokens,
        "trees": None if record.tree is None else record.tree._asdict(),
        "prompts": prompt_digest(prompts),
        "policies": {kind.name: source_digest(kind) for kind in settings.kinds},
        "trials": settings.trials,
        "tuning_share": settings.tuning_share,
        "seed": settings.seed,
    }


def _claim(out: Path, identity: dict[str, Any], names: Sequence[str], *, overwrite: bool) -> None:
    """Make the folder this job's, or find that it is; InputError if it is another's."""
    path = out / SETTINGS
    if path.is_file() and overwrite:
        for name in (DECODED, PLAIN, *names, *read_own(path, Identity, again=ANEW)["drafters"]):
            remove_folder(out / name)
        write_json(identity, path)
    if not path.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise InputError(f"{out} holds other files than a leaderboard's; give another --out")
        write_json(identity, path)
    found = read_own(path, Identity, again=ANEW)
    refuse_other(f"{out} was made", found, identity, "pass --overwrite or another --out")


def _tuned(
    name: str,
    trace: Trace,
    cost: ProfileCost,
    paper_policy: str | None,
    settings: Settings,
    path: Path,
    progress: Progress,
) -> tuple[list[Entry], list[dict[str, str]]]:
    """The best policy of each role on the tuning prompts, and (policy, reason) of those that do not fit.

    paper_policy : name of the one that the drafter's paper drafts with
    """
    if not path.is_file():
        (board,) = leaderboards(
            {f"{name}: tune": trace},
            [cost],
            kinds=settings.kinds,
            trials=settings.trials,
            tuning_share=settings.tuning_share,
            replays=1,
            seed=settings.seed,
            sensitivity=False,
            progress=progress,
        )
        write_json(board.as_dict(), path)
    document, kinds = read_own(path, Tuned, again=ANEW), {kind.name: kind for kind in settings.kinds}
    best: dict[str, Entry] = {}
    for row in sorted(document["rows"], key=lambda row: -float(row["train_speedup"])):
        kind = kinds[row["policy"]]
        roles = [role_of(kind), *([PAPER] if kind.name == paper_policy else [])]
        for role in roles:
            entry = Entry(name, role, row["label"], build_policy(kind, row["params"]), row["train_speedup"])
            best.setdefault(role, entry)
    policies = [one.policy for role, one in best.items() if role != PAPER]
    found = [best[role] for role in (FIXED, ADAPTIVE, TREE, PAPER) if role in best]
    return [one for one in found if one.role != PAPER or one.policy not in policies], document["skipped"]


def named(drafters: str | None, target: str) -> dict[str, str]:
    """Names, in the leaderboard, of the drafters that were asked for: a folder's own name, else the drafter's."""
    from realrun.pairs.lab_drafters import LAB_DRAFTERS, LAB_PREFIX, has_lab_drafter
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
    found: dict[str, str] = {}
    for given in (part.strip() for part in drafters.split(",") if part.strip()):
        name = Path(given.removeprefix(LAB_PREFIX)).name
        if name in RESERVED:
            raise InputError(f"a drafter cannot be called {name} here; rename its folder")
        if name in found:
            raise InputError(f"two drafters are called {name}; give each once, and folders of different names")
        found[name] = given
    if not found:
        raise InputError(f"--drafters {drafters!r} names none; write for example model,{LOOKUP}")
    return found
