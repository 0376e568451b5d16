"""Decode held-out prompts with all arms in turns and in repeats, and keep every sequence to resume from.

The costs of the same run follow from the rounds of its arms, and from probes among them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec
import numpy as np

from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler
from realrun.experiment.timing import Arm, Timings, WallClock, decode_sequence, turned, warm_up
from realrun.kept_files import read_kept
from realrun.lm.llama import shared_prefill
from realrun.machine_load import Load, Ticks, load_from, watch
from realrun.measure.interleaving import TURN_ROUNDS
from realrun.measure.profile import contexts_between
from realrun.measure.stream import Samples, Stream
from realrun.measure.sweeps import ProbedText, Prober, profile_from
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.profile import Profile
from specsim.cost.table import context_range
from specsim.io.arrays import Floats
from specsim.io.files import write_json
from specsim.io.progress import Counter
from specsim.policy.base import Policy
from specsim.replaying.intervals import Estimate, noise_floor_percent, ratio_interval
from specsim.trace.trace import Trace

Run = tuple[Policy | None, int, list[Round]]  # policy, prompt tokens, rounds
PROBES = "probes.json"  # those that were still missing at the end
QUIET_PERCENT = 1.0  # noise floor at which another repeat would tell little


class MeasuredCosts:
    """Costs of a pair while its arms decode a trace.

    probed : samples of the probes so far

    Parameters
    ----------
    trace : that the arms decode
    beside : another trace to be priced by these costs, whose contexts they cover too
    texts : to be probed along in all, every repeat counted
    own_baseline : whether the baseline runs the pair's own pass, or a pass that other pairs share
    arms : numbers of the arms whose rounds are samples of these costs
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
        arms: Sequence[int] = (),
    ):
        self.own_baseline, self.arms = own_baseline, arms
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
        met = [*self.met.values()]
        return ProbedText(self.prober, met, self.probed, prompt.tokens, output, left)

    def finish(self, prompt: Prompt, index: int, earlier: Samples | None = None) -> Samples:
        """Probe what is still missing, where there were too few texts to probe along; the samples, for `resume`.

        earlier : samples of earlier starts, which come first
        """
        self.texts_left = 1
        probing = self.probing(prompt, index)
        while not probing.done:
            probing.advance()
        samples = Stream() if earlier is None else Stream.of(earlier)
        samples.merge(probing.samples.as_dict())
        return samples.as_dict()

    def resume(self, probed: Samples, texts: int = 1) -> None:
        """Go on with these samples of probes, as `Stream.as_dict` gives them, along so many of the texts."""
        self.probed.merge(probed)
        self.texts_left = max(1, self.texts_left - texts)

    def saw(self, runs: Iterable[Run]) -> None:
        """Runs of the arms: what several of them tell, no probe need tell."""
        for run in runs:
            self._add(self.met.setdefault(str(run[0]), Stream()), [run])

    def profile(self, runs: Iterable[Run], repeats: int) -> Profile:
        """The profile that follows from these runs and the probes."""
        stream = Stream()
        stream.merge(self.probed.as_dict())
        self._add(stream, runs)
        return profile_from(stream, self.contexts, self.prober, self.seed, {}, repeats=repeats)

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


class SequenceRuns(NamedTuple):
    """Every arm's run of a sequence in a repeat, the samples of probes among them, and the machine's ticks."""

    runs: list[Decoded]
    probes: Samples
    ticks: Ticks


class SequenceFile(TypedDict):
    """What the file of a decoded sequence holds: arms by name and settings, and the fields of `SequenceRuns`."""

    arms: list[list[Any]]
    runs: list[Decoded]
    probes: Samples
    ticks: Ticks


@dataclass(frozen=True)
class Measurement:
    """Prompts that a baseline, several policies and the baseline once more (the A/A test) decoded in turns.

    arms, prompts : in the order of `timings`
    load : how busy other processes kept the machine meanwhile
    """

    arms: Sequence[Arm]
    prompts: Sequence[Prompt]
    timings: Timings
    load: Load

    @property
    def sequences(self) -> range:
        return range(len(self.prompts))

    @property
    def repeats(self) -> int:
        """Count the runs of every prompt by every arm."""
        return len(self.timings.runs[0, 0])

    @cached_property
    def seconds(self) -> list[Floats]:
        """Seconds of every arm [S] at the median of repeats, for as many tokens as the baseline emitted."""
        return [self.timings.seconds_for_baseline(arm, self.sequences) for arm in range(len(self.arms))]

    @cached_property
    def speedups(self) -> list[Estimate]:
        """Speedup of every arm over the baseline."""
        return [ratio_interval(self.seconds[0], own_s) for own_s in self.seconds]

    @property
    def fastest(self) -> int:
        """Return the number of the fastest policy's arm; the first of equals."""
        return max(range(1, len(self.arms) - 1), key=lambda arm: self.speedups[arm])

    @cached_property
    def null_arm(self) -> Estimate:
        """The baseline's seconds over those of its repetition."""
        return ratio_interval(self.seconds[0], self.seconds[-1])

    @property
    def noise_floor_percent(self) -> float:
        return noise_floor_percent(self.null_arm)

    @cached_property
    def baseline_tokens(self) -> int:
        """Tokens that the baseline emitted in `seconds[0]`."""
        return sum(len(run.tokens) for run in self.last_runs(0))

    def last_runs(self, arm: int) -> list[Decoded]:
        """Return the last run of every sequence."""
        return self.timings.last_runs(arm, self.sequences)

    def typical_rounds(self, arm: int) -> list[list[Round]]:
        """Return the rounds of every sequence, each at the median of its repeats."""
        return [self.timings.rounds(arm, index) for index in self.sequences]

    def runs(self, arms: Iterable[int]) -> Iterator[Run]:
        """Yield the typical rounds of these arms with policy and prompt tokens, as costs are made of them."""
        for arm in arms:
            for prompt, rounds in zip(self.prompts, self.typical_rounds(arm), strict=True):
                yield self.arms[arm].policy, len(prompt.tokens), rounds

    def wall_clock(self, arm: int, measured: Estimate) -> WallClock:
        """Return the arm's wall-clock speedup beside the measured one."""
        baseline_s, own_s = (self.timings.wall_s_for_baseline(number, self.sequences) for number in (0, arm))
        return WallClock.of(baseline_s, own_s, measured, self.noise_floor_percent)


def measure_in_turns(
    arms: Sequence[Arm],
    costs: Mapping[str, MeasuredCosts],
    prompts: Sequence[Prompt],
    trace: Trace,
    folder: Path | None,
    *,
    repeats: int,
    seed: int,
    progress: Counter,
    more_until_s: float | None = None,
) -> Measurement:
    """Decode every prompt with every arm in every repeat, and watch how busy others keep the machine meanwhile.

    All arms decode a sequence at once, as `realrun.experiment.timing` says. Runs of these arms that the folder holds
    are read, with the state of every policy that carries it from sequence to sequence: so rounds are those of a
    measurement that nothing interrupted.

    Parameters
    ----------
    costs : by name; the probes of one of them take turns with the arms on each sequence
    prompts : of the trace's sequences, whose budgets and numbers they take
    folder : where a file for each repeat and sequence is kept; None keeps nothing
    progress : called with the sequences done in all repeats and their number
    more_until_s : time.monotonic() by which the repeats after the first must end, which are made, all or none, only if
        the first leaves a noise floor of more than `QUIET_PERCENT`; None makes them all
    """
    sure = repeats if more_until_s is None else 1
    timings, ticks, names, total = Timings(), list[Ticks](), list(costs), sure * len(prompts)
    decoding = _Decoding(arms, prompts, trace, seed)
    samplers = [arm.decoder.sampler for arm in arms]
    missing = (folder and read_kept(folder / PROBES, dict[str, Samples])) or {}
    for name, samples in missing.items():
        costs[name].resume(samples, texts=0)
    for repeat in range(repeats):
        order, resuming = np.random.default_rng((seed, repeat)), True
        states: list[Any] = [None] * len(arms)
        if trace.sampled_by_rejection:  # every run draws a text; several show the mean better than one
            for arm, sampler in zip(arms, samplers, strict=True):
                arm.decoder.sampler = replace(sampler, seed=sampler.seed + repeat)
        for index, prompt in enumerate(prompts):
            number = repeat * len(prompts) + index
            measured = costs[names[number % len(names)]]
            path = None if folder is None else folder / f"{repeat}-{index}.json"
            # Sequences behind a newly decoded sequence would go on from other states.
            done = _runs_from(path, arms) if path and resuming else None
            if done is None:
                resuming = False
                if not decoding.warm:
                    progress(number, total)  # the first takes long
                done = decoding.decode(repeat, index, states, order, measured)
                if path is not None:
                    runs = msgspec.to_builtins(done._asdict(), enc_hook=float)
                    write_json({"arms": _names(arms), **runs}, path)
            else:
                measured.resume(done.probes)
            states = [run.state for run in done.runs]
            ticks.append(done.ticks)
            for place, run in enumerate(done.runs):
                timings.add(place, index, run)
            for cost in costs.values():
                cost.saw((arms[at].policy, len(prompt.tokens), done.runs[at].rounds) for at in cost.arms)
            progress(number + 1, total)
        if sure < repeats:
            others_s = (repeats - 1) * sum(runs[0].seconds for runs in timings.runs.values())
            floor_percent = Measurement(arms, prompts, timings, load_from(ticks)).noise_floor_percent
            if floor_percent <= QUIET_PERCENT or time.monotonic() + others_s > (more_until_s or 0.0):
                break
            sure, total = repeats, repeats * len(prompts)
    last = len(prompts) - 1
    probes = {name: cost.finish(prompts[last], last, missing.get(name)) for name, cost in costs.items()}
    if folder is not None:
        write_json({**missing, **probes}, folder / PROBES)
    return Measurement(arms, prompts, timings, load_from(ticks))


@dataclass
class _Decoding:
    """Decodes sequences by all arms, each arm on another's decoder in every second sequence."""

    arms: Sequence[Arm]
    prompts: Sequence[Prompt]
    trace: Trace
    seed: int
    warm: bool = False

    def decode(
        self, repeat: int, index: int, states: Sequence[Any], order: np.random.Generator, measured: MeasuredCosts
    ) -> SequenceRuns:
        """Decode the sequence of this index, beside probes of these costs."""
        exchanged = turned(self.arms)
        if not self.warm:
            warm_up([*self.arms, *exchanged], self.prompts, self.trace)
            self.warm = True
        prompt = self.prompts[index]
        load = watch()
        with shared_prefill():
            probing = measured.probing(prompt, index)
            runs = decode_sequence(
                exchanged if (repeat + index) % 2 else self.arms,
                prompt,
                self.trace,
                index,
                states,
                seed=self.seed,
                order=order,
                beside=probing,
                shift=repeat % TURN_ROUNDS,
            )
        return SequenceRuns(runs, probing.samples.as_dict(), load())


def _names(arms: Sequence[Arm]) -> list[list[Any]]:
    """Return names and settings of arms, as JSON gives them back."""
    return json.loads(json.dumps([[arm.name, arm.policy and arm.policy.settings] for arm in arms]))


def _runs_from(path: Path, arms: Sequence[Arm]) -> SequenceRuns | None:
    """Return the runs in a file; None if there are none, or of other arms."""
    document = read_kept(path, SequenceFile)
    if document is None or document["arms"] != _names(arms):
        return None
    return msgspec.convert([document[name] for name in SequenceRuns._fields], SequenceRuns)
