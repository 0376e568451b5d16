"""Acceptance model with context difficulty: some texts and stretches are easier, and the drafter partly sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.acceptance.difficulty_fit import from_rounds, from_trace
from specsim.acceptance.latent import KNOTS, Drift, Table
from specsim.acceptance.sources import Counters, Source
from specsim.acceptance.synthetic import Drafts, match_lengths
from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.trace.trace import Trace


@dataclass(frozen=True)
class Difficulty:
    """Latent difficulty that drifts along the text and drives confidence, entropy and acceptance.

    Every output token has, for branches that are accepted up to it, three standard normal scores:
    of top-1 confidence, of entropy, and of the drafted token's probability over the top token's.
    A Gaussian copula correlates them (`on_correlation`: confidence-entropy, confidence-ratio,
    entropy-ratio), and tables of quantiles at KNOTS turn them into values. Confidence and entropy drift
    by `feature_drift` (latent.Drift), the ratio is fresh at every token. A weighted sum of the scores,
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

        See `difficulty_fit`. Raises InputError for counters per depth, which do not separate rounds.
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
    """Probability, confidence and entropy of these scores [3, ...]."""
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
