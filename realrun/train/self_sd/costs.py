"""Measure the costs of rounds with skipped sublayers through the real loop.

A candidate's step is interpolated between four measured steps: with all sublayers, without the MLPs, without attention,
and without both. Every repeat runs all four in shuffled order, so that other work on the machine disturbs them equally.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.self_sd import SkippingLM
from realrun.lm.variants import SkippedSublayers
from realrun.measure.curve import along_contexts
from realrun.measure.rounds import ScriptedVerifier, scripted_round
from realrun.measure.stream import Stream
from realrun.measure.sweeps import AUTOREGRESSIVE_BURST
from realrun.pairs.pair import Pair
from specsim.io.progress import Progress

WARMUP_ROUNDS = 3

Line = dict[str, Any]


@torch.inference_mode()
def measure_costs(
    pair: Pair, contexts: tuple[int, int], depth: int, repeats: int, sampler: Sampler, seed: int, progress: Progress
) -> Line:
    """Measure mean costs, as in a profile, at the smallest and the largest context, in cached tokens.

    draft_step : seconds [2, 2, D, C] of the d-th draft step of a round; first index: whether all attention
        is skipped, second: all MLPs; rounds : all other costs, as in a cost profile
    """
    target, drafter = pair.make_drafter(())
    assert isinstance(drafter, DraftModel) and isinstance(drafter.lm, SkippingLM)
    decoder = Decoder(target, drafter, (), sampler, ScriptedVerifier())
    everything, nothing = frozenset(range(len(pair.target.model.layers))), frozenset[int]()
    sets = [SkippedSublayers(attention, mlp) for attention in (nothing, everything) for mlp in (nothing, everything)]
    measured = [max(2, contexts[0]), max(3, contexts[0] + 1, contexts[1])]
    drafter.prepare(measured[1] + depth + 2, sampler, 0, depth + 2)
    rng = np.random.default_rng(seed)
    streams = [Stream() for _ in sets]
    for done, context in enumerate(measured):
        tokens = rng.integers(1, min(int(pair.target.config.vocab_size), len(pair.tokenizer)), context + 1).tolist()
        target.reset()
        target.prefill(tokens[:-1])
        drafter.begin(tokens[:-1])
        # Drafts of maximum length measure draft steps; verification is measured with the cheapest drafts.
        jobs = [(number, depth) for number in range(len(sets))] + [(3, size) for size in range(depth)]
        for repeat in range(WARMUP_ROUNDS + repeats):
            for job in rng.permutation(len(jobs)).tolist():
                number, size = jobs[job]
                drafter.lm.skips = sets[number]
                scripted_round(decoder, tokens, context, size, 0, rng)  # for warmth
                for _ in range(1 if size else AUTOREGRESSIVE_BURST):
                    round_ = scripted_round(decoder, tokens, context, size, 0, rng)
                    if repeat >= WARMUP_ROUNDS and size:
                        streams[number].add(round_, context)
                    elif repeat >= WARMUP_ROUNDS:
                        streams[number].add_baseline(round_, context)
            progress("costs", done * (WARMUP_ROUNDS + repeats) + repeat + 1, 2 * (WARMUP_ROUNDS + repeats))

    steps = [
        [along_contexts(stream.points["draft", place], measured).tolist() for place in range(1, depth + 1)]
        for stream in streams
    ]
    return {
        "contexts": [contexts[0], measured[1]],
        "draft_step": [steps[:2], steps[2:]],
        "rounds": streams[3].tables(measured, depth, [], masks=False)["mean_s"],
    }
