"""Acceptance models of rates, and synthetic dense traces with a common rule for branches over the same token.

The draft at position t, depth i concerns output token t + i - 1, and so do the drafts at
t + 1, depth i - 1, and so on: as long as a branch is accepted, its context is the output itself.
An independent draft model, asked for the same token in the same context, answers the same.
Hence every output token has a single draw: branches that are accepted up to it have the same
outcome, and the same confidence if the model has any, and branches that are rejected at the same token
continue identically. (Recorded traces of draft models show exactly this, greedy and with coupled noise.)
A drafter whose answer depends on the way to a context, such as parallel heads, shares less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from specsim.acceptance.sources import Source, verified_by_depth
from specsim.io.arrays import Bools, Floats, Ints
from specsim.io.errors import InputError
from specsim.trace.trace import Trace

EOS = 0  # never drawn, so that sequences end by their budget
VOCABULARY = 32_000
MAX_SEED = 2**32 - 1


class AcceptanceModel(Protocol):
    """Frozen dataclass of numbers and tuples that draws which drafts are accepted."""

    name: ClassVar[str]
    source: ClassVar[str]
    informed: ClassVar[bool]  # whether the drafter's confidence predicts acceptance

    @classmethod
    def fit(cls, source: Source) -> Self:
        """Fit to data; InputError if the data do not determine the model."""

    def draw(self, lengths: Ints, depth: int, rng: np.random.Generator) -> Drafts:
        """Draw the drafts of sequences of these lengths [S]."""


@dataclass(frozen=True)
class Drafts:
    """Columns of a trace: match_len uint8 [N]; prob, confidence, entropy_nats float32 [N, D]."""

    match_len: npt.NDArray[np.uint8]
    prob: npt.NDArray[np.float32]
    confidence: npt.NDArray[np.float32]
    entropy_nats: npt.NDArray[np.float32]


def match_lengths(accepted: list[Bools], lengths: Ints) -> npt.NDArray[np.uint8]:
    """Number of leading accepted tokens of the branch at every position, uint8 [N], up to the sequence's end.

    accepted[i][p] : whether a branch, accepted before token p, is accepted there if p is its i-th token, from 0
    """
    total = int(lengths.sum())
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(total)  # tokens from here to the end
    match = np.zeros(total, dtype=np.uint8)
    alive = np.arange(total)  # starts whose branch is accepted so far
    for i, here in enumerate(accepted):
        alive = alive[left[alive] > i]
        alive = alive[here[alive + i]]
        match[alive] += 1
    return match


def geometric_entropy_nats(confidence: npt.ArrayLike) -> Floats:
    """Entropy of the geometric distribution whose largest probability this is: (-c ln c - (1-c) ln(1-c)) / c."""
    c = np.clip(np.asarray(confidence, dtype=np.float64), 1e-6, 1.0)
    rest = 1 - c
    tail = rest * np.log(rest, out=np.zeros_like(rest), where=rest > 0)
    return np.asarray(np.maximum(-c * np.log(c) - tail, 0.0) / c)


def uninformed(accept_prob: Floats, total: int) -> dict[str, npt.NDArray[np.float32]]:
    """Features that do not predict acceptance: the same confidence at every position, accept_prob [D] by depth."""
    confidence = np.tile(accept_prob.astype(np.float32), (total, 1))
    entropy = np.tile(geometric_entropy_nats(accept_prob).astype(np.float32), (total, 1))
    return {"prob": confidence, "confidence": confidence.copy(), "entropy_nats": entropy}


@dataclass(frozen=True)
class PerPosition:
    """alpha[i - 1] in [0, 1]: probability that the i-th drafted token is accepted if all before it were.

    Every output token has a uniform random number; a branch that drafts the token as its i-th is
    accepted there if the number is below alpha_i. Tokens are independent; branches over the same token
    agree as far as their alphas allow. Confidence is alpha_i, as in the i.i.d. model.
    """

    alpha: tuple[float, ...]

    name = "per_position"
    source = "acceptance counters per draft position, as vLLM exports; product-limit estimate, Kaplan and Meier 1958"
    informed = False

    def __post_init__(self) -> None:
        if not self.alpha or not all(0 <= a <= 1 for a in self.alpha):
            raise InputError(f"acceptance model per_position: alpha={self.alpha}; give a list of values in [0, 1]")

    @classmethod
    def fit(cls, source: Source) -> PerPosition:
        """Fit discrete hazards (`sources.verified_by_depth`) down to the deepest verified depth."""
        accepted, verified = verified_by_depth(source)
        seen = int(np.argmin(verified > 0)) if (verified <= 0).any() else len(verified)
        if seen == 0:
            raise InputError("acceptance model per_position: nothing was drafted; give rounds that draft")
        return cls(tuple((accepted[:seen] / verified[:seen]).tolist()))

    def draw(self, lengths: Ints, depth: int, rng: np.random.Generator) -> Drafts:
        if depth > len(self.alpha):
            raise InputError(
                f"acceptance model per_position has depths up to {len(self.alpha)}, not {depth}; "
                "lower the depth or fit to longer drafts"
            )
        total = int(lengths.sum())
        uniform = rng.random(total)
        accepted = [uniform < alpha for alpha in self.alpha[:depth]]
        return Drafts(match_lengths(accepted, lengths), **uninformed(np.array(self.alpha[:depth]), total))


@dataclass(frozen=True)
class IID:
    """Independent acceptance with probability alpha in [0, 1], given that the draft prefix was accepted.

    Confidence is alpha everywhere and entropy that of a geometric distribution with this mode, so
    neither tells a policy which tokens will be accepted.
    """

    alpha: float

    name = "iid"
    source = "Leviathan et al. 2023, arXiv:2211.17192, section 3.1"
    informed = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise InputError(f"acceptance model iid: alpha={self.alpha} is outside [0, 1]; choose a value inside")

    @classmethod
    def fit(cls, source: Source) -> IID:
        """Fit alpha by maximum likelihood: accepted over verified tokens, also for rounds with a = k.

        mean(a) / mean(k) would count tokens after a rejection as rejected and underestimate alpha.
        In a dense trace every output token is verified once, as the first of a draft.
        """
        if isinstance(source, Trace):
            drafted = source.draft_limit > 0
            if not drafted.any():
                raise InputError("acceptance model iid: no token of this trace could be drafted; record longer outputs")
            return cls(float((source.match_len > 0)[drafted].mean()))
        accepted, verified = verified_by_depth(source)
        return cls(float(accepted.sum() / verified.sum()))

    def draw(self, lengths: Ints, depth: int, rng: np.random.Generator) -> Drafts:
        total = int(lengths.sum())
        accepted = rng.random(total) < self.alpha
        return Drafts(match_lengths([accepted] * depth, lengths), **uninformed(np.full(depth, self.alpha), total))
