"""An engine's rounds in a batch beside a replay's: what a server drafts by its load, and what is accepted of it.

How many tokens a round drafts depends on how many sequences run beside it, that is, on how much the others accepted.
So the simulated server chooses every K for sequences that accept what the engine counted, and each round must accept
what the recording says of a draft so long. Where all do, both are the simulated server's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from realrun.engines.compare import Agreement, Counted, Models, NearTie, difference, draft_tie, near, text_tie
from specsim.cost.linear import LinearCost, LinearPass
from specsim.engines.as_engine import as_engine, output_lengths
from specsim.engines.conventions import Conventions
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.serving.arrivals import Requests
from specsim.serving.continuous import run_server
from specsim.serving.draft_length import ScheduledK
from specsim.serving.drafts import Drafts, drafts_of
from specsim.trace.trace import Trace

ANY_COST = LinearCost(LinearPass(1e-2), LinearPass(1e-3))  # a schedule does not look at costs
Replayed = tuple[int, int, int]  # t, drafted and accepted tokens of a round


@dataclass(frozen=True, eq=False)
class CountedDrafts(Drafts):
    """Drafts of which as many tokens are accepted as an engine counted, round by round.

    counted : by sequence, the accepted tokens of its rounds that drafted
    """

    counted: Sequence[Iterator[int]] = ()

    def draft(self, k: int | Ints, sequence: Ints, row: Ints) -> tuple[Ints, Ints]:
        drafted, _ = super().draft(k, sequence, row)
        accepted = [next(self.counted[s], 0) if count else 0 for s, count in zip(sequence, drafted, strict=True)]
        return drafted, np.minimum(drafted, np.array(accepted, dtype=np.int64))


def compare_batch(
    trace: Trace,
    rule: ScheduledK,
    slots: int,
    conventions: Conventions,
    max_output_tokens: int,
    outputs: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[Counted]],
    models: Models,
) -> list[Agreement]:
    """Compare every sequence of an engine's run in batches, all asked at once, with a simulated server's.

    trace : the whole recording, whose drafts are at least as long as the engine's
    rule, slots : K by the sequences of a step, and most of these
    conventions, max_output_tokens : the engine's
    outputs, theirs : by sequence, the tokens that it put out, an end of text left out, and its rounds that drafted
    """
    lengths = output_lengths(trace, max_output_tokens)
    if lengths.min() < 2:
        raise InputError(
            f"prompt {int(lengths.argmin()) + 1} ends with its first token, so that it has no rounds in a batch; leave "
            "that prompt out, or decode prompts one by one"
        )
    played = as_engine(trace, conventions, max_output_tokens=max_output_tokens).trace
    whole = as_engine(trace, replace(conventions, first_token="round"), max_output_tokens=max_output_tokens).trace
    simulated = _simulated(whole, rule, slots, conventions, theirs)
    agreements = []
    for sequence, rounds in enumerate(simulated):
        recorded = trace.select([sequence])
        text = recorded.token[: lengths[sequence]].tolist()
        parted = text_tie(recorded, sequence, text, outputs[sequence], models.target)
        if parted and not near(parted):
            agreements.append(
                Agreement(len(theirs[sequence]), 0, [], [], f"texts differ from position {parted.position} on")
            )
        else:
            own = played.select([sequence])
            agreements.append(_agreement(own, sequence, rounds, theirs[sequence], parted, conventions, models))
    return agreements


def _simulated(
    whole: Trace, rule: ScheduledK, slots: int, conventions: Conventions, theirs: Sequence[Sequence[Counted]]
) -> list[list[tuple[int, int]]]:
    """Simulate the server; return (row, K) of every sequence's rounds that draft.

    whole : trace that includes the token of the prefill; returned rows are numbered without it
    theirs : of every sequence, K and accepted tokens of the engine's rounds; the simulation accepts the same
    """
    every = np.arange(whole.sequences)
    prompt_tokens, output_tokens = (np.asarray(v, np.int64) for v in (whole.prompt_tokens, whole.output_tokens))
    requests = Requests(np.zeros(len(every)), prompt_tokens, output_tokens, every)
    counted = [iter([accepted for _, accepted in rounds]) for rounds in theirs]
    drafts = CountedDrafts(**vars(drafts_of(whole, rule, served=True)), counted=counted)
    enough = int(prompt_tokens.sum()) + slots * (2 + rule.max_draft_tokens)  # tokens, so that no step is full
    run = run_server(
        drafts, ANY_COST, requests, slots=slots, users=len(every), server=conventions.engine, step_tokens=enough
    )
    drafting = []
    for request in every:
        mine = run.rounds["request"] == request
        drafted, accepted = run.rounds["drafted"][mine], run.rounds["accepted"][mine]
        rows = np.cumsum(accepted + 1) - accepted - 1
        drafting.append([(row, k) for row, k in zip(rows.tolist(), drafted.tolist(), strict=True) if k])
    return drafting


def _agreement(
    played: Trace,
    sequence: int,
    simulated: Sequence[tuple[int, int]],
    theirs: Sequence[Counted],
    parted: NearTie | None,
    conventions: Conventions,
    models: Models,
) -> Agreement:
    """Compare a sequence's rounds, up to where its text differs.

    played : of this sequence alone
    """
    shift = int(conventions.first_token == "prefill")
    expected = [(row + shift, k, min(k, int(played.match_len[row]))) for row, k in simulated]
    if parted is not None:
        expected = [row for row in expected if row[0] + row[2] < parted.position]
        theirs = theirs[: len(expected)]
    ties = [] if parted is None else [parted]
    replayed: list[Replayed] = []
    identical = 0
    for ours, counted in zip(expected, theirs, strict=False):
        if ours[1:] == counted:
            identical += 1
        else:
            tie = None
            if ours[1] == counted[0] and models.drafter is not None:
                depths = range(1, min(ours[2], counted[1]) + 2)
                tie = draft_tie(played, sequence, ours[0] - shift, depths, shift, models.drafter)
            if tie is None:
                break
            ties.append(tie)
        replayed.append((ours[0], counted[0] or 0, counted[1]))
    whole = len(replayed) == len(expected) == len(theirs)
    return Agreement(
        len(theirs), identical, ties, replayed, "" if whole else difference(expected, theirs, len(replayed))
    )
