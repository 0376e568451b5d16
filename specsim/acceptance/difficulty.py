"""Acceptance model with context difficulty: some texts and stretches are easier, and the drafter partly sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.acceptance.models import Drafts, geometric_entropy_nats, match_lengths
from specsim.acceptance.sources import Counters, Rounds, Source
from specsim.io.arrays import Bools, Floats, IntArray, Ints
from specsim.io.errors import InputError
from specsim.trace.trace import Trace

SEQUENCE_NODES, TOKEN_STATES = 7, 15
MAX_POSITIONS = 12_000  # that the likelihood uses; enough for the shares
ROUGH_POSITIONS = 3_000
MISSING = -1
MOST_LAGS = 32
Table = tuple[float, ...]
KNOTS = np.linspace(-3.5, 3.5, 57)  # normal scores at which tables hold the quantiles of a distribution


class Drift(NamedTuple):
    """Autocorrelation of a standard Gaussian process: at lag k >= 1, sequence + local x decay^k.

    sequence : share of variance common to a whole sequence
    local : share that fades along the text
    decay : per token, in [0, 1)

    The rest of the variance is fresh at every token.
    """

    sequence: float
    local: float
    decay: float

    def draw(self, lengths: Ints, rng: np.random.Generator) -> Floats:
        """Draw a process over sequences of these lengths [S]: float64 [N], standard normal at every position."""
        from scipy.signal import lfilter

        total, longest = int(lengths.sum()), int(lengths.max())
        inside = np.arange(longest) < lengths[:, None]
        noise = rng.standard_normal((len(lengths), longest))
        noise[:, 1:] *= np.sqrt(1 - self.decay**2)
        fading = lfilter([1.0], [1.0, -self.decay], noise, axis=1)[inside]
        common = np.repeat(rng.standard_normal(len(lengths)), lengths)
        fresh = rng.standard_normal(total)
        parts = zip((self.sequence, self.local, self.fresh), (common, fading, fresh), strict=True)
        return np.asarray(sum(np.sqrt(share) * part for share, part in parts))

    @property
    def fresh(self) -> float:
        return max(0.0, 1 - self.sequence - self.local)


def fit_drift(score: Floats, lengths: IntArray) -> Drift:
    """Fit a drift by least squares to the autocorrelations of standard normal scores [N] at lags up to MOST_LAGS."""
    from scipy.optimize import least_squares

    lag = np.arange(1, min(MOST_LAGS, int(lengths.max()) - 1) + 1)
    if len(lag) < 4:
        return Drift(0.0, 0.0, 0.0)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    correlation, weight = np.zeros(len(lag)), np.zeros(len(lag))
    for i, k in enumerate(lag.tolist()):
        same = sequence[k:] == sequence[:-k]
        correlation[i] = (score[k:] * score[:-k])[same].mean()
        weight[i] = np.sqrt(same.sum())

    def misfit(x: Floats) -> Floats:
        return np.asarray(weight * (x[0] + x[1] * x[2] ** lag - correlation))

    low = max(correlation[-1], 0.0)
    start = [min(low, 0.9), float(np.clip(correlation[0] - low, 0.01, 0.9)), 0.8]
    return _bounded(*least_squares(misfit, start, bounds=([0, 0, 0], [0.98, 0.98, 0.995])).x)


def fit_hidden(offset: Floats, accepted: npt.NDArray[np.int8]) -> Drift:
    """Fit the drift of a standard Gaussian z with accepted = [offset + z > 0] by maximum likelihood.

    offset : float64 [S, T], so that the probability of acceptance is Phi(offset) if nothing else is known
    accepted : int8 [S, T], 1, 0, or MISSING, which is ignored

    The likelihood is that of a hidden Markov chain: the sequence's share on Gauss-Hermite
    nodes, the fading share as Rouwenhorst's chain (1995), which has the AR(1) process's
    autocorrelation exactly. Outcomes must be missing at random, given the others.
    """
    from scipy.optimize import minimize

    def search(start: Floats, positions: int, step: float) -> Any:
        keep = max(1, positions // max(1, accepted.shape[1]))

        def loss(x: Floats) -> float:
            return -log_likelihood(_from_free(x), offset[:keep], accepted[:keep])

        simplex = np.vstack([start, start + step * np.eye(3)])
        options = {"xatol": 0.05, "fatol": 0.02, "initial_simplex": simplex}
        return minimize(loss, start, method="Nelder-Mead", options=options)

    # Differences between sequences and between stretches of text are two local minima: search both on less data.
    starts = np.array([-1.0, 0.0, 1.0]), np.array([-2.0, -2.0, 2.5])
    rough = min((search(start, ROUGH_POSITIONS, 1.0) for start in starts), key=lambda result: result.fun)
    best = search(rough.x, MAX_POSITIONS, 0.3)
    keep = max(1, MAX_POSITIONS // max(1, accepted.shape[1]))
    nothing = Drift(0.0, 0.0, 0.0)
    # Three parameters have to improve the likelihood by more than chance does.
    if -log_likelihood(nothing, offset[:keep], accepted[:keep]) <= best.fun + 3.0:
        return nothing
    return _from_free(best.x)


def fit_mean(drift: Drift, accepted: npt.NDArray[np.int8]) -> float:
    """Fit the constant offset of these outcomes under this drift by maximum likelihood; see `fit_hidden`."""
    from scipy.optimize import minimize_scalar

    accepted = accepted[: max(1, MAX_POSITIONS // max(1, accepted.shape[1]))]

    def loss(mean: float) -> float:
        return -log_likelihood(drift, np.full(accepted.shape, mean), accepted)

    return float(minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 0.01}).x)


def _from_free(x: Floats) -> Drift:
    """Drift from three logits: share of all drift, the sequence's part of it, decay."""
    total, split, decay = 1 / (1 + np.exp(-np.clip(x, -12, 12)))
    return _bounded(total * split, total * (1 - split), decay)


def _bounded(sequence: float, local: float, decay: float) -> Drift:
    shrink = min(1.0, 0.98 / max(sequence + local, 1e-12))
    return Drift(float(sequence * shrink), float(local * shrink), float(min(decay, 0.995)))


def log_likelihood(drift: Drift, offset: Floats, accepted: npt.NDArray[np.int8]) -> float:
    """Log-likelihood of accepted and rejected tokens, in nats; see `fit_hidden`."""
    from scipy.special import ndtr

    nodes, weights = np.polynomial.hermite_e.hermegauss(SEQUENCE_NODES)
    weights = weights / weights.sum()
    states, chain, stationary = _rouwenhorst(drift.decay)
    level = np.sqrt(drift.sequence) * nodes[:, None] + np.sqrt(drift.local) * states  # [Q, G]
    scale = np.sqrt(drift.fresh)
    belief = np.broadcast_to(stationary, (len(accepted), SEQUENCE_NODES, TOKEN_STATES)).copy()
    total = np.zeros((len(accepted), SEQUENCE_NODES))
    for t in range(accepted.shape[1]):
        if t > 0:
            belief = belief @ chain
        sign = np.where(accepted[:, t] == 1, 1.0, -1.0)[:, None, None]
        prob = ndtr(sign * (offset[:, t, None, None] + level) / scale)
        prob[accepted[:, t] == MISSING] = 1.0
        belief *= prob
        norm = np.maximum(belief.sum(axis=2), 1e-300)
        total += np.log(norm)
        belief /= norm[:, :, None]
    peak = total.max(axis=1)
    return float((peak + np.log(np.exp(total - peak[:, None]) @ weights)).sum())


def _rouwenhorst(decay: float) -> tuple[Floats, Floats, Floats]:
    """States [G], transition matrix [G, G] and stationary distribution [G] of Rouwenhorst's chain for an AR(1)."""
    p = (1 + decay) / 2
    chain = np.array([[p, 1 - p], [1 - p, p]])
    for n in range(3, TOKEN_STATES + 1):
        larger = np.zeros((n, n))
        larger[:-1, :-1] += p * chain
        larger[:-1, 1:] += (1 - p) * chain
        larger[1:, :-1] += (1 - p) * chain
        larger[1:, 1:] += p * chain
        larger[1:-1] /= 2
        chain = larger
    states = np.linspace(-1, 1, TOKEN_STATES) * np.sqrt(TOKEN_STATES - 1)
    stationary = np.array([1.0])
    for _ in range(TOKEN_STATES - 1):
        stationary = np.convolve(stationary, [0.5, 0.5])
    return states, chain, stationary


@dataclass(frozen=True)
class Difficulty:
    """Latent difficulty that drifts along the text and drives confidence, entropy and acceptance.

    Every output token has, for branches that are accepted up to it, three standard normal scores:
    of top-1 confidence, of entropy, and of the drafted token's probability over the top token's.
    A Gaussian copula correlates them (`on_correlation`: confidence-entropy, confidence-ratio,
    entropy-ratio), and tables of quantiles at KNOTS turn them into values. Confidence and entropy drift
    by `feature_drift` (`Drift`), the ratio is fresh at every token. A weighted sum of the scores,
    `hit_weight`, scaled to variance 1, is looked up in `hit_prob`, also at KNOTS: the probability p of
    acceptance, which is calibrated by construction. The token is accepted if Phi^-1(p) + z > 0, z a hidden
    standard normal that drifts by `hidden_drift`: difficulty that the drafter does not see.

    After a rejection the branch leaves the output. Its tokens draw from separate tables (`off_`);
    `off_follow` is the correlation of their confidence with that of the rejected token, `off_common` the
    variance that they share beyond it; the rejected token's scores have the distribution `miss_score`.
    Depth along a branch has no effect of its own.
    """

    on_confidence: Table
    on_entropy_nats: Table
    on_ratio: Table
    on_correlation: Table
    feature_drift: Table
    hit_weight: Table
    hit_prob: Table
    hidden_drift: Table
    off_confidence: Table
    off_entropy_nats: Table
    off_ratio: Table
    off_correlation: Table
    off_follow: float
    off_common: float
    miss_score: Table

    name = "difficulty"
    source = "latent Gaussian difficulty with a copula of confidence, entropy and hits; own"
    informed = True

    def __post_init__(self) -> None:
        for side in ("on", "off"):
            self._check(f"{side}_confidence", len(KNOTS), 0, 1, rising=True)
            self._check(f"{side}_entropy_nats", len(KNOTS), 0, np.inf, rising=True)
            self._check(f"{side}_ratio", len(KNOTS), 0, 1, rising=True)
            self._check(f"{side}_correlation", 3, -1, 1)
        self._check("hit_prob", len(KNOTS), 0, 1)
        self._check("miss_score", len(KNOTS), -np.inf, np.inf, rising=True)
        self._check("hit_weight", 3, -np.inf, np.inf)
        for name in ("feature_drift", "hidden_drift"):
            self._check(name, 3, 0, 1)
            if sum(getattr(self, name)[:2]) > 1 or getattr(self, name)[2] == 1:
                raise InputError(
                    f"acceptance model difficulty: {name} has shares above 1 or a decay of 1; fit it again"
                )
        if not (-1 <= self.off_follow <= 1 and 0 <= self.off_common <= 1 - self.off_follow**2 + 1e-9):
            raise InputError("acceptance model difficulty: off_follow^2 + off_common exceeds 1; fit it again")

    def _check(self, name: str, length: int, low: float, high: float, *, rising: bool = False) -> None:
        value = getattr(self, name)
        if not isinstance(value, tuple) or len(value) != length or not all(low <= x <= high for x in value):
            raise InputError(
                f"acceptance model difficulty: {name} needs {length} values in [{low:g}, {high:g}]; fit it again"
            )
        if rising and (np.diff(value) < 0).any():
            raise InputError(f"acceptance model difficulty: {name} must not fall; fit it again")

    @classmethod
    def fit(cls, source: Source) -> Difficulty:
        """Fit every parameter to a dense trace; to rounds only the latent, with a default joint distribution.

        See `from_trace` and `from_rounds`. Raises InputError for counters per depth, which do not separate rounds.
        """
        if isinstance(source, Counters):
            raise InputError(
                "acceptance model difficulty cannot be fitted to counters, which do not separate easy "
                "rounds from hard ones; give a trace or rounds, or fit per_position"
            )
        return cls(**(from_trace(source) if isinstance(source, Trace) else from_rounds(source)))

    def draw(self, lengths: Ints, depth: int, rng: np.random.Generator) -> Drafts:
        from scipy.special import ndtri

        total = int(lengths.sum())
        drift = Drift(*self.feature_drift)
        fields = np.stack([drift.draw(lengths, rng), drift.draw(lengths, rng), rng.standard_normal(total)])
        on_scores = cholesky(self.on_correlation) @ fields
        index = np.array(self.hit_weight) @ on_scores
        prob = np.interp(index, KNOTS, self.hit_prob)
        accepted = ndtri(np.clip(prob, 1e-9, 1 - 1e-9)) + Drift(*self.hidden_drift).draw(lengths, rng) > 0
        match_len = match_lengths([accepted] * depth, lengths)
        on = _values(on_scores, self.on_confidence, self.on_entropy_nats, self.on_ratio)
        rejected = np.flatnonzero(~accepted)
        off_scores = self._off_scores(on_scores[0, rejected], depth - 1, rng)
        off = _values(off_scores, self.off_confidence, self.off_entropy_nats, self.off_ratio)
        return Drafts(match_len, **_spread(on, off, rejected, match_len, depth))

    def _off_scores(self, rejected_score: Floats, length: int, rng: np.random.Generator) -> Floats:
        """Draw scores [3, rejected, length] of the tokens after rejected tokens with these confidence scores."""
        shape = len(rejected_score), length
        start = np.interp(rejected_score, self.miss_score, KNOTS)  # standard normal among rejected tokens
        common = np.sqrt(self.off_common)
        rest = np.sqrt(max(0.0, 1 - self.off_follow**2 - self.off_common))
        first = (self.off_follow * start + common * rng.standard_normal(len(rejected_score)))[:, None]
        second = common * rng.standard_normal((len(rejected_score), 1))
        fields = np.stack(
            [
                first + rest * rng.standard_normal(shape),
                second + np.sqrt(1 - self.off_common) * rng.standard_normal(shape),
                rng.standard_normal(shape),
            ]
        )
        return np.tensordot(cholesky(self.off_correlation), fields, axes=1)


def cholesky(correlation: Table) -> Floats:
    """Lower triangle L [3, 3] of which L L^T is the matrix of these (01, 02, 12) correlations."""
    matrix = np.eye(3)
    matrix[[0, 0, 1], [1, 2, 2]] = matrix[[1, 2, 2], [0, 0, 1]] = correlation
    least = np.linalg.eigvalsh(matrix)[0]
    if least < 1e-6:  # correlations of ranks need not be exactly consistent
        matrix = (matrix + (1e-6 - least) * np.eye(3)) / (1 + 1e-6 - least)
    return np.asarray(np.linalg.cholesky(matrix))


def _values(scores: Floats, confidence: Table, entropy_nats: Table, ratio: Table) -> tuple[Floats, Floats, Floats]:
    top = np.interp(scores[0], KNOTS, confidence)
    entropy = np.interp(scores[1], KNOTS, entropy_nats)
    least = -np.log(np.maximum(top, 1e-9))  # smallest entropy of a distribution with this mode
    return top * np.interp(scores[2], KNOTS, ratio), top, np.maximum(entropy, least)


def _spread(
    on: tuple[Floats, ...], off: tuple[Floats, ...], rejected: Ints, match_len: Any, depth: int
) -> dict[str, npt.NDArray[np.float32]]:
    """Trace columns [N, D] from values per output token [N] and per rejected token and step [rejected, D - 1].

    Cells beyond the end of a sequence hold values of another position; no policy reads them.
    """
    total = len(match_len)
    start = np.arange(total)
    row = np.zeros(total, dtype=np.int64)
    row[rejected] = np.arange(len(rejected))
    branch = row[np.minimum(start + match_len, total - 1)]
    result = {}
    for name, before, after in zip(("prob", "confidence", "entropy_nats"), on, off, strict=True):
        before, after = before.astype(np.float32), after.astype(np.float32)
        column = np.empty((total, depth), dtype=np.float32)
        for i in range(depth):
            column[:, i] = before[np.minimum(start + i, total - 1)]
            astray = np.flatnonzero(match_len < i) if len(rejected) else start[:0]
            column[astray, i] = after[branch[astray], i - match_len[astray] - 1]
        result[name] = column
    return result


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


def _off_distribution(trace: Trace, score: Floats, rejected: Bools) -> dict[str, Table | float]:
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
