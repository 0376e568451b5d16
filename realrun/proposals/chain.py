"""Dense recording of a draft model: its proposals at every position of an output at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from realrun.decode.sampling import Sampler, gumbel_noise
from realrun.lm.cached import CachedLM
from realrun.lm.number_type import check_drafted
from realrun.proposals.recorder import Columns, RecordRequest
from realrun.proposals.trees import Noise, Trees, grown_trees
from specsim.io.arrays import Floats, Ints

CHUNK = 256  # positions whose branches share a forward pass
STATISTICS = 5  # columns of `described`
NO_RANK = -1
MAX_RANK = np.iinfo(np.int16).max


@torch.inference_mode()
def branch_columns(lm: CachedLM, request: RecordRequest) -> Columns:
    """Record what a draft model proposes at every position; a `Recorder` once lm is given.

    A teacher-forced pass gives every first token. Then, step by step, a branch per position grows by a token:
    all branches share the prefix's cache, and a mask lets a branch see the prefix up to its position and its own
    earlier tokens.
    """
    output, first, depth = request.output, len(request.prompt), request.depth
    proposals = Proposals(request, int(lm.model.config.vocab_size))
    lm.reset()
    lm.keep_hidden = request.scorer is not None
    logits = lm.forward([*request.prompt, *output[:-1]])[first - 1 :]
    rank = true_ranks(logits, output, request.sampler, request.sequence)
    tokens = proposals.take(logits, lm.hidden, 0, 0)
    prefix = lm.length
    for begin in range(0, len(output), CHUNK):
        rows = torch.arange(begin, min(begin + CHUNK, len(output)), device=logits.device)
        branch = tokens[rows]
        for step in range(1, depth):
            logits = branch_pass(lm, branch, rows + first, prefix, step)
            branch = proposals.take(logits, lm.hidden, begin, step)
        lm.drop_rows((depth - 1) * len(rows))
    return proposals.columns(rank) | proposals.grown_tree_columns(lm)


class Proposals:
    """What is drafted at every position of an output of T tokens, filled in depth by depth.

    statistics [T, D, STATISTICS], scores [T, D], siblings and sibling_probs [T, D, width]
    """

    def __init__(self, request: RecordRequest, vocabulary: int):
        self.request, total, depth = request, len(request.output), request.depth
        self.width = 0 if request.tree is None else min(request.tree.width, vocabulary)
        self.statistics = torch.empty(total, depth, STATISTICS, dtype=torch.float64)
        self.scores = torch.zeros(total, depth, dtype=torch.float64)
        self.siblings = np.empty((total, depth, self.width), dtype=np.int64)
        self.sibling_probs = np.empty((total, depth, self.width), dtype=np.float32)

    def take(self, logits: torch.Tensor, hidden: torch.Tensor | None, begin: int, step: int) -> torch.Tensor:
        """Fill in what is drafted from logits [n, V] at depth step + 1 from position `begin` on; the tokens [n].

        hidden : the states behind the logits, the last n rows of it, where they are kept
        """
        sampler, sequence = self.request.sampler, self.request.sequence
        rows = slice(begin, begin + len(logits))
        drafted = described(sampler, logits, sequence, begin + step)
        self.statistics[rows, step] = on_host = drafted.cpu()
        check_drafted(on_host)  # ahead of feeding the tokens
        self.take_scores(None if hidden is None else hidden[-len(logits) :], begin, step)
        if self.request.tree is not None:
            ahead = range(begin + step, begin + step + len(logits))
            tokens, probs = sampler.candidates(logits, sequence, ahead, self.width)
            self.siblings[rows, step], self.sibling_probs[rows, step] = tokens.cpu().numpy(), probs.cpu().numpy()
        return drafted[:, 0].long()

    def take_scores(self, hidden: torch.Tensor | None, begin: int, step: int) -> None:
        """Fill in the scores of tokens with these states [n, d], if scores are requested and states kept."""
        if self.request.scorer is not None and hidden is not None:
            self.scores[begin : begin + len(hidden), step] = self.request.scorer(hidden, step + 1, begin).cpu()

    def columns(self, rank: Ints) -> Columns:
        """Make the trace's columns; rank : see `columns_of`."""
        columns = columns_of(self.statistics.numpy(), rank, np.asarray(self.request.output), self.request.depth)
        if self.request.scorer is not None:
            columns["score"] = self.scores.numpy().astype(np.float32)
        return columns

    def grown_tree_columns(self, lm: CachedLM, pending: Ints | None = None) -> Columns:
        """Grow the trees from the chains, if trees are requested; lm, pending : see `grown_trees`."""
        if self.request.tree is None:
            return {}
        noise, first = Noise(self.request.sampler, self.request.sequence), len(self.request.prompt)
        drafted = (self.siblings, self.sibling_probs, self.request.tree.nodes)
        return tree_columns(grown_trees(lm, noise, first, *drafted, pending))


def tree_columns(trees: Trees) -> Columns:
    """Name the columns of trees as traces do."""
    return {f"tree_{name}": column for name, column in trees._asdict().items()}


def branch_pass(lm: CachedLM, tokens: torch.Tensor, visible: torch.Tensor, prefix: int, steps: int) -> torch.Tensor:
    """Compute logits [n, V] after each branch's newest token; branch j follows visible[j] tokens of the prefix."""
    mask = branch_mask(visible, prefix, steps, lm.model.dtype)
    return lm.run_model(input_ids=tokens[None], position_ids=(visible + steps - 1)[None], attention_mask=mask)


def described(sampler: Sampler, logits: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
    """Describe the tokens drafted from logits [n, V]: `Sampler.statistics`, then top10_confidence, [n, 5]."""
    return with_top10(sampler.statistics(logits, sequence, position), sampler, logits)


def with_top10(statistics: torch.Tensor, sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
    """Append to statistics [n, 4] the top10_confidence of their logits [n, V]: [n, 5]."""
    return torch.cat([statistics, sampler.top10_confidence(logits)[:, None]], dim=-1)


def true_ranks(logits: torch.Tensor, output: Sequence[int], sampler: Sampler, sequence: int, position: int = 0) -> Ints:
    """Rank each output token, [T], among the siblings that `Sampler.candidates` orders, from logits [T, V].

    The rank counts the tokens of a larger score, and those of the same score and a lower index.
    position : output position of the first
    """
    scores = sampler.warped(logits)
    if sampler.mode == "gumbel":
        total, vocabulary = scores.shape
        scores = scores + gumbel_noise(sampler.seed, sequence, position, total, vocabulary, scores.device, scores.dtype)
    truth = torch.tensor(output, device=scores.device)[:, None]
    own = scores.gather(-1, truth)
    index = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > own) | ((scores == own) & (index < truth))
    ranks: Ints = before.sum(-1).cpu().numpy()
    return ranks


def branch_mask(visible: torch.Tensor, prefix: int, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Make an additive mask [1, 1, n, prefix + steps * n]; branch j sees visible[j] prefix tokens and itself."""
    n = len(visible)
    seen = torch.arange(prefix, device=visible.device)[None] < visible[:, None]
    own = torch.eye(n, dtype=torch.bool, device=visible.device).repeat(1, steps)
    mask = torch.zeros(n, prefix + steps * n, dtype=dtype, device=visible.device)
    mask.masked_fill_(~torch.cat([seen, own], dim=1), torch.finfo(dtype).min)
    return mask[None, None]


def columns_of(
    statistics: Floats,
    rank: Ints,
    output: Ints,
    depth: int,
) -> Columns:
    """Make columns of a trace from statistics [T, depth, STATISTICS] of the branches; rank [T] of the true token."""
    total = len(output)
    draft_token = statistics[:, :, 0].astype(np.int32)
    position = np.arange(total)[:, None] + np.arange(depth)[None]  # output position of each drafted token
    inside = position < total
    position = np.minimum(position, total - 1)
    match = (draft_token == output[position]) & inside
    return {
        "token": output.astype(np.int32),
        "match_len": np.logical_and.accumulate(match, axis=1).sum(axis=1).astype(np.uint8),
        "draft_token": draft_token,
        "prob": statistics[:, :, 1].astype(np.float32),
        "confidence": statistics[:, :, 2].astype(np.float32),
        "entropy_nats": statistics[:, :, 3].astype(np.float32),
        "top10_confidence": statistics[:, :, 4].astype(np.float32),
        # An independent draft model sees only tokens: on the true path its distribution at depth i is its first
        # distribution i - 1 positions later.
        "true_rank": np.where(inside, np.minimum(rank, MAX_RANK)[position], NO_RANK).astype(np.int16),
    }
