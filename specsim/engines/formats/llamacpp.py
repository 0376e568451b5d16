"""llama.cpp's log and responses: rounds where LLAMA_TRACE=1 was set, else counters by position, else sums.

A log may hold, from the most that they tell to the least, a line for every round, cumulative statistics of each
drafter, and the acceptance of every request. The rounds of a request are taken only where its own line counts the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NotRequired, TypedDict

from specsim.engines import rates
from specsim.engines.formats.imported import (
    Imported,
    Request,
    as_rounds,
    check_request,
    count,
    definition_of,
    json_records,
    lengths_of,
    log_lines,
    one_version,
)
from specsim.errors import InputError
from specsim.json_files import checked

ENGINE = "llamacpp"
APART = "give a log that no other program wrote into"
INSTEAD = "set LLAMA_TRACE=1 for llama-server and import its log (llamacpp-log), which has every round"

ROUND = re.compile(r"task (\d+) \| accepted\s+(\d+)/\s*(\d+) draft tokens(, new n_tokens = \d+)?\s*$")
LENGTH = re.compile(r"task (\d+) \|\s+eval time =[^|/]*/\s*(\d+) tokens")
SUMMARY = re.compile(
    r"task (\d+) \| draft acceptance(?: rate)? = [\d.]+ \(\s*(\d+) accepted /\s*(\d+) generated\)"
    r"(?:, mean (?:acceptance length|len) =\s*([\d.]+))?(?:, acceptance rate per position = \(([\d., ]+)\))?"
)
PER_POSITION = re.compile(r"task (\d+) \|\s+acc per pos = \(([\d., ]+)\)")
STATISTICS = re.compile(r"statistics\s+(\S+?):? #calls")
COUNTS = re.compile(r"#(gen drafts|gen tokens|acc tokens) =\s*(\d+)")
RATES = re.compile(r"#acc rate/pos = \(([\d., ]*)\)")
COUNTED = ("gen drafts", "gen tokens", "acc tokens")
BUILD = re.compile(r"build: (\d+ \([0-9a-f]+\))")
MARKS = ("| accepted ", "draft acceptance", "#gen drafts")


class Task:
    """What a log says of a request so far."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []
        self.repeated: list[tuple[int, int]] = []  # at debug level, of the same rounds
        self.summary: tuple[int, int] | None = None
        self.mean_length: str | None = None
        self.rates: str | None = None
        self.output_tokens: int | None = None

    def request(self) -> Request:
        rounds = self.rounds or self.repeated
        return Request([drafted for drafted, _ in rounds], [accepted for _, accepted in rounds], self.output_tokens)


class Log:
    """What the lines of a log come to."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.running: dict[str, Task] = {}
        self.ended: dict[str, Task] = {}
        self.statistics: dict[str, list[tuple[int, int, int, str | None]]] = {}
        self.builds: list[str] = []
        self.unread = 0

    def take(self, line: str) -> None:
        if found := ROUND.search(line):
            task, accepted, drafted = found[1], count(found[2], "accepted"), count(found[3], "drafted")
            rounds = self._task(task).repeated if found[4] else self._task(task).rounds
            rounds.append((drafted, accepted))
        elif found := LENGTH.search(line):
            if "prompt eval" not in line:
                self._task(found[1]).output_tokens = count(found[2], "tokens")
        elif found := SUMMARY.search(line):
            ended = self.running.pop(found[1], None) or self._new()
            ended.summary = count(found[3], "generated"), count(found[2], "accepted")
            ended.mean_length, ended.rates = found[4], found[5]
            self.ended[found[1]] = ended
        elif found := PER_POSITION.search(line):
            if found[1] in self.ended:
                self.ended[found[1]].rates = found[2]
        elif (found := STATISTICS.search(line)) and len(counts := dict(COUNTS.findall(line))) == len(COUNTED):
            drafts, drafted, accepted = (count(counts[name], f"#{name}") for name in COUNTED)
            if accepted > drafted or bool(drafts) != bool(drafted):
                raise InputError(
                    f"statistics of {found[1]}: {accepted:,} of {drafted:,} tokens accepted in {drafts:,} drafts "
                    f"cannot be; {APART}"
                )
            by_position = RATES.search(line)
            self.statistics.setdefault(found[1], []).append(
                (drafts, drafted, accepted, by_position[1] if by_position else None)
            )
        elif found := BUILD.search(line):
            self.builds.append(found[1])
        elif any(mark in line for mark in MARKS) and "restore checkpoint" not in line:
            self.unread += 1

    def _task(self, name: str) -> Task:
        if name not in self.running:
            self.running[name] = self._new()
        return self.running[name]

    def _new(self) -> Task:
        self.tasks.append(Task())
        return self.tasks[-1]


def read_log(paths: Sequence[Path]) -> Imported:
    """The log of llama-server, of one run or of several one after another."""
    log = Log()
    skipped: Counter[str] = Counter()
    for line in log_lines(paths, skipped):
        log.take(line)
    version = one_version(log.builds)
    if log.unread:
        skipped["lines that were cut off or have another form"] = log.unread
    if any(task.rounds or task.repeated for task in log.tasks):
        return _of_rounds(log, version, skipped)
    if any(line[1] for lines in log.statistics.values() for line in lines):
        return _of_statistics(log, version, skipped)
    ended = [task for task in log.tasks if task.summary is not None]
    if not ended:
        raise InputError(f"{paths[0]} holds no line of llama.cpp about drafts; give the log of a speculative run")
    return _of_requests(ended, version, skipped)


def _of_rounds(log: Log, version: str, skipped: dict[str, int]) -> Imported:
    whole: list[Request] = []
    partial = 0
    for task in log.tasks:
        request = task.request()
        if task.summary is not None and task.summary != (sum(request.drafted), sum(request.accepted)):
            partial += 1
        elif request.drafted:
            check_request(request, f"request {len(whole) + 1} of the log")
            whole.append(request)
    if partial:
        skipped = {**skipped, "requests whose rounds are not all in the log": partial}
    if not whole:
        raise InputError(f"the log holds no request's rounds in full; {INSTEAD}")
    rounds, notes = as_rounds(whole)
    ended = sum(task.summary is not None for task in log.tasks) - partial
    if ended < len(whole):
        notes.append(f"{len(whole) - ended:,} requests without their last line, of which the end may be missing")
    return Imported(
        rounds, ENGINE, definition_of(ENGINE), version, len(whole), lengths_of(whole), notes=tuple(notes),
        skipped=skipped,
    )  # fmt: skip


def _of_statistics(log: Log, version: str, skipped: dict[str, int]) -> Imported:
    """The last line of each process, in which the counts since its start stand."""
    used = {name: lines for name, lines in log.statistics.items() if any(line[1] for line in lines)}
    if len(used) > 1:
        raise InputError(f"the log has statistics of several drafters ({', '.join(sorted(used))}); run one at a time")
    (lines,) = used.values()
    last = [
        line for line, following in zip(lines, [*lines[1:], (0, 0, 0, None)], strict=True) if following[0] < line[0]
    ]
    drafts, drafted, accepted = (sum(column) for column in zip(*(line[:3] for line in last), strict=True))
    ended = [task for task in log.tasks if task.summary is not None]
    about = _about(ended, version, skipped)
    if any(not line[3] for line in last):
        return replace(about, sums=(drafts, drafted, accepted), instead=INSTEAD)
    parts = [rates.Part(line[0], line[1], _by_position(line[3] or "", line[0], line[2]), 0) for line in last]
    found, notes = rates.sum_of_parts(parts, INSTEAD)
    return replace(about, source=found, notes=tuple(notes))


def _about(ended: Sequence[Task], version: str, skipped: dict[str, int]) -> Imported:
    lengths = lengths_of([task.request() for task in ended])
    return Imported(
        None,
        ENGINE,
        definition_of(ENGINE),
        version,
        requests=len(ended) or None,
        output_tokens=lengths,
        skipped=skipped,
    )


def _by_position(texts: str, drafts: int, accepted: int) -> rates.Counted:
    counted = rates.counts_of_rates(_printed(texts), drafts, accepted)
    if counted is None:
        raise InputError(f"acceptance rates by position ({texts}) {_unfit(accepted)} in {drafts:,} drafts; {APART}")
    return counted


def _printed(texts: str) -> list[rates.Printed]:
    try:
        return [rates.Printed.of(text) for text in texts.split(",")]
    except ValueError:
        raise InputError(f"acceptance rates by position ({texts}) are no numbers; {APART}") from None


def _unfit(accepted: int) -> str:
    return f"do not fit {accepted:,} tokens accepted"


def _of_requests(ended: Sequence[Task], version: str, skipped: dict[str, int]) -> Imported:
    """By position where every request's line tells mean length and rates, else sums."""
    about = _about(ended, version, skipped)
    parts = []
    for task in ended:
        assert task.summary is not None
        drafted, accepted = task.summary
        if not 0 <= accepted <= drafted:
            raise InputError(f"{accepted} of {drafted} drafted tokens accepted cannot be; export again")
        if not drafted:
            continue
        if task.mean_length is None or not task.rates:
            drafted, accepted = (sum(one.summary[i] for one in ended if one.summary) for i in (0, 1))
            return replace(about, sums=(None, drafted, accepted), instead=INSTEAD)
        (mean_length,) = _printed(task.mean_length)
        part = rates.part_of(mean_length, _printed(task.rates), drafted, accepted)
        if part is None:
            raise InputError(f"mean length {task.mean_length} and rates ({task.rates}) {_unfit(accepted)}; {APART}")
        parts.append(part)
    if not parts:
        raise InputError("no request of the log drafted anything; give the log of a speculative run")
    found, notes = rates.sum_of_parts(parts, INSTEAD)
    return replace(about, source=found, notes=tuple(notes))


class Timings(TypedDict):
    """Of a response; drafts are left out where none was made."""

    predicted_n: int
    draft_n: NotRequired[int]
    draft_n_accepted: NotRequired[int]


class Response(TypedDict):
    """Of llama-server, as far as it is read."""

    timings: Timings


def read_responses(paths: Sequence[Path]) -> Imported:
    """Responses of llama-server: sums of every request."""
    invalid = "give responses of llama-server, as JSON Lines or a list"
    records, skipped = json_records(paths, invalid=invalid)
    sums, lengths, without = [], [], 0
    for number, record in enumerate(records):
        name = f"response {number + 1}"
        timings = checked(record, name, Response, invalid=invalid)["timings"]
        if "draft_n" not in timings:
            without += 1
            continue
        lengths.append(count(timings["predicted_n"], f"{name}: predicted_n"))
        drafted = count(timings["draft_n"], f"{name}: draft_n")
        sums.append((drafted, count(timings.get("draft_n_accepted", 0), f"{name}: draft_n_accepted", drafted)))
    if without:
        skipped["responses without a draft"] = without
    if not sums:
        raise InputError(f"{paths[0]} holds no response with drafts (timings.draft_n); {invalid}")
    drafted, accepted = (sum(column) for column in zip(*sums, strict=True))
    return Imported(
        None, ENGINE, definition_of(ENGINE), "", len(sums), tuple(lengths), (None, drafted, accepted),
        skipped=skipped, instead=INSTEAD,
    )  # fmt: skip
