"""Draft statistics: the token of a row of draft logits, and its probability, confidence and entropy."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

from speckernels.ops.results import check_tensor
from speckernels.runtime.dispatch import register

LOGITS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_TOP_K = 32
MAX_VOCABULARY = 1 << 24  # a token id must fit a float exactly
MAX_SPLITS = 32  # one partial result per lane of the warp that merges them
TEMPERATURES = (1e-30, 1e30)
COLUMNS = 5

# For the choice of splits: the elements that take a block as long as its reductions do, the smallest part worth a
# block, and the unit of a part.
_BLOCK_COST, _MIN_CHUNK, _CHUNK_UNIT = 2048, 4096, 512


class DraftStatistics(NamedTuple):
    """Statistics of n rows, in the type of x (float32, or float64 for float64 logits).

    Attributes
    ----------
    values : [n, 5], the columns that the properties name; one tensor, so that one copy brings
        all of it to the host
    top_ids : int64 [n, k], tokens of the k largest p, falling, lowest index first at ties; -1
        where a row has fewer usable logits
    top_probs : [n, k], their p; 0 where there is none
    """

    values: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor

    @property
    def token(self) -> torch.Tensor:
        """int64 [n], the given or chosen token; -1 where a row has none."""
        return self.values[:, 0].long()

    @property
    def prob(self) -> torch.Tensor:
        """[n], p(token), 0 for a token outside the vocabulary."""
        return self.values[:, 1]

    @property
    def confidence(self) -> torch.Tensor:
        """[n], the largest p."""
        return self.values[:, 2]

    @property
    def entropy_nats(self) -> torch.Tensor:
        """[n], entropy of p in nats."""
        return self.values[:, 3]

    @property
    def logsumexp(self) -> torch.Tensor:
        """[n], log sum exp(x); p = exp(x - logsumexp)."""
        return self.values[:, 4]


def draft_statistics(
    logits: torch.Tensor,
    *,
    noise: torch.Tensor | None = None,
    temperature: float = 1.0,
    token_ids: torch.Tensor | None = None,
    top_k: int = 0,
) -> DraftStatistics:
    """Token, probability, confidence, entropy and logsumexp of each row in one pass.

    With x = logits / temperature (IEEE division in float32, or float64) and p = softmax(x), the
    token is argmax(x + noise), the lowest index at ties: greedy without noise, a draw from p
    with Gumbel noise. NaN counts as -inf, and +inf as the largest finite number, in x and in
    x + noise. A row without a usable logit has token -1, p 0, entropy 0 and logsumexp -inf.

    Parameters
    ----------
    logits : [n, V] float16, bfloat16, float32 or float64
    noise : [n, V] in the type of x, or None for 0
    temperature : from 1e-30 to 1e30
    token_ids : int64 [n], tokens to use in place of the argmax; one outside [0, V) has p 0
    top_k : how many of the largest p to return, 0 to 32; noise plays no part in these

    Returns
    -------
    DraftStatistics
        Five numbers and the most probable tokens of each row.

    Raises
    ------
    ValueError
        For other types, shapes or sizes.

    References
    ----------
    Milakov and Gimelshein 2018, arXiv:1805.02867, for the running maximum and sum.
    """
    check_tensor("logits", logits, LOGITS, (None, None), logits.device)
    if not 1 <= logits.shape[1] <= MAX_VOCABULARY:
        raise ValueError(f"logits has {logits.shape[1]} columns; give 1 to {MAX_VOCABULARY}")
    if noise is not None:
        check_tensor("noise", noise, (result_type(logits),), logits.shape, logits.device)
    if token_ids is not None:
        check_tensor("token_ids", token_ids, (torch.int64,), logits.shape[:1], logits.device)
    if not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
        raise ValueError(f"temperature is {temperature}; give {TEMPERATURES[0]} to {TEMPERATURES[1]}")
    if not 0 <= top_k <= MAX_TOP_K:
        raise ValueError(f"top_k is {top_k}; give 0 to {MAX_TOP_K}")
    return DraftStatistics(*torch.ops.speckernels.draft_statistics(logits, noise, float(temperature), token_ids, top_k))


def result_type(logits: torch.Tensor) -> torch.dtype:
    """Type of x: float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def empty_results(logits: torch.Tensor, top_k: int) -> DraftStatistics:
    """Uninitialised results of the right shapes and types."""
    rows, dtype = logits.shape[0], result_type(logits)
    return DraftStatistics(
        logits.new_empty(rows, COLUMNS, dtype=dtype),
        logits.new_empty(rows, top_k, dtype=torch.int64),
        logits.new_empty(rows, top_k, dtype=dtype),
    )


def with_unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the tensor only if its rows are not contiguous."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


@cache
def split(rows: int, vocabulary: int, slots: int) -> tuple[int, int]:
    """Number of parts per row, and elements per part, on a GPU that runs `slots` blocks at once.

    Blocks run in waves, so the time is the number of waves times the time of a block.
    """

    def chunk(splits: int) -> int:
        return math.ceil(vocabulary / splits / _CHUNK_UNIT) * _CHUNK_UNIT

    def cost(splits: int) -> int:
        return math.ceil(rows * splits / slots) * (chunk(splits) + _BLOCK_COST)

    best = min(range(1, min(MAX_SPLITS, math.ceil(vocabulary / _MIN_CHUNK)) + 1), key=cost)
    return math.ceil(vocabulary / chunk(best)), chunk(best)


register(
    "draft_statistics",
    "(Tensor logits, Tensor? noise, float temperature, Tensor? token_ids, int top_k) -> (Tensor, Tensor, Tensor)",
    lambda logits, noise, temperature, token_ids, top_k: tuple(empty_results(logits, top_k)),
)
