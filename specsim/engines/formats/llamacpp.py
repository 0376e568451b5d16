"""llama.cpp's log and responses: rounds where LLAMA_TRACE=1 was set, else counters by position, else sums.

A log may hold, in decreasing detail: a line for every round, cumulative statistics of each drafter, and the acceptance
of every request. The rounds of a request are used only if their sums equal the request's own line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from specsim.acceptance.sources import Counters
from specsim.engines import rates
from specsim.engines.formats.reading import (
    Request,
    count,
    json_records,
    lengths_of,
    log_lines,
    rounds_of_requests,
    single_version,
)
from specsim.engines.formats.records import ImportedRecords, Setup, Skipped, check_output
from specsim.io.errors import InputError
from specsim.io.json import checked

ENGINE = "llamacpp"
OTHER_LOG = "give a log that no other program wrote into"
INSTEAD = (
    "set LLAMA_TRACE=1 for llama-server (of summer 2026 on) and import its log (llamacpp-log), which has every round"
)
NO_POSITIONS = "`specsim advise` takes acceptance to fall alike from position to position"

ROUND = re.compile(r"task (\d+) \| accepted\s+(\d+)/\s*(\d+) draft tokens(, new n_tokens = \d+)?\s*$")
TIMINGS = re.compile(r"print_timings?: .*task (\d+) \|")  # of a request, whose numbers may follow in lines of their own
SLOT = re.compile(r"(launch_slot_)?: id\s+(\d+) \| task (\d+) \|")  # any line of a request
LENGTH = re.compile(
    r"(?:task (\d+) \||^[^|/=]{0,40}?)\s*(?<!prompt )"
    r"eval time =(?:\s*(\d{1,12}(?:\.\d{1,12})?) ms)?[^|/]*/\s*(\d+) tokens"
)
SUMMARY = re.compile(
    r"(?:task (\d+) \| )?draft acceptance(?: rate)? = [\d.]+ \(\s*(\d+) accepted /\s*(\d+) generated\)"
    r"(?:, mean (?:acceptance length|len) =\s*([\d.]+))?(?:, acceptance rate per position = \(([\d., ]+)\))?"
)
PER_POSITION = re.compile(r"task (\d+) \|\s+acc per pos = \(([\d., ]+)\)")
STATISTICS = re.compile(r"statistics\s+(\S+?):? #calls")
CALLS = re.compile(r"#calls(?:\(b,g,a\) =\s*\d+\s+(\d+)| =\s*(\d+))")  # steps that asked the drafter
COUNTS = re.compile(r"#(gen drafts|gen tokens|acc tokens) =\s*(\d+)")
RATES = re.compile(r"#acc rate/pos = \(([\d., ]*)\)")
DRAFTING = re.compile(r"dur\(b,g,a\) = [\d.]+, (\d{1,12}(?:\.\d{1,12})?), [\d.]+ ms")  # since the server's start
COUNTED = ("gen drafts", "gen tokens", "acc tokens")
BENCH = re.compile(r"\bpred=\s{0,9}(\d+)\s{1,9}draft=\s{0,9}(\d+)\s{1,9}acc=\s{0,9}(\d+)")  # of mtp-bench.py
EXAMPLE = re.compile(r"^\s{0,9}n_(draft|predict|drafted|accept) {0,9}= (\d+)\s*$")  # of llama-speculative
BUILD = re.compile(r"build: (\d+ \([0-9a-f]+\))")
MARKS = ("| accepted ", "draft acceptance", "#gen drafts")


def drafting_totals(lines: Iterable[str]) -> tuple[int, int, float]:
    """Drafts, drafted tokens and milliseconds of drafting since a server's start, summed over its drafters."""
    last: dict[str, tuple[dict[str, int], float]] = {}
    for line in lines:
        if (match := STATISTICS.search(line)) and (drafting := DRAFTING.search(line)):
            counts = {name: count(text, f"#{name}") for name, text in COUNTS.findall(line)}
            last[match[1]] = counts, float(drafting[1])
    drafts, drafted = (sum(counts.get(key, 0) for counts, _ in last.values()) for key in ("gen drafts", "gen tokens"))
    return drafts, drafted, sum(ms for _, ms in last.values())


@dataclass
class Task:
    """The lines of a request so far; `repeated` are debug-level lines of the same rounds."""

    rounds: list[tuple[int, int]] = field(default_factory=list)
    repeated: list[tuple[int, int]] = field(default_factory=list)
    summary: tuple[int, int] | None = None
    mean_length: str | None = None
    rates: str | None = None
    output_tokens: int | None = None
    decode_ms: float | None = None

    def request(self) -> Request:
        rounds = self.rounds or self.repeated
        return Request([drafted for drafted, _ in rounds], [accepted for _, accepted in rounds], self.output_tokens)


class Statistics(NamedTuple):
    """Counts of a drafter since the server's start, its printed rates by position, and how often it was asked."""

    drafts: int
    drafted: int
    accepted: int
    rates: str | None
    calls: int | None


class Log:
    """The content of a log's lines."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.running: dict[str, Task] = {}
        self.ended: dict[str, Task] = {}
        self.statistics: dict[str, list[Statistics]] = {}
        self.builds: list[str] = []
        self.unread = 0
        self.timed: str | None = None
        self.example: dict[str, int] = {}
        self.draft_tokens: int | None = None
        self.slots: set[str] = set()
        self.seen: list[str] = []  # requests by their lines, each once for as long as no other has one
        self.launched = 0

    def setup(self) -> Setup:
        """K, and the throughput of a log that shows one request at a time."""
        ended = [task for task in self.tasks if task.summary is not None]
        timed = [(task.output_tokens, task.decode_ms) for task in ended if task.output_tokens and task.decode_ms]
        alone = len(set(self.seen)) == len(self.seen) and (len(self.slots) == 1 or self.launched >= len(ended))
        if not timed or not self.slots or not alone:
            return Setup(draft_tokens=self.draft_tokens)
        tokens, ms = (sum(column) for column in zip(*timed, strict=True))
        return Setup(draft_tokens=self.draft_tokens, tokens_per_s=1e3 * tokens / ms)

    def take(self, line: str) -> None:
        """Read a line into the log."""
        if match := SLOT.search(line):
            self.launched += match[1] is not None
            self.slots.add(match[2])
            if self.seen[-1:] != [match[3]]:
                self.seen.append(match[3])
        if match := TIMINGS.search(line):
            self.timed = match[1]
        if match := ROUND.search(line):
            task = self._task(match[1])
            rounds = task.repeated if match[4] else task.rounds
            accepted = count(match[2], "accepted")
            rounds.append((count(match[3], "drafted"), accepted))
        elif "eval time" in line:
            if (match := LENGTH.search(line)) and (name := match[1] or self.timed):
                task = self._task(name)
                task.output_tokens, task.decode_ms = count(match[3], "tokens"), float(match[2] or 0)
        elif (match := SUMMARY.search(line)) and (name := match[1] or self.timed):
            ended = self.running.pop(name, None) or self._new()
            ended.summary = count(match[3], "generated"), count(match[2], "accepted")
            ended.mean_length, ended.rates = match[4], match[5]
            self.ended[name] = ended
        elif match := PER_POSITION.search(line):
            if match[1] in self.ended:
                self.ended[match[1]].rates = match[2]
        elif (match := STATISTICS.search(line)) and len(counts := dict(COUNTS.findall(line))) == len(COUNTED):
            self.statistics.setdefault(match[1], []).append(_statistics(match[1], counts, line))
        elif match := BENCH.search(line):
            self._add(*(count(text, "tokens") for text in match.groups()))
        elif match := EXAMPLE.match(line):
            self.example[match[1]] = count(match[2], f"n_{match[1]}")
            if len(self.example) == 4:
                self.draft_tokens = self.example["draft"]
                self._add(*(self.example.pop(key) for key in ("predict", "drafted", "accept")))
        elif match := BUILD.search(line):
            self.builds.append(match[1])
        elif any(mark in line for mark in MARKS) and "restore checkpoint" not in line:
            self.unread += 1

    def _add(self, output: int, drafted: int, accepted: int) -> None:
        task = self._new()
        task.output_tokens, task.summary = output, (drafted, accepted)

    def _task(self, name: str) -> Task:
        if name not in self.running:
            self.running[name] = self._new()
        return self.running[name]

    def _new(self) -> Task:
        self.tasks.append(Task())
        return self.tasks[-1]


def _statistics(drafter: str, counts: dict[str, str], line: str) -> Statistics:
    drafts, drafted, accepted = (count(counts[name], f"#{name}") for name in COUNTED)
    if accepted > drafted or bool(drafts) != bool(drafted):
        raise InputError(
            f"statistics of {drafter}: {accepted:,} of {drafted:,} tokens accepted in {drafts:,} drafts are "
            f"impossible; {OTHER_LOG}"
        )
    by_position, calls = RATES.search(line), CALLS.search(line)
    asked = None if calls is None else count(calls[1] or calls[2], "#calls")
    return Statistics(drafts, drafted, accepted, by_position[1] if by_position else None, asked)


def read_log(paths: Sequence[Path]) -> ImportedRecords:
    """Read the log of llama-server, of any number of runs."""
    log, skipped = Log(), Skipped()
    for line in log_lines(paths, skipped):
        log.take(line)
    version = single_version(log.builds)
    if log.unread:
        skipped["lines that were cut off or have another form"] = log.unread
    if any(task.rounds or task.repeated for task in log.tasks):
        return _of_rounds(log, version, skipped)
    ended = [task for task in log.tasks if task.summary is not None]
    lengths = lengths_of([task.request() for task in ended])
    sums_only = ImportedRecords(
        None,
        ENGINE,
        "",
        version,
        len(ended) or None,
        lengths,
        skipped=skipped,
        instead=INSTEAD,
        setup=log.setup(),
    )
    if any(line.drafted for lines in log.statistics.values() for line in lines):
        return _of_statistics(log, sums_only)
    if not ended:
        raise InputError(f"{paths[0]} holds no line of llama.cpp about drafts; give the log of a speculative run")
    return _of_requests(ended, sums_only)


def _of_rounds(log: Log, version: str, skipped: Skipped) -> ImportedRecords:
    whole: list[Request] = []
    partial = 0
    for task in log.tasks:
        request = task.request()
        if task.summary is not None and task.summary != (sum(request.drafted), sum(request.accepted)):
            partial += 1
        elif request.drafted:
            whole.append(request.check(f"request {len(whole) + 1} of the log"))
    if partial:
        skipped["requests whose rounds are not all in the log"] = partial
    if not whole:
        raise InputError(f"the log holds no request's rounds in full; {INSTEAD}")
    imported = replace(rounds_of_requests(ENGINE, whole, skipped, version=version), setup=log.setup())
    ended = sum(task.summary is not None for task in log.tasks) - partial
    if ended == len(whole):
        return imported
    note = f"{len(whole) - ended:,} requests without their last line, whose end may be missing"
    return replace(imported, notes=(*imported.notes, note))


def _of_statistics(log: Log, sums_only: ImportedRecords) -> ImportedRecords:
    """The last line of each process, which counts everything since its start; drafters of a chain are added."""
    last = {  # before counts begin anew
        name: [line for line, next_ in zip(lines, [*lines[1:], None], strict=True)
               if next_ is None or next_.drafts < line.drafts]
        for name, lines in log.statistics.items()
    }  # fmt: skip
    lines = [line for own in last.values() for line in own if line.drafted]
    drafts, drafted, accepted = (sum(column) for column in zip(*(line[:3] for line in lines), strict=True))
    used = {name: own for name, own in last.items() if any(line.drafted for line in own)}
    notes = []
    if len(used) > 1:
        for name, own in used.items():
            sums = [sum(column) for column in zip(*(line[:3] for line in own), strict=True)]
            notes.append(f"{name}: {sums[0]:,} drafts, {sums[1]:,} tokens drafted, {sums[2]:,} accepted")
        notes.append("drafters of a chain are added; a K stands for all of them")
    asked = [sum(line.calls or 0 for line in own) for own in last.values() if all(line.calls for line in own)]
    told = [task.summary[1] for task in log.tasks if task.summary is not None]
    known = replace(
        sums_only,
        sums=(drafts, drafted, accepted),
        plain_steps=max(max(asked) - drafts, 0) if asked else None,  # the first drafter of a chain is asked in all
        output_tokens=sums_only.output_tokens if sum(told) == accepted else None,  # else of other requests, too
        notes=tuple(notes),
        setup=replace(sums_only.setup, method="+".join(sorted(used))),
    )
    if any(not line.rates for line in lines):
        return known
    return _with_counters([_part(line) for line in lines], known)


def _with_counters(parts: Sequence[rates.Part], sums_only: ImportedRecords) -> ImportedRecords:
    counters, notes = rates.sum_of_parts(parts, INSTEAD)
    notes = [*sums_only.notes, *notes]
    return replace(sums_only, source=counters, notes=tuple(notes), instead="")


def _part(line: Statistics) -> rates.Part:
    printed = line.rates or ""
    counted = rates.counts_of_rates(_numbers(printed), line.drafts, line.accepted)
    if counted is None:
        raise InputError(
            f"acceptance rates by position ({printed}) do not fit {line.accepted:,} tokens accepted in "
            f"{line.drafts:,} drafts; {OTHER_LOG}"
        )
    return rates.Part(line.drafts, line.drafted, counted, 0)


def _numbers(printed: str) -> list[rates.Printed]:
    try:
        return [rates.Printed.of(text) for text in printed.split(",")]
    except ValueError:
        raise InputError(f"acceptance rates by position ({printed}) are not numbers; {OTHER_LOG}") from None


def _of_requests(ended: Sequence[Task], sums_only: ImportedRecords) -> ImportedRecords:
    """Counters by position if every request's line has mean length and rates, else sums."""
    parts = []
    for task in ended:
        assert task.summary is not None
        drafted, accepted = task.summary
        if not 0 <= accepted <= drafted:
            raise InputError(f"{accepted} of {drafted} drafted tokens accepted is impossible; export again")
        if not drafted:
            continue
        if task.mean_length is None or not task.rates:
            drafted, accepted = (sum(other.summary[i] for other in ended if other.summary) for i in (0, 1))
            return replace(sums_only, sums=(_rounds_of_means(ended), drafted, accepted))
        (mean_length,) = _numbers(task.mean_length)
        part = rates.part_of(mean_length, _numbers(task.rates), drafted, accepted)
        if part is None:
            raise InputError(
                f"mean length {task.mean_length} and rates ({task.rates}) do not fit {accepted:,} tokens accepted; "
                f"{OTHER_LOG}"
            )
        parts.append(part)
    if not parts:
        raise InputError("no request of the log drafted anything; give the log of a speculative run")
    return _with_counters(parts, sums_only)


def _rounds_of_means(ended: Sequence[Task]) -> int | None:
    """Rounds by every request's mean length, which is 1 + accepted / rounds; None where one is not told."""
    rounds = 0
    for task in ended:
        if task.summary is None or not task.summary[0]:
            continue
        longer = float(task.mean_length or 1) - 1
        if longer <= 0 or not task.summary[1]:
            return None
        rounds += round(task.summary[1] / longer)
    return rounds


class Depth(TypedDict):
    """Tokens drafted at a depth, from 1; of ik_llama.cpp."""

    depth: int
    draft_n: int
    draft_n_accepted: int


class Timings(TypedDict):
    """Timings of a response; the draft counts are missing where nothing was drafted."""

    predicted_n: int
    draft_n: NotRequired[int]
    draft_n_accepted: NotRequired[int]
    draft_by_depth: NotRequired[list[Depth]]  # ik_llama.cpp
    draft_rounds: NotRequired[int]  # mlx-vlm
    draft_kind: NotRequired[str]


class Response(TypedDict):
    """A response of llama-server, as far as it is read."""

    timings: Timings


def read_responses(paths: Sequence[Path]) -> ImportedRecords:
    """Read responses of llama-server: sums of every request."""
    invalid = "give responses of llama-server, as JSON Lines or a list"
    skipped = Skipped()
    rows: list[tuple[int, int, int]] = []
    rounds: list[int | None] = []
    depths: list[list[tuple[int, int]]] = []
    kinds = set()
    records = json_records(paths, skipped, invalid=invalid, noun="response")
    for name, record in [*_of_mtp_bench(records)]:
        timings: Any = checked(record, name, Response, invalid=invalid)["timings"]
        if "draft_n" not in timings:
            skipped["responses without a draft"] += 1
            continue
        length = count(timings["predicted_n"], f"{name}: predicted_n")
        drafted = count(timings["draft_n"], f"{name}: draft_n")
        accepted = count(timings.get("draft_n_accepted", 0), f"{name}: draft_n_accepted", drafted)
        rows.append((length, drafted, accepted))
        own = timings.get("draft_rounds")
        rounds.append(None if own is None else count(own, f"{name}: draft_rounds"))
        if "draft_kind" in timings:
            kinds.add(timings["draft_kind"])
        depths.append(_by_depth(timings.get("draft_by_depth", []), drafted, accepted, name))
        check_output(rounds[-1] or 0, accepted, length, 1, 1, name)
    if not rows:
        raise InputError(f"{paths[0]} holds no response with drafts (timings.draft_n); {invalid}")
    lengths, drafted_sums, accepted_sums = zip(*rows, strict=True)
    known = None if None in rounds else sum(number or 0 for number in rounds)
    imported = ImportedRecords(
        None,
        ENGINE if known is None else "mlx-vlm",
        requests=len(rows),
        output_tokens=lengths,
        sums=(known, sum(drafted_sums), sum(accepted_sums)),
        skipped=skipped,
        instead=INSTEAD if known is None else NO_POSITIONS,
        setup=Setup(method="+".join(sorted(kinds))),
    )
    if not all(depths):
        return imported
    columns = np.zeros((2, max(map(len, depths))), dtype=np.int64)
    for by_depth in depths:
        columns[:, : len(by_depth)] += np.array(by_depth).T
    if not columns[0].any():
        return imported
    counters = Counters(columns[0][columns[0] > 0], columns[1][columns[0] > 0])
    return replace(imported, source=counters, sums=(None, None, None), plain_steps=None, instead="")


def _of_mtp_bench(records: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield responses; a file of mtp-bench.py has one for each prompt, in a list."""
    for name, record in records:
        results = record.get("results")
        if "timings" in record or not isinstance(results, list):
            yield name, record
        else:
            yield from ((f"{name}, result {i}", {"timings": each}) for i, each in enumerate(results, start=1))


def _by_depth(depths: Sequence[Depth], drafted: int, accepted: int, name: str) -> list[tuple[int, int]]:
    """Drafted and accepted tokens by depth; InputError where they contradict the sums."""
    rows = [
        (count(row["draft_n"], f"{name}: draft_n"), count(row["draft_n_accepted"], f"{name}: draft_n_accepted"))
        for row in depths
    ]
    if not rows:
        return []
    columns = np.array(rows)
    if (
        [row["depth"] for row in depths] != [*range(1, len(depths) + 1)]
        or columns.sum(axis=0).tolist() != [drafted, accepted]
        or (np.diff(columns, axis=0) > 0).any()
        or (columns[:, 1] > columns[:, 0]).any()
    ):
        raise InputError(f"{name}: draft_by_depth does not add up to {accepted} of {drafted} tokens; export again")
    return rows
