"""The lines about speculation that vLLM logs at intervals, and the end of `vllm bench serve`.

Each line counts its own interval, so they are summed. Rates are printed with three decimals; the number of rounds
follows from them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specsim.engines import rates
from specsim.engines.formats.reading import count, log_lines, single_version
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.engines.formats.requests import DETAILED
from specsim.io.errors import InputError

FIELDS = {
    "mean": re.compile(r"Mean acceptance length: (\d+\.\d+)"),
    "accepted": re.compile(r"Accepted: (\d+) tokens"),
    "drafted": re.compile(r"Drafted: (\d+) tokens"),
    "rates": re.compile(r"Per-position acceptance rate: (\d\.\d+(?:, \d\.\d+)*)(?=, [A-Z]|\s*$)"),
}
LAST = re.compile(r"Draft acceptance rate: \d+\.\d+%")  # of vLLM's line, which a cut line lacks
OLD = re.compile(r"Draft acceptance rate: \d+\.\d+%?, Accepted: (\d+) tokens, Drafted: (\d+) tokens")
OLDER = re.compile(r"Draft acceptance rate: \d+\.\d+, Number of accepted tokens: (\d+), Number of draft tokens: (\d+),")
OLDEST = re.compile(  # accepted counts tokens behind a rejected token, too, but emitted does not
    r"Number of speculative tokens: (\d+), Number of accepted tokens: (\d+), Number of draft tokens: (\d+), "
    r"Number of emitted tokens: (\d+)"
)
MARKS = ("SpecDecoding metrics:", "Speculative metrics:")
VERSION = re.compile(r"(?:vLLM API server version|LLM engine \(v)\s*(\d[\w.+]*)")
NOTHING = "Drafted: 0 tokens"
ONE_SERVER = "give the log of a single server"


class Lines:
    """Counts in a log's lines, by the versions that print them."""

    def __init__(self) -> None:
        self.parts: list[rates.Part] = []
        self.old: list[tuple[int, int]] = []
        self.oldest: tuple[int, int, int] | None = None
        self.versions: list[str] = []

    def take(self, line: str, skipped: Skipped) -> None:
        if match := VERSION.search(line):
            self.versions.append(match[1])
        if not any(mark in line for mark in MARKS):
            return
        fields = {name: match[1] for name, pattern in FIELDS.items() if (match := pattern.search(line))}
        if NOTHING in line:
            skipped["intervals without a draft"] += 1
        elif len(fields) == len(FIELDS) and LAST.search(line):
            self.parts.append(_part(fields))
        elif "mean" not in fields and (match := OLD.search(line) or OLDER.search(line)):
            self.old.append((count(match[1], "Accepted"), count(match[2], "Drafted")))
        elif match := OLDEST.search(line):
            self.oldest = count(match[1], "speculative"), count(match[3], "drafted"), count(match[4], "emitted")
        else:
            skipped["lines that were cut off or have another form"] += 1


def read_vllm_log(paths: Sequence[Path]) -> ImportedRecords:
    """Read vLLM's log."""
    lines, skipped = Lines(), Skipped()
    for line in log_lines(paths, skipped):
        lines.take(line, skipped)
    if sum(map(bool, (lines.parts, lines.old, lines.oldest))) > 1:
        raise InputError(f"the log has lines of several versions of vllm; {ONE_SERVER}")
    version = single_version(lines.versions)
    imported = ImportedRecords(None, "vllm", version=version, skipped=skipped, instead=DETAILED)
    if lines.parts:
        return _with_counters(lines.parts, imported)
    if lines.old:
        accepted, drafted = (sum(column) for column in zip(*lines.old, strict=True))
        sums: tuple[int | None, int, int] = None, drafted, accepted
    elif lines.oldest is not None:  # since the server's start
        k, drafted, emitted = lines.oldest
        rounds = drafted // max(k, 1)
        if rounds * k != drafted or not rounds <= emitted <= rounds + drafted:
            raise InputError(f"{emitted:,} tokens emitted of {drafted:,} in drafts of {k} is impossible; {ONE_SERVER}")
        accepted = emitted - rounds
        sums = rounds, drafted, accepted
    else:
        raise InputError(f"{paths[0]} holds no line with {' or '.join(MARKS)} give the log of a speculative run")
    if accepted > drafted:
        raise InputError(f"{accepted} of {drafted} drafted tokens accepted is impossible; {ONE_SERVER}")
    return replace(imported, sums=sums)


def _part(fields: dict[str, str]) -> rates.Part:
    drafted, accepted = count(fields["drafted"], "Drafted"), count(fields["accepted"], "Accepted")
    shares = [rates.Printed.of(text) for text in fields["rates"].split(", ")]
    part = rates.part_of(rates.Printed.of(fields["mean"]), shares, drafted, accepted)
    if part is None:
        raise InputError(
            f"mean acceptance length {fields['mean']} and rates {fields['rates']} do not fit {accepted:,} of "
            f"{drafted:,} drafted tokens; give a log as vLLM wrote it"
        )
    return part


def _with_counters(parts: Sequence[rates.Part], imported: ImportedRecords) -> ImportedRecords:
    depths = sorted({len(part.counted.accepted) for part in parts})
    if len(depths) > 1:
        raise InputError(f"the log has lines of several draft lengths ({', '.join(map(str, depths))}); {ONE_SERVER}")
    counters, notes = rates.sum_of_parts(parts, DETAILED)
    return replace(imported, source=counters, notes=tuple(notes), instead="")


BENCH = {
    "drafts": re.compile(r"^Drafts:\s+(\d+)\s*$"),
    "drafted": re.compile(r"^Draft tokens:\s+(\d+)\s*$"),
    "accepted": re.compile(r"^Accepted tokens:\s+(\d+)\s*$"),
}
BENCH_POSITION = re.compile(r"^\s+Position (\d+):\s+(\d+\.\d+)\s*$")


def read_vllm_bench(paths: Sequence[Path]) -> ImportedRecords:
    """Read what `vllm bench serve` prints at the end of a run."""
    sums: dict[str, int] = {}
    shares: list[rates.Printed] = []
    skipped = Skipped()
    for line in log_lines(paths, skipped):
        for name, pattern in BENCH.items():
            if match := pattern.match(line):
                if name in sums:
                    raise InputError(f"{paths[0]} holds several benchmarks; give a single benchmark")
                sums[name] = count(match[1], name)
        if match := BENCH_POSITION.match(line):
            if count(match[1], "position") != len(shares):
                raise InputError(f"{paths[0]} holds several benchmarks, or a part of one; give a single benchmark")
            shares.append(rates.Printed(float(match[2]) / 100, 0.5e-4))
    if len(sums) < len(BENCH) or not shares:
        raise InputError(f"{paths[0]} lacks the part 'Speculative Decoding' of vllm bench serve; give its whole output")
    counted = rates.counts_of_rates(shares, sums["drafts"], sums["accepted"])
    if counted is None:
        raise InputError(f"acceptance by position does not fit {sums['accepted']:,} accepted tokens; {ONE_SERVER}")
    part = rates.Part(sums["drafts"], sums["drafted"], counted, 0)
    return _with_counters([part], ImportedRecords(None, "vllm", skipped=skipped, instead=DETAILED))
