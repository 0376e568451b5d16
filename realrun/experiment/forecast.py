"""Forecasts: what every policy promises, written down before the first held-out token is decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from realrun.experiment.forecast_costs import ForecastCosts
from realrun.experiment.settings import Candidate
from realrun.kept_files import read_own
from specsim.io.files import write_json
from specsim.policy.base import Policy
from specsim.replaying.forecast import forecast_interval
from specsim.replaying.intervals import NO_SPECULATION
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace

FORECAST = "forecast.json"
FORECAST_KIND = "specsim-forecast"


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


def speedups_on(known: Mapping[str, PricedTrace], policy: Policy, seed: int) -> dict[str, float]:
    """Replay a policy on several traces with costs; return its speedup on each, by the trace's name."""
    return {name: float(priced.replay(policy, seed=seed).speedup) for name, priced in known.items()}


def sealed_forecast(folder: Path, made: dict[str, Any]) -> dict[str, Any]:
    """Keep a forecast in its folder; one that an earlier start of the job made of the same policies stands."""
    path = folder / FORECAST
    if path.is_file():
        old = read_own(path, ForecastFile, again="pass --overwrite")
        known, wanted = ([[row["label"], row["params"]] for row in document["rows"]] for document in (old, made))
        if known == wanted:
            return old
    write_json(made, path)
    return made
