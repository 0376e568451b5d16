"""Fit of the difficulty model: all of it to a dense trace, its latent alone to rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.acceptance.latent import KNOTS, MISSING, Table, fit_drift, fit_hidden, fit_mean
from specsim.acceptance.sources import Rounds
from specsim.acceptance.synthetic import geometric_entropy_nats
from specsim.io.arrays import Bools, Floats, IntArray
from specsim.io.errors import InputError
from specsim.trace.trace import Trace

MIN_TOKENS = 200  # fewer are not enough for calibration
MIN_OFF = 50  # drafted tokens after a rejection; with fewer, use the distribution before a rejection
# Default share of the latent's variance that the drafter's confidence reveals. Models fitted to two dense
# traces of the lab's pair, greedy and with coupled noise at temperature 0.8, have 0.44 and 0.33.
INFORMED = 0.4
MIN_PROB = 1e-4  # bound on fitted probabilities of acceptance


def from_trace(trace: Trace) -> dict[str, Any]:
    """Estimate each parameter from the tokens whose draft prefix was accepted, each counted once.

    Tables are empirical quantiles and correlations those of normal scores. The probability of acceptance is an
    isotonic regression on the best linear index (logistic regression). Drifts are fitted to the scores'
    autocorrelations and to the likelihood of acceptance. Raises InputError for fewer than 200 output tokens
    and if all or no first drafts are accepted.
    """
    verified = trace.draft_limit > 0  # the budget leaves room for a draft
    accepted, total = (trace.match_len > 0) & verified, int(verified.sum())
    if total < MIN_TOKENS or accepted.sum() in (0, total):
        raise InputError(
            f"acceptance model difficulty needs {MIN_TOKENS} output tokens, some accepted and some rejected; this "
            f"trace has {total} with {int(accepted.sum())} accepted; record more or fit iid"
        )
    rejected = verified & ~accepted
    on = _columns(trace, slice(None), slice(0, 1))[:, :, 0]
    scores = np.stack([normal_scores(column) for column in on])
    weight, prob = _calibrate(scores, accepted, verified)
    lengths = trace.output_tokens
    padded, outcome = _by_sequence(prob, np.where(verified, accepted, MISSING), lengths)
    off = _off_distribution(trace, scores[0], rejected)
    return dict(
        on_confidence=_quantiles(on[0], 0, 1),
        on_entropy_nats=_quantiles(on[1], 0, np.inf),
        on_ratio=_quantiles(on[2], 0, 1),
        on_correlation=_correlations(scores),
        feature_drift=tuple(fit_drift(scores[0], lengths)),
        hit_weight=tuple(weight[0].tolist()),
        hit_prob=tuple(weight[1].tolist()),
        hidden_drift=tuple(fit_hidden(padded, outcome)),
        miss_score=_quantiles(scores[0][rejected], -np.inf, np.inf),
        **off,
    )


def from_rounds(rounds: Rounds) -> dict[str, Any]:
    """Fit the latent to the accepted tokens of rounds; the joint distribution of the features is a default.

    A round shows a accepted tokens and, if a < k, a rejected one; the token after a full acceptance
    is not observed. The latent's drift, then its mean, are fitted by maximum likelihood, which assumes that
    draft lengths do not depend on acceptance: prefer rounds of a fixed K to adaptive ones. Runs
    of several policies over the same sequences are combined.

    Default joint distribution: confidence is calibrated and reveals the share INFORMED of the latent's variance;
    entropy is that of a geometric distribution with this mode; the drafted token is the most
    likely; after a rejection confidence keeps its distribution and is independent of the rejected token's.
    """
    from scipy.special import ndtr, ndtri

    if rounds.sequence_id is None or rounds.t is None:
        raise InputError(
            "acceptance model difficulty needs the columns sequence_id and t in rounds; add them or fit per_position"
        )
    outcome = _outcomes(rounds)
    seen = outcome != MISSING
    accepted, verified = int((outcome == 1).sum()), int(seen.sum())
    if verified < MIN_TOKENS or accepted in (0, verified):
        raise InputError(
            f"acceptance model difficulty needs {MIN_TOKENS} verified tokens, some accepted and some rejected; these "
            f"rounds have {verified} with {accepted} accepted; give more rounds or fit iid"
        )
    mean = float(ndtri(accepted / verified))  # too low: unverified tokens follow full acceptances
    drift = fit_hidden(np.full(outcome.shape, mean), outcome)
    mean = fit_mean(drift, outcome)
    prob = ndtr((mean + np.sqrt(INFORMED) * KNOTS) / np.sqrt(1 - INFORMED))
    confidence = tuple(prob.tolist())
    entropy = tuple(np.sort(geometric_entropy_nats(prob)).tolist())
    ones = (1.0,) * len(KNOTS)
    return {
        "on_confidence": confidence,
        "on_entropy_nats": entropy,
        "on_ratio": ones,
        "on_correlation": (-1.0, 0.0, 0.0),
        "feature_drift": tuple(drift),
        "hit_weight": (1.0, 0.0, 0.0),
        "hit_prob": confidence,
        "hidden_drift": tuple(drift),
        "off_confidence": confidence,
        "off_entropy_nats": entropy,
        "off_ratio": ones,
        "off_correlation": (-1.0, 0.0, 0.0),
        "off_follow": 0.0,
        "off_common": 0.0,
        "miss_score": tuple(KNOTS.tolist()),
    }


def normal_scores(values: Floats) -> Floats:
    """Standard normal scores of ranks; ties share the score of their mean rank."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    return np.asarray(ndtri((rankdata(values) - 0.5) / len(values)))


def _columns(trace: Trace, rows: Any, depths: Any) -> Floats:
    """Confidence, entropy and probability over confidence of these cells, float64 [3, ...]."""
    pick = rows, depths
    confidence = np.clip(trace.confidence[pick].astype(np.float64), 1e-9, 1)
    ratio = np.clip(trace.prob[pick] / confidence, 0, 1)
    ratio[ratio > 1 - 1e-5] = 1.0  # equal up to float32 rounding
    entropy = np.maximum(trace.entropy_nats[pick], 0)
    return np.stack([confidence, entropy, ratio]).astype(np.float64)


def _quantiles(values: Floats, low: float, high: float) -> Table:
    from scipy.special import ndtr

    return tuple(np.maximum.accumulate(np.clip(np.quantile(values, ndtr(KNOTS)), low, high)).tolist())


def _correlations(scores: Floats) -> Table:
    """Correlations (01, 02, 12) of scores [3, n]; 0 where a score is constant."""
    scores = scores - scores.mean(axis=1, keepdims=True)
    spread = np.sqrt((scores**2).mean(axis=1))
    pairs = ((0, 1), (0, 2), (1, 2))
    below = [spread[i] * spread[j] for i, j in pairs]
    above = [(scores[i] * scores[j]).mean() for i, j in pairs]
    return tuple(float(np.clip(a / b, -1, 1)) if b > 1e-9 else 0.0 for a, b in zip(above, below, strict=True))


def _calibrate(scores: Floats, accepted: Bools, verified: Bools) -> tuple[tuple[Floats, Floats], Floats]:
    """Weights [3] of the best index of standard normal scores, acceptance at KNOTS, and probability per token.

    scores [3, N], accepted and verified [N]; the fit uses verified tokens only.
    """
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

    varying = scores.std(axis=1) > 1e-9
    weight = np.zeros(3)
    if varying.any():
        weight[varying] = LogisticRegression(C=1.0).fit(scores[varying][:, verified].T, accepted[verified]).coef_[0]
    scale = float(np.std(weight @ scores))
    if scale < 1e-9:  # uninformative features
        rate = float(accepted[verified].mean())
        return (np.array([1.0, 0.0, 0.0]), np.full(len(KNOTS), rate)), np.full(len(accepted), rate)
    weight /= scale
    index = normal_scores(weight @ scores)
    known = index[verified]
    fitted = IsotonicRegression().fit_transform(known, accepted[verified].astype(float))
    # Interpolate between means of groups of equal size, so that no probability is 0 or 1 by chance.
    groups = np.array_split(np.argsort(known, kind="stable"), int(np.clip(len(known) // 50, 2, 24)))
    centre = [float(known[group].mean()) for group in groups]
    mean = [float((fitted[group].sum() + 0.5) / (len(group) + 1)) for group in groups]
    table = np.clip(np.interp(KNOTS, centre, mean), MIN_PROB, 1 - MIN_PROB)
    return (weight, table), np.asarray(np.interp(index, KNOTS, table))


def _by_sequence(prob: Floats, result: IntArray, lengths: IntArray) -> tuple[Floats, npt.NDArray[np.int8]]:
    """Reshape Phi^-1(probability) and results (1, 0 or MISSING) from [N] to [S, T], padded with MISSING."""
    from scipy.special import ndtri

    inside = np.arange(int(lengths.max())) < lengths[:, None]
    offset, outcome = np.zeros(inside.shape), np.full(inside.shape, MISSING, dtype=np.int8)
    offset[inside], outcome[inside] = ndtri(prob), result
    return offset, outcome


def _outcomes(rounds: Rounds) -> npt.NDArray[np.int8]:
    """Acceptance of the verified tokens, int8 [S, T]; MISSING for tokens that no round verified."""
    assert rounds.sequence_id is not None and rounds.t is not None
    sequence = np.unique(rounds.sequence_id, return_inverse=True)[1]
    outcome = np.full((int(sequence.max()) + 1, int((rounds.t + rounds.drafted).max()) + 1), MISSING, dtype=np.int8)
    rejected = rounds.accepted < rounds.drafted
    outcome[sequence[rejected], (rounds.t + rounds.accepted)[rejected]] = 0
    for i in range(int(rounds.accepted.max())):
        more = rounds.accepted > i
        outcome[sequence[more], rounds.t[more] + i] = 1
    return outcome


def _off_distribution(trace: Trace, score: Floats, rejected: Bools) -> dict[str, Any]:
    """Fit the `off_` fields to tokens drafted after a rejection, each once, from the first position of its branch."""
    rows = np.flatnonzero(rejected)
    limit = trace.draft_limit[rows].astype(np.int64)
    drafted = np.arange(1, trace.depth) < limit[:, None]  # [rejected, D - 1]
    enough = int(drafted.sum()) >= MIN_OFF
    if enough:
        values = _columns(trace, rows, slice(1, None))
        cells = values[:, drafted]
    else:
        cells = _columns(trace, slice(None), slice(0, 1))[:, :, 0]
    scores = np.stack([normal_scores(column) for column in cells])
    follow = common = 0.0
    if enough:
        placed = np.full(drafted.shape, np.nan)
        placed[drafted] = scores[0]
        start = normal_scores(score[rows])
        follow = float(np.clip(np.nanmean(placed * start[:, None]), -0.95, 0.95))
        if trace.depth > 2:
            neighbours = float(np.nanmean(placed[:, 1:] * placed[:, :-1])) if drafted[:, 1].any() else 0.0
            common = float(np.clip(neighbours - follow**2, 0, 0.98 - follow**2))
    return {
        "off_confidence": _quantiles(cells[0], 0, 1),
        "off_entropy_nats": _quantiles(cells[1], 0, np.inf),
        "off_ratio": _quantiles(cells[2], 0, 1),
        "off_correlation": _correlations(scores),
        "off_follow": follow,
        "off_common": common,
    }
