"""Linear costs: a pass takes a fixed time plus times per new token and per cached token, as in serving papers.

A batch of B sequences in lockstep is a pass over B times the tokens and B times the cache; times are the whole batch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchCost, BatchTokens
from specsim.cost.model import MAX_TREE_TOKENS, MIN_SECONDS, check_seconds
from specsim.io.arrays import Seconds
from specsim.io.errors import InputError

OTHERS = "use costs of several batches, such as specdecode-bench-llama3.1-8b-eagle-h100"


@dataclass(frozen=True)
class LinearPass:
    """One model's passes.

    fixed_s : seconds of any pass, such as reading the weights and launches. Positive
    token_s : seconds per new token
    cached_token_s : seconds per token in the cache that the new ones attend to

    Raises InputError for a negative time, or a fixed time of 0.
    """

    fixed_s: float
    token_s: float = 0.0
    cached_token_s: float = 0.0

    def __post_init__(self) -> None:
        check_seconds(self, "fixed_s", least=MIN_SECONDS)
        check_seconds(self, "token_s", "cached_token_s")

    def seconds(self, n_tokens: int, context: npt.ArrayLike, batch: int) -> Seconds:
        """A pass over n_tokens new tokens of each of `batch` sequences, behind `context` cached tokens each."""
        return self.batch_seconds(BatchTokens.alike(batch, n_tokens, context))

    def batch_seconds(self, tokens: BatchTokens) -> Seconds:
        """Passes over ragged batches."""
        return np.asarray(self.fixed_s + tokens.new * self.token_s + tokens.cached * self.cached_token_s)


@dataclass(frozen=True)
class Proposal:
    """Time of proposing a draft, once per round, however long the draft is.

    fixed_s : seconds per round that drafts
    cached_token_s : seconds per token in the cache

    Raises InputError for a negative time.
    """

    fixed_s: float
    cached_token_s: float = 0.0

    def __post_init__(self) -> None:
        check_seconds(self, "fixed_s", "cached_token_s")

    def batch_seconds(self, tokens: BatchTokens) -> Seconds:
        """Seconds of a proposal for each of several ragged batches."""
        return np.asarray(self.fixed_s + tokens.cached * self.cached_token_s)


class Fitted(NamedTuple):
    """Ranges to which costs were fitted.

    batches : smallest and largest batch; if equal, other batches and wider passes are unknown
    draft_tokens : smallest and largest K; None if unknown
    """

    batches: tuple[int, int]
    draft_tokens: tuple[int, int] | None = None


@dataclass(frozen=True, repr=False)
class LinearCost(BatchCost):
    """A target and a drafter with linear passes, and the overhead of steps.

    target, drafter : of a pass. A draft of K tokens is K passes of the drafter, each over the cache so far
    proposal : time of drafting once per round, in addition to these K passes
    step_s : overhead per engine step, such as scheduling: once per round, and once per baseline decoding step
    round_s : further overhead of a round of speculation
    batch : sequences in lockstep
    fitted : ranges of the fit. Costs of a single batch price neither other batches nor trees
    method : the drafter's kind, such as "eagle3"; "" if unknown

    Raises InputError for a negative overhead, a batch below 1, or a batch other than the only fitted batch.

    References: arXiv:2601.11580, SpecDecode-Bench's simulator, of this form, which charges drafting once a round.

    >>> from specsim.cost.linear import LinearCost, LinearPass, Proposal
    >>> cost = LinearCost(target=LinearPass(0.010, 0.001), drafter=LinearPass(0.002), step_s=0.001)
    >>> float(cost.verify(4, 100)), float(cost.draft(3, 100)), float(cost.autoregressive_step(100))
    (0.014, 0.006, 0.012)
    >>> once = LinearCost(target=LinearPass(0.010), drafter=LinearPass(1e-6), proposal=Proposal(0.002))
    >>> float(once.draft(1, 100)), float(once.draft(3, 100))
    (0.002001, 0.002003)
    """

    target: LinearPass
    drafter: LinearPass
    step_s: float = 0.0
    round_s: float = 0.0
    batch: int = 1
    proposal: Proposal | None = None
    fitted: Fitted | None = None
    method: str = ""

    def __post_init__(self) -> None:
        check_seconds(self, "step_s", "round_s")
        if self.batch < 1:
            raise InputError(f"cost: batch={self.batch}; give at least 1")
        only = self.only_batch
        if only is not None and self.batch != only:
            raise InputError(f"was measured at batch {only} alone, which says nothing of batch {self.batch}; {OTHERS}")

    @property
    def only_batch(self) -> int | None:
        """The only fitted batch; None if several were fitted."""
        return self.fitted.batches[0] if self.fitted and self.fitted.batches[0] == self.fitted.batches[1] else None

    @property
    def max_tree_tokens(self) -> int:
        return MAX_TREE_TOKENS if self.only_batch is None else 0

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        seconds = self.drafter.batch_seconds(tokens)
        if self.proposal is None:
            return seconds
        return seconds + np.where(np.asarray(place) == 0, self.proposal.batch_seconds(tokens), 0.0)

    def proposal_seconds(self, context: npt.ArrayLike) -> Seconds:
        if self.proposal is None:
            return super().proposal_seconds(context)
        return self.proposal.batch_seconds(BatchTokens.alike(self.batch, 1, context))

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        if self.fitted is None:
            return []
        beyond = []
        (low, high), lengths = self.fitted.batches, self.fitted.draft_tokens
        if not low <= self.batch <= high:
            beyond.append(f"extrapolated: batch {self.batch}, fitted to {low} to {high}")
        if lengths is None:
            beyond.append(
                "the source of these costs does not say which K they were fitted to; choose no K by them alone"
            )
        elif not lengths[0] <= max_draft_tokens <= lengths[1]:
            beyond.append(f"extrapolated: drafts of {max_draft_tokens} tokens, fitted to {lengths[0]} to {lengths[1]}")
        return beyond

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        return self.target.batch_seconds(tokens)
