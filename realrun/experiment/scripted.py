"""Scripted acceptance: true shapes with random weights, accepted and rejected as a trace says.

All compute is real: draft steps, copies to the host, policy decisions, target passes and caches are those of a decoding
run, through the same loop. Only the text is not: token ids are arbitrary. What is accepted, and what the policy sees of
each drafted token, is read from a dense trace, position by position, so that rounds are those of the replay. This
validates predicted time at the size of models whose weights are not at hand.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.draft import Draft, Drafter, KeepDrafting
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.experiment.pipeline import candidates
from realrun.experiment.settings import Candidate
from realrun.experiment.timing import Arm, Timings, WallClock, check_repeats, turned
from realrun.experiment.validate import choice_of, compared_row, forecasts_of, median_error, rounds_identical
from realrun.measure.interleaving import TURN_ROUNDS, take_turns
from realrun.measure.profile import contexts_between, profile_slice
from realrun.measure.rounds import ScriptedVerifier
from realrun.measure.stream import Stream
from realrun.pairs.pair import Pair
from realrun.pairs.shapes import describe, random_pair, vocabulary
from realrun.provenance import provenance
from specsim.cost.profile import Profile, ProfileCost
from specsim.cost.table import context_range
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.learn.settings import SearchSettings
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.replaying.chain import or_unread
from specsim.replaying.checks import check_replayable
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.priced import PricedTrace
from specsim.report.experiment import Row
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

WARM_UP_ROUNDS = 8
SLICE_SWEEPS = 10  # of a slice of the profile
KIND, VERSION = "specsim-scripted", 1
BASELINE = 0  # its number among the arms
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


def scripted_arm(name: str, policy: ChainPolicy | None, pair: Pair, script: Script, sampler: Sampler) -> Arm:
    """An arm with its own caches, whose rounds go as the script says; no token ends a text."""
    target, draft = pair.make_drafter(())
    return Arm(name, policy, Decoder(target, ScriptedDrafter(draft, script), (), sampler, TraceVerifier(script)), 0)


class ScriptedDecoding(Decoding):
    """Decodes a trace's sequence of this index, to the end of its output.

    text : random tokens, of which the prompt takes the first
    """

    def __init__(self, arm: Arm, trace: Trace, index: int, text: Sequence[int], seed: int):
        prompt, budget = int(trace.prompt_tokens[index]), int(trace.budget_tokens[index])
        super().__init__(arm.decoder, text[:prompt], budget, arm.policy, int(trace.sequence_id[index]), seed)
        self.output_tokens = int(trace.output_tokens[index])

    def advance(self) -> Draft:
        draft = super().advance()
        self.done = self.position >= self.output_tokens  # an output may end before its budget
        return draft


def with_prefix(trace: Trace, tokens: int) -> Trace:
    """The same trace behind that many more tokens of prompt."""
    return dataclasses.replace(trace, prompt_tokens=trace.prompt_tokens + tokens, prompt=None)


@dataclass(frozen=True)
class ScriptedSettings:
    """How to tune and run.

    context : tokens of random text put before every prompt, so that long contexts can be validated
    policies : default: tuned on one half of the sequences, as in `realrun.experiment.validate`, and run on the other
    minutes : of profiling and running together. Sequences are run in random order, and no sequence is
        begun that would not be done in that time; the first two are run whatever the time
    """

    context: int = 0
    policies: Sequence[ChainPolicy] | None = None
    trials: int = 100
    repeats: int = 3
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

    The autoregressive baseline and all policies run a sequence at once, in turns of a few rounds. Every round is taken
    at the median of its repeats. The profile is taken in slices between the repeats, since machines drift.
    """
    begun = time.monotonic() if begun is None else begun
    deadline = np.inf if settings.minutes is None else begun + 60 * settings.minutes
    seed, repeats, sampler = settings.seed, settings.repeats, Sampler()  # the trace's own mode does not matter here
    vocabulary(pair)
    trace = with_prefix(trace, settings.context)  # runs take what was accepted from the trace
    for policy in settings.policies or ():
        check_replayable(trace, policy)
        if policy.carries_state:  # sequences are run in random order, and not always all of them
            raise InputError(f"policy {policy} carries its state over sequences; let it start anew with each")
    contexts, sweeps = contexts_between(*context_range(trace)), list[Stream]()

    def profile() -> tuple[Profile, float]:
        """Measure another slice; return the profile of all slices so far, and the seconds of this one."""
        start, before, total = time.monotonic(), len(sweeps), (1 + repeats) * SLICE_SWEEPS
        profile = profile_slice(
            pair,
            sweeps,
            SLICE_SWEEPS,
            contexts=contexts,
            depth=trace.depth,
            sampler=sampler,
            seed=seed,
            tree_tokens=0,
            progress=lambda done, _: progress("profile", before + done, total),
        )
        return profile, time.monotonic() - start

    measured, slice_s = profile()
    if settings.policies is None:
        tuning, held = split_sequences(trace, seed=seed)
        train, holdout = trace.select(tuning), trace.select(held)
        chosen, _ = candidates(
            train, measured.cost, SearchSettings(trials=settings.trials, seed=seed), progress=progress
        )
    else:
        train, holdout = trace.select([]), trace
        chosen = [Candidate(policy, "given") for policy in settings.policies]
    script = Script(holdout)
    policies: list[Any] = [None, *(candidate.policy for candidate in chosen)]
    arms = [scripted_arm(str(policy), policy, pair, script, sampler) for policy in policies]
    longest = int(holdout.prompt_tokens.max())
    text = np.random.default_rng(seed).integers(1, vocabulary(pair), longest).tolist()
    timings, complete, runs = Timings(), 0, 0
    order, longest_s = np.random.default_rng(seed), 0.0
    index_order = order.permutation(holdout.sequences).tolist()
    for arm in [*arms, *turned(arms)]:
        warming = ScriptedDecoding(arm, holdout, 0, text, seed)
        while not warming.done and len(warming.rounds) < WARM_UP_ROUNDS:
            warming.advance()
    for repeat in range(repeats):
        before = runs
        for index in index_order:
            start = time.monotonic()
            # The sequence and the last slice of the profile need their time as well.
            if start + longest_s + slice_s > deadline and runs >= MIN_SEQUENCES:
                break
            decodings = [
                ScriptedDecoding(arm, holdout, index, text, seed)
                for arm in (turned(arms) if (repeat + index) % 2 else arms)
            ]
            take_turns(decodings, order, shift=repeat % TURN_ROUNDS)
            for place, decoding in enumerate(decodings):
                timings.add(place, index, decoding.result)
            runs, longest_s = runs + 1, max(longest_s, time.monotonic() - start)
            progress("run", runs, repeats * holdout.sequences)
        if runs > before:
            measured, last_s = profile()
            slice_s = max(slice_s, last_s)
        if runs < before + holdout.sequences:
            break
        complete += 1
    done = np.array(sorted(index for arm, index in timings.runs if arm == BASELINE))
    autoregressive_s = timings.seconds(BASELINE, done.tolist())
    rows = _rows(holdout.select(done), chosen, measured.cost, timings, done.tolist(), seed)
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
        "decoding": sampler.as_dict(),
        "context": settings.context,
        "sequences": {"tuning": train.sequences, "holdout": holdout.sequences, "run": len(done)},
        "output_tokens": int(holdout.output_tokens[done].sum()),
        "done": {
            "minutes": None if settings.minutes is None else float(settings.minutes),
            "spent_minutes": (time.monotonic() - begun) / 60,
            "stopped_early": runs < repeats * holdout.sequences,
            "repeats": complete,
            "repeats_asked": repeats,
            "sequence_runs": runs,
            "sequence_runs_asked": repeats * holdout.sequences,
        },
        "autoregressive_sequence_seconds": autoregressive_s.tolist(),
        "rows": [row.as_dict() for row in sorted(rows, key=lambda row: -row.measured)],
        "median_abs_error_percent": median_error([row.error_percent for row in rows]),
        "choice": choice_of(forecasts, autoregressive_s, 0.0).as_dict() if forecasts else None,
        "profile": measured.as_dict(),
        "provenance": provenance(pair.device, pair.number_type),
    }


def _rows(
    trace: Trace, chosen: Sequence[Candidate], cost: ProfileCost, timings: Timings, done: Sequence[int], seed: int
) -> list[Row]:
    """Predicted beside measured, over the sequences that were run."""
    priced, baseline_s = PricedTrace(trace, cost), timings.seconds(BASELINE, done)
    oracle_s = chain_oracle_seconds(trace, priced.table())
    rows = []
    for arm, candidate in enumerate(chosen, start=1):
        replayed = priced.replay(candidate.policy, seed=seed, log=True)
        decoded, own_s = timings.last_runs(arm, done), timings.seconds(arm, done)
        measured = ratio_interval(baseline_s, own_s)
        wall_clock = WallClock.of(timings.wall_s(BASELINE, done), timings.wall_s(arm, done), measured, 0.0)
        rounds, same = [timings.rounds(arm, index) for index in done], rounds_identical(replayed, decoded)
        rows.append(compared_row(candidate, priced, replayed, oracle_s, measured, wall_clock, own_s, rounds, same))
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
    positions = int((trace.prompt_tokens + trace.budget_tokens).max()) + settings.context + trace.depth + 4
    pair = random_pair(target, draft, device=device, dtype=dtype, positions=positions, smoke=smoke, seed=settings.seed)
    return scripted_validation(pair, trace, settings, progress, begun)
