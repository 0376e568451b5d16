"""Measure what every part of a round costs on this machine, through the real loop.

For each context length, rounds of every draft length and, if asked, trees of many sizes are
run in shuffled order with scripted acceptance, so that the same code is timed that decodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.profiling.masks import masked_passes, masked_table
from realrun.profiling.rounds import ScriptedVerifier, _measure_round, _measure_score
from realrun.profiling.trees import (
    PASSES,
    Samples,
    ScriptedTreeVerifier,
    measure_tree_round,
    tree_sizes,
    tree_table,
    warm_trees,
)
from realrun.provenance import provenance
from speckernels import backend_for
from specsim.arrays import Floats
from specsim.cost.profile import PROFILE_KIND, PROFILE_VERSION
from specsim.errors import InputError
from specsim.progress import Counter

WARMUP_ROUNDS = 3
AUTOREGRESSIVE_BURST = 4


@torch.inference_mode()
def profile(
    pair: Pair,
    *,
    contexts: Sequence[int],
    depth: int = 16,
    repeats: int = 40,
    sampler: Sampler | None = None,
    seed: int = 0,
    tree_tokens: int = 65,
    samples: Samples | None = None,
    progress: Counter | None = None,
) -> dict[str, Any]:
    """Measure what every part of a round costs, through the real loop.

    Parameters
    ----------
    pair : Pair
    contexts : sequence of int
        Cached tokens before a round, increasing. Text is random, for prompt lookup repetitive: time does not depend
        on it otherwise.
    depth : int
        Places of a draft whose steps are measured, in tokens, where the drafter goes so far.
    repeats : int
        Rounds of every kind, in shuffled order.
    sampler, seed
        How tokens are chosen; the order of the rounds and their acceptance.
    tree_tokens : int
        Largest tree, the pending token included; 0 for no trees, as for drafters that have none.
    samples : dict, optional
        Those of earlier slices of the same profile, to which this one's are added: on a machine that drifts, slices
        spread over a job tell more than one long measurement.
    progress : callable, optional
        Told (done, total) after every context.

    Returns
    -------
    dict
        The JSON document of a cost profile, medians and quartiles in seconds; `specsim.read_cost` reads its file.

    Raises
    ------
    InputError
        If the contexts do not fit the models.

    Examples
    --------
    >>> import realrun
    >>> pair = realrun.load_pair(drafter="prompt-lookup")
    >>> document = realrun.profile(pair, contexts=[8, 16], depth=2, repeats=2)
    >>> document["contexts"], len(document["median_s"]["verify"])
    ([8, 16], 3)
    """
    target, drafter = pair.make_drafter(())
    decoder = Decoder(target, drafter, (), sampler or Sampler(), ScriptedVerifier(), ScriptedTreeVerifier())
    target.keep_hidden = drafter.wants_target_hidden
    depth = min(depth, drafter.max_depth or depth)
    if repeats < 2:
        raise InputError(f"repeats={repeats}; give at least 2")
    sizes = tree_sizes(tree_tokens if pair.drafter.trees else 0)
    longest_draft = max(depth, min(PASSES, drafter.max_depth or PASSES)) if sizes else depth
    _check(contexts, longest_draft, min(decoder.target.max_positions, drafter.lm.max_positions))
    longest = contexts[-1] + longest_draft + 2
    drafter.prepare(longest, decoder.sampler, 0, longest_draft + 1)
    warm_trees(decoder, sizes, range(1, depth + 2), longest)
    rng = np.random.default_rng(seed)
    vocab = min(int(pair.target.config.vocab_size), int(pair.draft_config.vocab_size), len(pair.tokenizer))
    samples = defaultdict(list) if samples is None else samples
    for done, context in enumerate(contexts):
        tokens = pair.drafter.profiling_text(rng.integers(1, vocab, context + 1).tolist())
        decoder.target.reset()
        decoder.target.prefill(tokens[:-1])
        drafter.begin(tokens[:-1], decoder.produced_by(-1))
        for repeat in range(repeats + WARMUP_ROUNDS):
            thrown_away: Samples = defaultdict(list)
            kept = samples if repeat >= WARMUP_ROUNDS else thrown_away
            # Of a tree: nodes of its draft passes, and tokens verified.
            trees = [*zip(sizes, rng.permutation(sizes).tolist(), strict=True)]
            masked = masked_passes(depth) if pair.drafter.mask_groups else []
            # Each is run twice, the first for warmth: a decoding run seldom changes size as wildly as this one.
            for job in rng.permutation(depth + 1 + len(trees) + len(masked)).tolist():
                size = job - len(trees)
                if size < 0:
                    level_nodes, verified = trees[job]
                    for into in (thrown_away, kept):
                        measure_tree_round(decoder, tokens, context, level_nodes, verified, rng, into)
                elif size == 0:  # autoregressive steps follow one another, in caches that no drafter has used
                    _measure_round(decoder, tokens, context, 0, 0, rng, thrown_away)
                    for _ in range(AUTOREGRESSIVE_BURST):
                        _measure_round(decoder, tokens, context, 0, 0, rng, kept)
                elif size > depth:
                    masks, drafted = masked[size - depth - 1]
                    for into in (thrown_away, kept):
                        _measure_round(decoder, tokens, context, drafted, 0, rng, into, masks)
                else:  # the draft cache lacks one token more after a fully accepted draft
                    for into in (thrown_away, kept):
                        _measure_round(decoder, tokens, context, size, (size + repeat) % 2, rng, into)
            if pair.predictor is not None:
                _measure_score(decoder, tokens, context, depth, rng, kept)
        if progress:
            progress(done + 1, len(contexts))
    decoding = decoder.sampler.as_dict()
    return _document(samples, list(contexts), depth, drafter.max_depth, sizes, repeats, pair, seed, decoding)


def _check(contexts: Sequence[int], depth: int, positions: int) -> None:
    if not contexts or list(contexts) != sorted(set(contexts)) or contexts[0] < 2:
        raise InputError(f"contexts {list(contexts)} must increase and start at 2 tokens or more; mend the list")
    if contexts[-1] + depth + 2 > positions:
        raise InputError(
            f"context {contexts[-1]} and depth {depth} exceed the models' {positions} positions; shorten them"
        )


def _document(
    samples: Samples,
    contexts: list[int],
    depth: int,
    max_depth: int | None,
    sizes: list[int],
    repeats: int,
    pair: Pair,
    seed: int,
    decoding: dict[str, Any],
) -> dict[str, Any]:
    def tables(q: float) -> dict[str, Any]:
        def over_contexts(*key: Any) -> Floats:
            return np.array([np.quantile(samples[(*key, c)], q) for c in contexts])

        first = over_contexts("draft", 0, 1)
        behind = over_contexts("draft", 1, 1) if samples["draft", 1, 1, contexts[0]] else first
        trees = {"tree": tree_table(samples, contexts, sizes, depth, q, max_depth)} if sizes else {}
        if pair.drafter.mask_groups:
            trees = {"tree": masked_table(samples, contexts, depth, q)}
        return {
            "draft_step": [over_contexts("draft", 0, place).tolist() for place in range(1, depth + 1)],
            # A difference of medians may be negative by noise, a time may not.
            "catch_up": np.maximum(behind - first, 0.0).tolist(),
            "verify": [over_contexts("verify", n).tolist() for n in range(1, depth + 2)],
            "autoregressive": over_contexts("autoregressive").tolist(),
            "policy_step": float(np.quantile(samples["policy"], q)) if depth > 1 else 0.0,
            "round_overhead": float(np.quantile(samples["overhead"], q)),
            # To be added to the draft steps of policies that read the score, and of no others.
            "score_step": max(0.0, float(np.quantile(samples["score"], q))) if samples["score"] else 0.0,
            **trees,
        }

    return {
        "kind": PROFILE_KIND,
        "version": PROFILE_VERSION,
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "drafter_kind": pair.drafter.name,
        "drafter_facts": pair.drafter.facts,
        "decoding": decoding,
        "kernels": backend_for(pair.device),
        "contexts": contexts,
        "repeats": repeats,
        "seed": seed,
        "median_s": tables(0.5),
        "p25_s": tables(0.25),
        "p75_s": tables(0.75),
        "provenance": provenance(pair.device, pair.dtype),
    }
