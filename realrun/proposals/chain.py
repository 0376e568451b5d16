"""What a draft model proposes at every position of an output at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from realrun.decode.acceptance_predictor import Scorer
from realrun.decode.gumbel import gumbel_noise
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.lm.number_type import check_drafted
from realrun.proposals.recorder import Columns
from realrun.proposals.trees import TreeSize, grown_trees
from specsim.arrays import Floats, Ints

CHUNK = 256  # positions whose branches share one forward pass
STATISTICS = 5  # columns of `described`
NO_RANK = -1
MAX_RANK = np.iinfo(np.int16).max


@torch.inference_mode()
def branch_columns(
    lm: CachedLM,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """What a draft model proposes at every position, a `Recorder` once lm is given.

    One teacher-forced pass gives every first token. Then, step by step, one branch per position grows by a token:
    all branches share the prefix's cache, and a mask lets a branch see the prefix up to its position and its own
    earlier tokens.
    """
    first = len(prompt)
    proposals = Proposals(len(output), depth, sampler, sequence, scorer, tree, int(lm.model.config.vocab_size))
    lm.reset()
    lm.keep_hidden = scorer is not None
    logits = lm.forward([*prompt, *output[:-1]])[first - 1 :]
    rank = true_ranks(logits, output, sampler, sequence)
    tokens = proposals.take(lm, logits, 0, 0)
    prefix = lm.length
    for begin in range(0, len(output), CHUNK):
        rows = torch.arange(begin, min(begin + CHUNK, len(output)), device=logits.device)
        branch = tokens[rows]
        for step in range(1, depth):
            mask = branch_mask(rows + first, prefix, step, lm.model.dtype)
            logits = lm.run_model(
                input_ids=branch[None], position_ids=(rows + first + step - 1)[None], attention_mask=mask
            )
            branch = proposals.take(lm, logits, begin, step)
        lm.cache.crop(-(depth - 1) * len(rows))
    return proposals.columns(lm, first, output, rank)


class Proposals:
    """What is drafted at every position of an output of T tokens, filled in depth by depth.

    statistics [T, D, STATISTICS], scores [T, D], siblings and sibling_probs [T, D, width]
    """

    def __init__(
        self,
        total: int,
        depth: int,
        sampler: Sampler,
        sequence: int,
        scorer: Scorer | None,
        tree: TreeSize | None,
        vocabulary: int,
    ):
        self.sampler, self.sequence, self.scorer, self.tree = sampler, sequence, scorer, tree
        self.width = 0 if tree is None else min(tree.width, vocabulary)
        self.statistics = torch.empty(total, depth, STATISTICS, dtype=torch.float64)
        self.scores = torch.zeros(total, depth, dtype=torch.float64)
        self.siblings = np.empty((total, depth, self.width), dtype=np.int64)
        self.sibling_probs = np.empty((total, depth, self.width), dtype=np.float32)

    def take(self, lm: CachedLM, logits: torch.Tensor, begin: int, step: int) -> torch.Tensor:
        """Fill in what is drafted from logits [n, V] at depth step + 1 from position `begin` on; the tokens [n]."""
        rows = slice(begin, begin + len(logits))
        drafted = described(self.sampler, logits, self.sequence, begin + step)
        self.statistics[rows, step] = on_host = drafted.cpu()
        check_drafted(on_host)  # ahead of feeding the tokens
        if self.scorer is not None and lm.hidden is not None:
            self.scores[rows, step] = self.scorer(lm.hidden[-len(logits) :], step + 1, begin).cpu()
        if self.tree is not None:
            ahead = range(begin + step, begin + step + len(logits))
            tokens, probs = self.sampler.candidates(logits, self.sequence, ahead, self.width)
            self.siblings[rows, step], self.sibling_probs[rows, step] = tokens.cpu().numpy(), probs.cpu().numpy()
        return drafted[:, 0].long()

    def columns(
        self,
        lm: CachedLM,
        first: int,
        output: Sequence[int],
        rank: Ints,
        pending: Ints | None = None,
    ) -> Columns:
        """The trace's columns, with those of the trees grown from here; lm, first, pending : as for `grown_trees`."""
        columns = columns_of(self.statistics.numpy(), rank, np.asarray(output), self.statistics.shape[1])
        if self.scorer is not None:
            columns["score"] = self.scores.numpy().astype(np.float32)
        if self.tree is not None:
            drafted = (self.siblings, self.sibling_probs, self.tree.nodes)
            trees = grown_trees(lm, first, *drafted, self.sampler, self.sequence, pending)
            columns |= {f"tree_{name}": column for name, column in trees._asdict().items()}
        return columns


def described(sampler: Sampler, logits: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
    """What is recorded of the tokens drafted from logits [n, V]: `Sampler.statistics`, then top10_confidence [n, 5]."""
    return with_top10(sampler.statistics(logits, sequence, position), sampler, logits)


def with_top10(statistics: torch.Tensor, sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
    """Statistics [n, 4] of these logits [n, V] and their top10_confidence, [n, 5]."""
    return torch.cat([statistics, sampler.top10_confidence(logits)[:, None]], dim=-1)


def true_ranks(logits: torch.Tensor, output: Sequence[int], sampler: Sampler, sequence: int, position: int = 0) -> Ints:
    """Rank [T] of each output token among the siblings that `Sampler.candidates` orders, from logits [T, V].

    How many stand before it: those of a larger score, and of an equal one those of a lower index.
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
    """Additive mask [1, 1, n, prefix + steps * n]; branch j sees visible[j] prefix tokens and itself."""
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
    """Columns of a trace from statistics [T, depth, STATISTICS] of the branches; rank [T] of the true token."""
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
        # An independent draft model sees only tokens, so on the true path its distribution at
        # depth i is its first distribution i - 1 positions later.
        "true_rank": np.where(inside, np.minimum(rank, MAX_RANK)[position], NO_RANK).astype(np.int16),
    }
