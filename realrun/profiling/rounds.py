"""One timed round of a scripted draft."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from realrun.decode.chain_verify import verifier_for
from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Round, RoundContext
from realrun.profiling.masks import pass_tokens, set_masks
from realrun.profiling.trees import Samples, fall_behind
from specsim.policy.registry import make_policy


class ScriptedVerifier:
    """Does the verifier's work, then accepts as many tokens as it was told."""

    def __init__(self) -> None:
        self.accept = 0

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        verifier_for(context.sampler)(logits, draft, context)
        return [*draft.tokens[: self.accept], 0]


def _measure_round(
    decoder: Decoder,
    tokens: list[int],
    context: int,
    size: int,
    behind: int,
    rng: np.random.Generator,
    samples: Samples,
    masks: int = 0,
) -> None:
    """One round of `size` drafted tokens at this context; both caches are put back after it.

    behind : cached tokens that the draft cache lacks at first, if it can lack any
    masks : behind every token of SPACE's pass
    """
    drafter, verifier = decoder.drafter, decoder.verifier
    assert isinstance(drafter, DraftModel)
    assert isinstance(verifier, ScriptedVerifier)
    if size and drafter.lm.reads_target_states:
        fall_behind(decoder, context, size, rng)
        behind = 0  # it is so in every round, and no extra
    else:
        drafter.commit(context - behind, decoder.produced_by(-1))
        behind = context - drafter.lm.length  # nothing, where the cache is the target's
    set_masks(decoder.target, masks)
    verifier.accept = int(rng.integers(size + 1))
    policy = make_policy("adaedl", {"lambda0": -10.0, "max_draft_tokens": size}) if size else None
    state = policy.initial_state(policy.params) if policy else None
    rounds: list[Round] = []
    _, draft = decoder.round(list(tokens), RoundContext(decoder.sampler, 0, 0, size), policy, state, rounds)
    (measured,) = rounds
    if size:
        samples["draft", behind, 1, context].append(draft.step_s[0])
        for place, step_s in enumerate(draft.step_s[1:], start=2):
            samples["draft", 0, place, context].append(step_s)
        if size > 1:
            samples["policy"].append(draft.policy_s / (size - 1))
        samples["overhead"].append(measured.other_s + measured.draft_s - sum(draft.step_s))
        drafter.commit(context)
    if masks:
        samples["tree verify", pass_tokens(masks, size), context].append(measured.verify_s)
    else:
        samples["verify", size + 1, context].append(measured.verify_s)
    if not size and not masks:
        samples["autoregressive", context].append(measured.seconds)
    decoder.target.truncate(context)
    # A round that drafted nothing leaves the draft cache behind.
    drafter.lm.prefill(tokens[drafter.lm.length : context])


def _measure_score(
    decoder: Decoder, tokens: list[int], context: int, size: int, rng: np.random.Generator, samples: Samples
) -> None:
    """What the predictor adds to a draft step: rounds of `size` tokens with and without scores, one after the other."""
    drafter = decoder.drafter
    assert isinstance(drafter, DraftModel)
    mean_s = {}
    for scoring in rng.permutation([False, True]).tolist():
        drafter.enable_scores(scoring)
        decoder.target.keep_hidden = drafter.wants_target_hidden
        steps: Samples = defaultdict(list)
        _measure_round(decoder, tokens, context, size, 0, rng, steps)
        mean_s[scoring] = float(np.mean([steps["draft", 0, place, context] for place in range(1, size + 1)]))
    drafter.enable_scores(False)
    decoder.target.keep_hidden = drafter.wants_target_hidden
    samples["score"].append(mean_s[True] - mean_s[False])
