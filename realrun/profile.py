"""Measure what every part of a round costs on this machine, through the real loop.

For each context length, rounds of every draft length and, if asked, trees of many sizes are
run in shuffled order with scripted acceptance, so that the same code is timed that decodes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from realrun.choice import Choice
from realrun.decode import Decoder, Round, verifier_for
from realrun.drafters.draft import Draft
from realrun.drafters.draft_model import DraftModel
from realrun.models import Pair
from realrun.open_drafter import open_drafter
from realrun.profile_masks import masked_passes, masked_table, pass_tokens, set_masks
from realrun.profile_trees import (
    PASSES,
    Samples,
    ScriptedTreeVerifier,
    fall_behind,
    measure_tree_round,
    tree_sizes,
    tree_table,
    warm_trees,
)
from realrun.provenance import provenance
from speckernels import backend_for
from specsim.cost_profile import PROFILE_KIND, PROFILE_VERSION
from specsim.errors import InputError
from specsim.policy import make_policy

WARMUP_ROUNDS = 3
AUTOREGRESSIVE_BURST = 4


class ScriptedVerifier:
    """Does the verifier's work, then accepts as many tokens as it was told."""

    def __init__(self) -> None:
        self.accept = 0

    def __call__(self, logits: torch.Tensor, draft: Draft, choice: Choice, sequence: int, position: int) -> list[int]:
        verifier_for(choice)(logits, draft, choice, sequence, position)
        return [*draft.tokens[: self.accept], 0]


@torch.inference_mode()
def profile(
    pair: Pair,
    *,
    contexts: Sequence[int],
    depth: int = 16,
    repeats: int = 40,
    choice: Choice | None = None,
    seed: int = 0,
    tree_tokens: int = 65,
    samples: Samples | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Medians and quartiles over a grid of contexts, as the JSON document of a cost profile.

    contexts : cached tokens before a round, increasing. Text is random, for prompt lookup
    repetitive: time does not depend on it otherwise. depth : places of a draft whose steps are
    measured, in tokens, where the drafter goes so far. tree_tokens : largest tree, the pending
    token included; 0 for no trees, as for drafters that have none. samples : those of earlier
    slices of the same profile, to which this one's are added: on a machine that drifts, slices
    spread over a job tell more than one long measurement. Raises InputError for contexts that
    do not fit the models.
    """
    target, drafter = open_drafter(pair, ())
    decoder = Decoder(target, drafter, (), choice or Choice(), ScriptedVerifier(), ScriptedTreeVerifier())
    target.keep_hidden = drafter.wants_target_hidden
    depth = min(depth, drafter.deepest or depth)
    if repeats < 2:
        raise InputError(f"repeats={repeats}; give at least 2")
    sizes = tree_sizes(tree_tokens if pair.trees else 0)
    deepest = max(depth, min(PASSES, drafter.deepest or PASSES)) if sizes else depth
    _check(contexts, deepest, min(decoder.target.max_positions, drafter.lm.max_positions))
    longest = contexts[-1] + deepest + 2
    drafter.prepare(longest, decoder.choice, 0, deepest + 1)
    warm_trees(decoder, sizes, range(1, depth + 2), longest)
    rng = np.random.default_rng(seed)
    vocab = min(int(pair.target.config.vocab_size), int(pair.draft.config.vocab_size), len(pair.tokenizer))
    samples = defaultdict(list) if samples is None else samples
    for done, context in enumerate(contexts):
        tokens = rng.integers(1, vocab, context + 1).tolist()
        if pair.kind == "lookup":  # it drafts only what the text repeats
            tokens = tokens[:1] * len(tokens)
        decoder.target.reset()
        decoder.target.prefill(tokens[:-1])
        drafter.begin(tokens[:-1], decoder.produced_by(-1))
        for repeat in range(repeats + WARMUP_ROUNDS):
            thrown_away: Samples = defaultdict(list)
            kept = samples if repeat >= WARMUP_ROUNDS else thrown_away
            # Of a tree: nodes of its draft passes, and tokens verified.
            trees = [*zip(sizes, rng.permutation(sizes).tolist(), strict=True)]
            masked = masked_passes(depth) if pair.kind == "space" else []
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
    decoding = decoder.choice.as_dict()
    return _document(samples, list(contexts), depth, drafter.deepest, sizes, repeats, pair, seed, decoding)


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
    if size and drafter.lm.follows:
        fall_behind(decoder, context, size, rng)
        behind = 0  # it is so in every round, and no extra
    else:
        drafter.commit(context - behind, decoder.produced_by(-1))
        behind = context - drafter.lm.length  # nothing, where the cache is the target's
    set_masks(decoder.target, masks)
    verifier.accept = int(rng.integers(size + 1))
    policy = make_policy("adaedl", {"lambda0": -10.0, "max_draft": size}) if size else None
    state = policy.initial_state(policy.params) if policy else None
    rounds: list[Round] = []
    _, draft = decoder.round(list(tokens), 0, size, policy, state, 0, 0, rounds)
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
        drafter.let_score(scoring)
        decoder.target.keep_hidden = drafter.wants_target_hidden
        steps: Samples = defaultdict(list)
        _measure_round(decoder, tokens, context, size, 0, rng, steps)
        mean_s[scoring] = float(np.mean([steps["draft", 0, place, context] for place in range(1, size + 1)]))
    drafter.let_score(False)
    decoder.target.keep_hidden = drafter.wants_target_hidden
    samples["score"].append(mean_s[True] - mean_s[False])


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
    deepest: int | None,
    sizes: list[int],
    repeats: int,
    pair: Pair,
    seed: int,
    decoding: dict[str, Any],
) -> dict[str, Any]:
    def tables(q: float) -> dict[str, Any]:
        def over_contexts(*key: Any) -> npt.NDArray[np.float64]:
            return np.array([np.quantile(samples[(*key, c)], q) for c in contexts])

        first = over_contexts("draft", 0, 1)
        behind = over_contexts("draft", 1, 1) if samples["draft", 1, 1, contexts[0]] else first
        trees = {"tree": tree_table(samples, contexts, sizes, depth, q, deepest)} if sizes else {}
        if pair.kind == "space":
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
        "drafter_kind": pair.kind,
        "drafter_facts": pair.drafter_facts,
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


def write_json(document: dict[str, Any], path: Path) -> None:
    """Write JSON atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as handle:
            json.dump(document, handle, indent=1)
            handle.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
