"""Traces and searches that the tests of the tuner share; also run by processes that get killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specsim.io.progress import Counter
from specsim.learn.search import SearchResult, find_best
from specsim.learn.settings import Search, SearchSettings
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.hugging_face import HuggingFace
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from tests.support.reference import RampCost, build_trace

DEPTH = 8
CASES: dict[Search, tuple[type[ChainPolicy], int]] = {
    "grid": (AdaEDL, 600),
    "optuna": (AdaEDL, 40),
}


def stretchy_trace(sequences: int, tokens: int, seed: int = 0) -> Trace:
    """Acceptance in stretches of 20 tokens on average; entropy and confidence tell some of it."""
    rng = np.random.default_rng(seed)
    positions = sequences * tokens
    stretch = np.cumsum(rng.random(positions) < 1 / 20)
    ease = 1.75 + 1.2 * rng.normal(size=stretch[-1] + 1)[stretch]
    accept_prob = 1 / (1 + np.exp(-(ease[:, None] + 0.8 * rng.normal(size=(positions, DEPTH)))))
    return build_trace(
        rng,
        rng.random(accept_prob.shape) < accept_prob,
        [tokens] * sequences,
        confidence=accept_prob,
        entropy_nats=3.5 * (1 - accept_prob) ** 0.8 * np.exp(0.3 * rng.normal(size=accept_prob.shape)),
    )


def run_case(search: Search, seed: int, storage: Path | None = None, progress: Counter | None = None) -> SearchResult:
    """One of the searches that are interrupted, killed and repeated."""
    kind, trials = CASES[search]
    trace = stretchy_trace(40, 150)
    return find_best(
        kind,
        PricedTrace(trace, RampCost()),
        SearchSettings(search=search, trials=trials, seed=seed, storage=storage),
        progress=progress,
    )


def carrying(trace: Trace) -> list[ChainPolicy]:
    """Policies, one with a state that lives on across sequences."""
    return [
        HuggingFace(
            num_assistant_tokens=k, schedule=schedule, assistant_confidence_threshold=0.2, max_draft_tokens=trace.depth
        )
        for k, schedule in ((3, "heuristic"), (5, "constant"), (5, "heuristic_transient"))
    ]
