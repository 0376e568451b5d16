"""Run probes, scripted rounds, in sweeps over several contexts, so that every time is measured on the same machine.

Probes are of every draft length and of trees of many sizes. They run through the real loop, so that the timed code is
the code that decodes. A profile consists of them (`realrun.measure.profile`); beside the arms of a measurement they
measure the parts that the arms run too rarely.

A machine changes within seconds while other work comes and goes. Measured one context after the other, costs of
different contexts would be costs of different machines. A sweep visits every context, in shuffled order, and runs every
probe there, in shuffled order; the errors of the means follow from how much they differ from sweep to sweep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Round
from realrun.decode.sampling import Sampler
from realrun.lm.clock import clock_name
from realrun.lm.variants import expansion_of
from realrun.measure.curve import Influences, influences
from realrun.measure.rounds import (
    PASSES,
    ScriptedTreeVerifier,
    ScriptedVerifier,
    masked_passes,
    pass_tokens,
    passes,
    scored_round,
    scripted_round,
    scripted_tree_round,
    tree_sizes,
    warm_trees,
)
from realrun.measure.stream import Key, Stream
from realrun.pairs.pair import Pair
from realrun.provenance import provenance
from speckernels import backend_for
from specsim.cost.model import CostModel
from specsim.cost.profile import LEAST_CONTEXT, PROFILE_KIND, PROFILE_VERSION, Profile, ProfileSeconds, ProfileWidths
from specsim.io.arrays import Floats, finite_or_null
from specsim.io.errors import InputError

ENOUGH = 12  # samples of each cost
AUTOREGRESSIVE_BURST = 4
CATCH_UP = (4, 16, 64)  # tokens that a draft cache lacks after rounds of other drafters
NEGLIGIBLE = 20  # parts shorter than this fraction of a decoding step need be only as precise as one of this length

Cell = tuple[Key, int]  # a key and a context


class Probe(NamedTuple):
    """A round to measure: a chain of `tokens` drafted, with `masks` behind each, or a tree of `tokens` verified.

    nodes : of each draft pass of a tree, 0 of a chain
    """

    tokens: int
    masks: int = 0
    nodes: int = 0

    @property
    def keys(self) -> list[Key]:
        """List what the probe is there to sample; longer drafts have samples of shorter ones' steps, too."""
        if self.masks:
            return [("tree verify", pass_tokens(self.masks, self.tokens))]
        if self.nodes:
            return [("tree verify", self.tokens)] if self.tokens > 1 else []
        return [("verify", self.tokens + 1), *([("draft", self.tokens)] if self.tokens else [])]


BASELINE = Probe(0)


class Prober:
    """Runs probes of a pair on a decoder of its own, over a single text at a time.

    depth : longest draft; tree_tokens : largest tree, the pending token included, 0 for none
    """

    def __init__(self, pair: Pair, *, depth: int, tree_tokens: int, sampler: Sampler, seed: int):
        target, drafter = pair.make_drafter(())
        self.pair, self.drafter, self.target = pair, drafter, target
        self.decoder = Decoder(target, drafter, (), sampler, ScriptedVerifier(), ScriptedTreeVerifier())
        target.keep_hidden = drafter.wants_target_hidden
        self.rng = np.random.default_rng(seed)
        self.depth = min(depth, drafter.max_depth or depth)
        self.sizes = tree_sizes(tree_tokens if pair.trees else 0)
        self.longest = max(self.depth, min(PASSES, drafter.max_depth or PASSES)) if self.sizes else self.depth
        masked = masked_passes(self.depth) if pair.drafter.mask_groups else []
        self.chains = [
            *(Probe(tokens) for tokens in range(1, self.depth + 1)),
            *(Probe(drafted, masks) for masks, drafted in masked),
        ]
        self.length = 0

    @property
    def positions(self) -> int:
        """Give the maximum sequence length, in tokens, that both models support."""
        return min(self.target.max_positions, self.drafter.lm.max_positions)

    def probes(self) -> list[Probe]:
        """List all probes; each tree has draft passes over as many nodes as another, drawn anew, has tokens."""
        trees = zip(self.sizes, self.rng.permutation(self.sizes).tolist(), strict=True)
        return [BASELINE, *self.chains, *(Probe(tokens, nodes=nodes) for nodes, tokens in trees)]

    @torch.inference_mode()
    def warm(self, length: int) -> None:
        """Get both models ready for texts of `length` tokens."""
        room = length + self.longest + 2
        for features in (("score",), ()) if self.pair.predictor is not None else ((),):
            self.drafter.prepare(room, self.decoder.sampler, 0, self.longest + 1, features)
        warm_trees(self.decoder, self.sizes, range(1, self.depth + 2), room)

    @torch.inference_mode()
    def begin(self, tokens: Sequence[int]) -> None:
        """Cache a text but for its last token, which is pending."""
        self.tokens = list(tokens)
        self.target.reset()
        self.target.prefill(self.tokens[:-1])
        self.drafter.begin(self.tokens[:-1], self.decoder.produced_by(-1))

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        before = len(self.tokens) - 1
        self.tokens += tokens
        self.target.prefill(self.tokens[before:-1])
        self.drafter.commit(before, self.decoder.produced_by(-1))
        self.drafter.lm.prefill(self.tokens[self.drafter.lm.length : -1])

    @property
    def context(self) -> int:
        """Count the cached tokens."""
        return len(self.tokens) - 1

    @torch.inference_mode()
    def run(self, probe: Probe, stream: Stream, behind: int = 0) -> None:
        """Run a probe twice and keep the second: decoding seldom changes size as wildly as probes do.

        behind : tokens that the draft's own cache lacks at first; stream : where the sample goes
        """
        for samples in (Stream(), stream):
            if probe.nodes:
                round_ = scripted_tree_round(
                    self.decoder, self.tokens, self.context, probe.nodes, probe.tokens, self.rng
                )
            else:
                round_ = self._chain(probe.tokens, behind, probe.masks)
            self._add(samples, round_, tree=bool(probe.nodes), masks=probe.masks)

    @torch.inference_mode()
    def baseline(self, stream: Stream, rounds: int) -> None:
        """Run consecutive autoregressive steps, in caches that no drafter has used."""
        self._chain(0, 0, 0)
        for _ in range(rounds):
            stream.add_baseline(self._chain(0, 0, 0), self.context)

    @torch.inference_mode()
    def catch_up(self, stream: Stream, lacking: int) -> None:
        """Draft a single token twice, and keep the second; the cache lacks `lacking` tokens that others drafted."""
        for samples in (Stream(), stream):
            self._add(samples, self._chain(1, lacking, 0), lacking=lacking)

    @torch.inference_mode()
    def scores(self, stream: Stream) -> None:
        """Run the longest draft with the predictor's scores."""
        self._add(stream, scored_round(self.decoder, self.tokens, self.context, self.depth, self.rng), scored=True)

    def _add(self, stream: Stream, round_: Round, **how: Any) -> None:
        stream.add(round_, self.context, target_states=self.drafter.lm.reads_target_states, **how)

    def _chain(self, size: int, behind: int, masks: int) -> Round:
        return scripted_round(self.decoder, self.tokens, self.context, size, behind, self.rng, masks)


class ProbedText:
    """Runs the probes that have too few samples along a text; takes turns as a `Decoding` does.

    Parts that only a single arm runs are probed as well, so that there are enough samples without that arm's.

    met : samples of every arm; probed : samples of all probes, which grow when this text is done
    samples : those of this text
    texts_left : texts over which the missing samples are spread, this text included
    """

    def __init__(
        self,
        prober: Prober,
        met: Sequence[Stream],
        probed: Stream,
        prompt: Sequence[int],
        output: Sequence[int],
        texts_left: int,
    ):
        text = prober.pair.drafter.profiling_text([*prompt, *output])
        self.prober, self.met, self.probed, self.output = prober, met, probed, text[len(prompt) :]
        self.samples = Stream()
        self.position, self.behind = 0, 0
        self.lacking = self._lacking()
        self.owed = math.ceil(sum(self.lacking.values()) / texts_left)
        self.done = not self.owed
        if not self.done:
            self.stride = len(output) / self.owed
            prober.begin(text[: len(prompt)])

    def _lacking(self) -> dict[Probe, int]:
        """Count the samples that are missing of each probe."""
        lacking = {}
        for probe in self.prober.probes():
            keys = probe.keys
            if probe.nodes and passes(probe.nodes, self.prober.drafter.max_depth) > 1:  # the first ingests one token
                keys.append(("tree draft", probe.nodes))
            lacking[probe] = max(0, ENOUGH - min((self._count(*key) for key in keys), default=ENOUGH))
        return lacking

    def _count(self, *parts: Any) -> int:
        """Count the samples of a kind, without those of the arm that has most of them."""
        counts = [stream.count(*parts) for stream in self.met]
        return sum(counts) - max(counts, default=0) + self.probed.count(*parts)

    def advance(self) -> None:
        """Run the probe that lacks most samples."""
        prober = self.prober
        probe = max(self.lacking, key=self.lacking.__getitem__)
        prober.run(probe, self.samples, behind=self.behind)
        self.lacking[probe] -= 1
        self.behind = 1 - self.behind
        self.owed -= 1
        before, self.position = self.position, round(len(self.output) - self.owed * self.stride)
        self.done = not self.owed
        if self.done:
            self.probed.merge(self.samples.as_dict())
        else:
            prober.extend(self.output[before : self.position])


def probing_s(pair: Pair, cost: CostModel, context: float, *, depth: int, tree_tokens: int) -> float:
    """Estimate by costs how long `ProbedText` takes over all samples, if no arm runs what it probes.

    depth, tree_tokens : as of `Prober`
    """
    seconds = [cost.verify(1, context)]
    seconds += [cost.draft(k, context) + cost.verify(k + 1, context) for k in range(1, depth + 1)]
    if pair.drafter.mask_groups:
        for masks, drafted in masked_passes(depth):
            draft_s = cost.draft(drafted, context) if drafted else 0.0
            seconds.append(draft_s + cost.tree_verify(pass_tokens(masks, drafted), context))
        seconds.append(len(seconds) * cost.tree_verify(pass_tokens(depth, 0), context))  # of the pass before each
    for size in tree_sizes(tree_tokens if pair.trees else 0):
        drafted = min(passes(size), depth)
        draft_s = cost.draft(drafted, context) + drafted * cost.wider(size, context)
        seconds.append(draft_s + cost.tree_verify(size, context))
    return 2 * ENOUGH * float(sum(seconds))  # a probe runs twice


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

    def profile(self, **facts: Any) -> Profile:
        """Make the cost profile of all sweeps. facts : keys to add"""
        stream = Stream()
        for samples in self.done:
            stream.merge(samples.as_dict())
        widths = {key: mean.relative_half_width for key, mean in self.means().items()}
        facts = {"sweeps": len(self.done), **facts}
        return profile_from(stream, self.contexts, self.prober, self.seed, widths, **facts)


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


def profile_from(
    stream: Stream, contexts: Sequence[int], prober: Prober, seed: int, widths: Mapping[Key, Floats], **facts: Any
) -> Profile:
    """Make a cost profile of samples.

    widths : relative half-widths of the means, as far as known; facts : more keys, such as how often was measured
    """
    pair, masks = prober.pair, prober.pair.drafter.mask_groups
    tables = stream.tables(contexts, prober.depth, [1] if masks else prober.sizes, masks=masks)
    document = {
        "kind": PROFILE_KIND,
        "version": PROFILE_VERSION,
        **measurement_facts(prober, contexts, seed),
        "drafter_facts": pair.drafter.facts,
        "block_expansion": expansion_of(pair.target),
        **facts,
        **tables,
    }
    if widths:
        document["relative_half_width"] = _half_widths(widths, tables["mean_s"], len(contexts))
    return Profile.from_json(document, "just measured")


def _half_widths(widths: Mapping[Key, Floats], table: ProfileSeconds, contexts: int) -> ProfileWidths:
    """Arrange half-widths as the times of a profile are; None where a time was not measured."""
    widths = {**widths, ("tree verify", 1): widths["verify", 1]}

    def rows(kind: str, sizes: Iterable[int]) -> list[list[float | None]]:
        return finite_or_null(np.array([widths.get((kind, size), np.full(contexts, np.nan)) for size in sizes]))

    arranged: ProfileWidths = {
        "draft_step": rows("draft", range(1, len(table["draft_step"]) + 1)),
        "verify": rows("verify", range(1, len(table["verify"]) + 1)),
        "autoregressive": finite_or_null(widths["autoregressive",]),
    }
    if tree := table.get("tree"):
        arranged |= {"tree_sizes": tree["sizes"], "tree_verify": rows("tree verify", tree["sizes"])}
    return arranged


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
