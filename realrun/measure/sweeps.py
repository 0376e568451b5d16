"""Run probes in sweeps over several contexts, so that every time is measured on the same machine.

A machine changes within seconds while other work comes and goes. Measured one context after the other, costs of
different contexts would be costs of different machines. A sweep visits every context, in shuffled order, and runs every
probe there, in shuffled order; the errors of the means follow from how much they differ from sweep to sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.lm.clock import clock_name
from realrun.lm.variants import expansion_of
from realrun.measure.curve import Influences, influences
from realrun.measure.probes import BASELINE, Probe, Prober
from realrun.measure.stream import Key, Stream
from realrun.pairs.pair import Pair
from realrun.provenance import provenance
from speckernels import backend_for
from specsim.cost.profile import LEAST_CONTEXT, PROFILE_KIND, PROFILE_VERSION
from specsim.io.arrays import finite_or_null
from specsim.io.errors import InputError

AUTOREGRESSIVE_BURST = 4
CATCH_UP = (4, 16, 64)  # tokens that a draft cache lacks after rounds of other drafters
NEGLIGIBLE = 20  # parts shorter than this fraction of a decoding step need be only as precise as one of this length

Cell = tuple[Key, int]  # a key and a context


def check_contexts(contexts: Sequence[int]) -> None:
    """Raise InputError for contexts that do not increase, or are too short."""
    if not contexts or list(contexts) != sorted(set(contexts)) or contexts[0] < LEAST_CONTEXT:
        raise InputError(
            f"contexts {list(contexts)} must increase and start at {LEAST_CONTEXT} tokens or more; correct the list"
        )


def keys_of(probe: Probe) -> list[Key]:
    """List the times that a probe is there to measure."""
    return [("autoregressive",), *probe.keys] if probe == BASELINE else probe.keys


class Sweeps:
    """Sweeps of a pair.

    done : samples of every sweep; more are appended

    Parameters
    ----------
    contexts : cached tokens, increasing; depth : longest draft; tree_tokens : largest tree, 0 for none
    """

    def __init__(
        self,
        pair: Pair,
        contexts: Sequence[int],
        done: list[Stream],
        *,
        depth: int,
        tree_tokens: int,
        sampler: Sampler,
        seed: int,
    ):
        check_contexts(contexts)
        self.contexts, self.seed, self.done = list(contexts), seed, done
        self.prober = prober = Prober(pair, depth=depth, tree_tokens=tree_tokens, sampler=sampler, seed=seed)
        if contexts[-1] + prober.longest + 2 > prober.positions:
            raise InputError(
                f"context {contexts[-1]} and depth {prober.longest} exceed the models' {prober.positions} positions; "
                "shorten them"
            )
        prober.warm(contexts[-1])
        vocab = min(int(pair.target.config.vocab_size), int(pair.draft_config.vocab_size), len(pair.tokenizer))
        tokens = np.random.default_rng(seed).integers(1, vocab, contexts[-1] + 1).tolist()
        self.text = pair.drafter.profiling_text(tokens)
        self.rng = np.random.default_rng((seed, len(done)))
        self.keys = [*dict.fromkeys(key for probe in prober.probes() for key in keys_of(probe))]
        self._visit(contexts[0], Stream(), None)  # the first rounds compile policies and load libraries

    def run(self, wanted: Collection[Cell] | None = None) -> float:
        """Make a sweep: run the probes of these cells, or all probes; return its seconds."""
        samples, start_s = Stream(), time.monotonic()
        for context in self.rng.permutation(self.contexts).tolist():
            self._visit(context, samples, wanted)
        self.done.append(samples)
        return time.monotonic() - start_s

    def _visit(self, context: int, samples: Stream, wanted: Collection[Cell] | None) -> None:
        """Run probes at a context, in shuffled order."""
        prober, pair, number = self.prober, self.prober.pair, len(self.done)
        runs: list[Callable[[], None]] = [
            partial(prober.baseline, samples, AUTOREGRESSIVE_BURST)
            if probe == BASELINE
            # After a fully accepted draft, the draft cache lacks another token.
            else partial(prober.run, probe, samples, behind=(number + probe.tokens + 1) % 2)
            for probe in prober.probes()
            if wanted is None or any((key, context) in wanted for key in keys_of(probe))
        ]
        if wanted is None and not pair.drafter.mask_groups:
            runs += [partial(prober.catch_up, samples, lacking) for lacking in CATCH_UP if lacking < context]
        if wanted is None and pair.predictor is not None:
            runs.append(partial(prober.scores, samples))
        if runs:
            prober.begin(self.text[: context + 1])
        for index in self.rng.permutation(len(runs)).tolist():
            runs[index]()

    def means(self) -> dict[Key, Influences]:
        """Compute the mean of every measured time, and how much each sweep moves it."""
        points = {key: [sweep.points.get(key, []) for sweep in self.done] for key in self.keys}
        return {key: influences(sweeps, self.contexts) for key, sweeps in points.items() if any(sweeps)}

    def document(self, **facts: Any) -> dict[str, Any]:
        """Make the JSON document of a cost profile. facts : keys to add"""
        stream = Stream()
        for samples in self.done:
            stream.merge(samples.as_dict())
        document = profile_document(stream, self.contexts, self.prober, self.seed, sweeps=len(self.done), **facts)
        widths = {key: mean.relative_half_width for key, mean in self.means().items()}
        widths["tree verify", 1] = widths["verify", 1]
        unmeasured = np.full(len(self.contexts), np.nan)
        tables = document["mean_s"]

        def rows(kind: str, sizes: Iterable[int]) -> list[list[float | None]]:
            return finite_or_null(np.array([widths.get((kind, size), unmeasured) for size in sizes]))

        document["relative_half_width"] = {
            "draft_step": rows("draft", range(1, len(tables["draft_step"]) + 1)),
            "verify": rows("verify", range(1, len(tables["verify"]) + 1)),
            "autoregressive": finite_or_null(widths["autoregressive",]),
        }
        if "tree" in tables:
            sizes = tables["tree"]["sizes"]
            document["relative_half_width"] |= {"tree_sizes": sizes, "tree_verify": rows("tree verify", sizes)}
        return document


def imprecise(means: Mapping[Key, Influences], contexts: Sequence[int], precision: float) -> set[Cell]:
    """Find the measured times whose intervals are wider than this, or not known."""
    least_s = means["autoregressive",].values / NEGLIGIBLE
    return {
        (key, context)
        for key, mean in means.items()
        for context, wide in zip(
            contexts, ~(mean.relative_half_width <= precision * np.maximum(1.0, least_s / mean.values)), strict=True
        )
        if wide
    }


def profile_document(
    stream: Stream, contexts: Sequence[int], prober: Prober, seed: int, **facts: Any
) -> dict[str, Any]:
    """Make the JSON document of a cost profile; facts : more keys, such as how often was measured."""
    pair, masks = prober.pair, prober.pair.drafter.mask_groups
    return {
        "kind": PROFILE_KIND,
        "version": PROFILE_VERSION,
        **measurement_facts(prober, contexts, seed),
        "drafter_facts": pair.drafter.facts,
        "block_expansion": expansion_of(pair.target),
        **facts,
        **stream.tables(contexts, prober.depth, [1] if masks else prober.sizes, masks=masks),
    }


def measurement_facts(prober: Prober, contexts: Sequence[int], seed: int) -> dict[str, Any]:
    """Describe what is measured and where, for the document of a profile or a probe."""
    pair = prober.pair
    return {
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "drafter_kind": pair.drafter.name,
        "decoding": prober.decoder.sampler.as_dict(),
        "contexts": list(contexts),
        "seed": seed,
        "kernels": backend_for(pair.device),
        "clock": clock_name(),
        "provenance": provenance(pair.device, pair.number_type),
    }
