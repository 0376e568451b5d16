"""Results of benchmarks: `accept_lengths` of MEDUSA, EAGLE and Spec-Bench, NVIDIA's specdec_bench, InferenceX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED, Rounds
from specsim.engines import rates
from specsim.engines.formats.reading import by_number, count, json_records, log_lines
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.errors import InputError
from specsim.io.json import checked, read_json

ANSWERS = "give Spec-Bench's answers, with choices[].accept_lengths, or EAGLE's, with idxs and new_tokens"
GOLDEN = "give a YAML of InferenceX's golden_al_distribution"
ACCEPTANCE = "give acceptance_rate.json of specdec_bench"


class Choice(TypedDict):
    """An answer: the rounds of all turns in a list, or EAGLE's last round (from 0) of each turn."""

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
    if turns and not lists:
        return _of_turns(turns, skipped)
    if not any(map(any, lists)):
        raise InputError(f"{paths[0]} holds no accepted drafts; {ANSWERS}")
    if all(length == 1 for lengths in lists for length in lengths):
        raise InputError(
            f"every round of {paths[0]} has length 1, as without drafts; give the speculative run's answers"
        )
    return _of_lengths(lists, skipped)


def _of_lengths(lists: Sequence[Sequence[int]], skipped: Skipped) -> ImportedRecords:
    """Rounds of answers by their lengths, which may include the bonus token."""
    lengths = np.array([length for answer in lists for length in answer], dtype=np.int64)
    bonus = int(lengths.min() > 0)
    accepted = lengths - bonus
    depth = int(accepted.max())
    sequence = np.repeat(np.arange(len(lists)), list(map(len, lists)))
    notes = (
        "lengths are never 0: taken to include the token that the target adds" if bonus
        else "some lengths are 0: taken to leave out the token that the target adds",
        f"drafts are taken to be {depth} deep, as the longest accepted; their real length is unknown",
        "of draft trees these are paths accepted among the branches, which a chain of the same drafter does not reach",
        "the positions of rounds are unknown: no column t",
    )  # fmt: skip
    return ImportedRecords(
        Rounds(np.full(len(accepted), depth), accepted, None, sequence),
        "benchmark",
        f"accept_lengths = {'tokens that a round added' if bonus else 'accepted tokens of a round'}",
        requests=len(lists),
        notes=notes,
        skipped=skipped,
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
        skipped=skipped,
        instead="run Spec-Bench, whose answers have the accept_lengths of every round",
    )


class Bench(TypedDict):
    """Lengths with the bonus; the first of every turn is the prompt's."""

    Request_AL: dict[str, Any]
    Acceptance_Length_Histogram: dict[str, int]
    Conditional_Acceptance_Rate: dict[str, float]


def read_specdec_bench(paths: Sequence[Path]) -> ImportedRecords:
    """Read counters from the histogram, less the first step of every turn, which the prompt's pass made."""
    if len(paths) > 1:
        raise InputError(f"{len(paths)} files; give a single acceptance_rate.json")
    path = paths[0]
    runs = read_json(path, str(path), list[Bench] | Bench, missing=ACCEPTANCE, invalid=ACCEPTANCE)
    if isinstance(runs, list) and len(runs) != 1:
        raise InputError(f"{path} holds {len(runs)} runs; give a file of a single run")
    document: Bench = runs[0] if isinstance(runs, list) else runs
    requests = document["Request_AL"].values()
    turns = sum(len(request) if isinstance(request, Mapping) else 1 for request in requests)
    histogram = by_number(document["Acceptance_Length_Histogram"], f"{path}: Acceptance_Length_Histogram")
    used = [length for length, steps in histogram.items() if steps]
    depth = max([len(document["Conditional_Acceptance_Rate"]), *used], default=1) - 1
    times = np.zeros(depth + 2, dtype=np.int64)
    times[used] = [histogram[length] for length in used]
    if times[0]:
        raise InputError(f"{path}: a step without a token is impossible; {ACCEPTANCE}")
    if times[1] < turns or depth < 1:
        raise InputError(f"{path}: {times[1]} steps of 1 token for {turns} turns, which begin with one; {ACCEPTANCE}")
    times[1] -= turns
    counters, _ = rates.counters_of_histogram(times[1:], int(times.sum()) * depth, "")
    notes = [
        f"the first step of each of {turns:,} turns, which is the prompt's, is left out",
        f"drafts are taken to be of {depth} tokens, all of them: a last draft cut by the limit counts as rejected",
    ]
    if not all(isinstance(request, Mapping) for request in requests):
        notes.append("the number of turns of a request is unknown: taken as 1, so first steps of others stay in")
    definition = "acceptance length = tokens of a step, the bonus included; the prompt's step counted as 1"
    return ImportedRecords(counters, "specdec_bench", definition, requests=len(requests), notes=tuple(notes))


YAML_LINE = re.compile(r"( *)([^\s#:'\"]+):(?: +(\S.*))?$")


def read_inferencex(paths: Sequence[Path]) -> ImportedRecords:
    """Read mean acceptance lengths by K of InferenceX: YAML with model, mode, and `K: length` below."""
    lengths: dict[str, dict[int, float]] = {}
    parents: list[tuple[int, str]] = []  # indentation and name of the mappings around a line
    skipped = Skipped()
    for line in log_lines(paths, skipped):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = YAML_LINE.match(line.rstrip())
        if match is None:
            raise InputError(f"{paths[0]}: {line.strip()!r:.60} is not a line of such a table; {GOLDEN}")
        indent, name, value = len(match[1]), match[2], match[3]
        parents = [parent for parent in parents if parent[0] < indent]
        if value is None:
            parents.append((indent, name))
        elif parents and name.isascii() and name.isdigit() and re.fullmatch(r"\d{1,3}(\.\d+)?", value):
            k, length = int(name[:9]), float(value)
            where = " ".join(parent for _, parent in parents)
            if not 1 <= length <= k + 1 or k in lengths.get(where, {}):
                raise InputError(f"{paths[0]}: {where} has length {length} at K = {k}, or has it twice; {GOLDEN}")
            lengths.setdefault(where, {})[k] = length
    if not lengths:
        raise InputError(f"{paths[0]} holds no acceptance lengths; {GOLDEN}")
    notes = []
    for where, by_k in lengths.items():
        falls = [k for k in sorted(by_k) if by_k[k] < max(by_k[other] for other in by_k if other <= k)]
        if falls:
            at = ", ".join(map(str, falls))
            notes.append(
                f"{where}: longer drafts are accepted less at K = {at}; either the drafts depend on K, or it is noise"
            )
    return ImportedRecords(
        None,
        "inferencex",
        "1 + accepted tokens / drafts, mean of a run for each K",
        averages={f"{where}, K = {k}": by_k[k] for where, by_k in lengths.items() for k in sorted(by_k)},
        notes=tuple(notes),
        skipped=skipped,
        instead="these are means without counts; import those of your own server, such as a scrape",
    )
