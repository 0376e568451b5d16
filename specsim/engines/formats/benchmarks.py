"""Answers of benchmarks: `accept_lengths` of MEDUSA and Spec-Bench, `idxs` and `new_tokens` of EAGLE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED, Rounds
from specsim.engines.formats.reading import count, json_records
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.io.json import checked

PATHS = "of draft trees these are paths accepted among the branches, which a chain of the same drafter does not reach"
ANSWERS = "give Spec-Bench's answers, with choices[].accept_lengths, or EAGLE's, with idxs and new_tokens"


class Choice(TypedDict):
    """An answer: the rounds of all turns in a list, or EAGLE's last round (from 0) of each turn.

    new_tokens : output tokens of each turn
    """

    accept_lengths: NotRequired[list[int]]
    idxs: NotRequired[list[int]]
    new_tokens: NotRequired[list[int]]


class Answer(TypedDict):
    """The answers to a question, by seed."""

    choices: list[Choice]


def read_accept_lengths(paths: Sequence[Path]) -> ImportedRecords:
    """Read rounds; the deepest accepted draft is taken for the depth, on which acceptance does not depend."""
    skipped = Skipped()
    lists: list[list[int]] = []
    outputs: list[int | None] = []  # tokens of each of the lists
    turns: list[tuple[int, int]] = []
    for name, record in json_records(paths, skipped, invalid=ANSWERS, noun="answer"):
        if "choices" not in record:
            skipped["lines without choices"] += 1
            continue
        for choice in checked(record, name, Answer, invalid=ANSWERS)["choices"]:
            lengths = choice.get("accept_lengths")
            if lengths is None:
                turns += _eagle_turns(choice, name)
            elif any(not 0 <= length <= MOST_DRAFTED for length in lengths):
                raise InputError(f"{name}: accept_lengths are impossible; {ANSWERS}")
            elif lengths:
                lists.append(lengths)
                new = choice.get("new_tokens")
                outputs.append(None if new is None else sum(count(tokens, f"{name}: new_tokens") for tokens in new))
    if turns and not lists:
        return _of_turns(turns, skipped)
    if not any(map(any, lists)):
        raise InputError(f"{paths[0]} holds no accepted drafts; {ANSWERS}")
    if all(length == 1 for lengths in lists for length in lengths):
        raise InputError(
            f"every round of {paths[0]} has length 1, as without drafts; give the speculative run's answers"
        )
    return _of_lengths(lists, outputs, skipped)


def _of_lengths(lists: Sequence[Sequence[int]], outputs: Sequence[int | None], skipped: Skipped) -> ImportedRecords:
    """Rounds of answers by their lengths, which may include the bonus token."""
    lengths = np.array([length for answer in lists for length in answer], dtype=np.int64)
    output = tuple(tokens for tokens in outputs if tokens is not None)
    bonus, why = _includes_bonus(lengths, sum(output) if len(output) == len(lists) else None)
    accepted = np.maximum(lengths - bonus, 0)  # a last round can be cut at the limit to none of its tokens
    depth = int(accepted.max())
    sequence = np.repeat(np.arange(len(lists)), list(map(len, lists)))
    notes = (
        why,
        f"drafts are taken to be {depth} deep, as the longest accepted; their real length is unknown",
        PATHS,
        "the positions of rounds are unknown: no column t",
    )
    return ImportedRecords(
        Rounds(np.full(len(accepted), depth), accepted, None, sequence),
        "benchmark",
        f"accept_lengths = {'tokens that a round added' if bonus else 'accepted tokens of a round'}",
        requests=len(lists),
        output_tokens=output if len(output) == len(lists) else None,
        notes=notes,
        skipped=skipped,
    )


def _includes_bonus(lengths: Ints, output: int | None) -> tuple[bool, str]:
    """Whether lengths include the token that the target adds, and how that is known.

    output : sum of new_tokens; None if the file lacks them
    """
    # The nearer sum decides: some evaluations count the prompt's first token beside the rounds, or cut the last round.
    with_bonus, without = int(lengths.sum()), int(lengths.sum()) + len(lengths)
    if output is None:
        if lengths.min() > 0:
            return True, "lengths are never 0: taken to include the token that the target adds"
        return False, "some lengths are 0: taken to leave out the token that the target adds"
    if abs(output - with_bonus) <= abs(output - without):
        return (
            True,
            f"lengths sum to {with_bonus:,}, new_tokens to {output:,}: they include the token that the target adds",
        )
    return (
        False,
        f"lengths sum to {with_bonus:,}, new_tokens to {output:,}: they leave out the token that the target adds",
    )


def _eagle_turns(choice: Choice, name: str) -> list[tuple[int, int]]:
    """Rounds and output tokens of every turn."""
    idxs, tokens = choice.get("idxs"), choice.get("new_tokens")
    if idxs is None or tokens is None or len(idxs) != len(tokens):
        raise InputError(f"{name}: a choice has neither accept_lengths nor idxs and new_tokens; {ANSWERS}")
    turns = [
        (count(last, f"{name}: idxs") + 1, count(new, f"{name}: new_tokens"))
        for last, new in zip(idxs, tokens, strict=True)
    ]
    if any(new < rounds for rounds, new in turns):
        raise InputError(f"{name}: fewer tokens than rounds, each of which adds a token; {ANSWERS}")
    return turns


def _of_turns(turns: Sequence[tuple[int, int]], skipped: Skipped) -> ImportedRecords:
    rounds, output = (sum(column) for column in zip(*turns, strict=True))
    return ImportedRecords(
        None,
        "benchmark",
        "idxs = last round of a turn, counted from 0; new_tokens = tokens that the rounds added",
        requests=len(turns),
        output_tokens=(output,),
        sums=(rounds, None, output - rounds),
        notes=(PATHS,),
        skipped=skipped,
        instead="run Spec-Bench, whose answers have the accept_lengths of every round",
    )
