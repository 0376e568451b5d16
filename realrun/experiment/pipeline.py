"""An experiment: record, measure costs, tune and forecast on some prompts, then really decode the others in turns.

`realrun validate` is an experiment with a drafter, or with several that take turns (`--join`); `realrun board` ranks
several drafters. They differ in how costs are measured, which tuned policies are decoded, and in their documents.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from msgspec.structs import replace

from realrun.experiment.forecast import ANEW, Forecast, ForecastCosts, ForecastRow, forecast, probed, sealed_forecast
from realrun.experiment.measuring import MeasuredCosts, Measurement, Run, measure_in_turns
from realrun.experiment.settings import Candidate, ExperimentSettings
from realrun.experiment.timing import make_arm
from realrun.kept_files import read_kept, read_own
from realrun.lm.clock import clock_name
from realrun.lm.variants import expansion_of
from realrun.measure.record import RecordSettings, decodes_batches, has_recorded
from realrun.measure.reuse import check_job, recorded_trace, recording_identity
from realrun.measure.sweeps import probing_s
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest, spread
from realrun.provenance import device_name
from speckernels import backend_for
from specsim.cost.joined import JoinedCost
from specsim.cost.model import CostModel
from specsim.cost.probe import Probe
from specsim.cost.profile import Profile
from specsim.cost.table import context_range
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json
from specsim.io.progress import Progress
from specsim.learn.fit import needs_fitting
from specsim.learn.settings import SearchSettings
from specsim.learn.storage import source_digest
from specsim.learn.variants import applicable_variants, fit_variant, label
from specsim.policy.base import Policy, Variant, build_policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES
from specsim.replaying.checks import check_covered, check_replayable
from specsim.replaying.priced import PricedTrace
from specsim.report.experiment import Prompts
from specsim.trace.files import read_trace
from specsim.trace.joined import join_traces
from specsim.trace.trace import Trace

UNFINISHED = "validation.partial"  # folder, in the output's, of what is there before the result
# In the folder of an experiment that is not whole.
IDENTITY, PLAN, TUNED, DECODED = "settings.json", "plan.json", "tuned.json", "decoded"
OTHER = f"{ANEW} or another --out"
# Time of a recorded token, in decoding steps, its own decoded alone or in a batch, and the proposals behind it; trees
# take more.
RECORD_STEPS, BATCHED_STEPS = 2.0, 0.9
RECORD_SHARE = 0.21  # of the minutes, at most for recording
# Time of decoding with all arms over that of their rounds alone, without probes: prompts are read, too.
DECODE_FACTOR = 1.2
TOGETHER = 8  # prompts decoded at once where nothing is timed
END_S = 15.0  # for the probe and the report after decoding
LEAST_PROMPTS, LEAST_HELD_OUT, ENOUGH_HELD_OUT = 8, 4, 12
ENOUGH_POLICIES = 3

log = logging.getLogger("realrun")


class TunedFile(TypedDict):
    """A policy's settings and where they come from, or the reason why it cannot be validated."""

    params: NotRequired[dict[str, Any]]
    role: NotRequired[str]
    train_speedup: NotRequired[float]
    reason: NotRequired[str]


@dataclass(frozen=True)
class Contender:
    """A drafter over the target, or several drafters of which a policy chooses one in each round.

    pair : whose decoders its arms run on
    parts : the pairs that are recorded and profiled, by the folder of their trace
    record : what is recorded of them
    """

    pair: Pair
    parts: Mapping[Path, Pair]
    record: RecordSettings

    def cost(self, profiles: Sequence[Profile]) -> CostModel:
        """Make the costs of its rounds from a profile of each part."""
        return profiles[0].cost if len(profiles) == 1 else JoinedCost(tuple(profile.cost for profile in profiles))

    def tree_tokens(self, cost: CostModel) -> int:
        """Return the tokens of the largest tree whose costs are known, 0 if no trees are recorded."""
        return cost.max_tree_tokens if self.record.tree_nodes else 0

    def runs(self, part: int, measurement: Measurement, arms: Sequence[int]) -> Iterator[Run]:
        """Yield the runs of these arms: of a contender with several parts only the rounds that this part drafted."""
        for policy, prompt_tokens, rounds in measurement.runs(arms):
            own = policy is None or len(self.parts) == 1
            yield policy, prompt_tokens, rounds if own else [one for one in rounds if one.drafter == part]


@dataclass(frozen=True)
class Entry:
    """A policy that is decoded. name : its contender's; forecast : its forecast"""

    name: str
    candidate: Candidate
    forecast: ForecastRow

    @property
    def title(self) -> str:
        """Name contender and policy."""
        return f"{self.name}, {self.candidate.variant}"

    @property
    def speedup(self) -> float:
        """Return the forecast without its interval."""
        return self.forecast.forecast.estimate


@dataclass(frozen=True)
class Outcome:
    """What an experiment knows at its end; mappings are by the contender's name.

    trains, holdouts : traces of the tuning prompts, and of the held-out prompts that were decoded
    costs : of the forecast
    measurement : of the baseline, of every entry in its order, and of the baseline again; None if nothing was decoded
    profiles : of each part of a contender while its entries decoded; empty if nothing was decoded
    skipped : (contender, policy, reason) of what was not decoded
    """

    contenders: Mapping[str, Contender]
    entries: Sequence[Entry]
    trains: Mapping[str, Trace]
    holdouts: Mapping[str, Trace]
    costs: Mapping[str, ForecastCosts]
    forecast: Forecast
    measurement: Measurement | None
    profiles: Mapping[str, Sequence[Profile]]
    skipped: Sequence[tuple[str, str, str]]
    tuning_prompts: int

    @property
    def measured(self) -> Measurement:
        """Return what was measured; the experiment must have decoded its held-out prompts."""
        assert self.measurement is not None
        return self.measurement

    def run_cost(self, name: str) -> CostModel:
        """Return the costs of a contender's rounds while it decoded."""
        return self.contenders[name].cost(self.profiles[name])

    def partly_known(self, name: str) -> dict[str, PricedTrace]:
        """Return the held-out text at the costs of the forecast, and the tuning text at the costs of the run."""
        holdout, costs = self.holdouts[name], self.costs[name]
        text_known = {"text_known": PricedTrace(holdout, costs.cost)}
        if costs.unprobed is not None:
            text_known["text_known_without_probe"] = PricedTrace(holdout, costs.unprobed)
        return {**text_known, "costs_known": PricedTrace(self.trains[name], self.run_cost(name))}


class Experiment(ABC):
    """The steps of an experiment, each of which reads what an interrupted start left in `folder`.

    contenders : by name
    plain : pair of the baseline
    given : all prompts; `prompts` are those that fit the minutes, `split` the numbers of tuning and held-out ones
    folder : of what is there before the result
    """

    def __init__(
        self,
        contenders: Mapping[str, Contender],
        plain: Pair,
        prompts: Sequence[Prompt],
        settings: ExperimentSettings,
        folder: Path,
        progress: Progress,
        *,
        overwrite: bool,
    ):
        self.contenders, self.plain, self.settings = dict(contenders), plain, settings
        self.given, self.prompts, self.folder = prompts, prompts, folder
        self.progress, self.overwrite = progress, overwrite
        self.begun_s = time.monotonic()
        self.skipped: list[tuple[str, str, str]] = []

    @property
    def traces(self) -> list[Path]:
        """List the folders of all traces."""
        return [folder for contender in self.contenders.values() for folder in contender.parts]

    @cached_property
    def state(self) -> Probe:
        """Probe the machine's state."""
        return probed(self.plain, self.given, self.settings, None, self.progress)

    def run(self) -> Outcome:
        """Do all steps. Errors are those of `realrun.validate`."""
        settings = self.settings
        batches = decodes_batches(self.plain.core, settings.record)
        plan = Plan(self.folder / PLAN, settings, lambda: self.state.decoding_step_s, batches=batches)
        recorded = next((folder for folder in self.traces if folder.exists() and not self.overwrite), None)
        self.prompts = plan.to_record(self.given, recorded)
        self.split = tuning, held = check_job(
            self.folder, self.prompts, tuning_share=settings.tuning_share, seed=settings.seed
        )
        sealed = self.overwrite or not any(has_recorded(folder, held.tolist()) for folder in self.traces)

        trains = self.record(tuning, "record tuning prompts")
        self.claim()
        costs = self.costs()
        tuned = {name: self.tune(name, trains[name], costs[name].cost) for name in self.contenders}

        everyone = [candidate for chosen in tuned.values() for candidate in chosen]
        least = len(everyone) if len(tuned) > 1 else 1
        texts = [self.prompts[number] for number in held]
        spent_s = time.monotonic() - self.begun_s
        probes_s = sum(self.probing_s(name, trains[name], costs[name].cost) for name in self.contenders)
        fitting, decoded = plan.to_decode(everyone, texts, spent_s, probes_s, least_policies=least)
        for name, chosen in tuned.items():
            left_out = [candidate for candidate in chosen if not any(candidate is one for one in fitting)]
            self.skipped += [(name, candidate.variant, plan.reason) for candidate in left_out]
            tuned[name] = [candidate for candidate in chosen if candidate not in left_out]
        held = held[decoded]
        made = sealed_forecast(self.folder, self.forecast(tuned, trains, costs, len(held), sealed=sealed))
        log.info(str(made))

        rows = iter(made.rows)
        entries = [Entry(name, candidate, next(rows)) for name, chosen in tuned.items() for candidate in chosen]
        holdouts = {name: trace.select(held) for name, trace in self.record(held, "record", whole=True).items()}
        measurement, profiles = None, dict[str, list[Profile]]()
        if settings.repeats:
            measurement, profiles = self.decode(entries, [self.prompts[n] for n in held], trains, holdouts, costs)
        return Outcome(
            contenders=self.contenders,
            entries=entries,
            trains=trains,
            holdouts=holdouts,
            costs=costs,
            forecast=made,
            measurement=measurement,
            profiles=profiles,
            skipped=self.skipped,
            tuning_prompts=len(tuning),
        )

    def record(self, sequences: Ints, what: str, *, whole: bool = False) -> dict[str, Trace]:
        """Record these prompts with every contender, or read their traces. whole : with all others, which are there"""
        return {
            name: join_parts(
                {
                    str(folder): recorded_trace(
                        pair,
                        self.prompts,
                        contender.record,
                        folder,
                        lambda done, total, name=name: self.tell(name, what, done, total),  # type: ignore[misc]
                        overwrite=self.overwrite,
                        sequences=None if whole else sequences,
                        together=TOGETHER,
                    )
                    for folder, pair in contender.parts.items()
                }
            )
            for name, contender in self.contenders.items()
        }

    def probing_s(self, name: str, train: Trace, cost: CostModel) -> float:
        """Estimate by the forecast's costs how long a contender's probes take while its arms decode."""
        contender, context = self.contenders[name], float(np.mean(context_range(train)))
        costs = cost.parts if isinstance(cost, JoinedCost) else [cost]
        return sum(
            probing_s(pair, own, context, depth=train.depth, tree_tokens=contender.tree_tokens(own))
            for pair, own in zip(contender.parts.values(), costs, strict=True)
        )

    def tell(self, name: str, what: str, done: int, total: int) -> None:
        """Report the progress of a contender's step."""
        self.progress(f"{name}: {what}" if len(self.contenders) > 1 else what, done, total)

    @abstractmethod
    def claim(self) -> None:
        """Refuse a folder that holds an unfinished experiment of other settings."""

    @abstractmethod
    def costs(self) -> Mapping[str, ForecastCosts]:
        """Measure the costs to tune under and to forecast by, or read them; by the contender's name."""

    def tune(self, name: str, train: Trace, cost: CostModel) -> list[Candidate]:
        """Tune a contender's policies; add those that cannot be decoded to `skipped`."""
        chosen, skipped = candidates(
            train, cost, self.search, kinds=self.kinds, progress=self.progress, kept=self.folder / TUNED
        )
        self.skipped += [(name, policy, reason) for policy, reason in skipped]
        return chosen

    @property
    def kinds(self) -> Sequence[type[Policy]] | None:
        """Policies to tune; None: all that the trace can serve."""
        return self.settings.kinds

    @property
    def search(self) -> SearchSettings:
        """Settings of the search for a policy's settings."""
        return SearchSettings(trials=self.settings.trials, seed=self.settings.seed)

    def forecast(
        self,
        tuned: Mapping[str, Sequence[Candidate]],
        trains: Mapping[str, Trace],
        costs: Mapping[str, ForecastCosts],
        held_out: int,
        *,
        sealed: bool,
    ) -> Forecast:
        """Forecast all policies; the rows of several contenders name the contender ahead of the policy."""
        made = {
            name: forecast(chosen, trains[name], costs[name], held_out=held_out, sealed=sealed, seed=self.settings.seed)
            for name, chosen in tuned.items()
        }
        *_, last = made.values()
        if len(made) == 1:
            return last
        rows = [
            replace(row, drafter=name, label=f"{name}, {candidate.variant}")
            for name, one in made.items()
            for row, candidate in zip(one.rows, tuned[name], strict=True)
        ]
        return replace(last, rows=rows, drafter=[*tuned])

    def arm_name(self, entry: Entry) -> str:
        """Name an entry's arm."""
        return str(entry.candidate.policy)

    def decode(
        self,
        entries: Sequence[Entry],
        prompts: Sequence[Prompt],
        trains: Mapping[str, Trace],
        holdouts: Mapping[str, Trace],
        costs: Mapping[str, ForecastCosts],
    ) -> tuple[Measurement, dict[str, list[Profile]]]:
        """Decode the held-out prompts, and measure what the rounds of every part of a contender cost meanwhile.

        Every prompt is decoded at once by the baseline, by every entry, and by the baseline once more, which shows what
        differs by chance (the A/A test), in turns of a few rounds. Probes of what no arm does often take turns too.
        Every round is taken at the median of its repeats.
        """
        settings, sampler = self.settings, self.settings.record.sampler
        baselines = [0, len(entries) + 1]
        policies = [(entry.name, entry.candidate.policy) for entry in entries]
        arms = [
            make_arm("autoregressive", None, self.plain, sampler),
            *(
                make_arm(self.arm_name(entry), policy, self.contenders[name].pair, sampler)
                for entry, (name, policy) in zip(entries, policies, strict=True)
            ),
            make_arm("null arm", None, self.plain, sampler),
        ]
        parts = [
            (name, part, pair)
            for name, contender in self.contenders.items()
            for part, pair in enumerate(contender.parts.values(), start=1)
        ]
        own_arms = {name: [arm for arm, (of, _) in enumerate(policies, start=1) if of == name] for name, _, _ in parts}
        measured: dict[tuple[str, int], MeasuredCosts] = {}
        for name, part, pair in parts:
            contender = self.contenders[name]
            own_baseline = contender.pair is self.plain
            joined = len(contender.parts) > 1  # an arm's rounds are those of several parts
            arms_of_cost = [*(baselines if own_baseline else []), *([] if joined else own_arms[name])]
            measured[name, part] = MeasuredCosts(
                pair,
                holdouts[name],
                tree_tokens=contender.tree_tokens(costs[name].cost),
                sampler=sampler,
                seed=settings.seed,
                texts=math.ceil((1 if settings.minutes else settings.repeats) * len(prompts) / len(parts)),
                own_baseline=own_baseline,
                beside=trains[name],
                arms=sorted(arms_of_cost),
            )
        measurement = measure_in_turns(
            arms,
            {name if part == 1 else f"{name} {part}": cost for (name, part), cost in measured.items()},
            prompts,
            next(iter(holdouts.values())),
            self.folder / DECODED,
            repeats=settings.repeats,
            seed=settings.seed,
            progress=lambda done, total: self.progress("decode", done, total),
            more_until_s=self.begun_s + 60 * settings.minutes - END_S if settings.minutes else None,
        )
        profiles: dict[str, list[Profile]] = {name: [] for name in self.contenders}
        for name, part, _ in parts:
            runs = self.contenders[name].runs(part, measurement, sorted([*baselines, *own_arms[name]]))
            profiles[name].append(measured[name, part].profile(runs, measurement.repeats))
        return measurement, profiles


class Validation(Experiment):
    """An experiment in a folder of its own beside the result, which is removed at the end."""

    def begin(self, out: Path) -> None:
        """Check the prompts, and make the folder."""
        check_job(out, self.given, tuning_share=self.settings.tuning_share, seed=self.settings.seed)
        out.mkdir(parents=True, exist_ok=True)
        if self.overwrite:
            remove_folder(self.folder)

    def finish(self, out: Path) -> None:
        """Move to the result what was known before anything was decoded: profiles, tuned policies and forecasts."""
        for path in [*self.folder.glob("tun*.json"), *self.folder.glob("forecast*.json")]:
            path.replace(out / path.name)
        remove_folder(self.folder)


def join_parts(traces: Mapping[str, Trace]) -> Trace:
    """Return the trace of several drafters, or the only one."""
    return join_traces(traces) if len(traces) > 1 else next(iter(traces.values()))


def about_prompts(prompts: Sequence[Prompt], settings: ExperimentSettings) -> Prompts:
    """Describe the source, number and tokens of prompts for a document."""
    return Prompts(settings.record.prompts_source or "not named", len(prompts), prompt_digest(prompts))


def conditions_of(pair: Pair, settings: ExperimentSettings) -> dict[str, Any]:
    """Return the conditions under which sequences are decoded, by machine, target and tuning settings."""
    return {
        "layers": pair.target.config.num_hidden_layers,  # identity blocks are in no fingerprint, but take time
        "block_expansion": expansion_of(pair.target),
        "device": device_name(pair.device),
        "threads": torch.get_num_threads(),
        "clock": clock_name(),
        "kernels": backend_for(pair.device),
        "policies": {kind.name: source_digest(kind) for kind in settings.policies},
        "trials": settings.trials,
        "tuning_share": settings.tuning_share,
        "seed": settings.seed,
        "minutes": settings.minutes,  # by which held-out prompts are chosen, whose numbers name decoded sequences
    }


def identity_of(pair: Pair, prompts: Sequence[Prompt], settings: ExperimentSettings) -> dict[str, Any]:
    """Return all that tuned policies and decoded sequences depend on; repeats may be added."""
    return {**recording_identity(pair, prompts, settings.record), **conditions_of(pair, settings)}


def candidates(
    train: Trace,
    cost: CostModel,
    search: SearchSettings,
    *,
    kinds: Sequence[type[Policy]] | None = None,
    progress: Progress | None = None,
    kept: Path | None = None,
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Tune every policy that the trace can serve, in all its variants, on `train`.

    Returns the distinct policies, and (policy, reason) of those that trace or costs cannot serve.

    kept : file of tuned policies, written after each; policies in it are not tuned again
    """
    chosen: list[Candidate] = []
    priced = PricedTrace(train, cost)
    served, skipped = applicable_variants(train, POLICIES.values() if kinds is None else kinds, cost)
    tuned: dict[str, TunedFile] = {}
    if kept is not None and kept.is_file():
        tuned = read_own(kept, dict[str, TunedFile], again="delete it to tune again")
    for done, (kind, variant) in enumerate(served):
        name = label(kind, variant)
        if name not in tuned:
            tuned[name] = _tuned(kind, variant, priced, search)
            if kept is not None:
                write_json(tuned, kept)
        if reason := tuned[name].get("reason"):
            skipped.append((name, reason))
        else:
            policy = build_policy(kind, tuned[name]["params"])
            if all(policy != candidate.policy for candidate in chosen):
                chosen.append(Candidate(policy, tuned[name]["role"], tuned[name].get("train_speedup"), name))
        if progress:
            progress("tune", done + 1, len(served))
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
        raise InputError(f"none of the policies can be validated here ({reasons}); choose others")
    return chosen, skipped


def _tuned(kind: type[Policy], variant: Variant, priced: PricedTrace, search: SearchSettings) -> TunedFile:
    """Tune a policy: its settings and where they come from, or the reason why it cannot be validated."""
    try:
        policy = fit_variant(kind, variant, priced, search)
        check_replayable(priced.trace, policy)
        check_covered(priced.trace, policy, priced.table(policy))
        forecast = priced.replay(policy, seed=search.seed).speedup
    except InputError as error:  # such as a tree larger than those profiled
        return {"reason": str(error)}
    by_default = "fixed_k" if kind is FixedK else "fitted" if needs_fitting(kind) else "default"
    return {"params": policy.settings, "role": "tuned" if variant.tuned else by_default, "train_speedup": forecast}


class PlanFile(TypedDict, total=False):
    """Plan that an earlier start of the same job wrote: number of prompts to record; numbers of what is decoded."""

    step_s: float
    prompts: int
    policies: list[int]
    held_out: list[int]


class Plan:
    """Prompts and policies that fit into the minutes of an experiment; a file keeps them for a later start.

    The most telling comes first: the policy that the forecast would deploy, then the best variant of every other policy
    by forecast, then the other variants, on prompts spread evenly over the domains, each decoded once: another prompt
    tells more than the same again. Times are estimated from decoding steps, so they hold as long as the machine stays
    as it is.

    step_s : function that measures the seconds of a decoding step, called where the file does not tell them
    batches : whether recordings decode prompts at once
    """

    def __init__(self, path: Path, settings: ExperimentSettings, step_s: Callable[[], float], *, batches: bool = False):
        self.path, self.settings, self.measure_step_s = path, settings, step_s
        self.record_steps = BATCHED_STEPS if batches else RECORD_STEPS
        self.kept: dict[str, Any] = read_kept(path, PlanFile) or {}

    @property
    def reason(self) -> str:
        """Explain in the result why a policy was not decoded."""
        return f"left out to fit --minutes {self.settings.minutes:g}"

    @property
    def prompt_s(self) -> float:
        """Compute the seconds that decoding a prompt takes without speculation."""
        if "step_s" not in self.kept:
            self._keep({"step_s": self.measure_step_s()})
        return float(self.kept["step_s"]) * self.settings.record.max_new_tokens

    def to_record(self, prompts: Sequence[Prompt], recorded: Path | None) -> Sequence[Prompt]:
        """Select the prompts to record. recorded : a finished trace of this job, whose prompts stay as they are"""
        if not self.settings.minutes:
            return prompts
        if "prompts" not in self.kept:
            if recorded is None:
                share_s, prompt_s = 60 * self.settings.minutes * RECORD_SHARE, self.record_steps * self.prompt_s
                count, least = max(LEAST_PROMPTS, int(share_s / prompt_s)), min(LEAST_PROMPTS, len(prompts))
                if share_s < least * prompt_s:
                    minutes = least * prompt_s / RECORD_SHARE / 60
                    log.warning(
                        f"--minutes {self.settings.minutes:g} is too short: at least {least} prompts are recorded, "
                        f"which takes about {minutes:.2g} minutes with all that follows"
                    )
            else:
                count = read_trace(recorded).sequences
            self._keep({"prompts": min(count, len(prompts))})
        return spread(prompts, self.kept["prompts"])

    def to_decode(
        self,
        tuned: Sequence[Candidate],
        held_out: Sequence[Prompt],
        spent_s: float,
        probes_s: float,
        *,
        least_policies: int = 1,
    ) -> tuple[list[Candidate], list[int]]:
        """Choose the policies and held-out prompts to decode in the time that is left; prompts by number.

        spent_s : until now; probes_s : of the probes that take turns with the arms, however many prompts there are
        """
        if not self.settings.minutes or not self.settings.repeats:  # without repeats nothing is decoded
            return list(tuned), list(range(len(held_out)))
        if "policies" not in self.kept:
            left_s = 60 * self.settings.minutes - spent_s - probes_s - END_S
            baseline_s = DECODE_FACTOR * self.prompt_s  # once; again only where time is left
            speedups = [candidate.train_speedup or 1.0 for candidate in tuned]
            best_first = by_kind([candidate.policy.name for candidate in tuned], speedups)
            policies, prompts = fitting(
                [speedups[number] for number in best_first], len(held_out), left_s / baseline_s, least_policies
            )
            order = {id(prompt): number for number, prompt in enumerate(held_out)}
            chosen = sorted(order[id(prompt)] for prompt in spread(held_out, prompts))
            self._keep({"policies": sorted(best_first[:policies]), "held_out": chosen})
        return [tuned[number] for number in self.kept["policies"]], self.kept["held_out"]

    def _keep(self, more: dict[str, Any]) -> None:
        self.kept |= more
        write_json(self.kept, self.path)


def by_kind(names: Sequence[str], speedups: Sequence[float]) -> list[int]:
    """Order policies, by number: the fastest of each name, fastest first, then the others alike."""
    fastest_first = sorted(range(len(speedups)), key=lambda number: -speedups[number])
    met = [names[number] for number in fastest_first]
    return sorted(fastest_first, key=lambda number: met.index(names[number]) != fastest_first.index(number))


def fitting(speedups: Sequence[float], prompts: int, affordable: float, least_policies: int = 1) -> tuple[int, int]:
    """Count the policies, from the first on, and the prompts that two baselines and the policies can decode.

    Few policies on enough prompts tell more than many on few: policies are left out until `ENOUGH_POLICIES` are left or
    `ENOUGH_HELD_OUT` prompts fit, then prompts, then policies again. The least is `least_policies` policies on
    `LEAST_HELD_OUT` prompts, whatever fits.

    Parameters
    ----------
    speedups : forecast of every policy
    prompts : held-out prompts
    affordable : time, in that of the baseline on one prompt
    """

    def too_long(policies: int, prompts: int) -> bool:
        return prompts * (2 + sum(1 / speedup for speedup in speedups[:policies])) > affordable

    policies = len(speedups)
    while policies > max(ENOUGH_POLICIES, least_policies) and too_long(policies, min(prompts, ENOUGH_HELD_OUT)):
        policies -= 1
    while prompts > LEAST_HELD_OUT and too_long(policies, prompts):
        prompts -= 1
    while policies > least_policies and too_long(policies, prompts):
        policies -= 1
    return policies, prompts
