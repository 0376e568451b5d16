"""Scripted acceptance: true shapes with random weights, accepted and rejected as a trace says.

All compute is real: draft steps, copies to the host, policy decisions, target passes and caches are those of a decoding
run, through the same loop. Only the text is not: token ids are arbitrary. What is accepted, and what the policy sees of
each drafted token, is read from a dense trace, position by position, so that rounds are those of the replay. This
validates predicted time at the size of models whose weights are not at hand.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft, Drafter, KeepDrafting
from realrun.decode.rounds import Decoded, Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.experiment.pipeline import candidates
from realrun.experiment.settings import Candidate
from realrun.experiment.timing import Timings, WallClock, check_repeats
from realrun.experiment.validate import Row, choice_of, forecasts_of, rounds_identical, row_document
from realrun.lm.cached import CachedLM
from realrun.measure.profile import ProfileSlices, contexts_between
from realrun.measure.rounds import ScriptedVerifier
from realrun.pairs.pair import Pair
from realrun.pairs.shapes import describe, random_pair, vocabulary
from realrun.provenance import provenance
from specsim.cost.profile import ProfileCost
from specsim.cost.table import context_range
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.learn.settings import SearchSettings
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.replaying.chain import or_unread
from specsim.replaying.checks import check_replayable
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.kernel import step_functions
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.prediction import summarise
from specsim.replaying.priced import PricedTrace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

WARM_UP_ROUNDS = 8
KIND, VERSION = "specsim-scripted", 1
BASELINE = -1  # its number among the arms
MIN_SEQUENCES = 2  # run whatever the time, since an interval needs them


class Script:
    """What a trace says about each (sequence id, output position)."""

    def __init__(self, trace: Trace):
        self._first_row = dict(zip(trace.sequence_id.tolist(), trace.offsets[:-1].tolist(), strict=True))
        optional = [or_unread(trace, column) for column in (trace.score, trace.top10_confidence)]
        self._features = np.stack([trace.prob, trace.confidence, trace.entropy_nats, *optional], axis=-1)
        self.match_len: list[int] = trace.match_len.tolist()
        self.draft_limit: list[int] = trace.draft_limit.tolist()

    def row(self, sequence: int, position: int) -> int:
        """Row of the trace's arrays over positions."""
        return int(self._first_row[sequence] + position)

    def step(self, row: int, depth: int) -> Step:
        """Features of the token drafted at this depth, from 1."""
        return Step(*self._features[row, depth - 1].tolist())


class ScriptedDrafter:
    """Drafts for real; the policy sees, and the draft ends, what and where the trace says."""

    def __init__(self, drafter: Drafter, script: Script):
        self.drafter, self.script = drafter, script
        self.wants_target_hidden = False  # scores come from the trace

    def prepare(
        self, length: int, sampler: Sampler, sequence: int, positions: int, features: Sequence[str] = ()
    ) -> None:
        self.drafter.prepare(length, sampler, sequence, positions)

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        self.drafter.begin(context)

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft:
        row = self.script.row(context.sequence, context.position)
        limit = min(context.limit, self.script.draft_limit[row])
        if limit == 0:
            return Draft()

        def scripted(step: Step, depth: int) -> bool:
            return keep(self.script.step(row, depth), depth)

        draft = self.drafter.propose(tokens, context._replace(limit=limit), scripted)
        draft.steps = [self.script.step(row, depth) for depth in range(1, len(draft.tokens) + 1)]
        return draft

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None:
        self.drafter.commit(length)


class TraceVerifier(ScriptedVerifier):
    """Does the verifier's work, then accepts as many tokens as the trace says."""

    def __init__(self, script: Script):
        super().__init__()
        self.script = script

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        self.accept = min(len(draft.tokens), self.script.match_len[self.script.row(context.sequence, context.position)])
        return super().__call__(logits, draft, context)


class ScriptedDecoder:
    """Runs a trace's rounds on a pair of models. The trace's prompts become random text of their length."""

    def __init__(self, pair: Pair, trace: Trace, sampler: Sampler, seed: int):
        script = Script(trace)
        target, draft = pair.make_drafter(())
        self.trace, self.seed, self.draft_lm = trace, seed, draft.lm
        self.decoder = Decoder(target, ScriptedDrafter(draft, script), (), sampler, TraceVerifier(script))
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        self._tokens: list[int] = np.random.default_rng(seed).integers(1, vocabulary(pair), longest).tolist()

    @torch.inference_mode()
    def warm_up(self, policies: Sequence[ChainPolicy]) -> None:
        """Make room, record every size of pass, compile every policy: nothing of it belongs on the clock."""
        length, depth = len(self._tokens) + self.trace.depth + 2, self.trace.depth
        self.decoder.target.warm(range(1, depth + 2), length)
        self.decoder.drafter.prepare(length, self.decoder.sampler, int(self.trace.sequence_id[0]), depth)
        for policy in policies:
            self.speculative(0, policy, most_rounds=WARM_UP_ROUNDS)

    @torch.inference_mode()
    def speculative(self, index: int, policy: ChainPolicy, *, most_rounds: int | None = None) -> list[Round]:
        """The rounds of the trace's index-th sequence, all of them unless told."""
        trace, decoder = self.trace, self.decoder
        prompt, length = int(trace.prompt_tokens[index]), int(trace.output_tokens[index])
        sequence, rounds = int(trace.sequence_id[index]), list[Round]()
        self._prepare(sequence, length)
        for lm in (decoder.target, self.draft_lm):
            self._rewind(lm, prompt - 1)
        tokens, state = self._tokens[:prompt], step_functions(policy).initial_state(policy.params)
        while (t := len(tokens) - prompt) < length and (most_rounds is None or len(rounds) < most_rounds):
            context = RoundContext(decoder.sampler, sequence, t, policy.max_draft_tokens, self.seed)
            state, _ = decoder.round(tokens, context, policy, state, rounds)
        return rounds

    @torch.inference_mode()
    def autoregressive(self, index: int, start: int, end: int) -> list[Round]:
        """The baseline's rounds for output positions start .. end - 1 of a sequence, in warm caches."""
        trace, decoder = self.trace, self.decoder
        prompt, sequence = int(trace.prompt_tokens[index]), int(trace.sequence_id[index])
        rounds: list[Round] = []
        self._prepare(sequence, end)
        for warm, last in ((False, start + 1), (True, end)):
            tokens = self._tokens[: prompt + start]
            self._rewind(decoder.target, len(tokens) - 1)
            for t in range(start, last):
                context = RoundContext(decoder.sampler, sequence, t, 0, self.seed)
                decoder.round(tokens, context, None, None, rounds if warm else [])
        return rounds

    def _prepare(self, sequence: int, positions: int) -> None:
        """Make the noise of a sampled choice ahead of the clock, for drafts beyond the last position too."""
        model, sampler = self.decoder.target.model, self.decoder.sampler
        positions += self.trace.depth + 1
        sampler.prepare(sequence, positions, int(model.config.vocab_size), self.decoder.target.device, model.dtype)

    def _rewind(self, lm: CachedLM, length: int) -> None:
        """Make the cache `length` tokens long. Text that was there may stay, as it means nothing."""
        lm.truncate(length)
        lm.prefill(self._tokens[lm.length : length])


def with_prefix(trace: Trace, tokens: int) -> Trace:
    """The same trace behind that many more tokens of prompt."""
    return dataclasses.replace(trace, prompt_tokens=trace.prompt_tokens + tokens, prompt=None)


@dataclass(frozen=True)
class ScriptedSettings:
    """How to tune and run.

    context : tokens of random text put before every prompt, so that long contexts can be validated
    policies : default: tuned on one half of the sequences, as in `realrun.experiment.validate`, and run on the other
    sampler : how tokens are chosen; the trace's own mode does not matter here
    minutes : of profiling and running together. Sequences are run in random order, and no sequence is
        begun that would not be done in that time; the first two are run whatever the time
    """

    context: int = 0
    policies: Sequence[ChainPolicy] | None = None
    trials: int = 100
    repeats: int = 3
    sampler: Sampler = Sampler()
    seed: int = 0
    minutes: float | None = None

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        if self.context < 0:
            raise InputError(f"context={self.context}; give 0 or more tokens")


def scripted_validation(
    pair: Pair,
    trace: Trace,
    settings: ScriptedSettings,
    progress: Progress = lambda what, done, total: None,
    begun: float | None = None,
) -> dict[str, Any]:
    """Predict and really run the trace's rounds on this pair; the result as a JSON document.

    begun : on time.monotonic(), when the minutes begin, default now

    Every sequence is run by every policy in shuffled order, with a burst of the autoregressive
    baseline before each; together the bursts cover the sequence once. Every round is taken at the
    median of its repeats. The profile is taken in slices between the repeats, since machines drift.
    """
    begun = time.monotonic() if begun is None else begun
    deadline = np.inf if settings.minutes is None else begun + 60 * settings.minutes
    seed, repeats = settings.seed, settings.repeats
    vocabulary(pair)
    trace = with_prefix(trace, settings.context)  # runs take what was accepted from the trace
    for policy in settings.policies or ():
        check_replayable(trace, policy)
        if policy.carries_state:  # sequences are run in random order, and not always all of them
            raise InputError(f"policy {policy} carries its state over sequences; let it start anew with each")
    slices = ProfileSlices(
        pair,
        1 + repeats,
        lambda done, total: progress("profile", done, total),
        contexts=contexts_between(*context_range(trace)),
        depth=trace.depth,
        sampler=settings.sampler,
        seed=seed,
    )
    slices.measure()
    if settings.policies is None:
        tuning, held = split_sequences(trace, seed=seed)
        train, holdout = trace.select(tuning), trace.select(held)
        chosen, _ = candidates(
            train, slices.profile.cost, SearchSettings(trials=settings.trials, seed=seed), progress=progress
        )
    else:
        train, holdout = trace.select([]), trace
        chosen = [Candidate(policy, "given") for policy in settings.policies]
    runner = ScriptedDecoder(pair, holdout, settings.sampler, seed)
    pace, timings = _Pace(deadline, slices), Timings()
    complete = _run_repeats(runner, chosen, pace, timings, settings, progress)
    done = np.array(sorted(index for arm, index in timings.runs if arm == BASELINE))
    autoregressive_s = timings.seconds(BASELINE, done.tolist())
    rows = _rows(holdout.select(done), chosen, slices.profile.cost, timings, done.tolist(), seed)
    forecasts = forecasts_of(rows)
    return {
        "kind": KIND,
        "version": VERSION,
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "shapes": {
            "target": describe(pair.target.config, pair.dtype),
            "drafter": describe(pair.draft_config, pair.dtype),
        },
        "trace": {key: trace.meta.get(key) for key in ("target", "drafter", "decoding", "depth")},
        "decoding": settings.sampler.as_dict(),
        "context": settings.context,
        "sequences": {"tuning": train.sequences, "holdout": holdout.sequences, "run": len(done)},
        "output_tokens": int(holdout.output_tokens[done].sum()),
        "done": {
            "minutes": None if settings.minutes is None else float(settings.minutes),
            "spent_minutes": (time.monotonic() - begun) / 60,
            "stopped_early": pace.done < repeats * holdout.sequences,
            "repeats": complete,
            "repeats_asked": repeats,
            "sequence_runs": pace.done,
            "sequence_runs_asked": repeats * holdout.sequences,
        },
        "autoregressive_sequence_seconds": autoregressive_s.tolist(),
        "rows": sorted((row_document(row) for row in rows), key=lambda r: -r["measured"]["estimate"]),
        "median_abs_error_percent": float(np.median([abs(row.error_percent) for row in rows])),
        "choice": choice_of(forecasts, autoregressive_s, 0.0) if forecasts else None,
        "profile": slices.profile.as_dict(),
        "provenance": provenance(pair.device, pair.number_type),
    }


def _run_repeats(
    runner: ScriptedDecoder,
    chosen: Sequence[Candidate],
    pace: _Pace,
    timings: Timings,
    settings: ScriptedSettings,
    progress: Progress,
) -> int:
    """Run all sequences in repeats while there is time, with a slice of costs after each; count complete repeats."""
    arms = [candidate.policy for candidate in chosen if isinstance(candidate.policy, ChainPolicy)]
    runner.warm_up(arms)
    sequences, order = runner.trace.sequences, np.random.default_rng(settings.seed)
    baseline, index_order = _Baseline(runner, timings), order.permutation(sequences).tolist()
    for repeat in range(settings.repeats):
        before = pace.done
        for index in pace.within(index_order, lambda done: progress("run", done, settings.repeats * sequences)):
            for place, arm in enumerate(order.permutation(len(arms)).tolist()):
                baseline.burst(index, place, len(arms))  # together they cover the sequence once
                timings.add(arm, index, Decoded([], runner.speculative(index, arms[arm]), 0.0))
        if pace.done > before:
            pace.slices.measure()
        if pace.done < before + sequences:
            return repeat
    return settings.repeats


class _Pace:
    """Yields sequences as long as there is time; the first two whatever the time."""

    def __init__(self, deadline: float, slices: ProfileSlices):
        self.deadline, self.slices = deadline, slices
        self.done, self.longest_s = 0, 0.0

    def within(self, sequences: Iterable[int], report: Callable[[int], None]) -> Iterator[int]:
        for sequence in sequences:
            start = time.monotonic()
            # The sequence and the last slice of the profile need their time as well.
            late = start + self.longest_s + self.slices.longest_s > self.deadline
            if late and self.done >= MIN_SEQUENCES:
                return
            yield sequence
            self.done += 1
            self.longest_s = max(self.longest_s, time.monotonic() - start)
            report(self.done)


class _Baseline:
    """The autoregressive runs, each cut into as many bursts as there are turns."""

    def __init__(self, runner: ScriptedDecoder, timings: Timings):
        self.runner, self.timings = runner, timings
        self.rounds: list[Round] = []

    def burst(self, sequence: int, place: int, places: int) -> None:
        length = int(self.runner.trace.output_tokens[sequence])
        cuts = np.linspace(0, length, places + 1).round().astype(int).tolist()
        if place == 0:
            self.rounds = []
        if cuts[place] < cuts[place + 1]:
            self.rounds += self.runner.autoregressive(sequence, cuts[place], cuts[place + 1])
        if place == places - 1:
            self.timings.add(BASELINE, sequence, Decoded([], self.rounds, 0.0))


def _rows(
    trace: Trace, chosen: Sequence[Candidate], cost: ProfileCost, timings: Timings, done: Sequence[int], seed: int
) -> list[Row]:
    """Predicted beside measured, over the sequences that were run."""
    priced, baseline_s = PricedTrace(trace, cost), timings.seconds(BASELINE, done)
    oracle_s = chain_oracle_seconds(trace, priced.table())
    rows = []
    for arm, candidate in enumerate(chosen):
        replayed = priced.replay(candidate.policy, seed=seed, log=True)
        decoded, own_s = timings.last_runs(arm, done), timings.seconds(arm, done)
        measured = ratio_interval(baseline_s, own_s)
        rows.append(
            Row(
                candidate=candidate,
                priced=priced,
                replayed=replayed,
                predicted=summarise(replayed, oracle_s),
                measured=measured,
                wall_clock=WallClock.of(timings.wall_s(BASELINE, done), timings.wall_s(arm, done), measured, 0.0),
                speculative_s=own_s,
                rounds=[timings.rounds(arm, index) for index in done],
                runs=decoded,
                rounds_identical=rounds_identical(replayed, decoded),
            )
        )
    return rows


def run_scripted(
    target: str,
    draft: str,
    trace: Trace,
    settings: ScriptedSettings,
    *,
    device: str = "cuda",
    dtype: str = "bfloat16",
    smoke: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """`scripted_validation` of two named shapes, made with as many positions as the trace needs.

    The minutes cover making the models too.
    """
    begun = time.monotonic()
    positions = context_range(with_prefix(trace, settings.context))[1] + trace.depth + 4
    pair = random_pair(target, draft, device=device, dtype=dtype, positions=positions, smoke=smoke, seed=settings.seed)
    return scripted_validation(pair, trace, settings, progress, begun)
