"""Formulas of the field, each with its source. Counts: a round drafts d tokens, a of them
are accepted, and a + 1 tokens are emitted (the target's own included)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats, IntArray, Ints
from specsim.io.errors import InputError


def draft_precision(accepted: npt.ArrayLike, drafted: npt.ArrayLike) -> Floats:
    """v_d, accepted over drafted tokens; 0 where nothing was drafted (EESD Eq. 11)."""
    drafted = np.asarray(drafted, dtype=np.float64)
    return np.divide(accepted, drafted, out=np.zeros_like(drafted), where=drafted > 0)


def draft_recall(accepted: npt.ArrayLike, output_tokens: npt.ArrayLike) -> Floats:
    """r_d, accepted over output tokens (EESD Eq. 12)."""
    return np.asarray(np.divide(accepted, output_tokens), dtype=np.float64)


def harmonic_mean(v_d: npt.ArrayLike, r_d: npt.ArrayLike) -> Floats:
    """HM = 2 v_d r_d / (v_d + r_d), in [0, 1]; the paper prints percent (EESD section 3.1)."""
    v, r = np.asarray(v_d, dtype=np.float64), np.asarray(r_d, dtype=np.float64)
    return np.divide(2 * v * r, v + r, out=np.zeros(np.broadcast(v, r).shape), where=v + r > 0)


def tokens_per_round(output_tokens: npt.ArrayLike, rounds: npt.ArrayLike) -> Floats:
    """tau, output tokens per target pass, the target's own token included (EDD, section 4.1)."""
    return np.asarray(np.divide(output_tokens, rounds), dtype=np.float64)


def eq14_speedup(v_d: npt.ArrayLike, r_d: npt.ArrayLike, alpha_c: npt.ArrayLike) -> Floats:
    """v_d / ((alpha_c - v_d) r_d + v_d), alpha_c = T_d / T_t (EESD Eq. 14).

    Above 1 exactly when alpha_c < v_d. A run that drafts nothing (v_d = 0) has speedup 1.
    """
    v, r = np.asarray(v_d, dtype=np.float64), np.asarray(r_d, dtype=np.float64)
    below = (np.asarray(alpha_c) - v) * r + v
    return np.divide(v, below, out=np.ones(np.shape(below)), where=below > 0)


def eq5_expected_extra_time_s(
    path_accept_prob: npt.ArrayLike, draft_s: npt.ArrayLike, target_s: npt.ArrayLike
) -> Floats:
    """s_d - p_j s_t: expected extra time of drafting step j (EDD + PCT Eq. 5).

    The paper calls it a gain; a positive value is a loss, so continue drafting while it is negative.
    """
    return np.asarray(draft_s - np.multiply(path_accept_prob, target_s), dtype=np.float64)


def mean_tokens_per_round(accept_prob: npt.ArrayLike, draft_len: npt.ArrayLike) -> Floats:
    """(1 - a^(K+1)) / (1 - a): mean tokens emitted per round, i.i.d. acceptance.

    accept_prob in [0, 1], draft_len K >= 0 in tokens; broadcast against each other.
    Raises InputError outside these ranges. Leviathan et al. 2023, Eq. 1.
    """
    a, k = np.asarray(accept_prob, dtype=np.float64), np.asarray(draft_len, dtype=np.float64)
    if not (((a >= 0) & (a <= 1)).all() and (k >= 0).all()):  # also catches NaN
        raise InputError("mean_tokens_per_round: accept_prob must lie in [0, 1] and draft_len be at least 0")
    safe = np.where(a < 1, a, 0.0)
    with np.errstate(divide="ignore"):  # log1p(-1) at a = 0 is the right limit
        unreached = -np.expm1((k + 1) * np.log1p(safe - 1))  # 1 - a^(K+1), exact near a = 1 too
    return np.where(a < 1, unreached / (1 - safe), k + 1)


def leviathan_speedup(accept_prob: npt.ArrayLike, draft_len: npt.ArrayLike, cost_ratio: npt.ArrayLike) -> Floats:
    """(1 - a^(K+1)) / ((1 - a)(c K + 1)), c = T_d / T_t (Leviathan et al. 2023, Theorem 3.8)."""
    return mean_tokens_per_round(accept_prob, draft_len) / (np.multiply(cost_ratio, draft_len) + 1)


def adaedl_score(entropy_nats: npt.ArrayLike, gamma: float) -> Floats:
    """1 - sqrt(gamma H), H in nats; a score, not a bound (AdaEDL section 3)."""
    return np.asarray(1 - np.sqrt(gamma * np.asarray(entropy_nats, dtype=np.float64)))


@dataclass(frozen=True)
class Reliability:
    """Confidence against acceptance in equal-width bins.

    edges [B + 1]; count, mean_confidence, accept_rate [B] (NaN in empty bins).
    ece: expected calibration error, the count-weighted mean gap, in [0, 1].
    """

    edges: Floats
    count: Ints
    mean_confidence: Floats
    accept_rate: Floats
    ece: float


def reliability(confidence: npt.ArrayLike, accepted: npt.ArrayLike, bins: int = 10) -> Reliability:
    """Reliability diagram and ECE (Guo et al. 2017, Eq. 3). Both arrays have shape [n]."""
    conf, hit = np.asarray(confidence, dtype=np.float64), np.asarray(accepted, dtype=np.float64)
    if conf.size == 0:
        raise InputError("reliability: no data; record drafted tokens")
    edges = np.linspace(0, 1, bins + 1)
    index = np.clip((conf * bins).astype(int), 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(index, conf, bins) / count
        accept_rate = np.bincount(index, hit, bins) / count
    ece = float(np.nansum(count * np.abs(mean_confidence - accept_rate)) / conf.size)
    return Reliability(edges, count, mean_confidence, accept_rate, ece)


def distinct_trigrams(sequences: Sequence[IntArray]) -> float:
    """Distinct over all token trigrams, per sequence, then averaged: 1 means no repetition."""
    shares = []
    for tokens in sequences:
        if len(tokens) >= 3:
            grams = np.stack([tokens[:-2], tokens[1:-1], tokens[2:]], axis=1)
            shares.append(len(np.unique(grams, axis=0)) / len(grams))
    return float(np.mean(shares)) if shares else 1.0
