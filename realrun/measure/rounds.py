"""Timed rounds of scripted drafts: chains, and SPACE's passes with masks behind every token.

A pass of SPACE over m drafted tokens of a run with k masks is a tree of (m + 1)(k + 1) tokens, whose cache is compacted
at once.
"""

from __future__ import annotations

import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Round, RoundContext
from realrun.decode.verify import verifier_for
from realrun.drafters.space import MaskedTarget
from realrun.lm.cached import CachedLM
from realrun.measure.trees import fall_behind
from specsim.policy.registry import make_policy
from specsim.replaying.kernel import step_functions


def masked_passes(depth: int) -> list[tuple[int, int]]:
    """List the (masks, drafted tokens) to measure: full drafts of every k, shorter drafts of the largest k."""
    return [*((k, k) for k in range(1, depth + 1)), *((depth, drafted) for drafted in range(depth))]


def pass_tokens(masks: int, drafted: int) -> int:
    """Count the tokens of a pass: the pending token and the drafted tokens, each with its masks."""
    return (drafted + 1) * (masks + 1)


def _set_masks(target: CachedLM, masks: int) -> None:
    """Put this many masks into the groups of the next pass, after a pass that left all candidates to draft."""
    if not isinstance(target, MaskedTarget):
        assert masks == 0
        return
    target.masks = target.most
    target.ask()
    target.masks = masks


class ScriptedVerifier:
    """Does the verifier's work, then accepts `accept` tokens."""

    def __init__(self) -> None:
        self.accept = 0

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        verifier_for(context.sampler)(logits, draft, context)
        return [*draft.tokens[: self.accept], 0]


def scripted_round(
    decoder: Decoder,
    tokens: list[int],
    context: int,
    size: int,
    behind: int,
    rng: np.random.Generator,
    masks: int = 0,
) -> Round:
    """Run a round of `size` drafted tokens at this context; restore both caches afterwards.

    behind : cached tokens that the draft cache lacks at first, if it can lack any; a drafter that reads the target's
        states lacks a random number unless `behind` is more than 1
    masks : mask tokens behind every token of SPACE's pass
    """
    drafter, verifier = decoder.drafter, decoder.verifier
    assert isinstance(drafter, DraftModel)
    assert isinstance(verifier, ScriptedVerifier)
    if size and drafter.lm.reads_target_states and behind <= 1:
        fall_behind(decoder, context, size, rng)
    else:
        drafter.commit(context - behind, decoder.produced_by(-1))
    _set_masks(decoder.target, masks)
    verifier.accept = int(rng.integers(size + 1))
    policy = make_policy("adaedl", {"lambda0": -10.0, "max_draft_tokens": size}) if size else None
    state = step_functions(policy).initial_state(policy.params) if policy else None
    rounds: list[Round] = []
    decoder.round(list(tokens), RoundContext(decoder.sampler, 0, 0, size), policy, state, rounds)
    if size:
        drafter.commit(context)
    decoder.target.truncate(context)
    # A round that drafted nothing leaves the draft cache behind.
    drafter.lm.prefill(tokens[drafter.lm.length : context])
    return rounds[0]


def scored_round(decoder: Decoder, tokens: list[int], context: int, size: int, rng: np.random.Generator) -> Round:
    """Run `scripted_round` with the predictor's scores."""
    drafter = decoder.drafter
    assert isinstance(drafter, DraftModel)
    drafter.enable_scores(True)
    decoder.target.keep_hidden = drafter.wants_target_hidden
    round_ = scripted_round(decoder, tokens, context, size, 0, rng)
    drafter.enable_scores(False)
    decoder.target.keep_hidden = drafter.wants_target_hidden
    return round_
