"""What a drafter that lives on the target's cache or states proposes at every position of an output at once.

At output position t Self-SD's drafter sees the target's own keys and values of all tokens before the
pending one, EDD's and EAGLE's those that they make of its states; all make those of the pending token and of
what they draft. So the target feeds the whole text once, and behind what it leaves every position has a
branch of its own, whose first node is the pending token. As the branch's keys and values depend on where it
starts, ranks of the true tokens do too: they are not those of an independent model, equal along a diagonal,
and take a pass of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from realrun.decode.acceptance_predictor import Scorer
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.lm.split_target import SplitTarget
from realrun.proposals.chain import CHUNK, MAX_RANK, NO_RANK, Proposals, true_ranks
from realrun.proposals.recorder import Columns, Recorder
from realrun.proposals.trees import CHUNK_NODES, TreeSize
from specsim.errors import InputError


def target_cache_recorder(target: SplitTarget, lm: CachedLM, sampler: Sampler) -> Recorder:
    """`target_cache_columns` of this drafter; InputError in rejection mode."""
    if sampler.mode == "rejection":
        raise InputError(
            "drafters that read the target's cache or states are recorded in greedy and Gumbel mode only; choose one "
            "of them"
        )
    return partial(target_cache_columns, target, lm)


@torch.inference_mode()
def target_cache_columns(
    target: SplitTarget,
    lm: CachedLM,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
    ranks: bool = True,
) -> Columns:
    """What the drafter proposes at every position, a `Recorder` once target and lm, its pass over it, are given.

    One pass of the target, then one of the drafter for each depth, in which every position's branch
    grows by a token, and one over the true tokens after every position.

    ranks : whether true_rank, which only trees need, is among the columns
    """
    total, first = len(output), len(prompt)
    proposals = Proposals(total, depth, sampler, sequence, scorer, tree, int(lm.model.config.vocab_size))
    target.reset()
    target.prefill([*prompt, *output[:-1]])
    lm.reset()
    lm.prefill([*prompt, *output[:-1]])
    lm.keep_hidden = scorer is not None
    pending = np.array([prompt[-1], *output[:-1]])
    for begin in range(0, total, CHUNK):
        at = np.arange(begin, min(begin + CHUNK, total))
        prefix = np.arange(lm.length) < (first - 1 + at)[:, None]
        own, branch = np.eye(len(at), dtype=np.bool_), pending[at]
        for step in range(depth):
            seen = torch.from_numpy(np.hstack([prefix, *[own] * (step + 1)]))
            logits = lm.append_rows(branch.tolist(), (first - 1 + at + step).tolist(), seen)
            branch = proposals.take(lm, logits, begin, step).cpu().numpy()
        lm.truncate(lm.length)
    columns = proposals.columns(lm, first, output, np.zeros(total, np.int64), pending)
    del columns["true_rank"]
    return columns | {"true_rank": true_path_ranks(lm, prompt, output, depth, sampler, sequence)} if ranks else columns


def true_path_ranks(
    lm: CachedLM,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
) -> npt.NDArray[np.int16]:
    """Rank [T, D] of output[t + i] where the drafter has fed the pending token and output[t : t + i]; -1 beyond T.

    lm : over a target that has fed the text but for its last token
    """
    total, before = len(output), len(prompt) - 1
    text = np.array([*prompt, *output])
    rank = np.full((total, depth), NO_RANK)
    size = max(CHUNK_NODES // depth, 1)
    for begin in range(0, total, size):
        # By depth, then by position; a branch ends with the output.
        counts = [max(min(begin + size, total - step) - begin, 0) for step in range(depth)]
        owner = np.concatenate([np.arange(count) for count in counts])
        step_of = np.repeat(np.arange(depth), counts)
        lineage = (owner[:, None] == owner) & (step_of[:, None] >= step_of)
        seen = np.hstack([np.arange(lm.length) < (before + begin + owner)[:, None], lineage])
        at = before + begin + owner + step_of
        logits = lm.append_rows(text[at].tolist(), at.tolist(), torch.from_numpy(seen))
        for step, part in enumerate(logits.split(counts)):
            place = begin + step
            if counts[step]:
                truth = output[place : place + counts[step]]
                rank[begin : begin + counts[step], step] = true_ranks(part, truth, sampler, sequence, place)
        lm.truncate(lm.length)
    return np.minimum(rank, MAX_RANK).astype(np.int16)
