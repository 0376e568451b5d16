"""Measure rounds of a batch: probes at chosen contexts and draft lengths, through the loop that decodes.

They take turns with each other and with other measurements (`realrun.measure.interleaving`), so that all of them see
the same machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from realrun.decode.batch import BatchDecoding, BatchRound
from realrun.drafters.independent import IndependentKind
from realrun.lm.batched_llama import BatchedLlama
from realrun.measure.curve import Point, along_contexts, centre
from realrun.measure.interleaving import turns
from realrun.pairs.pair import Pair
from realrun.provenance import provenance
from specsim.cost.batch_profile import BATCH_PROFILE_KIND, BATCH_PROFILE_VERSION
from specsim.io.errors import InputError
from specsim.io.progress import Counter, no_progress

WARM_UP_ROUNDS = 4
Samples = dict[str, list[Point]]  # (context, seconds) of "verify N", "draft PLACE", "behind", "step", "round"


def profile_batches(
    pair: Pair,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    depth: int,
    repeats: int,
    seed: int = 0,
    progress: Counter = no_progress,
) -> dict[str, Any]:
    """Measure the cost of rounds of batches, with greedy chains of a draft model.

    Parameters
    ----------
    pair : Pair
        Pair with an independent draft model.
    batches : sequence of int
        Batch sizes, increasing from 1 on.
    contexts : sequence of int
        Cached tokens of every sequence, increasing.
    depth : int
        Maximum draft length, in tokens; all lengths from 1 on are measured.
    repeats : int
        Rounds at each context and draft length, in shuffled order.
    seed : int
        Seed of the order and of the random text.
    progress : callable, optional
        Called with (done, total) of probes.

    Returns
    -------
    dict
        JSON document of a batch profile, in seconds, with its `noise_floor`; `specsim.read_cost` reads its file.

    Raises
    ------
    InputError
        For another drafter, a model other than Llama or Qwen3, or contexts that exceed the models' positions.
    """
    if not isinstance(pair.drafter, IndependentKind):
        raise InputError(f"batches are decoded with a draft model, not with {pair.drafter.name}; give a draft model")
    _check(batches, contexts)
    rng, lengths = np.random.default_rng(seed), range(1, depth + 1)
    probers = {}
    for batch in batches:
        models = BatchedLlama(pair.target), BatchedLlama(pair.drafter.model)
        probers[batch] = BatchProber(*models, batch, contexts, lengths, sweeps=repeats, end=1.0, rng=rng)
        probers[batch].warm_up()
    total = sum(len(prober.probes) for prober in probers.values())
    for _ in turns(probers.values(), rng):
        progress(sum(prober.number for prober in probers.values()), total)
    samples = {batch: prober.samples for batch, prober in probers.items()}
    return {
        **batch_profile_document(samples, contexts, lengths),
        "noise_floor": noise_floor(samples),
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "repeats": repeats,
        "seed": seed,
        "provenance": provenance(pair.device, pair.number_type),
    }


def _check(batches: Sequence[int], contexts: Sequence[int]) -> None:
    if not batches or batches[0] != 1 or any(a >= b for a, b in pairwise(batches)):
        raise InputError(f"batches {list(batches)}: give increasing sizes that begin with 1, such as 1,2,4,8")
    if not contexts or any(a >= b for a, b in pairwise(contexts)):
        raise InputError(f"contexts {list(contexts)}: give increasing contexts")


class BatchProber:
    """Runs rounds of a batch on random text; takes turns as a `BatchDecoding` does.

    Parameters
    ----------
    target, drafter : BatchedLlama
        Their caches are overwritten.
    batch : int
        Number of sequences.
    contexts : sequence of int
        Cached tokens of every sequence, at least 1.
    lengths : sequence of int
        Draft lengths; steps without speculation are probed as well.
    sweeps : int
        Rounds at each context and length.
    end : float
        Position of the last probe; probes are spread evenly up to it.

    Attributes
    ----------
    samples : seconds of the rounds
    """

    def __init__(
        self,
        target: BatchedLlama,
        drafter: BatchedLlama,
        batch: int,
        contexts: Sequence[int],
        lengths: Sequence[int],
        *,
        sweeps: int,
        end: float,
        rng: np.random.Generator,
    ):
        if min(contexts) < 1 or min(lengths) < 1:
            raise InputError(f"contexts {list(contexts)}, draft lengths {list(lengths)}; give at least 1")
        longest = max(contexts) + max(lengths) + 3  # so that no sequence ends
        vocab = min(int(model.single.model.config.vocab_size) for model in (target, drafter))
        self.texts = rng.integers(1, vocab, (batch, longest)).tolist()
        probes = [*product(contexts, (0, *lengths))]
        self.probes = [probes[i] for _ in range(sweeps) for i in rng.permutation(len(probes))]
        prompts = [text[: max(contexts) + 1] for text in self.texts]
        budgets = [longest - max(contexts) - 1] * batch
        self.decoding = BatchDecoding(target, drafter, prompts, budgets, max(lengths))
        self.end, self.number = end, 0
        self.samples: Samples = defaultdict(list)

    @property
    def position(self) -> float:
        return self.end * self.number / len(self.probes)

    @property
    def done(self) -> bool:
        return self.number == len(self.probes)

    def warm_up(self) -> None:
        """Run rounds that do not count."""
        for context, k in self.probes[:WARM_UP_ROUNDS]:
            self._round(context, k, behind=0)

    def advance(self) -> None:
        """Run the next probe; in every other probe the drafter ingests an additional token."""
        (context, k), behind = self.probes[self.number], self.number % 2
        self.number += 1
        round_ = self._round(context, k, behind)
        self.samples[f"verify {k + 1}"].append((context, round_.verify_s))
        self.samples["round" if k else "step"].append((context, round_.other_s))
        for place, step_s in enumerate(round_.step_s):
            self.samples["behind" if behind and not place else f"draft {place}"].append((context, step_s))

    def _round(self, context: int, k: int, behind: int) -> BatchRound:
        """Run a round of all sequences at this context; the drafter lacks `behind` tokens beside the pending token."""
        decoding = self.decoding
        for row, text in zip(decoding.rows, self.texts, strict=True):
            row.tokens = text[: context + 1]
        # All caches hold more than that.
        decoding.target.lengths = np.full(len(self.texts), context)
        decoding.drafter.lengths = np.full(len(self.texts), context - behind)
        decoding.k = k
        return decoding.advance()


def noise_floor(samples: Mapping[int, Mapping[str, Sequence[Point]]]) -> float | None:
    """Compute the relative difference between the medians of the odd and the even samples of the same time.

    It is the median over passes and draft steps at their contexts, None if nothing was measured twice. A cost made of
    all samples is more precise than the medians compared here, which are made of half of them.
    """
    differences = []
    for name, points in ((name, points) for batch in samples.values() for name, points in batch.items()):
        for context in {context for context, _ in points} if name.startswith(("verify", "draft")) else ():
            seconds = [s for c, s in points if c == context]
            if len(seconds) > 1:
                halves = np.median(seconds[::2]), np.median(seconds[1::2])
                differences.append(abs(halves[0] - halves[1]) / np.mean(halves))
    return float(np.median(differences)) if differences else None


def batch_profile_document(
    samples: Mapping[int, Mapping[str, Sequence[Point]]], contexts: Sequence[int], lengths: Sequence[int]
) -> dict[str, Any]:
    """Make the JSON document of a batch profile from the samples of probes, by batch."""
    sizes, places = [k + 1 for k in sorted({0, *lengths})], range(max(lengths))

    def curves(batch: int, *names: str) -> list[list[float]]:
        """Fit a curve over contexts for each of these samples: [contexts, names]."""
        return np.transpose([along_contexts(samples[batch][name], contexts) for name in names]).tolist()

    batches = sorted(samples)
    first, behind = (np.array([curves(batch, name) for batch in batches])[..., 0] for name in ("draft 0", "behind"))
    beside = {
        name: centre([seconds for batch in samples.values() for _, seconds in batch[name]])
        for name in ("step", "round")
    }
    return {
        "kind": BATCH_PROFILE_KIND,
        "version": BATCH_PROFILE_VERSION,
        "batches": batches,
        "contexts": list(contexts),
        "tokens": sizes,
        "verify_s": [curves(batch, *(f"verify {size}" for size in sizes)) for batch in batches],
        "draft_s": [curves(batch, *(f"draft {place}" for place in places)) for batch in batches],
        # A difference may be negative by noise, a time may not.
        "catch_up_s": np.maximum(behind - first, 0.0).tolist(),
        "step_s": beside["step"],
        "round_s": max(beside["round"] - beside["step"], 0.0),
    }
