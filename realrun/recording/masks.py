"""What SPACE's masks propose at every position of an output at once.

A round at output position t drafts what the masks behind prompt + output[:t - 1] said, the text without
the pending token. So one pass feeds the text, and behind it every position has a group of masks of its
own, which sees that prefix and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from realrun.decode.sampling import Sampler
from realrun.drafters.acceptance_predictor import Scorer
from realrun.drafters.space import Masks, mask_token
from realrun.lm.cached import CachedLM
from realrun.recording.chain import CHUNK, Columns
from realrun.recording.heads import said_columns
from realrun.recording.trees import TreeSize
from specsim.errors import InputError


class MasksSaid:
    """What the masks say by their states [T, D, d]; see `realrun.recording.heads.Said`."""

    def __init__(self, head: Any, hidden: torch.Tensor):
        self.head, self.hidden = head, hidden

    def states(self, step: int) -> torch.Tensor:
        return self.hidden[:, step]

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(states)
        return logits


@torch.inference_mode()
def masks_columns(
    target: PreTrainedModel,
    masks: Masks,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """What the masks propose after prompt + output[:t], for every t at once: `said_columns`; no trees."""
    assert tree is None, "SPACE drafts chains"
    if depth > len(masks):
        raise InputError(f"{len(masks)} masks of SPACE draft at most {len(masks)} tokens, not {depth}; lower the depth")
    said = MasksSaid(target.get_output_embeddings(), mask_states(target, prompt, output, depth))
    return said_columns(target, said, prompt, output, depth, sampler, sequence, scorer)


def mask_states(target: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], depth: int) -> torch.Tensor:
    """States [T, D, d] of D masks behind prompt + output[:t - 1], for t = 0 .. T - 1; at t = 0 behind prompt[:-1]."""
    lm, total, before = CachedLM(target), len(output), len(prompt) - 1
    lm.keep_hidden = True
    lm.prefill([*prompt, *output][: before + total - 1])
    own = torch.ones(depth, depth, dtype=torch.bool).tril()
    states = []
    for rows in torch.arange(total).split(max(CHUNK // depth, 1)):
        ends = (before + rows).repeat_interleave(depth)  # tokens before each group
        prefix = torch.arange(lm.length) < ends[:, None]
        seen = torch.cat([prefix, torch.block_diag(*[own] * len(rows)).bool()], dim=1)
        positions = ends + torch.arange(depth).repeat(len(rows))
        lm.append_rows([mask_token(target)] * len(positions), positions.tolist(), seen)
        assert lm.hidden is not None
        states.append(lm.hidden.unflatten(0, (len(rows), depth)))
        lm.truncate(lm.length)
    return torch.cat(states)
