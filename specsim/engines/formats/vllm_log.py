"""The lines about speculation that vLLM and LMDeploy log at intervals, and the end of `vllm bench serve`.

Lines count their interval alone, so that they are summed. Rates are printed with three decimals; how many rounds there
were follows from them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specsim.engines import rates
from specsim.engines.formats.imported import Imported, count, definition_of, log_lines, one_version
from specsim.engines.formats.requests import DETAILED
from specsim.errors import InputError

FIELDS = {
    "mean": re.compile(r"Mean acceptance length: (\d+\.\d+)"),
    "accepted": re.compile(r"Accepted: (\d+) tokens"),
    "drafted": re.compile(r"Drafted: (\d+) tokens"),
    "rates": re.compile(r"Per-position acceptance rate: (\d\.\d+(?:, \d\.\d+)*)(?=, [A-Z]|\s*$)"),
}
LAST = re.compile(r"Draft acceptance rate: \d+\.\d+%")  # of vLLM's line, which a cut one lacks
OLD = re.compile(r"Draft acceptance rate: \d+\.\d+%?, Accepted: (\d+) tokens, Drafted: (\d+) tokens")
OLDER = re.compile(r"Draft acceptance rate: \d+\.\d+, Number of accepted tokens: (\d+), Number of draft tokens: (\d+),")
OLDEST = re.compile(  # of which accepted counts tokens behind a rejected one, too, but emitted does not
    r"Number of speculative tokens: (\d+), Number of accepted tokens: (\d+), Number of draft tokens: (\d+), "
    r"Number of emitted tokens: (\d+)"
)
MARKS = ("SpecDecoding metrics:", "Speculative metrics:")
VERSION = re.compile(r"(?:vLLM API server version|LLM engine \(v)\s*(\d[\w.+]*)")
NOTHING = "Drafted: 0 tokens"
APART = "give the log of one server"


def read_vllm_log(paths: Sequence[Path]) -> Imported:
    """vLLM's log."""
    return _read(paths, "vllm", DETAILED)


def read_lmdeploy_log(paths: Sequence[Path]) -> Imported:
    """LMDeploy's log, whose lines are vLLM's but for their order."""
    found = _read(paths, "lmdeploy", "give lines with per-position rates, or two scrapes of its metrics (prometheus)")
    note = "lines are taken to count their interval, as vLLM's do"
    return replace(found, definition=definition_of("vllm"), notes=(*found.notes, note))


def _read(paths: Sequence[Path], engine: str, instead: str) -> Imported:
    parts: list[rates.Part] = []
    old: list[tuple[int, int]] = []
    oldest: tuple[int, int, int] | None = None
    versions: list[str] = []
    skipped: Counter[str] = Counter()
    for line in log_lines(paths, skipped):
        if found := VERSION.search(line):
            versions.append(found[1])
        if not any(mark in line for mark in MARKS):
            continue
        fields = {name: pattern.search(line) for name, pattern in FIELDS.items()}
        if NOTHING in line:
            skipped["intervals without a draft"] += 1
        elif all(fields.values()) and LAST.search(line):
            parts.append(_part({name: one[1] for name, one in fields.items() if one}, engine))
        elif fields["mean"] is None and (one := OLD.search(line) or OLDER.search(line)):
            old.append((count(one[1], "Accepted"), count(one[2], "Drafted")))
        elif one := OLDEST.search(line):
            oldest = count(one[1], "speculative"), count(one[3], "drafted"), count(one[4], "emitted")
        else:
            skipped["lines that were cut off or have another form"] += 1
    kinds = [bool(parts), bool(old), oldest is not None]
    if sum(kinds) > 1:
        raise InputError(f"the log has lines of several versions of {engine}; {APART}")
    about = Imported(None, engine, definition_of(engine), one_version(versions), skipped=skipped, instead=instead)
    if parts:
        return _of_parts(parts, about)
    if old:
        accepted, drafted = (sum(column) for column in zip(*old, strict=True))
        sums: tuple[int | None, int, int] = None, drafted, accepted
    elif oldest is not None:  # since the server's start
        k, drafted, emitted = oldest
        rounds = drafted // max(k, 1)
        if rounds * k != drafted or not rounds <= emitted <= rounds + drafted:
            raise InputError(f"{emitted:,} tokens emitted of {drafted:,} in drafts of {k} cannot be; {APART}")
        accepted = emitted - rounds
        sums = rounds, drafted, accepted
    else:
        raise InputError(f"{paths[0]} holds no line with {' or '.join(MARKS)} give the log of a speculative run")
    if accepted > drafted:
        raise InputError(f"{accepted} of {drafted} drafted tokens accepted cannot be; {APART}")
    return replace(about, sums=sums)


def _part(fields: dict[str, str], engine: str) -> rates.Part:
    drafted, accepted = count(fields["drafted"], "Drafted"), count(fields["accepted"], "Accepted")
    shares = [rates.Printed.of(text) for text in fields["rates"].split(", ")]
    part = rates.part_of(rates.Printed.of(fields["mean"]), shares, drafted, accepted)
    if part is None:
        raise InputError(
            f"mean acceptance length {fields['mean']} and rates {fields['rates']} do not fit {accepted:,} of "
            f"{drafted:,} drafted tokens; give a log as {engine} wrote it"
        )
    return part


def _of_parts(parts: Sequence[rates.Part], about: Imported) -> Imported:
    depths = sorted({len(part.counted.accepted) for part in parts})
    if len(depths) > 1:
        raise InputError(f"the log has lines of several draft lengths ({', '.join(map(str, depths))}); {APART}")
    found, notes = rates.sum_of_parts(parts, about.instead)
    return replace(about, source=found, notes=tuple(notes), instead="")


BENCH = {
    "drafts": re.compile(r"^Drafts:\s+(\d+)\s*$"),
    "drafted": re.compile(r"^Draft tokens:\s+(\d+)\s*$"),
    "accepted": re.compile(r"^Accepted tokens:\s+(\d+)\s*$"),
}
BENCH_POSITION = re.compile(r"^\s+Position (\d+):\s+(\d+\.\d+)\s*$")


def read_vllm_bench(paths: Sequence[Path]) -> Imported:
    """What `vllm bench serve` prints at its end, of one run."""
    sums: dict[str, int] = {}
    texts: list[str] = []
    skipped: Counter[str] = Counter()
    for line in log_lines(paths, skipped):
        for name, pattern in BENCH.items():
            if found := pattern.match(line):
                if name in sums:
                    raise InputError(f"{paths[0]} holds several benchmarks; give one at a time")
                sums[name] = count(found[1], name)
        if found := BENCH_POSITION.match(line):
            if count(found[1], "position") != len(texts):
                raise InputError(f"{paths[0]} holds several benchmarks, or a part of one; give one at a time")
            texts.append(found[2])
    if len(sums) < len(BENCH) or not texts:
        raise InputError(f"{paths[0]} lacks the part 'Speculative Decoding' of vllm bench serve; give its whole output")
    shares = [rates.Printed(float(text) / 100, 0.5e-4) for text in texts]
    counted = rates.counts_of_rates(shares, sums["drafts"], sums["accepted"])
    if counted is None:
        raise InputError(f"acceptance by position does not fit {sums['accepted']:,} accepted tokens; {APART}")
    parts = [rates.Part(sums["drafts"], sums["drafted"], counted, 0)]
    return _of_parts(parts, Imported(None, "vllm", definition_of("vllm"), skipped=skipped, instead=DETAILED))
