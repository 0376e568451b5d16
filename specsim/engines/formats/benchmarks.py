"""Results of benchmarks: `accept_lengths` of MEDUSA, EAGLE and Spec-Bench, NVIDIA's specdec_bench, InferenceX."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED, Rounds
from specsim.engines import rates
from specsim.engines.formats.imported import Imported, by_number, count, json_records, log_lines
from specsim.errors import InputError
from specsim.json_files import checked, read_json

ANSWERS = "give Spec-Bench's answers, with choices[].accept_lengths, or EAGLE's, with idxs and new_tokens"
GOLDEN = "give a YAML of InferenceX's golden_al_distribution"
ACCEPTANCE = "give acceptance_rate.json of specdec_bench"


class Choice(TypedDict):
    """An answer: its rounds over all turns, one list after another; of EAGLE, for each turn, its last round from 0."""

    accept_lengths: NotRequired[list[int]]
    idxs: NotRequired[list[int]]
    new_tokens: NotRequired[list[int]]


class Answer(TypedDict):
    """Of a question, once for every seed."""

    choices: list[Choice]


def read_accept_lengths(paths: Sequence[Path]) -> Imported:
    """Rounds; the draft's depth is taken to be the deepest accepted, which acceptance does not depend on."""
    found, skipped = json_records(paths, invalid=ANSWERS)
    lists: list[list[int]] = []
    turns: list[tuple[int, int]] = []
    without = 0
    for number, record in enumerate(found):
        if "choices" not in record:
            without += 1
            continue
        for choice in checked(record, f"answer {number + 1}", Answer, invalid=ANSWERS)["choices"]:
            if "accept_lengths" not in choice:
                turns += _eagle_turns(choice, f"answer {number + 1}")
                continue
            if any(not 0 <= length <= MOST_DRAFTED for length in choice["accept_lengths"]):
                raise InputError(f"answer {number + 1}: accept_lengths cannot be; {ANSWERS}")
            lists += [choice["accept_lengths"]] if choice["accept_lengths"] else []
    if without:
        skipped["lines without choices"] = without
    if turns and not lists:
        return _of_turns(turns, skipped)
    lengths = np.array([length for one in lists for length in one], dtype=np.int64)
    if not len(lengths) or lengths.max() == 0:
        raise InputError(f"{paths[0]} holds no accepted drafts; {ANSWERS}")
    bonus = int(lengths.min() > 0)
    accepted = lengths - bonus
    depth = int(accepted.max())
    if not depth:
        raise InputError(
            f"every round of {paths[0]} has length 1, as without drafts; give the speculative run's answers"
        )
    rounds = Rounds(
        np.full(len(accepted), depth), accepted, None, np.repeat(np.arange(len(lists)), list(map(len, lists)))
    )
    notes = [
        "lengths are never 0: taken to include the token that the target adds" if bonus
        else "lengths of 0 are there: taken to leave out the token that the target adds",
        f"drafts are taken to be {depth} deep, as the longest accepted; how long they were is not told",
        "of draft trees these are paths accepted among the branches, which a chain of the same drafter does not reach",
        "where rounds begin is not told: no column t",
    ]  # fmt: skip
    definition = (
        "accept_lengths = tokens that a round added" if bonus else "accept_lengths = accepted tokens of a round"
    )
    return Imported(rounds, "benchmark", definition, "", len(lists), notes=tuple(notes), skipped=skipped)


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
        raise InputError(f"{name}: fewer tokens than rounds, each of which adds one; {ANSWERS}")
    return turns


def _of_turns(turns: Sequence[tuple[int, int]], skipped: Mapping[str, int]) -> Imported:
    rounds, output = (sum(column) for column in zip(*turns, strict=True))
    return Imported(
        None, "benchmark", "idxs = last round of a turn, counted from 0; new_tokens = tokens that the rounds added", "",
        len(turns), (output,), (rounds, None, output - rounds), skipped=skipped,
        instead="run Spec-Bench, whose answers have the accept_lengths of every round",
    )  # fmt: skip


class Bench(TypedDict):
    """Lengths with the bonus; the first of every turn is the prompt's."""

    Request_AL: dict[str, Any]
    Acceptance_Length_Histogram: dict[str, int]
    Conditional_Acceptance_Rate: dict[str, float]


def read_specdec_bench(paths: Sequence[Path]) -> Imported:
    """Counters from the histogram, less the first step of every turn, which the prompt's pass made."""
    if len(paths) > 1:
        raise InputError(f"{len(paths)} files; give one acceptance_rate.json")
    runs = read_json(paths[0], str(paths[0]), list[Bench] | Bench, missing=ACCEPTANCE, invalid=ACCEPTANCE)
    if isinstance(runs, list) and len(runs) != 1:
        raise InputError(f"{paths[0]} holds {len(runs)} runs, one after another; give a file of one run")
    document: Bench = runs[0] if isinstance(runs, list) else runs
    requests = document["Request_AL"].values()
    turns = sum(len(one) if isinstance(one, Mapping) else 1 for one in requests)
    histogram = by_number(document["Acceptance_Length_Histogram"], f"{paths[0]}: Acceptance_Length_Histogram")
    used = [length for length, steps in histogram.items() if steps]
    depth = max([len(document["Conditional_Acceptance_Rate"]), *used], default=1) - 1
    times = np.zeros(depth + 2, dtype=np.int64)
    times[used] = [histogram[length] for length in used]
    if times[0]:
        raise InputError(f"{paths[0]}: a step without a token cannot be; {ACCEPTANCE}")
    if times[1] < turns or depth < 1:
        raise InputError(
            f"{paths[0]}: {times[1]} steps of one token for {turns} turns, whose first is one; {ACCEPTANCE}"
        )
    times[1] -= turns
    steps = int(times.sum())
    passed = times[::-1].cumsum()[::-1][2:].tolist()
    found, _ = rates.counters(steps, steps * depth, passed, "")
    notes = [
        f"the first step of each of {turns:,} turns, which is the prompt's, is left out",
        f"drafts are taken to be of {depth} tokens, all of them: a last one cut by the limit counts as rejected",
    ]
    if not all(isinstance(one, Mapping) for one in requests):
        notes.append("how many turns a request has is not told: taken as one, so that first steps of others stay in")
    definition = "acceptance length = tokens of a step, the bonus included; the prompt's step counted as one"
    return Imported(found, "specdec_bench", definition, "", len(requests), notes=tuple(notes))


YAML_LINE = re.compile(r"( *)([^\s#:'\"]+):(?: +(\S.*))?$")


def read_inferencex(paths: Sequence[Path]) -> Imported:
    """Mean acceptance lengths by K of InferenceX: model, mode, and `K: length` below, of YAML's plainest form."""
    lengths: dict[str, dict[int, float]] = {}
    above: list[tuple[int, str]] = []  # indentation and name of what a line is inside of
    skipped: Counter[str] = Counter()
    for line in log_lines(paths, skipped):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = YAML_LINE.match(line.rstrip())
        if found is None:
            raise InputError(f"{paths[0]}: {line.strip()!r:.60} is no line of such a table; {GOLDEN}")
        indent, name, value = len(found[1]), found[2], found[3]
        above = [one for one in above if one[0] < indent]
        if value is None:
            above.append((indent, name))
        elif above and name.isascii() and name.isdigit() and re.fullmatch(r"\d{1,3}(\.\d+)?", value):
            k, length = int(name[:9]), float(value)
            where = " ".join(one for _, one in above)
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
                f"{where}: longer drafts are accepted less at K = {at}; what is drafted depends on K, or is noise"
            )
    averages = {f"{where}, K = {k}": length for where, by_k in lengths.items() for k, length in sorted(by_k.items())}
    return Imported(
        None, "inferencex", "1 + accepted tokens / drafts, mean of a run for each K", averages=averages,
        notes=tuple(notes), skipped=skipped,
        instead="these are means without counts; import those of your own server, such as a scrape",
    )  # fmt: skip
