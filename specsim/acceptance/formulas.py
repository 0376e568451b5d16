"""Formulas of the field, each with its source.

A round drafts d tokens, a of them are accepted, and a + 1 tokens are emitted, the target's own included. Every function
takes numbers or arrays, broadcast against each other.

Examples
--------
EESD's table 11, LLaMA-2-13B by Beta-TS on XSum, with its effective T_d / T_t; printed are HM 55.46 % and 1.84:

>>> from specsim import formulas
>>> f"{formulas.harmonic_mean(0.48, 0.66):.3f}"
'0.556'
>>> f"{formulas.eq14_speedup(0.48, 0.66, alpha_c=0.149):.2f}"
'1.84'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats, IntArray, Ints
from specsim.io.errors import InputError


def draft_precision(accepted: npt.ArrayLike, drafted: npt.ArrayLike) -> Floats:
    """Return v_d, accepted over drafted tokens; 0 where nothing was drafted.

    Parameters
    ----------
    accepted, drafted : array_like
        Tokens.

    Returns
    -------
    ndarray or float
        In [0, 1].

    References
    ----------
    EESD, arXiv:2406.03853, Eq. 11.

    Examples
    --------
    >>> float(draft_precision(6, 8))
    0.75
    """
    drafted = np.asarray(drafted, dtype=np.float64)
    return np.divide(accepted, drafted, out=np.zeros_like(drafted), where=drafted > 0)


def draft_recall(accepted: npt.ArrayLike, output_tokens: npt.ArrayLike) -> Floats:
    """Return r_d, accepted over output tokens.

    Parameters
    ----------
    accepted, output_tokens : array_like
        Tokens; output tokens are those of the target as well.

    Returns
    -------
    ndarray or float
        In [0, 1).

    References
    ----------
    EESD, arXiv:2406.03853, Eq. 12.

    Examples
    --------
    >>> float(draft_recall(6, 8))
    0.75
    """
    return np.asarray(np.divide(accepted, output_tokens), dtype=np.float64)


def harmonic_mean(v_d: npt.ArrayLike, r_d: npt.ArrayLike) -> Floats:
    """Return HM = 2 v_d r_d / (v_d + r_d); 0 where both are.

    Parameters
    ----------
    v_d, r_d : array_like
        As `draft_precision` and `draft_recall` return them.

    Returns
    -------
    ndarray or float
        In [0, 1]; the paper prints percent.

    References
    ----------
    EESD, arXiv:2406.03853, section 4.1 and appendix D.

    Examples
    --------
    >>> float(harmonic_mean(0.5, 0.5))
    0.5
    """
    v, r = np.asarray(v_d, dtype=np.float64), np.asarray(r_d, dtype=np.float64)
    return np.divide(2 * v * r, v + r, out=np.zeros(np.broadcast(v, r).shape), where=v + r > 0)


def tokens_per_round(output_tokens: npt.ArrayLike, rounds: npt.ArrayLike) -> Floats:
    """Return tau, output tokens per target pass, the target's own token included.

    Parameters
    ----------
    output_tokens, rounds : array_like
        Tokens, and rounds of them.

    Returns
    -------
    ndarray or float
        At least 1 where every round emits a token.

    References
    ----------
    EDD + PCT, section 4.1.

    Examples
    --------
    >>> float(tokens_per_round(8, 2))
    4.0
    """
    return np.asarray(np.divide(output_tokens, rounds), dtype=np.float64)


def eq14_speedup(v_d: npt.ArrayLike, r_d: npt.ArrayLike, alpha_c: npt.ArrayLike) -> Floats:
    """Return v_d / ((alpha_c - v_d) r_d + v_d), the speedup where draft and target passes alone take time.

    Above 1 exactly when alpha_c < v_d. A run that drafts nothing (v_d = 0) has speedup 1.

    Parameters
    ----------
    v_d, r_d : array_like
        As `draft_precision` and `draft_recall` return them.
    alpha_c : array_like
        T_d / T_t, time of a draft step over that of a target pass.

    Returns
    -------
    ndarray or float
        Time without speculation over time with it.

    References
    ----------
    EESD, arXiv:2406.03853, Eq. 14.

    Examples
    --------
    >>> f"{eq14_speedup(0.75, 0.75, 0.1):.3f}"
    '2.857'
    """
    v, r = np.asarray(v_d, dtype=np.float64), np.asarray(r_d, dtype=np.float64)
    below = (np.asarray(alpha_c) - v) * r + v
    return np.divide(v, below, out=np.ones(np.shape(below)), where=below > 0)


def eq5_expected_extra_time_s(
    path_accept_prob: npt.ArrayLike, draft_s: npt.ArrayLike, target_s: npt.ArrayLike
) -> Floats:
    """Return s_d - p_j s_t, the expected extra time of drafting step j.

    The paper calls it a gain; a positive value is a loss, so continue drafting while it is negative.

    Parameters
    ----------
    path_accept_prob : array_like
        p_j, the probability that all tokens up to step j are accepted.
    draft_s, target_s : array_like
        s_d and s_t, in seconds.

    Returns
    -------
    ndarray or float
        Seconds.

    References
    ----------
    EDD + PCT, Eq. 5.

    Examples
    --------
    >>> float(eq5_expected_extra_time_s(0.5, 1.0, 10.0))
    -4.0
    """
    return np.asarray(draft_s - np.multiply(path_accept_prob, target_s), dtype=np.float64)


def mean_tokens_per_round(accept_prob: npt.ArrayLike, draft_len: npt.ArrayLike) -> Floats:
    """Return (1 - a^(K+1)) / (1 - a), mean tokens emitted per round by i.i.d. acceptance.

    Parameters
    ----------
    accept_prob : array_like
        a, in [0, 1].
    draft_len : array_like
        K, in tokens, at least 0.

    Returns
    -------
    ndarray or float
        Tokens, in [1, K + 1].

    Raises
    ------
    InputError
        Outside these ranges.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, Eq. 1.

    Examples
    --------
    >>> float(mean_tokens_per_round(0.5, 1))
    1.5
    """
    a, k = np.asarray(accept_prob, dtype=np.float64), np.asarray(draft_len, dtype=np.float64)
    if not (((a >= 0) & (a <= 1)).all() and (k >= 0).all()):  # also catches NaN
        raise InputError("mean_tokens_per_round: accept_prob must lie in [0, 1] and draft_len be at least 0")
    safe = np.where(a < 1, a, 0.0)
    with np.errstate(divide="ignore"):  # log1p(-1) at a = 0 is the right limit
        unreached = -np.expm1((k + 1) * np.log1p(safe - 1))  # 1 - a^(K+1), exact near a = 1 too
    return np.where(a < 1, unreached / (1 - safe), k + 1)


def leviathan_speedup(accept_prob: npt.ArrayLike, draft_len: npt.ArrayLike, cost_ratio: npt.ArrayLike) -> Floats:
    """Return (1 - a^(K+1)) / ((1 - a)(c K + 1)), the speedup by i.i.d. acceptance.

    Parameters
    ----------
    accept_prob, draft_len : array_like
        a and K, as in `mean_tokens_per_round`.
    cost_ratio : array_like
        c = T_d / T_t, time of a draft step over that of a target pass.

    Returns
    -------
    ndarray or float
        Time without speculation over time with it.

    Raises
    ------
    InputError
        As `mean_tokens_per_round` does.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, Theorem 3.8.

    Examples
    --------
    >>> float(leviathan_speedup(0.5, 1, 0.5))
    1.0
    """
    return mean_tokens_per_round(accept_prob, draft_len) / (np.multiply(cost_ratio, draft_len) + 1)


def adaedl_score(entropy_nats: npt.ArrayLike, gamma: float) -> Floats:
    """Return 1 - sqrt(gamma H): a score, not a bound on acceptance.

    Parameters
    ----------
    entropy_nats : array_like
        H of the drafter's distribution, in nats.
    gamma : float
        0.2 in the paper.

    Returns
    -------
    ndarray or float
        At most 1; negative for a large entropy.

    References
    ----------
    AdaEDL, arXiv:2410.18351, section 3.

    Examples
    --------
    >>> float(adaedl_score(1.25, 0.2))
    0.5
    """
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
    """Compute the reliability diagram and the expected calibration error.

    Parameters
    ----------
    confidence, accepted : array_like
        Of every drafted token [n]: a probability, and whether it was accepted.
    bins : int
        Of equal width.

    Returns
    -------
    Reliability
        Its arrays by bin, and `ece`.

    Raises
    ------
    InputError
        Without any token.

    References
    ----------
    Guo et al. 2017, arXiv:1706.04599, Eq. 3.

    Examples
    --------
    >>> f"{reliability([0.9, 0.9], [True, False]).ece:.2f}"
    '0.40'
    """
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
    """Return distinct over all token trigrams, per sequence, then averaged.

    Parameters
    ----------
    sequences : sequence of ndarray
        Tokens of each; fewer than three do not count.

    Returns
    -------
    float
        In (0, 1]; 1 means no repetition.

    Examples
    --------
    >>> distinct_trigrams([np.array([1, 2, 3, 1, 2, 3])])
    0.75
    """
    shares = []
    for tokens in sequences:
        if len(tokens) >= 3:
            grams = np.stack([tokens[:-2], tokens[1:-1], tokens[2:]], axis=1)
            shares.append(len(np.unique(grams, axis=0)) / len(grams))
    return float(np.mean(shares)) if shares else 1.0
