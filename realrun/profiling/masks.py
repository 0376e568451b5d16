"""The costs of SPACE's passes, measured through the real loop as those of chains are (`realrun.profiling.profile`).

A pass over m drafted tokens of a run with k masks is a tree of (m + 1)(k + 1) tokens, whose cache is compacted at
once. All full drafts of every k are measured, and all shorter ones of the largest: other sizes lie between.
"""

from __future__ import annotations

from realrun.drafters.space import MaskedTarget
from realrun.lm.cached import CachedLM


def masked_passes(depth: int) -> list[tuple[int, int]]:
    """(masks, drafted tokens) of the rounds to measure."""
    return [*((k, k) for k in range(1, depth + 1)), *((depth, drafted) for drafted in range(depth))]


def pass_tokens(masks: int, drafted: int) -> int:
    """Tokens of a pass: the pending one and those drafted, each with its masks."""
    return (drafted + 1) * (masks + 1)


def set_masks(target: CachedLM, masks: int) -> None:
    """Let the next pass have so many masks in a group, after one that left all candidates to draft."""
    if not isinstance(target, MaskedTarget):
        assert masks == 0
        return
    target.masks = target.most
    target.ask()
    target.masks = masks
