"""The lines about speculation that vLLM logs at intervals.

Each line counts its own interval, so they are summed. Rates are printed with three decimals; the number of rounds
follows from them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specsim.acceptance.sources import SLACK
from specsim.engines import rates
from specsim.engines.flags import VLLM_KEYS
from specsim.engines.formats.reading import count, left_out, log_lines, single_version
from specsim.engines.formats.records import UNSET, ImportedRecords, Setup, Skipped
from specsim.engines.formats.requests import DETAILED
from specsim.io.errors import InputError

FIELDS = {
    "mean": re.compile(r"Mean acceptance length: (\d+\.\d+)"),
    "accepted": re.compile(r"Accepted: (\d+) tokens"),
    "drafted": re.compile(r"Drafted: (\d+) tokens"),
    "rates": re.compile(r"Per-position acceptance rate: (\d\.\d+(?:, \d\.\d+)*)(?=, [A-Z]|\s*$)"),
}
WORDS = {"accepted": "Accepted", "drafted": "Drafted", "rates": "Per-position acceptance rate"}
LAST = re.compile(r"Draft acceptance rate: \d+\.\d+%")  # of vLLM's line, which a cut line lacks
OLD = re.compile(r"Draft acceptance rate: \d+\.\d+%?, Accepted: (\d+) tokens, Drafted: (\d+) tokens")
MARKED = "SpecDecoding metrics:"
MARK = re.compile(r"SpecDecoding\s*(?:metrics:|$)")
VERSION = re.compile(r"(?:vLLM API server version|LLM engine \(v)\s*(\d[\w.+]*)")
NOTHING = "Drafted: 0 tokens"
ONE_SERVER = "give the log of a single server"
DRAFTING = re.compile(r"Drafted throughput: (\d+\.\d+) tokens/s")
ENGINE = re.compile(r"Engine (\d+): ")
GENERATING = re.compile(
    r"Avg generation throughput: (\d+(?:\.\d+)?) tokens/s, (Finished: \d+ reqs, Unfinished: \d+ reqs, )?"
    r"Running: (\d+) reqs"
)
NEW_LINE = re.compile(
    r"^\W*(?:INFO|WARNING|ERROR|DEBUG|\w+ pid=|\d{4}-\d\d|\d\d[-:]\d\d)"
)  # of a log, not a part of one
QUOTE = re.compile(r"^\s*(?:>\s*)+")
MOST_WRAPPED = 12  # lines that a terminal or a chat makes of one
SETTINGS = {
    "model": re.compile(r"(?:config: model=|'model(?:_tag)?': )'([^']{1,200})'"),
    "method": re.compile(r"SpeculativeConfig\(method='([\w-]+)'|'method': '([\w-]+)'"),
    "drafter": re.compile(
        r"SpeculativeConfig\(method='[\w-]+', model='([^']{1,200})'|"
        r"'speculative_config': \{[^{}]{0,300}?'model': '([^']{1,200})'"
    ),
    "verification": re.compile(r"'rejection_sample_method': '(\w+)'"),
    "tp": re.compile(r"'tensor_parallel_size': (\d{1,5})|\btensor_parallel_size=(\d{1,5})"),
    "weights": re.compile(r"'quantization': '([\w-]{1,40})'|\bquantization='?([\w-]{1,40})"),
    "cache": re.compile(r"'kv_cache_dtype': '(\w{1,40})'|\bkv_cache_dtype='?(\w{1,40})"),
    "tree": re.compile(r"speculative_token_tree'?[:=] ?[\"']\[([\d(), ]{1,4000})\]"),
}
BESIDE = {  # how a server splits a model beside tensor parallelism, by its option
    "--data-parallel-size {}": re.compile(r"\bdata_parallel_size(?:': |=)(\d{1,5})"),
    "--pipeline-parallel-size {}": re.compile(r"\bpipeline_parallel_size(?:': |=)(\d{1,5})"),
    "--enable-expert-parallel": re.compile(r"\benable_expert_parallel(?:': |=)(True)"),
}
NGRAMS = re.compile(r"'(prompt_lookup_(?:min|max))': (\d{1,5})")
SPECULATIVE = re.compile(r"'speculative_config': \{[^{}]{0,4000}\}")  # whose quantization is the drafter's
VERIFICATION = {  # notes by rejection_sample_method, for methods that do not verify token by token
    "block": "block verification accepts a draft as a whole: a draft cut at K is accepted otherwise than a draft of K; "
    "measure the K that you choose",
    "synthetic": "acceptance was scripted (rejection_sample_method synthetic): it is not the drafter's",
}


class Interval(NamedTuple):
    """Output tokens per second and running requests in an interval, from the line about throughput."""

    tokens_per_s: float
    running: int


class Lines:
    """Counts in a log's lines, by the versions that print them.

    wrapped : the pieces of a line that a terminal or a chat has wrapped, as far as they are read
    generating : of the line about throughput that was read last
    windows : seconds of every line about drafts, where it tells them, and what was generated in it
    busy, idle : intervals with drafts, and intervals without
    lmdeploy : whether the lines are LMDeploy's
    """

    def __init__(self) -> None:
        self.parts: list[rates.Part] = []
        self.old: list[tuple[int, int]] = []
        self.versions: list[str] = []
        self.settings: dict[str, str] = {}
        self.beside: dict[str, str] = {}
        self.ngrams: dict[str, int] = {}
        self.wrapped: list[str] = []
        self.lacking: str = ""
        self.generating: Interval | None = None
        self.windows: list[tuple[float, Interval] | None] = []
        self.busy: list[Interval] = []
        self.idle: list[Interval] = []
        self.engines: set[str] = set()
        self.number = self.began = 0
        self.lmdeploy = False

    def take(self, line: str, skipped: Skipped) -> None:
        """Read a line."""
        self.number += 1
        if match := VERSION.search(line):
            self.versions.append(match[1])
        if "'" in line:
            of_target = SPECULATIVE.sub("", line)
            for name, pattern in SETTINGS.items():
                if match := pattern.search(of_target if name in ("tp", "weights", "cache") else line):
                    self.settings.setdefault(name, next(filter(None, match.groups())))
            self.ngrams |= {key: int(length) for key, length in NGRAMS.findall(line)}
            for option, pattern in BESIDE.items():
                if (match := pattern.search(of_target)) and match[1] != "1":
                    self.beside.setdefault(option, match[1])
        marked = "Spec" in line and MARK.search(line) is not None
        match = GENERATING.search(line) if "throughput" in line else None
        if self.wrapped and (marked or match or NEW_LINE.search(line) or len(self.wrapped) > MOST_WRAPPED):
            self.end(skipped)
        if match:
            self._flush()
            if engine := ENGINE.search(line):
                self.engines.add(engine[1])
            self.lmdeploy |= match[2] is not None  # LMDeploy's line is vLLM's, with these two numbers added
            self.generating = Interval(float(match[1]), count(match[3], "Running"))
        if not marked and not self.wrapped:
            return
        if not self.wrapped:
            self.began = self.number
        self.wrapped.append(QUOTE.sub("", line) if self.wrapped else line)
        for between in (" ", ""):  # wrapped between words, or in the midst of one
            if self._read(between.join(map(str.strip, self.wrapped)), skipped):
                self.wrapped = []
                return

    def _read(self, line: str, skipped: Skipped) -> bool:
        """Read a whole line about drafts; False if it is not whole."""
        fields = {name: match[1] for name, pattern in FIELDS.items() if (match := pattern.search(line))}
        if NOTHING in line:
            skipped["intervals without a draft"] += 1
            self._flush()
        elif len(fields) == len(FIELDS) and LAST.search(line):
            part = _part(fields)
            self.parts.append(part)
            drafting = DRAFTING.search(line)
            seconds = part.drafted / float(drafting[1]) if drafting and float(drafting[1]) else 0.0
            self.busy += [self.generating] if self.generating else []
            self.windows.append((seconds, self.generating) if seconds and self.generating else None)
            self.generating = None
        elif "mean" not in fields and (match := OLD.search(line)):
            self.old.append((count(match[1], "Accepted"), count(match[2], "Drafted")))
        else:
            return False
        return True

    def _flush(self) -> None:
        """The interval read last had no line about drafts."""
        if self.generating is not None:
            self.idle.append(self.generating)
        self.generating = None

    def end(self, skipped: Skipped) -> None:
        """Leave a line that is not whole."""
        if not self.wrapped:
            return
        text, self.wrapped = " ".join(map(str.strip, self.wrapped)), []
        missing = [word for name, word in WORDS.items() if not FIELDS[name].search(text)]
        if missing and not self.lacking and (mean := FIELDS["mean"].search(text)):
            k = len(match[1].split(",")) if (match := FIELDS["rates"].search(text)) else "K"
            self.lacking = (
                f"line {self.began} lacks {' and '.join(missing)}; give it as "
                f"vLLM wrote it, or `specsim advise --accept-length {mean[1]} --k {k}`"
            )
        skipped["lines that were cut off or have another form"] += 1

    def plain(self) -> tuple[int | None, int | None, list[str]]:
        """Output tokens and steps without a draft by the throughput of generation; None where it is not told."""
        windows = [window for window in self.windows if window is not None]
        if not windows or len(windows) < len(self.windows) or (self.idle and len(self.engines) > 1):
            return None, None, []
        seconds = float(np.median([seconds for seconds, _ in windows]))
        output = sum(length * interval.tokens_per_s for length, interval in windows)
        output += sum(seconds * interval.tokens_per_s for interval in self.idle)
        emitted = sum(part.rounds + int(part.counted.accepted.sum()) for part in self.parts)
        if emitted > (1 + SLACK) * output:
            note = (
                f"generation throughput says {output:,.0f} tokens, but rounds emitted {emitted:,}: it is not of the "
                "same requests, so that steps without a draft are unknown"
            )
            return None, None, [note]
        plain = max(round(output - emitted), 0)
        note = "output tokens by the throughput of generation: those beyond the rounds' are steps without a draft"
        return round(output), plain, [note] if plain else []

    @property
    def running(self) -> float | None:
        """Requests that ran at once, on average over intervals that generated."""
        running = [each.running for each in self.busy] or [each.running for each in self.idle if each.running]
        return float(np.mean(running)) if running else None

    @property
    def tokens_per_s(self) -> float | None:
        """Mean output tokens per second over intervals with drafts; None if several engines wrote the lines."""
        # An interval at whose end no request runs was idle for a part of its time.
        speeds = [each.tokens_per_s for each in self.busy if each.tokens_per_s and each.running]
        return float(np.mean(speeds)) if speeds and len(self.engines) < 2 else None


def read_vllm_log(paths: Sequence[Path]) -> ImportedRecords:
    """Read vLLM's log."""
    lines, skipped = Lines(), Skipped()
    for line in log_lines(paths, skipped):
        lines.take(line, skipped)
    lines.end(skipped)
    if lines.parts and lines.old:
        raise InputError(f"the log has lines of several versions of vllm; {ONE_SERVER}")
    version = single_version(lines.versions)
    words = (lines.settings.get(name, "") for name in SETTINGS)
    model, method, drafter, rule, tp, weights, cache, tree = ("" if word in UNSET else word for word in words)
    setup = Setup(
        model,
        drafter,
        method,
        running=lines.running,
        tokens_per_s=lines.tokens_per_s,
        tp=int(tp or 0) or None,
        weights=weights,
        cache=cache,
    )
    engine = "lmdeploy" if lines.lmdeploy else "vllm"
    trees = re.search("[1-9]", tree) is not None  # a chain has first children alone, all 0
    instead = "run vLLM without speculative_token_tree" if trees else DETAILED
    imported = ImportedRecords(
        None, engine, version=version, skipped=skipped, instead=instead, setup=setup, trees=trees
    )
    if lines.parts:
        output, plain, notes = lines.plain()
        told = replace(imported, output_tokens=None if output is None else (output,), plain_steps=plain)
        imported = _with_counters(lines.parts, told)
        notes += [VERIFICATION[rule]] if rule in VERIFICATION else []
        usual = VLLM_KEYS["prompt-lookup"]
        if method == "ngram" and any(usual[key] != length for key, length in lines.ngrams.items()):
            of_log = ", ".join(f'"{key}": {length}' for key, length in sorted(lines.ngrams.items()))
            notes.append(f"acceptance was counted with {of_log}: set them in the command, which has vLLM's default")
        notes += left_out([option.format(value) for option, value in lines.beside.items()])
        imported = replace(imported, notes=(*imported.notes, *notes))
        return replace(imported, source=None, sums=imported.counted, instead=instead) if trees else imported
    if not lines.old:
        if lines.lacking:
            raise InputError(f"{paths[0]}: {lines.lacking}")
        raise InputError(f"{paths[0]} holds no line with {MARKED} give the log of a speculative run")
    accepted, drafted = (sum(column) for column in zip(*lines.old, strict=True))
    if accepted > drafted:
        raise InputError(f"{accepted} of {drafted} drafted tokens accepted is impossible; {ONE_SERVER}")
    return replace(imported, sums=(None, drafted, accepted))


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
    counters, notes = rates.sum_of_parts(parts, DETAILED)
    depths = rates.depths_of(parts)
    setup = imported.setup if len(depths) > 1 else replace(imported.setup, draft_tokens=depths[0])
    return replace(imported, source=counters, notes=tuple(notes), instead="", setup=setup)
