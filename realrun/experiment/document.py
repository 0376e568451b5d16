"""A validation as JSON and as a table of rounds.

Beside the rows there are the errors of predicted times by part of a round, and the choice that the forecast made before
anything was decoded, with what it cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from realrun.decode.rounds import Round
from realrun.experiment.validate import Row, Validation
from specsim.acceptance import formulas as metrics
from specsim.cost.profile import profile_from_json
from specsim.io.arrays import Floats
from specsim.learn.calibration import verified_tokens
from specsim.policy.registry import make_policy
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.forecast import error_summary
from specsim.replaying.intervals import NO_SPECULATION, beyond_floor, simultaneous
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.replaying.rounds import PARTS
from specsim.trace.trace import Trace

ROUND_FIELDS = [field.name for field in dataclasses.fields(Round)]


class Forecast(NamedTuple):
    """A policy's speedup as forecast before decoding, and its measured seconds per held-out sequence [S]."""

    label: str
    speedup: float
    seconds: Floats


def choice_of(forecasts: Sequence[Forecast], baseline_s: Floats, floor_percent: float) -> dict[str, Any]:
    """Compare the forecast's best with the measured best, both among all policies and no speculation.

    Parameters
    ----------
    baseline_s : measured seconds per sequence without speculation [S]
    floor_percent : noise floor, below which a difference is not significant

    Returns
    -------
    dict
        "forecast" and "measured", the labels of the two best; "forecast_speedup" and "measured_speedup" of the
        forecast's best; "regret", the measured best's speedup less that; and "significant". Intervals hold for all
        candidates at once, because the best is picked on the same prompts.
    """
    everyone = [Forecast(NO_SPECULATION, 1.0, baseline_s), *forecasts]
    chosen = max(everyone, key=lambda forecast: forecast.speedup)
    best = min(everyone, key=lambda forecast: float(forecast.seconds.sum()))
    places = [number for wanted in (best, chosen) for number, other in enumerate(everyone) if other is wanted]
    measured = simultaneous(baseline_s, [forecast.seconds for forecast in everyone])
    regret = measured.difference(*places)
    speedups = [measured.speedups[place] for place in places]
    return {
        "forecast": chosen.label,
        "forecast_speedup": chosen.speedup,
        "measured_speedup": speedups[1].as_dict(),
        "measured": best.label,
        "regret": regret.difference.as_dict(),
        "significant": regret.significant and beyond_floor(floor_percent, *(speedup.estimate for speedup in speedups)),
    }


def error_parts(priced: PricedTrace, replayed: Replay, rounds: Sequence[Sequence[Round]]) -> dict[str, Any]:
    """Compute predicted minus measured seconds, in percent of the policy's measured seconds.

    Parameters
    ----------
    priced, replayed : the trace under its costs, and the policy's replay on it
    rounds : measured, of every sequence of the trace

    Returns
    -------
    dict
        "draft", "policy", "verify" and "other", which sum to the error of the whole; and "by_verified": for each
        number of tokens verified beside the pending one, how many rounds there were and the error of their
        verification. A positive error is a part predicted to take longer than it did. If the target has recurrent
        layers and fed tokens again, also "second_pass": the number of rounds with a second pass, and its predicted and
        measured share of the total time in percent.
    """
    done = [round_ for sequence in rounds for round_ in sequence]
    measured_s = np.array([[getattr(round_, f"{part}_s") for part in PARTS] for round_ in done]).sum(axis=0)
    predicted_s = replayed.seconds.sum(axis=0)
    whole_s = measured_s.sum()
    parts = dict(zip(PARTS, (100 * (predicted_s - measured_s) / whole_s).tolist(), strict=True))
    table = priced.table(replayed.policy)
    verify_s = table.verify_s
    if isinstance(replayed.policy, TreePolicy):
        assert table.tree is not None
        verify_s = table.tree.verify_s
    contexts = np.concatenate(
        [
            int(prompt) - 1 + np.array([round_.t for round_ in sequence], dtype=np.int64)
            for prompt, sequence in zip(priced.trace.prompt_tokens, rounds, strict=True)
        ]
    )
    verified = np.array([round_.verified for round_ in done])
    took_s = np.array([round_.verify_s - round_.refeed_s for round_ in done])
    price_s = verify_s[verified + 1, contexts >> table.bucket_bits]
    by_verified = [
        {
            "tokens": int(tokens),
            "rounds": int((verified == tokens).sum()),
            "verify": float(100 * (price_s - took_s)[verified == tokens].sum() / whole_s),
        }
        for tokens in np.unique(verified)
    ]
    refed = np.array([round_.refed for round_ in done])
    if not refed.any():
        return {**parts, "by_verified": by_verified}
    price_s = table.refeed_s[refed, contexts >> table.bucket_bits][refed > 0].sum()  # row 0 is unused
    second_pass = {
        "rounds": int((refed > 0).sum()),
        "predicted": float(100 * price_s / whole_s),
        "measured": float(100 * sum(round_.refeed_s for round_ in done) / whole_s),
    }
    return {**parts, "by_verified": by_verified, "second_pass": second_pass}


def as_document(validation: Validation) -> dict[str, Any]:
    """Return the JSON form of a validation, which its report is rendered from."""
    rows = sorted(validation.rows, key=lambda row: -row.measured.estimate)
    holdout, measurement = validation.holdout, validation.measurement
    best, floor, baseline_s = rows[0], measurement.noise_floor_percent, measurement.seconds[0]
    forecasts = forecasts_of(rows)
    errors = [abs(row.error_percent) for row in rows]
    documents = [
        {
            **row_document(row),
            **rate_of(row.speculative_s, measurement.baseline_tokens),
            "resolved": None if row is best else validation.resolved(row, best),
        }
        for row in rows
    ]
    return {
        "kind": "specsim-validation",
        "target": holdout.meta["target"],
        "drafter": holdout.meta["drafter"],
        "drafter_kind": holdout.meta.get("drafter_kind", "model"),
        "drafter_facts": holdout.meta.get("drafter_facts", {}),
        "block_expansion": validation.profile["block_expansion"],
        "device": validation.environment["device"],
        "dtype": validation.environment["dtype"],
        "decoding": holdout.meta["decoding"],
        "environment": validation.environment,
        "sequences": validation.forecast["sequences"],
        "forecast": {key: value for key, value in validation.forecast.items() if key != "rows"},
        "output_tokens": int(holdout.output_tokens.sum()),
        "distinct_trigram_share": holdout.meta["distinct_trigram_share"],
        "first_token_accepted_share": holdout.meta["first_token_accepted_share"],
        "autoregressive_sequence_seconds": baseline_s.tolist(),
        "null_arm": measurement.null_arm.as_dict(),
        "noise_floor_percent": floor,
        "baseline": rate_of(baseline_s, measurement.baseline_tokens),
        "rows": documents,
        "median_abs_error_percent": float(np.median(errors)),
        "p90_abs_error_percent": float(np.quantile(errors, 0.9)),
        "errors": errors_of(documents),
        "choice": choice_of(forecasts, baseline_s, floor) if forecasts else None,
        "k_curve": _k_curve(validation),
        "accepted_histogram": _accepted_histogram(best, holdout.depth),
        "reliability": _reliability(holdout),
        "domains": _domains(validation, best),
    }


def _k_curve(validation: Validation) -> dict[str, Any]:
    """Predict the speedup of every fixed K."""
    priced = PricedTrace(validation.holdout, profile_from_json(validation.profile, "just measured"))
    lengths = range(1, validation.holdout.depth + 1)
    curve = [predict_policy(priced, make_policy("fixed_k", {"k": k}), seed=validation.seed) for k in lengths]
    return {"k": list(lengths), "predicted": [prediction.speedup.as_dict() for prediction in curve]}


def _accepted_histogram(row: Row, depth: int) -> dict[str, Any]:
    """Count the rounds of a policy by accepted tokens, predicted and measured."""
    assert row.replayed.rounds is not None
    measured = [round_.accepted for run in row.runs for round_ in run.rounds]
    return {
        "label": str(row.candidate.policy),
        "predicted": np.bincount(row.replayed.rounds.accepted, minlength=depth + 1).tolist(),
        "measured": np.bincount(measured, minlength=depth + 1).tolist(),
    }


def _reliability(trace: Trace) -> dict[str, Any]:
    """Bin the acceptance rate of verified tokens by the drafter's confidence."""
    bins = metrics.reliability(*verified_tokens(trace))
    return {
        "edges": bins.edges.tolist(),
        "count": bins.count.tolist(),
        "mean_confidence": [None if np.isnan(x) else x for x in bins.mean_confidence.tolist()],
        "accept_rate": [None if np.isnan(x) else x for x in bins.accept_rate.tolist()],
        "ece": bins.ece,
    }


def forecasts_of(rows: Sequence[Row]) -> list[Forecast]:
    """Return the forecasts made before anything was decoded, of the rows that have one."""
    made = [row.forecasts["forecast"]["estimate"] if row.forecasts else row.candidate.train_speedup for row in rows]
    return [
        Forecast(str(row.candidate.policy), speedup, row.speculative_s)
        for row, speedup in zip(rows, made, strict=True)
        if speedup is not None
    ]


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarise the errors of up to six replays against the measurement, by what each did not know.

    rows : documents of rows

    Returns
    -------
    dict
        "forecast" knew neither text nor costs; "text_known" the text; "costs_known" the costs of this run;
        "decomposition" both. "forecast_without_probe" and "text_known_without_probe" are there where a probe rescaled
        costs from before.
    """
    speedups = {
        "forecast": [(row.get("forecast") or {}).get("estimate") for row in rows],
        **{
            name: [row.get(name) for row in rows]
            for name in ("forecast_without_probe", "text_known", "text_known_without_probe", "costs_known")
        },
        "decomposition": [row["predicted"]["estimate"] for row in rows],
    }
    measured = [row["measured"]["estimate"] for row in rows]
    return {name: error_summary(values, measured) for name, values in speedups.items() if None not in values}


def rate_of(seconds: Floats, tokens: int) -> dict[str, float]:
    """Compute tokens per second and milliseconds per token. seconds : of each sequence [S]; tokens : of all"""
    return {"tokens_per_s": tokens / float(seconds.sum()), "ms_per_token": 1e3 * float(seconds.sum()) / tokens}


def row_document(row: Row) -> dict[str, Any]:
    """Return the JSON form of a row."""
    predicted, priced, policy = row.predicted, row.priced, row.candidate.policy
    return {
        "policy": policy.name,
        "label": str(policy),
        "params": policy.settings,
        "role": row.candidate.role,
        "predicted": predicted.speedup.as_dict(),
        "measured": row.measured.as_dict(),
        **row.wall_clock,
        "train_speedup": row.candidate.train_speedup,
        "error_percent": row.error_percent,
        "truncated_share": predicted.truncated_share,
        "rounds_identical_percent": None if row.rounds_identical is None else 100 * row.rounds_identical,
        "ladder": {
            "eq14": predicted.eq14,
            "profile": predicted.speedup.estimate,
            "measured": row.measured.estimate,
        },
        **row.forecasts,
        "error_parts": error_parts(priced, row.replayed, row.rounds),
        **{name: getattr(predicted, name) for name in ("v_d", "r_d", "hm", "tau", "oracle_regret")},
        "sequence_seconds": row.speculative_s.tolist(),
        **row.text,
    }


def _domains(validation: Validation, best: Row) -> dict[str, Any]:
    holdout = validation.holdout
    result = {}
    for domain in np.unique(holdout.domain).tolist():
        members = holdout.domain == domain
        replayed = best.replayed
        result[domain] = {
            "sequences": int(members.sum()),
            "output_tokens": int(holdout.output_tokens[members].sum()),
            "predicted_speedup_best": float(
                replayed.autoregressive_s[members].sum() / replayed.speculative_s[members].sum()
            ),
            "measured_speedup_best": float(
                validation.measurement.seconds[0][members].sum() / best.speculative_s[members].sum()
            ),
        }
    return result


def rounds_table(validation: Validation) -> pa.Table:
    """Tabulate every real round of the last runs: tokens drafted and accepted, and seconds by phase."""
    rows = [
        {
            "policy": str(row.candidate.policy),
            "tree": isinstance(row.candidate.policy, TreePolicy),
            "sequence_id": sequence,
            "round": number,
            **{name: getattr(round_, name) for name in ROUND_FIELDS},
        }
        for row in validation.rows
        for sequence, run in zip(validation.holdout.sequence_id.tolist(), row.runs, strict=True)
        for number, round_ in enumerate(run.rounds)
    ]
    return pa.Table.from_pylist(rows)
