"""Dense recording of drafters that read the target's cache or states (Self-SD, EDD, EAGLE).

At output position t, Self-SD's drafter sees the target's own keys and values of all tokens before the pending token;
those of EDD and EAGLE are made of the target's states. All compute those of the pending token and of drafted tokens by
themselves. So the target feeds the whole text once, and every position has a branch behind it, whose first node is the
pending token. The branch's keys and values depend on where it starts, and so do the ranks of the true tokens: unlike
an independent model's they are not equal along a diagonal, and they take a separate pass. In rejection mode drafts are
drawn together with the output (`realrun.proposals.chain`).
"""

from __future__ import annotations

import numpy as np
import torch

from realrun.lm.cached import CachedLM
from realrun.lm.split_target import SplitTarget
from realrun.proposals.chain import CHUNK, AlongText, along_text, proposals_of, text_columns
from realrun.proposals.recorder import Columns, RecordRequest
from realrun.proposals.trees import CHUNK_NODES


@torch.inference_mode()
def target_cache_columns(target: SplitTarget, lm: CachedLM, request: RecordRequest, ranks: bool = True) -> Columns:
    """Record what the drafter proposes at every position; a `Recorder` once target and lm, its pass, are given.

    It runs a pass of the target, a pass of the drafter for each depth, in which every position's branch grows by a
    token, and a pass over the true tokens after every position.

    ranks : whether the columns of `text_columns`, which take a pass of their own, are among them
    """
    prompt, output = request.prompt, request.output
    total, first = len(output), len(prompt)
    proposals = proposals_of(request, int(lm.model.config.vocab_size), CachedLM(target.model))
    for each in (target, lm):
        each.reset()
        each.prefill([*prompt, *output[:-1]])
    lm.keep_hidden = request.scorer is not None
    pending = np.array([prompt[-1], *output[:-1]])
    for begin in range(0, total, CHUNK):
        at = np.arange(begin, min(begin + CHUNK, total))
        prefix = np.arange(lm.length) < (first - 1 + at)[:, None]
        own, branch = np.eye(len(at), dtype=np.bool_), pending[at]
        for step in range(request.depth):
            seen = torch.from_numpy(np.hstack([prefix, *[own] * (step + 1)]))
            logits = lm.append_rows(branch.tolist(), (first - 1 + at + step).tolist(), seen)
            branch = proposals.take(logits, lm.hidden, begin, step).cpu().numpy()
        lm.truncate(lm.length)
    columns = proposals.columns() | proposals.grown_tree_columns(lm, pending)
    return columns | true_path_columns(lm, request) if ranks else columns


def true_path_columns(lm: CachedLM, request: RecordRequest) -> Columns:
    """Make `text_columns`, where the drafter has fed the pending token and output[t : t + i].

    lm : over a target that has fed the text but for its last token
    """
    prompt, output, depth = request.prompt, request.output, request.depth
    total, before = len(output), len(prompt) - 1
    text = np.array([*prompt, *output])
    along = AlongText(np.zeros((total, depth), np.int64), np.zeros((total, depth)))
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
                rows = slice(begin, begin + counts[step])
                found = along_text(part, truth, request.sampler, request.sequence, place)
                along.rank[rows, step], along.prob[rows, step] = found
        lm.truncate(lm.length)
    return text_columns(along, request)
