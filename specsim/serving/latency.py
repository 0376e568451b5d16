"""Latency and throughput of a server in its steady state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.serving.continuous import ServingRun

PERCENTILES = (50, 90, 99)
WARM_UP = 0.1  # of the requests


@dataclass(frozen=True)
class Latency:
    """Seconds over requests: mean and percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ServingSummary:
    """A server in its steady state.

    The first tenth of the requests to finish is warm-up and left out, as is the time after the last arrival, when the
    server empties. Rates and the mean batch are of the time in between, latencies of the requests that arrive in it.

    label : of the policy or rule
    requests, measured : requests served, and those among them that latencies are of
    seconds : of the steady state
    tokens_per_s, requests_per_s : output tokens, and finished requests, per second
    mean_batch : sequences that decode, averaged over the time of decoding steps
    tokens_per_round : output tokens of a sequence's round
    mean_drafted : drafted tokens of a sequence's round
    tpot_s : seconds per output token after the first, (finished - first token) / (tokens - 1), of requests with more
        than a single token
    ttft_s : seconds to the first token, waiting and prefill included
    preemptions : times that a request gave its memory back, in the whole run
    goodput_per_s, within : requests per second that keep the bounds on latency, and their share; None without a bound
    """

    label: str
    requests: int
    measured: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    mean_batch: float
    tokens_per_round: float
    mean_drafted: float
    tpot_s: Latency
    ttft_s: Latency
    preemptions: int
    goodput_per_s: float | None
    within: float | None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: plain numbers, units as in the names."""
        return asdict(self)


def summarise_run(
    run: ServingRun,
    *,
    warm_up: float = WARM_UP,
    tpot_bound_s: float | Floats | None = None,
    ttft_bound_s: float | None = None,
) -> ServingSummary:
    """Rates and latencies of a run's steady state.

    run : as `serve` gives it
    warm_up : share of the requests that warm the server up, in [0, 1)
    tpot_bound_s, ttft_bound_s : what a request has to keep to count as good; the first may be each request's own [N]

    Raises InputError where no steady state is left.
    """
    if not 0 <= warm_up < 1:
        raise InputError(f"warm_up={warm_up} is no share; give at least 0 and less than 1")
    done = np.sort(run.finished_s)
    cold = math.floor(warm_up * len(done))
    begin_s = float(done[cold - 1]) if cold else 0.0
    end_s = float(run.submitted_s.max())
    measured = (run.submitted_s >= begin_s) & (run.submitted_s <= end_s)
    end = run.steps["end_s"]
    inside = (end > begin_s) & (end <= end_s)
    decoding = inside & (run.steps["sequences"] > 0)
    if not (inside & (run.steps["output_tokens"] > 0)).any():
        raise InputError(
            f"{len(done)} requests are too few to reach a steady state: the last one arrives before the first tenth "
            "has finished; serve more requests"
        )
    seconds = end_s - begin_s
    took, sequences = run.steps["seconds"][decoding], run.steps["sequences"][decoding]
    tokens = run.steps["output_tokens"][inside]
    round_tokens = tokens.sum() - run.steps["prefill_output"][inside].sum()
    output = run.requests.output_tokens
    with np.errstate(invalid="ignore"):
        tpot_s = np.where(output > 1, (run.finished_s - run.first_token_s) / np.maximum(output - 1, 1), np.nan)
    ttft_s = run.first_token_s - run.submitted_s
    own_bound_s = None if tpot_bound_s is None else np.broadcast_to(tpot_bound_s, measured.shape)[measured]
    within = _share_within(((tpot_s[measured], own_bound_s), (ttft_s[measured], ttft_bound_s)))
    finished = (run.finished_s > begin_s) & (run.finished_s <= end_s)
    requests_per_s = float(finished.sum() / seconds)
    return ServingSummary(
        label=run.label,
        requests=len(done),
        measured=int(measured.sum()),
        seconds=seconds,
        tokens_per_s=float(tokens.sum() / seconds),
        requests_per_s=requests_per_s,
        mean_batch=float(np.average(sequences, weights=took)) if decoding.any() else 0.0,
        tokens_per_round=float(round_tokens / max(sequences.sum(), 1)),
        mean_drafted=float(run.steps["drafted"][decoding].sum() / max(sequences.sum(), 1)),
        tpot_s=_latency(tpot_s[measured]),
        ttft_s=_latency(ttft_s[measured]),
        preemptions=run.preemptions,
        goodput_per_s=None if within is None else within * requests_per_s,
        within=within,
    )


def _share_within(bounded: Iterable[tuple[Floats, float | Floats | None]]) -> float | None:
    """Share of requests that keep every bound on their latencies; None without a bound."""
    # A request of a single token has no TPOT (NaN) and keeps any bound on it.
    slow = [latency_s > bound_s for latency_s, bound_s in bounded if bound_s is not None]
    return float((~np.any(slow, axis=0)).mean()) if slow else None


def _latency(values: Floats) -> Latency:
    known = values[np.isfinite(values)]
    if not known.size:  # all requests have a single token
        return Latency(0.0, 0.0, 0.0, 0.0)
    return Latency(float(known.mean()), *(float(value) for value in np.percentile(known, PERCENTILES)))
