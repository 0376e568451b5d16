"""Cost models: seconds of drafting, verification and decoding steps.

Seconds per call at batch size 1 unless the model says otherwise. `context` is the number
of tokens in the cache before the call (prompt plus emitted tokens, less the pending token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Ints, Seconds, increases
from specsim.io.errors import InputError

MAX_TREE_TOKENS = 512  # in a cost table
MIN_SECONDS, MAX_SECONDS = 1e-12, 1e9  # of a call: other times are mistakes, and sums would overflow
MAX_CONTEXT = 2**31  # tokens
SHOWN_CONTEXT = 1000  # cached tokens at which `repr` shows costs without measured contexts
NOISE = 0.05  # share of a step by which a round may measure less
MOST_NOISE = 0.5
FALL = 0.2  # share by which a longer pass may measure less; on CPUs passes of an even number of rows are 16 % faster
SPACE = "space"  # the kind of drafter whose drafts ride in the verification pass


def check_seconds(costs: object, *names: str, least: float = 0.0) -> None:
    """Raise InputError unless these fields are possible times of a call."""
    for name in names:
        value = getattr(costs, name)
        if not least <= value <= MAX_SECONDS:  # also catches NaN
            expected = "positive" if least else "0 or more"
            raise InputError(
                f"cost: {name}={value} seconds is not {expected} and finite; give {least:g} to {MAX_SECONDS:g}"
            )


def not_a_cost(cost: object) -> TypeError:
    """The error for an argument that is not a cost."""
    return TypeError(
        f"cost is a {type(cost).__name__}; expected a cost model such as specsim.ConstantCost(s_d=0.001, s_t=0.010), a "
        'cost file, a name of `specsim cost list`, or a mapping such as {"s_d": 0.001, "s_t": 0.010}'
    )


def check_rounds(
    name: str, round_s: Seconds, step_s: Seconds, what: str = "a round at K = {}", noise: float = NOISE
) -> None:
    """Raise InputError if rounds are, on average, faster than the decoding step that each contains.

    A round of K drafts verifies them in a pass of the target that yields a token anyway. Measured profiles are noisy,
    so the mean over contexts is judged; see `disturbances` for single contexts.

    round_s : [K, C], rounds of 1, 2, ... drafts, by context; step_s : [C]
    noise : relative noise of the measurements, clipped to `NOISE` to `MOST_NOISE`
    """
    shares = round_s.mean(axis=1) / step_s.mean()
    k = int(shares.argmin()) if shares.size else 0
    if shares.size and shares[k] < 1 - min(max(noise, NOISE), MOST_NOISE):
        raise InputError(
            f"{name}: {what.format(k + 1)} takes {shares[k]:.2f} of a step without speculation, which it "
            "contains; profile again on an idle machine"
        )


def disturbances(round_s: Seconds, step_s: Seconds, verify_s: Seconds) -> list[str]:
    """Notes on costs that were disturbed during measurement, at single contexts and between passes.

    round_s : [K, C]; step_s : [C]; verify_s : [N, C], passes over 1, 2, ... tokens
    """
    notes = []
    least = float((round_s / step_s).min(initial=1.0))
    if least < 1 - NOISE:
        notes.append(
            f"at one context a round takes {least:.2f} of a step without speculation, which it contains: the profile "
            "was disturbed, profile again on an idle machine"
        )
    mean_s = verify_s.mean(axis=1)
    fall = float((1 - mean_s / np.maximum.accumulate(mean_s)).max())
    if fall > FALL:
        notes.append(f"verifying more tokens takes up to {100 * fall:.0f} % less: the profile was disturbed")
    return notes


class CostModel:
    """Base of cost models. Answers in seconds, vectorised over context; of trees as of chains unless overridden.

    Your own model defines at least `draft`, `verify` and `autoregressive_step`.

    Examples
    --------
    >>> import numpy as np, specsim
    >>> class Knee(specsim.CostModel):
    ...     def draft(self, n_tokens, context):
    ...         return np.full(np.shape(context), 0.002 * n_tokens)
    ...     def verify(self, n_tokens, context):
    ...         return np.full(np.shape(context), 0.030 + 0.015 * max(n_tokens - 2, 0))
    ...     def autoregressive_step(self, context):
    ...         return np.full(np.shape(context), 0.030)
    >>> specsim.tune("example:lab-model", Knee(), "fixed_k", trials=8).best.k
    1
    """

    def __repr__(self) -> str:
        """One line: milliseconds of a decoding step and of a draft step in the middle of the contexts covered."""
        contexts = getattr(self, "contexts", (SHOWN_CONTEXT,))
        context, batch = int(contexts[len(contexts) // 2]), getattr(self, "batch", 1)
        try:
            proposal_s = float(self.proposal_seconds(context))
            steps = {"decoding step": float(self.autoregressive_step(context))}
            steps |= {"proposal": proposal_s} if proposal_s else {}
            steps["draft step"] = float(self.draft(1, context)) - proposal_s
        except (InputError, NotImplementedError):  # such as a class that is being written
            return object.__repr__(self)
        shown = ", ".join(f"{name} {1e3 * seconds:.4g} ms" for name, seconds in steps.items())
        of_batch = f"batch {batch}, " if batch > 1 else ""
        return f"{type(self).__name__}: {of_batch}{shown} at {context:,} cached tokens"

    @property
    def max_tree_tokens(self) -> int:
        """Most tokens of a tree, and nodes of a draft pass, that the model can price; 0: no trees."""
        return 0

    @property
    def error_band(self) -> tuple[float, float] | None:
        """5th and 95th percentile of measured over predicted speedup with such costs; None if unknown."""
        return None

    @property
    def error_known(self) -> bool:
        """Whether measurements of such costs support `speedup_error`; else it is a guess."""
        return True

    @property
    def speedup_error(self) -> tuple[float, float]:
        """Mean and standard deviation of log(measured / predicted speedup) with such costs; 0, 0 for measured costs."""
        return 0.0, 0.0

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        """Draft n_tokens in sequence; the first step ingests a single token."""
        raise NotImplementedError

    def proposal_seconds(self, context: npt.ArrayLike) -> Seconds:
        """The part of `draft` that is paid once per round, however many tokens are drafted."""
        return np.zeros(np.shape(context))

    def catch_up(self, context: npt.ArrayLike) -> Seconds:
        """Additional time of a round's first draft step if it ingests two tokens."""
        return np.zeros(np.shape(context))

    def catch_up_by(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        """The same for n missing tokens, after rounds of other drafters; by default n times a token's."""
        return n_tokens * self.catch_up(context)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        """A target pass over the pending token and n_tokens - 1 drafted tokens."""
        raise NotImplementedError

    def refeed(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        """A second pass of a target with recurrent layers over n tokens, after some of a draft were rejected.

        The pending token and the accepted ones are fed again, because the recurrent states already include the rejected
        tokens. Default: the seconds of verifying n_tokens tokens. Only replays of traces with "second_pass" in their
        meta.json use it.
        """
        return self.verify(n_tokens, context)

    def policy_step(self) -> float:
        """A decision whether to continue drafting."""
        return 0.0

    def round_overhead(self) -> float:
        """Overhead of a round besides drafting, policy and verification."""
        return 0.0

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        """A baseline decoding step, by the same code path."""
        raise NotImplementedError

    def round_seconds(self, k: int, context: float) -> float:
        """A round with K drafted tokens, or with K = 0 a step without speculation."""
        if not k:
            return float(self.autoregressive_step(context))
        return float(self.draft(k, context)) + float(self.verify(k + 1, context)) + self.round_overhead()

    def wider(self, n_nodes: int, context: npt.ArrayLike) -> Seconds:
        """Additional time of a draft pass over n tree nodes, compared with a chain's draft step."""
        return np.zeros(np.shape(context))

    def tree_verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        """A target pass over a tree of n tokens, the pending token included, and compaction of its cache."""
        return self.verify(n_tokens, context)

    def tree_policy_step(self) -> float:
        """A decision about a level of a tree."""
        return self.policy_step()

    def tree_round_overhead(self) -> float:
        """Overhead of a round with a tree, including selection and compaction of the draft cache."""
        return self.round_overhead()

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        """Notes for results with drafts of this length between these contexts, such as extrapolation."""
        return []


AS_IF_SPACE = (
    "as if masks of SPACE, whose drafts ride in the target's pass, were accepted like this trace's drafts; the oracle "
    "pays for its draft steps, so the gap to it may be below 0"
)


@dataclass(frozen=True)
class SpaceCost(CostModel):
    """Costs of SPACE, whose drafts ride in the verification pass as mask tokens.

    The pending token and each of m verified tokens have a group of k masks behind them, so that a pass is a tree of
    (m + 1)(k + 1) tokens, compaction of its cache included. Without tree costs, it is priced as a chain of that length.

    k : masks of a group, the longest draft; None for as many as are verified, the least that any k costs
    draft_steps : whether draft and policy steps have the model's cost; otherwise none, for models of another drafter

    References: Yi et al. 2024, arXiv:2402.11809, Eqs. 5-7.
    """

    model: CostModel
    k: int | None
    draft_steps: bool = False

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.model.draft(n_tokens, context) if self.draft_steps else np.zeros(np.shape(context))

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        verified = n_tokens if self.k is None else min(n_tokens, self.k + 1)  # more is never drafted
        tokens = verified * (verified if self.k is None else self.k + 1)
        if tokens > 1 and self.model.max_tree_tokens:
            return self.model.tree_verify(tokens, context)
        return self.model.verify(tokens, context)

    def policy_step(self) -> float:
        return self.model.policy_step() if self.draft_steps else 0.0

    def round_overhead(self) -> float:
        return self.model.round_overhead()

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self.model.autoregressive_step(context)

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        notes = self.model.notes(max_draft_tokens, contexts)
        return notes if self.draft_steps else [*notes, AS_IF_SPACE]


@dataclass(frozen=True)
class FullDraftCost(CostModel):
    """Costs of an engine that verifies K + 1 tokens in every round, whatever was drafted.

    OpenVINO GenAI's prompt lookup does so, also where it finds no match.

    Parameters
    ----------
    model : CostModel
    k : int
        K, the draft length that passes are padded to.

    Examples
    --------
    >>> import specsim
    >>> from specsim.cost.model import FullDraftCost
    >>> cost = specsim.read_cost("example:llama-3.1-8b-eagle-h100")
    >>> bool(FullDraftCost(cost, 31).verify(1, 1000) == cost.verify(32, 1000))
    True
    """

    model: CostModel
    k: int

    @property
    def speedup_error(self) -> tuple[float, float]:
        return self.model.speedup_error

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.model.verify(max(n_tokens, self.k + 1), context)

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.model.draft(n_tokens, context)

    def proposal_seconds(self, context: npt.ArrayLike) -> Seconds:
        return self.model.proposal_seconds(context)

    def refeed(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.model.refeed(n_tokens, context)

    def policy_step(self) -> float:
        return self.model.policy_step()

    def round_overhead(self) -> float:
        return self.model.round_overhead()

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self.model.autoregressive_step(context)

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        return self.model.notes(max_draft_tokens, contexts)


@dataclass(frozen=True)
class ConstantCost(CostModel):
    """The papers' cost: a draft step takes s_d, a target pass s_t, and nothing else counts.

    Parameters
    ----------
    s_d, s_t : float
        Seconds, positive.

    Raises
    ------
    InputError
        For a time outside 1e-12 to 1e9 seconds.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, section 3.3; EESD, arXiv:2406.03853, Eq. 13.

    Examples
    --------
    >>> import specsim
    >>> specsim.ConstantCost(s_d=0.001, s_t=0.010)
    ConstantCost(s_d=0.001, s_t=0.01)
    """

    s_d: float
    s_t: float

    def __post_init__(self) -> None:
        check_seconds(self, "s_d", "s_t", least=MIN_SECONDS)

    @property
    def max_tree_tokens(self) -> int:
        return MAX_TREE_TOKENS

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), n_tokens * self.s_d)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_t)

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_t)


def checked_axis(values: Sequence[int], name: str, advice: str, *, least: int = 0) -> Ints:
    """An increasing axis from `least` on or above; InputError calls it `name`."""
    array = np.asarray(values, dtype=np.int64)
    if not array.size or array[0] < least or array[-1] >= MAX_CONTEXT or not increases(array):
        raise InputError(f"{name} are not an increasing list from {least} on; {advice}")
    return array


def checked_table(
    values: Any, shape: Sequence[int | None], name: str, advice: str, *, positive: bool = False
) -> Seconds:
    """A table of seconds of this shape, in which None stands for any length; InputError calls it `name`."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except ValueError:
        raise InputError(f"{name} has rows of several lengths; {advice}") from None
    if (
        array.ndim != len(shape)
        or not array.size
        or any(length not in (None, own) for own, length in zip(array.shape, shape, strict=True))
    ):
        raise InputError(f"{name} does not fit the axes of the profile; {advice}")
    if not ((array >= (MIN_SECONDS if positive else 0)) & (array <= MAX_SECONDS)).all():
        raise InputError(f"{name}: a time is {'not positive' if positive else 'negative'} or not finite; {advice}")
    return array
