"""Forecast every policy's speedup before the first held-out token is decoded.

The costs to tune under and to forecast by are profiled now, or are from before and fitted to the machine by a probe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict

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
from specsim.cost.probe import probed_document
from specsim.cost.profile import PROFILE_KIND, ProfileCost, noisy_profile, profile_from_json
from specsim.io.files import digest, write_json
from specsim.io.progress import Progress
from specsim.policy.base import Policy
from specsim.replaying.forecast import forecast_interval
from specsim.replaying.intervals import NO_SPECULATION
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace

# Standard deviation of the logarithm of a speedup between costs and a run: with costs that were measured, or fitted to
# the machine by a probe, on an idle machine; what busy processes on all CPUs add, with the square of their share; with
# costs from before that nothing fits to the machine. Fitted to the runs of `studies/forecasts`.
IDLE_RUN_ERROR, BUSY_RUN_ERROR, OLD_RUN_ERROR = 0.024, 0.13, 0.06
UNKNOWN_SHARE = 0.5  # of the CPUs, where a system does not tell what other processes use
DRAWN = 16  # profiles, for the noise that costs bring into a forecast
PROFILE_SHARE, PROBE_SHARE = 0.3, 0.04  # of the minutes, at most
FORECAST = "forecast.json"
FORECAST_KIND = "specsim-forecast"


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
    facts: Mapping[str, Any]
    run_error: float
    unprobed: CostModel | None = None
    drawn: Sequence[CostModel] = ()

    @classmethod
    def profiled(cls, document: Mapping[str, Any], seed: int) -> ForecastCosts:
        """Make costs of a profile that was measured just before."""
        facts = {"source": "measured just before", **origin(document)}
        cost = profile_from_json(document, "just measured")
        return cls(cost, facts, run_error(document), drawn=drawn_costs(document, seed))


@dataclass(frozen=True)
class CostsBefore:
    """Costs from before, and the document of their profile if they are one."""

    source: str
    cost: CostModel
    profile: Mapping[str, Any] | None


def costs_before(settings: ValidationSettings) -> CostsBefore | None:
    """Read the costs that an experiment is to be forecast by; None where they are to be profiled now."""
    if settings.cost is None:
        return None
    document = read_cost_document(cost_path(settings.cost))
    is_profile = isinstance(document, Mapping) and document.get("kind") == PROFILE_KIND
    return CostsBefore(str(settings.cost), read_cost(settings.cost), document if is_profile else None)


def probed(
    pair: Pair, prompts: Sequence[Prompt], settings: ExperimentSettings, before: CostsBefore | None, progress: Progress
) -> dict[str, Any]:
    """Probe the machine's state at the shortest and the longest context of the prompts, within those of the costs."""
    longest = longest_prompt(pair, PASS_TOKENS + 1, 0)  # that leaves room for the probe's passes
    contexts = np.minimum(contexts_of(prompts, settings.record.max_new_tokens), longest)[[0, -1]]
    if before is not None and isinstance(before.cost, ProfileCost):
        contexts = contexts.clip(before.cost.contexts[0], before.cost.contexts[-1])
    return probe(
        pair,
        contexts=[*dict.fromkeys(contexts.tolist())],
        limit_s=limit_s(probe_module.LIMIT_S, PROBE_SHARE, settings.minutes),
        sampler=settings.record.sampler,
        seed=settings.seed,
        progress=lambda done, total: progress("probe", done, total),
    )


def decoding_step_s(state: Mapping[str, Any]) -> float:
    """Return the seconds of a decoding step in a probe."""
    return float(np.mean(state["mean_s"]["autoregressive"]))


def forecast_costs(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: ExperimentSettings,
    before: CostsBefore | None,
    state: Mapping[str, Any],
    path: Path,
    progress: Progress,
) -> ForecastCosts:
    """Return the costs to tune under and to forecast by: those from before at the probed state, or a profile made now.

    path : where a profile made now is kept
    """
    if before is None:
        return ForecastCosts.profiled(tuning_profile(pair, prompts, settings, path, progress), settings.seed)
    if before.profile is None:  # other forms of costs have no times to rescale
        return ForecastCosts(before.cost, {"source": before.source}, OLD_RUN_ERROR)
    sources = {"source": before.source, **origin(before.profile)}
    document = probed_document(before.profile, state, sources)
    return ForecastCosts(
        profile_from_json(document, before.source),
        {**sources, "probed": document["probed"]},
        run_error(state),
        before.cost,
        drawn_costs(document, settings.seed),
    )


def tuning_profile(
    pair: Pair, prompts: Sequence[Prompt], settings: ExperimentSettings, path: Path, progress: Progress
) -> dict[str, Any]:
    """Measure what rounds cost before anything is decoded, or read it from this file of an earlier start."""
    if not path.is_file():
        document = profile(
            pair,
            contexts=contexts_of(prompts, settings.record.max_new_tokens),
            depth=settings.record.max_draft_tokens,
            limit_s=limit_s(profile_module.LIMIT_S, PROFILE_SHARE, settings.minutes),
            sampler=settings.record.sampler,
            seed=settings.seed,
            tree_tokens=TREE_TOKENS if settings.record.tree_nodes else 0,
            progress=lambda done, total: progress("profile", done, total),
        )
        write_json(document, path)
    return read_own(path, again="pass --overwrite")


def run_error(document: Mapping[str, Any]) -> float:
    """Estimate by how much speedups under the costs of a profile or probe differ from those of a run, by its load.

    Returns the standard deviation of their logarithm.
    """
    percent = document.get("load", {}).get("others_percent")
    share = UNKNOWN_SHARE if percent is None else percent / 100
    return IDLE_RUN_ERROR + BUSY_RUN_ERROR * share**2


def contexts_of(prompts: Sequence[Prompt], new_tokens: int) -> list[int]:
    """Choose contexts to profile over all that rounds on these prompts may meet."""
    lengths = [len(prompt.tokens) for prompt in prompts]
    return contexts_between(min(lengths) - 1, max(lengths) + new_tokens - 2)


def limit_s(longest_s: float, share: float, minutes: float) -> float:
    """Return the seconds that a measurement may take in an experiment of these minutes, 0 for no limit."""
    return min(longest_s, 60 * minutes * share) if minutes else longest_s


def drawn_costs(document: Mapping[str, Any], seed: int) -> list[CostModel]:
    """Draw profiles within the stated errors of this profile, to propagate its noise into forecasts."""
    if "relative_half_width" not in document:
        return []
    rng = np.random.default_rng(seed)
    return [profile_from_json(noisy_profile(document, rng), "just measured") for _ in range(DRAWN)]


def origin(document: Mapping[str, Any]) -> dict[str, Any]:
    """Identify a profile by its digest, and by where and when it was measured."""
    made = document.get("provenance", {})
    return {"digest": digest(json.dumps(document)), **{name: made.get(name) for name in ("date", "device")}}


class ForecastRow(TypedDict):
    """Forecast of a policy, and the speedup at the costs before a probe rescaled them."""

    label: str
    params: dict[str, Any]
    forecast: dict[str, float]
    forecast_without_probe: NotRequired[float]


class ForecastFile(TypedDict):
    """Keys of forecast.json that a later start reads."""

    rows: list[ForecastRow]
    sealed: bool


def forecast(
    chosen: Sequence[Candidate], train: Trace, costs: ForecastCosts, *, held_out: int, sealed: bool, seed: int
) -> dict[str, Any]:
    """Forecast every policy's speedup and tokens per second on prompts that are not decoded yet.

    Parameters
    ----------
    train : trace of the tuning prompts
    held_out : prompts that will be decoded
    sealed : whether none of these has been decoded yet
    seed : of the policies' uniforms

    Returns
    -------
    dict
        The document of forecast.json: "rows" in the order of `chosen`, and "deploy", the label of the fastest, which
        may be no speculation.
    """
    priced = PricedTrace(train, costs.cost)
    noisy = [PricedTrace(train, cost) for cost in costs.drawn]
    before = {} if costs.unprobed is None else {"forecast_without_probe": PricedTrace(train, costs.unprobed)}
    baseline_tokens_per_s = float(train.output_tokens.sum() / priced.baseline_s.sum())
    rows: list[dict[str, Any]] = []
    for candidate in chosen:
        replayed = priced.replay(candidate.policy, seed=seed)
        drawn = [other.replay(candidate.policy, seed=seed).speedup for other in noisy]
        speedup = forecast_interval(
            replayed.autoregressive_s,
            replayed.speculative_s,
            train.domain,
            held_out,
            cost_error=float(np.log(drawn).std(ddof=1)) if len(drawn) > 1 else 0.0,
            run_error=costs.run_error,
        )
        rows.append(
            {
                "policy": candidate.policy.name,
                "label": str(candidate.policy),
                "params": candidate.policy.settings,
                "role": candidate.role,
                "forecast": speedup.as_dict(),
                "tokens_per_s": baseline_tokens_per_s * speedup,
                **speedups_on(before, candidate.policy, seed),
            }
        )
    best = max(rows, key=lambda row: row["forecast"]["estimate"])
    return {
        "kind": FORECAST_KIND,
        "version": 1,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "sealed": sealed,
        "target": train.meta["target"],
        "drafter": train.meta["drafter"],
        "sequences": {"tuning": train.sequences, "holdout": held_out},
        "baseline_tokens_per_s": baseline_tokens_per_s,
        "deploy": best["label"] if best["forecast"]["estimate"] > 1 else NO_SPECULATION,
        "rows": rows,
        "costs": dict(costs.facts),
    }


def speedups_on(traces: Mapping[str, PricedTrace], policy: Policy, seed: int) -> dict[str, float]:
    """Replay a policy on several traces with costs; return its speedup on each, by the trace's name."""
    return {name: float(priced.replay(policy, seed=seed).speedup) for name, priced in traces.items()}


def sealed_forecast(folder: Path, made: dict[str, Any]) -> dict[str, Any]:
    """Keep a forecast in its folder; one that an earlier start of the job made of the same policies stands."""
    path = folder / FORECAST
    if path.is_file():
        old = read_own(path, ForecastFile, again="pass --overwrite")
        earlier, wanted = ([[row["label"], row["params"]] for row in document["rows"]] for document in (old, made))
        if earlier == wanted:
            return old
    write_json(made, path)
    return made
