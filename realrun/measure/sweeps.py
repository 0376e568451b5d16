"""Run probes in sweeps over several contexts, so that every time is measured on the same machine.

A machine changes within seconds while other work comes and goes. Measured one context after the other, costs of
different contexts would be costs of different machines. A sweep visits every context, in shuffled order, and runs every
probe there, in shuffled order; the errors of the means follow from how much they differ from sweep to sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.lm.clock import clock_name
from realrun.lm.variants.block_expansion import expansion_of
from realrun.measure.curve import Influences, influences
from realrun.measure.probes import Probe, Prober
from realrun.measure.rounds import pass_tokens
from realrun.measure.stream import Stream
from realrun.pairs.pair import Pair
from realrun.provenance import provenance
from speckernels import backend_for
from specsim.cost.profile import LEAST_CONTEXT, PROFILE_KIND, PROFILE_VERSION
from specsim.io.arrays import Floats
from specsim.io.errors import InputError

AUTOREGRESSIVE_BURST = 4
CATCH_UP = (4, 16, 64)  # tokens that a draft cache lacks after rounds of other drafters
NEGLIGIBLE = 20  # parts shorter than this fraction of a decoding step need be only as precise as one of this length
BASELINE = Probe(0)

Key = tuple[Any, ...]  # of `Stream.points`
Cell = tuple[Key, int]  # a key and a context


def check_contexts(contexts: Sequence[int]) -> None:
    """Raise InputError for contexts that do not increase, or are too short."""
    if not contexts or list(contexts) != sorted(set(contexts)) or contexts[0] < LEAST_CONTEXT:
        raise InputError(
            f"contexts {list(contexts)} must increase and start at {LEAST_CONTEXT} tokens or more; correct the list"
        )


def cells_of(probe: Probe) -> list[Key]:
    """List the times that a probe is there to measure; longer drafts have samples of shorter ones' steps, too."""
    if probe == BASELINE:
        return [("autoregressive",), ("verify", 1)]
    if probe.masks:
        return [("tree verify", pass_tokens(probe.masks, probe.tokens))]
    if probe.nodes:
        return [("tree verify", probe.tokens)] if probe.tokens > 1 else []
    return [("verify", probe.tokens + 1), ("draft", probe.tokens)]


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
        probes = [BASELINE, *prober.chains, *prober.trees()]
        self.keys = [*dict.fromkeys(key for probe in probes for key in cells_of(probe))]
        self._visit(contexts[0], Stream(), None)  # the first rounds compile policies and load libraries

    def run(self, wanted: Collection[Cell] | None = None) -> None:
        """Make a sweep: run the probes of these cells, or all probes."""
        samples = Stream()
        for context in self.rng.permutation(self.contexts).tolist():
            self._visit(context, samples, wanted)
        self.done.append(samples)

    def _visit(self, context: int, samples: Stream, wanted: Collection[Cell] | None) -> None:
        """Run probes at a context, in shuffled order."""
        prober, pair = self.prober, self.prober.pair
        probes = [BASELINE, *prober.chains, *prober.trees()]
        runs: list[Callable[[], None]] = [
            self._run_of(probe, samples)
            for probe in probes
            if wanted is None or any((key, context) in wanted for key in cells_of(probe))
        ]
        if wanted is None and not pair.drafter.mask_groups:
            lags = [lacking for lacking in CATCH_UP if lacking < context]
            runs += [lambda lacking=lacking: prober.catch_up(samples, lacking) for lacking in lags]  # type: ignore[misc]
        if wanted is None and pair.predictor is not None:
            runs.append(lambda: prober.scores(samples))
        if runs:
            prober.begin(self.text[: context + 1])
        for index in self.rng.permutation(len(runs)).tolist():
            runs[index]()

    def _run_of(self, probe: Probe, samples: Stream) -> Callable[[], None]:
        if probe == BASELINE:
            return lambda: self.prober.baseline(samples, AUTOREGRESSIVE_BURST)
        # After a fully accepted draft, the draft cache lacks another token.
        return lambda: self.prober.run(probe, samples, behind=(probe.tokens + len(self.done)) % 2)

    @property
    def stream(self) -> Stream:
        """All samples."""
        stream = Stream()
        for samples in self.done:
            stream.merge(samples.as_dict())
        return stream

    def influences(self) -> dict[Key, Influences]:
        """Compute the mean of every measured time, and how much each sweep moves it."""
        points = {key: [sweep.points.get(key, []) for sweep in self.done] for key in self.keys}
        return {key: influences(sweeps, self.contexts) for key, sweeps in points.items() if any(sweeps)}

    def half_widths(self) -> dict[Key, Floats]:
        """Compute the half-widths of the 95 % intervals of all measured times, relative to them, by context [C]."""
        return {key: mean.relative_half_width for key, mean in self.influences().items()}

    def imprecise(self, precision: float) -> tuple[set[Cell], int]:
        """Find the measured times whose intervals are wider than this; also count all measured times."""
        every = self.influences()
        least_s = every["autoregressive",].values / NEGLIGIBLE
        wide = {
            (key, context)
            for key, mean in every.items()
            for context, width, floor in zip(
                self.contexts, mean.relative_half_width, np.maximum(1.0, least_s / mean.values), strict=True
            )
            if not width <= precision * floor  # also where it is not known
        }
        # After two sweeps, the first of which may lack a part, what has no samples is nothing that this drafter does.
        unknown = [key for key in self.keys if key not in every] if len(self.done) < 2 else []
        wide |= {(key, context) for key in unknown for context in self.contexts}
        return wide, (len(every) + len(unknown)) * len(self.contexts)

    def document(self, **facts: Any) -> dict[str, Any]:
        """Make the JSON document of a cost profile. facts : keys to add"""
        widths = self.half_widths()
        document = profile_document(self.stream, self.contexts, self.prober, self.seed, sweeps=len(self.done), **facts)
        tables = document["mean_s"]

        def known(row: Floats) -> list[float | None]:
            return [width if math.isfinite(width) else None for width in row.tolist()]

        def rows(kind: str, sizes: Iterable[int]) -> list[list[float | None]]:
            """Rows over contexts; None where a time was not measured."""
            unknown = np.full(len(self.contexts), np.nan)
            keys = [("verify", 1) if kind == "tree verify" and size == 1 else (kind, size) for size in sizes]
            return [known(widths.get(key, unknown)) for key in keys]

        document["relative_half_width"] = {
            "draft_step": rows("draft", range(1, len(tables["draft_step"]) + 1)),
            "verify": rows("verify", range(1, len(tables["verify"]) + 1)),
            "autoregressive": known(widths["autoregressive",]),
        }
        if "tree" in tables:
            sizes = tables["tree"]["sizes"]
            document["relative_half_width"] |= {"tree_sizes": sizes, "tree_verify": rows("tree verify", sizes)}
        return document


def profile_document(
    stream: Stream, contexts: Sequence[int], prober: Prober, seed: int, **facts: Any
) -> dict[str, Any]:
    """Make the JSON document of a cost profile; facts : more keys, such as how often was measured."""
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
        "contexts": list(contexts),
        "seed": seed,
        **facts,
        **stream.tables(contexts, prober.depth, [1] if masks else prober.sizes, masks=masks),
        "provenance": provenance(pair.device, pair.number_type),
    }
