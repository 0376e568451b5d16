"""Passes over ragged batches, in which every sequence has its own context and draft, and their cost models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.cost.model import CostModel
from specsim.io.arrays import Bools, Floats, Ints, Seconds
from specsim.io.errors import InputError

Pad = Literal["none", "longest", "graphs", "sequences"]
GRAPH_SIZES = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)])  # tokens, vLLM's default CUDA graphs
SEQUENCES = np.array([*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, 513, 16)])
LONGEST_DRAFT = 64  # tokens of a sequence; a pass with more reads prompts, for which SGLang captures no graph


class BatchTokens(NamedTuple):
    """Contents of passes, summed over sequences: arrays [Q] of Q passes, or numbers of a single pass.

    sequences : in the pass, at least 1
    new : new tokens
    cached : tokens in the caches before the pass
    pairs : of a new token and a token that it attends to, cached or new: n (c + n) per sequence
    prompts : new tokens that are prefilled; the others are decoded or verified
    """

    sequences: Floats
    new: Floats
    cached: Floats
    pairs: Floats
    prompts: Floats | float = 0.0

    @classmethod
    def alike(cls, sequences: npt.ArrayLike, new: npt.ArrayLike, cached: npt.ArrayLike) -> BatchTokens:
        """Equal sequences with these new and cached tokens each."""
        count, n, c = np.broadcast_arrays(*(np.asarray(value, np.float64) for value in (sequences, new, cached)))
        return cls(count, count * n, count * c, count * n * (c + n))

    @classmethod
    def of(cls, new: Ints, cached: Ints) -> BatchTokens:
        """A pass over sequences with these new and cached tokens [R]."""
        sums = (len(new), new.sum(), cached.sum(), (new * (cached + new)).sum())
        return cls(*np.array(sums, dtype=np.float64))

    def plus(self, other: BatchTokens | None) -> BatchTokens:
        """Passes over the sequences of both."""
        if other is None:
            return self
        return BatchTokens(*(np.asarray(a + b) for a, b in zip(self, other, strict=True)))

    def select(self, passes: Bools) -> BatchTokens:
        """Some of the passes."""
        return BatchTokens(*(np.broadcast_to(each, np.shape(self.new))[passes] for each in self))


class DoesNotFit(InputError):
    """Weights and caches of such a batch need more memory than the device has."""


class BatchCost(CostModel):
    """A cost model for batches of mixed contexts; as a `CostModel`, of `batch` sequences in lockstep."""

    @property
    def batch(self) -> int:
        return 1

    @property
    def step_s(self) -> float:
        """Overhead of an engine step besides its passes, in seconds."""
        return 0.0

    @property
    def round_s(self) -> float:
        """Further overhead of a step with speculation, in seconds."""
        return 0.0

    @property
    def pads_to_longest(self) -> bool:
        """Whether every sequence of a round is charged as many tokens as the one with the longest draft."""
        return False

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        """The draft step at this place of a round, from 0, of the sequences that still draft."""
        raise NotImplementedError

    def batch_wider(self, nodes: BatchTokens, chain: BatchTokens) -> Seconds:
        """Additional time of a draft pass over tree nodes, compared with a token of each sequence."""
        # as measured, a pass over more tokens may be a little faster
        return np.maximum(self.batch_draft(0, nodes) - self.batch_draft(0, chain), 0.0)

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        """A target pass over all pending and drafted tokens."""
        raise NotImplementedError

    def batch_tree_verify(self, tokens: BatchTokens) -> Seconds:
        """A target pass over trees, and compaction of the cache."""
        return self.batch_verify(tokens)

    def draft_step(self, place: npt.ArrayLike, context: npt.ArrayLike) -> Seconds:
        """The draft step at this place of a round, from 0, in a round that starts at `context`."""
        return self.batch_draft(place, BatchTokens.alike(self.batch, 1, np.asarray(context) + place))

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        places = np.arange(n_tokens).reshape(-1, *[1] * np.ndim(context))  # steps are computed together
        return np.asarray(np.sum(self.draft_step(places, context), axis=0))

    def catch_up(self, context: npt.ArrayLike) -> Seconds:
        return self.wider(2, context)

    def wider(self, n_nodes: int, context: npt.ArrayLike) -> Seconds:
        return self.batch_wider(*(BatchTokens.alike(self.batch, nodes, context) for nodes in (n_nodes, 1)))

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.batch_verify(BatchTokens.alike(self.batch, n_tokens, context))

    def tree_verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.batch_tree_verify(BatchTokens.alike(self.batch, n_tokens, context))

    def round_overhead(self) -> float:
        return self.step_s + self.round_s

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self.verify(1, context) + self.step_s


@dataclass(frozen=True)
class PaddedCost(BatchCost):
    """Costs of an engine that pads ragged batches.

    cost : of batches as they are
    pad : "longest", every sequence of a round drafts and verifies as many tokens as the longest draft has; "graphs", a
        pass computes the next larger number of tokens for which a CUDA graph was captured, see `GRAPH_SIZES`;
        "sequences", the next larger number of sequences in `SEQUENCES`, for which SGLang captures graphs when it
        speculates. Passes beyond the largest size are not padded
    """

    cost: BatchCost
    pad: Pad

    @property
    def max_tree_tokens(self) -> int:
        return self.cost.max_tree_tokens

    @property
    def step_s(self) -> float:
        return self.cost.step_s

    @property
    def round_s(self) -> float:
        return self.cost.round_s

    @property
    def pads_to_longest(self) -> bool:
        return self.pad == "longest"

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        return self.cost.batch_draft(place, self._padded(tokens))

    def batch_wider(self, nodes: BatchTokens, chain: BatchTokens) -> Seconds:
        return self.cost.batch_wider(self._padded(nodes), self._padded(chain))

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        return self.cost.batch_verify(self._padded(tokens))

    def batch_tree_verify(self, tokens: BatchTokens) -> Seconds:
        return self.cost.batch_tree_verify(self._padded(tokens))

    def _padded(self, tokens: BatchTokens) -> BatchTokens:
        count, new = np.asarray(tokens.sequences), np.asarray(tokens.new)
        if self.pad == "graphs":
            padded = captured_size(new, GRAPH_SIZES)
        elif self.pad == "sequences":
            rows = new / count * captured_size(count, SEQUENCES)
            padded = np.where(new > LONGEST_DRAFT * count, new, rows)
        else:
            return tokens
        # Padding counts as prefilled tokens, because no sequence verifies it.
        return tokens._replace(new=padded, prompts=tokens.prompts + padded - new)


def captured_size(count: npt.ArrayLike, sizes: Ints) -> Floats:
    """The next larger captured size, or the size itself beyond the largest.

    >>> captured_size([1, 31, 61, 700], SEQUENCES).tolist()
    [1.0, 32.0, 64.0, 700.0]
    """
    size = np.asarray(count, dtype=np.float64)
    place = np.searchsorted(sizes, size - 1e-9)
    return np.where(place < len(sizes), sizes[np.minimum(place, len(sizes) - 1)], size).astype(np.float64)
