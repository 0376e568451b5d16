"""Forecast every policy's speedup before the first held-out token is decoded.

The costs to tune under and to forecast by are profiled now, or are from before and fitted to the machine by a probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from realrun.experiment.settings import Candidate, ExperimentSettings, ValidationSettings
from realrun.kept_files import read_own
from realrun.measure import probe as probe_module
from realrun.measure import profile as profile_module
from realrun.measure.probe import PASS_TOKENS, probe
from realrun.measure.profile import TREE_TOKENS, contexts_between, profile
from realrun.measure.record import longest_prompt
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.files import cost_path, read_cost, read_cost_document
from specsim.cost.model import CostModel
from specsim.cost.probe import Probe, rescaled
from specsim.cost.profile import Profile, ProfileCost
from specsim.io.files import write_json
from specsim.io.progress import Progress
from specsim.policy.base import Policy
from specsim.replaying.document import Document
from specsim.replaying.forecast import forecast_interval
from specsim.replaying.intervals import NO_SPECULATION, Estimate
from specsim.replaying.priced import PricedTrace
from specsim.report.experiment import ForecastFacts, Parts
from specsim.trace.trace import Trace

# Standard deviation of the logarithm of a speedup between costs and a run: with costs that were measured, or fitted to
# the machine by a probe, on an idle machine; what busy processes on all CPUs add, with the square of their share; with
# costs from before that nothing fits to the machine. Fitted to the runs of `studies/forecasts`.
IDLE_RUN_ERROR, BUSY_RUN_ERROR, OLD_RUN_ERROR = 0.024, 0.13, 0.06
UNKNOWN_SHARE = 0.5  # of the CPUs, where a system does not tell what other processes use
DRAWN = 16  # profiles, for the noise that costs bring into a forecast
PROFILE_SHARE, PROBE_SHARE = 0.07, 0.02  # of the minutes, at most
FORECAST = "forecast.json"
Before = Profile | CostModel | None  # costs from before; None where they are profiled now
ANEW = "pass --overwrite"


@dataclass(frozen=True)
class ForecastCosts:
    """Costs from before the held-out prompts are decoded.

    cost : that policies are tuned under and forecast by
    facts : where the costs are from, for the document
    run_error : standard deviation of the logarithm of a speedup between such costs and a run
    unprobed : the same as they were before a probe of this machine rescaled them; None without a probe
    drawn : costs drawn within the errors of the profile, to propagate its noise
    """

    cost: CostModel
    facts: Mapping[str, object]
    run_error: float
    unprobed: CostModel | None = None
    drawn: Sequence[CostModel] = ()

    @classmethod
    def profiled(cls, profile: Profile, seed: int) -> ForecastCosts:
        """Make costs of a profile that was measured just before."""
        facts = {"source": "measured just before", **profile.origin}
        return cls(profile.cost, facts, run_error(profile.others_percent), drawn=profile.draws(DRAWN, seed))


def costs_before(settings: ValidationSettings) -> Before:
    """Read the costs that an experiment is to be forecast by."""
    if settings.cost is None:
        return None
    path, cost = cost_path(settings.cost), read_cost(settings.cost)
    return Profile.from_json(read_cost_document(path), str(path)) if isinstance(cost, ProfileCost) else cost


def probed(
    pair: Pair, prompts: Sequence[Prompt], settings: ExperimentSettings, before: Before, progress: Progress
) -> Probe:
    """Probe the machine's state at the longest context of the prompts, or where costs from before are to be fitted to
    it at the shortest as well, within theirs.
    """
    longest = longest_prompt(pair, PASS_TOKENS + 1, 0)  # that leaves room for the probe's passes
    ends = [-1] if before is None else [0, -1]
    contexts = np.minimum(contexts_of(prompts, settings.record.max_new_tokens), longest)[ends]
    if isinstance(before, Profile):
        contexts = contexts.clip(before.cost.contexts[0], before.cost.contexts[-1])
    document = probe(
        pair,
        contexts=[*dict.fromkeys(contexts.tolist())],
        limit_s=limit_s(probe_module.LIMIT_S, PROBE_SHARE, settings.minutes),
        sampler=settings.record.sampler,
        seed=settings.seed,
        progress=lambda done, total: progress("probe", done, total),
    )
    return Probe.from_json(document)


def forecast_costs(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: ValidationSettings,
    before: Before,
    state: Probe,
    path: Path,
    progress: Progress,
) -> ForecastCosts:
    """Return the costs to tune under and to forecast by: those from before at the probed state, or a profile made now.

    path : where a profile made now is kept
    """
    if before is None:
        return ForecastCosts.profiled(tuning_profile(pair, prompts, settings, path, progress), settings.seed)
    source = {"source": str(settings.cost)}
    if isinstance(before, CostModel):  # other forms of costs have no times to rescale
        return ForecastCosts(before, source, OLD_RUN_ERROR)
    sources = {**source, **before.origin}
    now, error = rescaled(before, state, sources), run_error(state.others_percent)
    facts = {**sources, "probed": now.as_dict()["probed"]}
    return ForecastCosts(now.cost, facts, error, before.cost, now.draws(DRAWN, settings.seed))


def tuning_profile(
    pair: Pair, prompts: Sequence[Prompt], settings: ExperimentSettings, path: Path, progress: Progress
) -> Profile:
    """Measure what rounds cost before anything is decoded, or read it from this file of an earlier start."""
    if not path.is_file():
        contexts = contexts_of(prompts, settings.record.max_new_tokens)
        document = profile(
            pair,
            contexts=[*dict.fromkeys((contexts[0], contexts[-1]))]
            if settings.minutes
            else contexts,  # with twice the sweeps
            depth=settings.record.max_draft_tokens,
            limit_s=limit_s(profile_module.LIMIT_S, PROFILE_SHARE, settings.minutes),
            sampler=settings.record.sampler,
            seed=settings.seed,
            tree_tokens=TREE_TOKENS if settings.record.tree_nodes else 0,
            progress=lambda done, total: progress("profile", done, total),
        )
        write_json(document, path)
    return Profile.from_json(read_own(path, again=ANEW), str(path))


def run_error(others_percent: float | None) -> float:
    """Estimate by how much speedups under the costs of a profile or probe differ from those of a run.

    others_percent : of the CPUs, used by other processes when the costs were measured

    Returns the standard deviation of their logarithm.
    """
    share = UNKNOWN_SHARE if others_percent is None else others_percent / 100
    return IDLE_RUN_ERROR + BUSY_RUN_ERROR * share**2


def contexts_of(prompts: Sequence[Prompt], new_tokens: int) -> list[int]:
    """Choose contexts to profile over all that rounds on these prompts may meet."""
    lengths = [len(prompt.tokens) for prompt in prompts]
    return contexts_between(min(lengths) - 1, max(lengths) + new_tokens - 2)


def limit_s(longest_s: float, share: float, minutes: float) -> float:
    """Return the seconds that a measurement may take in an experiment of these minutes, 0 for no limit."""
    return min(longest_s, 60 * minutes * share) if minutes else longest_s


class ForecastRow(Document, frozen=True):
    """Forecast of a policy.

    forecast : of the speedup
    forecast_without_probe : at the costs before a probe rescaled them; None without a probe
    drafter : None where there is only one
    """

    policy: str
    label: str
    params: dict[str, Any]
    role: str
    forecast: Estimate
    tokens_per_s: float
    forecast_without_probe: float | None = None
    drafter: str | None = None


class Forecast(Document, frozen=True):
    """Every policy's speedup as forecast before any held-out prompt is decoded; forecast.json.

    made : when
    sealed : whether none of the held-out prompts had been decoded
    drafter : several where rows name their drafter
    costs : where they are from
    """

    made: str
    sealed: bool
    target: str
    drafter: str | list[str]
    sequences: Parts
    baseline_tokens_per_s: float
    rows: list[ForecastRow]
    costs: dict[str, Any]
    kind: Literal["specsim-forecast"]
    version: Literal[1]

    def as_dict(self) -> dict[str, Any]:
        """Return the document of forecast.json."""
        return {**super().as_dict(), "deploy": self.deploy}

    @property
    def facts(self) -> ForecastFacts:
        """Return the forecast without its rows."""
        return ForecastFacts(*(getattr(self, name) for name in ForecastFacts.__struct_fields__))

    @property
    def best(self) -> ForecastRow:
        """Return the fastest policy's row."""
        return max(self.rows, key=lambda row: row.forecast)

    @property
    def deploy(self) -> str:
        """Label of the fastest, which may be no speculation."""
        return self.best.label if self.best.forecast > 1 else NO_SPECULATION

    def __str__(self) -> str:
        return (
            f"forecast: {self.best.label}, {self.best.forecast} times as fast as without speculation, from "
            f"{self.sequences.tuning} tuning prompts; {self.sequences.holdout} held-out prompts follow"
        )


def forecast(
    chosen: Sequence[Candidate], train: Trace, costs: ForecastCosts, *, held_out: int, sealed: bool, seed: int
) -> Forecast:
    """Forecast every policy's speedup and tokens per second on prompts that are not decoded yet.

    Parameters
    ----------
    train : trace of the tuning prompts
    held_out : prompts that will be decoded
    sealed : whether none of these has been decoded yet
    seed : of the policies' uniforms

    Returns
    -------
    Forecast
        With rows in the order of `chosen`.
    """
    priced = PricedTrace(train, costs.cost)
    noisy = [PricedTrace(train, cost) for cost in costs.drawn]
    before = None if costs.unprobed is None else PricedTrace(train, costs.unprobed)
    baseline_tokens_per_s = float(train.output_tokens.sum() / priced.baseline_s.sum())
    rows = []
    for candidate in chosen:
        policy = candidate.policy
        replayed = priced.replay(policy, seed=seed)
        drawn = [other.replay(policy, seed=seed).speedup for other in noisy]
        speedup = forecast_interval(
            replayed.autoregressive_s,
            replayed.speculative_s,
            train.domain,
            held_out,
            cost_error=float(np.log(drawn).std(ddof=1)) if len(drawn) > 1 else 0.0,
            run_error=costs.run_error,
        )
        rows.append(
            ForecastRow(
                policy.name,
                str(policy),
                policy.settings,
                candidate.role,
                speedup,
                baseline_tokens_per_s * speedup,
                None if before is None else float(before.replay(policy, seed=seed).speedup),
            )
        )
    return Forecast(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        sealed=sealed,
        target=train.meta["target"],
        drafter=train.meta["drafter"],
        sequences=Parts(train.sequences, held_out),
        baseline_tokens_per_s=baseline_tokens_per_s,
        rows=rows,
        costs=dict(costs.facts),
        kind="specsim-forecast",
        version=1,
    )


def speedups_on(traces: Mapping[str, PricedTrace], policy: Policy, seed: int) -> dict[str, float]:
    """Replay a policy on several traces with costs; return its speedup on each, by the trace's name."""
    return {name: float(priced.replay(policy, seed=seed).speedup) for name, priced in traces.items()}


def sealed_forecast(folder: Path, made: Forecast) -> Forecast:
    """Keep a forecast in its folder; one that an earlier start of the job made of the same policies stands."""
    path = folder / FORECAST
    if path.is_file():
        old = Forecast.from_json(read_own(path, again=ANEW), str(path), ANEW)
        earlier, wanted = ([(row.label, row.params) for row in forecast.rows] for forecast in (old, made))
        if earlier == wanted:
            return old
    write_json(made.as_dict(), path)
    return made
