"""Measure what every part of a round costs on this machine, through the real loop.

At each context length, rounds of every draft length and, if requested, trees of many sizes run in shuffled order with
scripted acceptance, so that the timed code is the code that decodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.lm.clock import clock_name
from realrun.lm.variants.block_expansion import expansion_of
from realrun.measure.probes import Prober
from realrun.measure.stream import Stream
from realrun.pairs.pair import Pair
from realrun.provenance import provenance
from speckernels import backend_for
from specsim.cost.profile import LEAST_CONTEXT, PROFILE_KIND, PROFILE_VERSION, ProfileCost, profile_from_json
from specsim.io.errors import InputError
from specsim.io.progress import Counter

WARMUP_ROUNDS, SLICE_WARMUP_ROUNDS = 3, 1  # of a profile, of a slice; every probe runs twice anyway
AUTOREGRESSIVE_BURST = 4
NUM_CONTEXTS = 4  # of a range
SLICE_REPEATS = 10  # of every measured size, in a slice
TREE_TOKENS = 65  # largest tree that is profiled, the pending token included
CATCH_UP = (4, 16, 64)  # tokens that a draft cache lacks after rounds of other drafters


def profile(
    pair: Pair,
    *,
    contexts: Sequence[int],
    depth: int = 16,
    repeats: int = 40,
    sampler: Sampler | None = None,
    seed: int = 0,
    tree_tokens: int = TREE_TOKENS,
    stream: Stream | None = None,
    progress: Counter | None = None,
) -> dict[str, Any]:
    """Measure what every part of a round costs, through the real loop.

    Parameters
    ----------
    pair : Pair
    contexts : sequence of int
        Cached tokens before a round, increasing. The text is random, or repetitive for prompt lookup.
    depth : int
        Maximum draft length to measure, in tokens; less if the drafter drafts less.
    repeats : int
        Rounds of every kind, in shuffled order.
    sampler, seed
        How tokens are chosen; seed of the order of the rounds and of their acceptance.
    tree_tokens : int
        Largest tree, the pending token included; 0 for no trees.
    stream : Stream, optional
        Samples of earlier slices of the same profile; those of this slice are added.
    progress : callable, optional
        Called with (done, total) after every context.

    Returns
    -------
    dict
        JSON document of a cost profile, in seconds: means (robust, see `realrun.measure.curve`), medians and quartiles;
        `specsim.read_cost` reads its file.

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
    if repeats < 2:
        raise InputError(f"repeats={repeats}; give at least 2")
    prober = Prober(pair, depth=depth, tree_tokens=tree_tokens, sampler=sampler or Sampler(), seed=seed)
    _check(contexts, prober.longest, prober.positions)
    prober.warm(contexts[-1])
    rng = np.random.default_rng(seed)
    vocab = min(int(pair.target.config.vocab_size), int(pair.draft_config.vocab_size), len(pair.tokenizer))
    warmups = WARMUP_ROUNDS if stream is None else SLICE_WARMUP_ROUNDS
    stream = Stream() if stream is None else stream
    for done, context in enumerate(contexts, start=1):
        prober.begin(pair.drafter.profiling_text(rng.integers(1, vocab, context + 1).tolist()))
        for repeat in range(repeats + warmups):
            _run_probes(prober, context, stream if repeat >= warmups else Stream(), repeat, rng)
        if progress:
            progress(done, len(contexts))
    return profile_document(stream, list(contexts), prober, repeats, seed)


def _run_probes(prober: Prober, context: int, samples: Stream, repeat: int, rng: np.random.Generator) -> None:
    """Run every probe at this context, in shuffled order."""
    pair = prober.pair
    lags = [] if pair.drafter.mask_groups else [tokens for tokens in CATCH_UP if tokens < context]
    probes = [None, *prober.chains, *prober.trees(), *lags]
    for index in rng.permutation(len(probes)).tolist():
        probe = probes[index]
        if probe is None:
            prober.baseline(samples, AUTOREGRESSIVE_BURST)
        elif isinstance(probe, int):
            prober.catch_up(samples, probe)
        else:  # after a fully accepted draft, the draft cache lacks another token
            prober.run(probe, samples, behind=(probe.tokens + repeat) % 2)
    if pair.predictor is not None:
        prober.scores(samples)


@dataclass
class ProfileSlices:
    """Cost profile of chains, measured in slices between the repeats of a job, so that both see the same drift.

    document : JSON profile of all slices so far; longest_s : seconds of the longest slice
    """

    pair: Pair
    contexts: Sequence[int]
    depth: int
    sampler: Sampler
    seed: int
    slices: int
    progress: Counter
    document: dict[str, Any] = field(default_factory=dict)
    longest_s: float = 0.0

    def __post_init__(self) -> None:
        self.stream, self.done = Stream(), 0

    def measure(self) -> ProfileCost:
        """Measure another slice; return the profile of all slices."""
        start, total = time.monotonic(), self.slices * len(self.contexts)
        self.document = profile(
            self.pair,
            contexts=self.contexts,
            depth=self.depth,
            repeats=SLICE_REPEATS,
            sampler=self.sampler,
            seed=self.seed,
            tree_tokens=0,
            stream=self.stream,
            progress=lambda done, _: self.progress(self.done + done, total),
        )
        self.done += len(self.contexts)
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        return profile_from_json(self.document, "just measured")


def contexts_between(low: int, high: int) -> list[int]:
    """Choose contexts to profile, in cached tokens, spread evenly over the range that rounds meet."""
    spread = np.linspace(max(low, LEAST_CONTEXT), max(high, LEAST_CONTEXT), NUM_CONTEXTS)
    return sorted({int(context) for context in spread.round()})


def _check(contexts: Sequence[int], depth: int, positions: int) -> None:
    if not contexts or list(contexts) != sorted(set(contexts)) or contexts[0] < LEAST_CONTEXT:
        raise InputError(
            f"contexts {list(contexts)} must increase and start at {LEAST_CONTEXT} tokens or more; correct the list"
        )
    if contexts[-1] + depth + 2 > positions:
        raise InputError(
            f"context {contexts[-1]} and depth {depth} exceed the models' {positions} positions; shorten them"
        )


def profile_document(stream: Stream, contexts: list[int], prober: Prober, repeats: int, seed: int) -> dict[str, Any]:
    """Make the JSON document of a cost profile."""
    pair, decoder = prober.pair, prober.decoder
    masks = pair.drafter.mask_groups
    return {
        "kind": PROFILE_KIND,
        "version": PROFILE_VERSION,
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "drafter_kind": pair.drafter.name,
        "drafter_facts": pair.drafter.facts,
        "block_expansion": expansion_of(pair.target),
        "decoding": decoder.sampler.as_dict(),
        "kernels": backend_for(pair.device),
        "clock": clock_name(),
        "contexts": contexts,
        "repeats": repeats,
        "seed": seed,
        **stream.tables(contexts, prober.depth, [1] if masks else prober.sizes, masks=masks),
        "provenance": provenance(pair.device, pair.number_type),
    }
