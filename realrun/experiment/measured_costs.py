"""The cost profile of a measurement: of the rounds of its own arms, and of probes among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from realrun.decode.rounds import Round
from realrun.decode.sampling import Sampler
from realrun.measure.probes import ProbedText, Prober
from realrun.measure.profile import contexts_between
from realrun.measure.stream import Stream
from realrun.measure.sweeps import profile_document
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.table import context_range
from specsim.policy.base import Policy
from specsim.trace.trace import Trace

Run = tuple[Policy | None, int, list[Round]]  # policy, prompt tokens, rounds


class MeasuredCosts:
    """Costs of a pair while its arms decode a trace.

    probed : samples of the probes so far

    Parameters
    ----------
    trace : that the arms decode
    beside : another trace to be priced by these costs, whose contexts they cover too
    texts : to be probed along in all, every repeat counted
    own_baseline : whether the baseline runs the pair's own pass, or a pass that other pairs share
    """

    def __init__(
        self,
        pair: Pair,
        trace: Trace,
        *,
        tree_tokens: int,
        sampler: Sampler,
        seed: int,
        texts: int,
        own_baseline: bool = True,
        beside: Trace | None = None,
    ):
        self.own_baseline = own_baseline
        self.trace, self.seed, self.texts_left = trace, seed, texts
        self.masks = pair.drafter.mask_groups
        self.prober = Prober(pair, depth=trace.depth, tree_tokens=tree_tokens, sampler=sampler, seed=seed)
        self.met: dict[str, Stream] = {}  # by policy
        self.probed = Stream()
        lows, highs = zip(*(context_range(part) for part in (trace, beside) if part is not None), strict=True)
        self.contexts = contexts_between(min(lows), max(highs))
        self.prober.warm(self.contexts[-1])

    def probing(self, prompt: Prompt, index: int) -> ProbedText:
        """Probes along the trace's sequence of this index."""
        output = self.trace.token[self.trace.offsets[index] : self.trace.offsets[index + 1]].tolist()
        left, self.texts_left = self.texts_left, max(1, self.texts_left - 1)
        return ProbedText(self.prober, [*self.met.values()], self.probed, prompt.tokens, output, left)

    def finish(self, prompt: Prompt, index: int) -> dict[str, Any]:
        """Probe what is still missing, where there were too few texts to probe along; the samples, for `resume`."""
        self.texts_left = 1
        probing = self.probing(prompt, index)
        while not probing.done:
            probing.advance()
        return probing.samples.as_dict()

    def resume(self, probed: Mapping[str, Any], texts: int = 1) -> None:
        """Go on with these samples of probes, as `Stream.as_dict` gives them, along so many of the texts."""
        self.probed.merge(probed)
        self.texts_left = max(1, self.texts_left - texts)

    def saw(self, runs: Iterable[Run]) -> None:
        """Runs of the arms: what several of them tell, no probe need tell."""
        for run in runs:
            self._add(self.met.setdefault(str(run[0]), Stream()), [run])

    def document(self, runs: Iterable[Run], repeats: int) -> dict[str, Any]:
        """The profile that follows from these runs and the probes, as JSON."""
        stream = Stream()
        stream.merge(self.probed.as_dict())
        self._add(stream, runs)
        return profile_document(stream, self.contexts, self.prober, self.seed, repeats=repeats)

    def _add(self, stream: Stream, runs: Iterable[Run]) -> None:
        for policy, prompt_tokens, rounds in runs:
            stream.add_run(
                rounds,
                prompt_tokens,
                policy,
                masks=self.masks,
                own_pass=self.own_baseline,
                target_states=self.prober.drafter.lm.reads_target_states,
            )
