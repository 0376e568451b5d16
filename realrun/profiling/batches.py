"""What rounds of a batch cost: probes at chosen contexts and draft lengths, through the loop that decodes.

They take turns with what else decodes (`realrun.validation.timing.take_turns`), so that a profile made of them and what
was measured beside them saw the same machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from realrun.decode.batch import BatchDecoding
from realrun.lm.batched_llama import BatchedLlama
from realrun.profiling.curve import Point, along_contexts, centre
from specsim.cost.batch_profile import BATCH_PROFILE_KIND, BATCH_PROFILE_VERSION
from specsim.errors import InputError

Samples = dict[str, list[Point]]  # (context, seconds) of "verify N", "draft PLACE", "behind", "step", "round"


class BatchProber:
    """Rounds of a batch on random text; takes turns as a `BatchDecoding` does.

    Parameters
    ----------
    target, drafter : BatchedLlama
        With caches of their own.
    batch : int
        Sequences, which stay together.
    contexts : sequence of int
        Cached tokens of all of them, at least 1.
    lengths : sequence of int
        Draft lengths; 0 is a step without speculation, which is probed, too.
    sweeps : int
        Rounds at each context and length.
    end : float
        Position at which the last one is done: probes are spread evenly up to there.

    Attributes
    ----------
    found : samples
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
        longest, vocab = max(contexts) + max(lengths) + 3, int(target.single.model.config.vocab_size)
        self.texts = rng.integers(1, vocab, (batch, longest)).tolist()
        probes = [*product(contexts, (0, *lengths))]
        self.probes = [probes[i] for _ in range(sweeps) for i in rng.permutation(len(probes))]
        prompts = [text[: max(contexts) + 1] for text in self.texts]
        budgets = [longest - max(contexts) - 1] * batch
        self.decoding = BatchDecoding(target, drafter, prompts, budgets, max(lengths))
        self.end, self.number = end, 0
        self.found: Samples = defaultdict(list)

    @property
    def position(self) -> float:
        return self.end * self.number / len(self.probes)

    @property
    def done(self) -> bool:
        return self.number == len(self.probes)

    def advance(self) -> None:
        """One probe; every other time the drafter has one token more to take in."""
        (context, k), behind = self.probes[self.number], self.number % 2
        self.number += 1
        decoding = self.decoding
        for row, text in zip(decoding.rows, self.texts, strict=True):
            row.tokens = text[: context + 1]
        # All caches hold more than that.
        decoding.target.lengths = np.full(len(self.texts), context)
        decoding.drafter.lengths = np.full(len(self.texts), context - behind)
        decoding.k = k
        took = decoding.advance()
        self.found[f"verify {k + 1}"].append((context, took.verify_s))
        self.found["round" if k else "step"].append((context, took.other_s))
        for place, step_s in enumerate(took.step_s):
            self.found["behind" if behind and not place else f"draft {place}"].append((context, step_s))


def batch_profile_document(
    samples: Mapping[int, Mapping[str, Sequence[Point]]], contexts: Sequence[int], lengths: Sequence[int]
) -> dict[str, Any]:
    """The JSON document of a batch profile, of the samples of probes by batch."""
    sizes, places = [k + 1 for k in sorted({0, *lengths})], range(max(lengths))

    def curves(batch: int, *names: str) -> list[list[float]]:
        """[contexts, names]"""
        return np.transpose([along_contexts(samples[batch][name], contexts) for name in names]).tolist()

    batches = sorted(samples)
    first, behind = (np.array([curves(batch, name) for batch in batches])[..., 0] for name in ("draft 0", "behind"))
    beside = {
        name: centre([seconds for one in samples.values() for _, seconds in one[name]]) for name in ("step", "round")
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
