"""Compare an engine's rounds with a replay's; where they differ, find out if a near tie in float32 explains it.

An engine computes in its own order, so that a probability next to p_min may come out on the other side, or the two
likeliest tokens change places. Such a near tie is named and the replay takes the engine's choice there: all that
follows must be identical again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from specsim.cost.model import ConstantCost
from specsim.engines.as_engine import as_engine, output_lengths, rounds_of
from specsim.engines.conventions import Conventions
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.p_min import LlamaCpp
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace

NEAR = 1e-4  # between two probabilities that float32 may turn around
ANY_COST = ConstantCost(1e-3, 1e-2)  # what engines draft does not depend on costs

Counted = tuple[int | None, int]  # drafted and accepted tokens of a round; None where the engine does not say
BestTwo = Callable[[Sequence[int]], tuple[float, float]]  # after these tokens, a model's two highest probabilities


class Models(NamedTuple):
    """Asked where an engine's choice of a token differs; no drafter where lookup drafts."""

    target: BestTwo
    drafter: BestTwo | None


class NearTie(NamedTuple):
    """Where an engine's arithmetic came out on the other side.

    sequence : number of the prompt, from 0
    position : of the output, at which the round starts
    depth : of the draft, from 1; 0 for the target's own choice
    what : "p_min", "draft token" or "target token"
    prob, beside : the probability, and p_min or the second token's, that it lies next to
    """

    sequence: int
    position: int
    depth: int
    what: str
    prob: float
    beside: float

    def __str__(self) -> str:
        where = f"sequence {self.sequence}, position {self.position}"
        where += f", depth {self.depth}" if self.depth else ""
        return f"{where}: {self.what} at probability {self.prob:.7f} beside {self.beside:.7g}"


class Agreement(NamedTuple):
    """The result of comparing a sequence.

    rounds : of the engine, as far as its text is the recorded one
    identical : rounds that the replay has too before near ties are applied
    replayed : (t, drafted, accepted) of the replay with near ties applied
    difference : where the two part all the same; "" where they do not
    """

    rounds: int
    identical: int
    near_ties: list[NearTie]
    replayed: list[tuple[int, int, int]]
    difference: str = ""


class Play(NamedTuple):
    """A replay: the trace of a single sequence, the rounds that the engine would count, all rounds' rows and drafts."""

    trace: Trace
    counted: list[tuple[int, int, int]]  # (t, drafted, accepted)
    every: list[tuple[int, int]]  # row, tokens drafted, dropped ones included

    def agreeing(self, theirs: Sequence[Counted]) -> int:
        """How many rounds are identical from the first on."""
        pairs = zip(self.counted, theirs, strict=False)
        return next(
            (i for i, (ours, their) in enumerate(pairs) if their not in (ours[1:], (None, ours[2]))),
            min(len(self.counted), len(theirs)),
        )

    def reach(self, theirs: Sequence[Counted]) -> tuple[int, bool]:
        """How far the two go together, and whether to the end."""
        agreeing = self.agreeing(theirs)
        return agreeing, agreeing == len(self.counted) == len(theirs)


def compare_sequence(
    trace: Trace,
    sequence: int,
    policy: ChainPolicy,
    conventions: Conventions,
    max_output_tokens: int,
    output: Sequence[int],
    theirs: Sequence[Counted],
    models: Models,
) -> Agreement:
    """Compare a sequence of an engine's run with a replay of its recording.

    trace : the whole recording, whose drafts are at least as long as the engine's
    policy, conventions, max_output_tokens : the engine's
    output, theirs : the tokens that it put out, an end of text left out, and its rounds
    """
    recorded = trace.select([sequence])
    text = recorded.token[: int(output_lengths(recorded, max_output_tokens)[0])].tolist()
    ties = []
    until = len(text)  # tokens up to here are the recording's
    if parted := text_tie(recorded, sequence, text, output, models.target):
        until = parted.position
        ties.append(parted)
        if not near(parted):
            return Agreement(len(theirs), 0, [], [], f"texts differ from position {until} on")

    def replay(changed: Trace) -> Play:
        log = PricedTrace(changed, ANY_COST).replay(policy, log=True).rounds
        assert log is not None
        rounds = rounds_of(log, changed, conventions)
        assert rounds.t is not None
        counted = zip(rounds.t.tolist(), rounds.drafted.tolist(), rounds.accepted.tolist(), strict=True)
        before_tie = [row for row in counted if until == len(text) or row[0] + row[2] < until]
        return Play(changed, before_tie, list(zip(log.t.tolist(), log.drafted.tolist(), strict=True)))

    play = first = replay(as_engine(recorded, conventions, max_output_tokens=max_output_tokens).trace)
    if until < len(text):
        theirs = theirs[: len(play.counted)]
    while not play.reach(theirs)[1]:
        attempts = [
            (tie, replay(changed))
            for tie, changed in _candidates(play, theirs, sequence, policy, conventions, models.drafter)
        ]
        tie, best = max(attempts, key=lambda attempt: attempt[1].reach(theirs), default=(None, play))
        if tie is None or best.reach(theirs) <= play.reach(theirs):
            break
        ties.append(tie)
        play = best
    agreeing, whole = play.reach(theirs)
    identical = len({*first.counted} & {*play.counted[:agreeing]})
    return Agreement(
        len(theirs), identical, ties, play.counted, "" if whole else difference(play.counted, theirs, agreeing)
    )


def text_tie(
    recorded: Trace, sequence: int, text: Sequence[int], output: Sequence[int], target: BestTwo
) -> NearTie | None:
    """Where an output parts from the recorded text, near or not; None where it does not.

    recorded : of this sequence alone
    """
    if [*output] == text[: len(output)] and len(output) >= len(text) - 1:  # the last may be an end of text
        return None
    until = next((i for i, pair in enumerate(zip(text, output, strict=False)) if pair[0] != pair[1]), len(output))
    return NearTie(sequence, until, 0, "target token", *target([*_prompt(recorded), *text[:until]]))


def draft_tie(
    trace: Trace, sequence: int, row: int, depths: Iterable[int], shift: int, drafter: BestTwo
) -> NearTie | None:
    """Find the first token of a draft whose two best candidates are tied; None if there is none.

    trace : of this sequence alone
    row : of the trace, at which the draft starts
    depths : which tokens of the draft to try, counted from 1
    shift : position in the output minus position in the trace
    """
    context = [*_prompt(trace), *trace.token[:row].tolist()]
    for depth in depths:
        two = drafter([*context, *trace.draft_token[row, : depth - 1]])
        if near(tie := NearTie(sequence, row + shift, depth, "draft token", *two)):
            return tie
    return None


def _candidates(
    play: Play,
    theirs: Sequence[Counted],
    sequence: int,
    policy: ChainPolicy,
    conventions: Conventions,
    drafter: BestTwo | None,
) -> Iterator[tuple[NearTie, Trace]]:
    """Yield near ties up to the first round that differs, each with the trace changed by it.

    An earlier round may be to blame if the rounds behind it happen to agree.
    """
    agreeing, trace = play.agreeing(theirs), play.trace
    shift = int(conventions.first_token == "prefill")  # of the trace's positions against the output's
    end = play.counted[agreeing][0] - shift if agreeing < len(play.counted) else len(trace.token)
    if isinstance(policy, LlamaCpp) and trace.top10_confidence is not None:
        for row, drafted in play.every:
            for depth in range(1, drafted + 1) if row <= end else ():
                prob = float(trace.top10_confidence[row, depth - 1])
                tie = NearTie(sequence, row + shift, depth, "p_min", prob, policy.p_min)
                if near(tie):
                    confidence = trace.top10_confidence.copy()
                    confidence[row, depth - 1] = 0.0 if prob >= policy.p_min else 1.0
                    yield tie, dataclasses.replace(trace, top10_confidence=confidence)
    if drafter is None or agreeing == min(len(play.counted), len(theirs)):
        return
    reported, accepted = theirs[agreeing]
    drafted = play.counted[agreeing][1] if reported is None else reported
    last = min(drafted, play.counted[agreeing][1]) + 1 if drafted < trace.depth else drafted
    if tie_of_draft := draft_tie(trace, sequence, end, range(1, last + 1), shift, drafter):
        yield tie_of_draft, _with_round(trace, end, drafted, accepted)


def near(tie: NearTie) -> bool:
    return abs(tie.prob - tie.beside) <= NEAR


def _with_round(trace: Trace, row: int, drafted: int, accepted: int) -> Trace:
    """The trace with a round of so many tokens at this row."""
    match_len = trace.match_len.copy()
    match_len[row] = accepted
    if trace.top10_confidence is None:
        return dataclasses.replace(trace, match_len=match_len)
    confidence = trace.top10_confidence.copy()
    confidence[row] = 0.0
    confidence[row, :drafted] = 1.0
    return dataclasses.replace(trace, match_len=match_len, top10_confidence=confidence)


def _prompt(trace: Trace) -> list[int]:
    """Return the prompt of a trace of a single sequence."""
    assert trace.prompt is not None
    return trace.prompt.tolist()


def difference(replayed: Sequence[tuple[int, int, int]], theirs: Sequence[Counted], agreeing: int) -> str:
    """Describe the first round that differs."""

    def described(drafted: int | None, accepted: int) -> str:
        return f"{accepted} accepted" if drafted is None else f"{accepted} of {drafted} accepted"

    ours = replayed[agreeing] if agreeing < len(replayed) else None
    where = "at the end" if ours is None else f"at position {ours[0]}"
    replay = "no round" if ours is None else described(*ours[1:])
    engine = described(*theirs[agreeing]) if agreeing < len(theirs) else "no round"
    return f"round {agreeing} {where}: {replay} in the replay, {engine} in the engine"
