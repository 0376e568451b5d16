"""Acceptance of every request: vLLM's per-request metrics, and AIPerf's engine-neutral records.

vLLM gives `metrics.speculative_decoding` in a response where the server runs with `--per-request-spec-decode-metrics`
(0.32); the level `detailed` lists every round. AIPerf's `SpecDecodeAcceptanceRecord` (0.13) is the same for any engine,
with a sparse histogram.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED, Counters
from specsim.engines import rates
from specsim.engines.definitions import BONUS, SHARE
from specsim.engines.formats.reading import Request, by_number, count, json_records, lengths_of, rounds_of_requests
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.errors import InputError
from specsim.io.json import checked

DETAILED = "run the server with --per-request-spec-decode-metrics detailed and import its responses (vllm-requests)"
RESPONSES = (
    "give responses of vLLM with metrics.speculative_decoding, or its spec_decode_metrics, as JSON or JSON Lines"
)
RECORDS = "give AIPerf's SpecDecodeAcceptanceRecord as JSON Lines"
NEUTRAL = f"mean_acceptance_length = {BONUS}; draft_acceptance_rate = {SHARE}"


class Acceptance(TypedDict):
    """Fields of both formats."""

    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: NotRequired[int | None]
    per_step_accepted: NotRequired[list[int] | None]
    per_step_drafted: NotRequired[list[int] | None]


class VllmAcceptance(Acceptance):
    """The histogram counts rounds by their accepted tokens, from 0."""

    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: NotRequired[dict[str, list[int]] | None]  # after 0.33


class NeutralAcceptance(Acceptance):
    """The histogram leaves out lengths that no round had."""

    engine: str
    acceptance_histogram: dict[str, int]
    completion_tokens: NotRequired[int | None]


@dataclass(frozen=True)
class Record:
    """A request: rounds by accepted tokens, the same by draft length, and its rounds, where these are given."""

    histogram: dict[int, int]
    drafted: int
    spec_tokens: int | None
    request: Request | None
    output_tokens: int | None
    by_length: dict[int, list[int]] | None = None


def read_vllm(paths: Sequence[Path]) -> ImportedRecords:
    """Read responses of vLLM, or the metrics alone."""
    skipped = Skipped()
    records = []
    for name, response in json_records(paths, skipped, invalid=RESPONSES):
        metrics = _metrics_of(response, name)
        if metrics is None or metrics.get("num_spec_steps") == 0:
            skipped["requests without speculation (or with several samples, of which vLLM tells nothing)"] += 1
            continue
        acceptance = checked(metrics, name, VllmAcceptance, invalid=RESPONSES)
        usage = response.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        record = _record(acceptance, dict(enumerate(acceptance["acceptance_histogram"])), tokens, name)
        records.append(replace(record, by_length=_by_length(acceptance, record, name)))
    return _imported(records, "vllm", skipped, f"{paths[0]} holds no request with speculation; {RESPONSES}")


def _metrics_of(record: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The metrics in a response, in an output's dictionary, or the record itself; None if absent."""
    if "num_spec_steps" in record:
        return dict(record)
    places = [record.get("metrics"), record]
    for place, key in zip(places, ("speculative_decoding", "spec_decode_metrics"), strict=True):
        if isinstance(place, dict) and key in place:
            return checked(place[key], f"{name}: {key}", dict[str, Any] | None, invalid=RESPONSES)
    return None


def _by_length(acceptance: VllmAcceptance, record: Record, name: str) -> dict[int, list[int]] | None:
    """Rounds by their accepted tokens, for every draft length; None in versions without it."""
    histograms = acceptance.get("acceptance_histogram_by_draft_length")
    if not histograms:
        return None
    lengths = by_number(dict.fromkeys(histograms, 1), f"{name}: acceptance_histogram_by_draft_length")
    parts = dict(zip(lengths, histograms.values(), strict=True))
    whole: Counter[int] = Counter()
    for length, times in parts.items():
        if len(times) > length + 1 or min(times, default=0) < 0:
            raise InputError(f"{name}: drafts of {length} tokens accept {len(times) - 1}; export again")
        whole.update(dict(enumerate(times)))
    drafted = sum(length * sum(times) for length, times in parts.items())
    if drafted != record.drafted or +whole != +Counter(record.histogram):
        raise InputError(f"{name}: its histograms contradict each other; export again")
    return parts


def read_aiperf(paths: Sequence[Path]) -> ImportedRecords:
    """Read AIPerf's records, each on its own line or below the key `spec_decode_acceptance`."""
    skipped = Skipped()
    records, engines = [], set()
    for name, line in json_records(paths, skipped, invalid=RECORDS):
        inner = line.get("spec_decode_acceptance", line)
        if inner is None or (inner is line and "acceptance_histogram" not in line):
            skipped["requests without speculation"] += 1
            continue
        acceptance = checked(inner, name, NeutralAcceptance, invalid=RECORDS)
        engines.add(acceptance["engine"])
        histogram = by_number(acceptance["acceptance_histogram"], f"{name}: acceptance_histogram")
        if acceptance["num_spec_steps"] == 0:
            skipped["requests without speculation"] += 1
            continue
        records.append(_record(acceptance, histogram, acceptance.get("completion_tokens"), name))
    if len(engines) > 1:
        raise InputError(f"records of several engines ({', '.join(sorted(engines))}); give a single engine's")
    nothing = f"{paths[0]} holds no request with speculation; {RECORDS}"
    return _imported(records, engines.pop() if engines else "", skipped, nothing, NEUTRAL)


def _record(acceptance: Acceptance, histogram: dict[int, int], tokens: Any, name: str) -> Record:
    """Check that steps and accepted tokens are those of the histogram and of the lists."""
    steps = count(acceptance["num_spec_steps"], f"{name}: num_spec_steps")
    drafted = count(acceptance["num_draft_tokens"], f"{name}: num_draft_tokens")
    accepted = count(acceptance["num_accepted_draft_tokens"], f"{name}: num_accepted_draft_tokens")
    spec_tokens = acceptance.get("num_spec_tokens")
    if any(times < 0 or (times and length > MOST_DRAFTED) for length, times in histogram.items()):
        raise InputError(f"{name}: acceptance_histogram has impossible counts; export again")
    if sum(histogram.values()) != steps or sum(length * times for length, times in histogram.items()) != accepted:
        raise InputError(f"{name}: acceptance_histogram is not of {steps} steps with {accepted} accepted; export again")
    if accepted > drafted or (spec_tokens is not None and not 0 < spec_tokens <= MOST_DRAFTED):
        raise InputError(f"{name}: {accepted} of {drafted} drafted tokens accepted, {spec_tokens} a step; export again")
    output = None if tokens is None else count(checked(tokens, f"{name}: completion_tokens", int, invalid=""), name)
    drafted_steps, accepted_steps = acceptance.get("per_step_drafted"), acceptance.get("per_step_accepted")
    request = None
    if drafted_steps is not None and accepted_steps is not None:
        request = Request(drafted_steps, accepted_steps, output).check(name)
        if (len(drafted_steps), sum(drafted_steps), sum(accepted_steps)) != (steps, drafted, accepted):
            raise InputError(f"{name}: its steps are not the {steps} of {drafted} drafted tokens; export again")
    return Record(histogram, drafted, spec_tokens, request, output)


def _imported(
    records: Sequence[Record], engine: str, skipped: Skipped, nothing: str, definition: str = ""
) -> ImportedRecords:
    if not records:
        raise InputError(nothing)
    requests = [record.request for record in records if record.request is not None]
    if len(requests) == len(records):
        imported = rounds_of_requests(engine, requests, skipped, definition=definition)
        notes = [*imported.notes]
    else:
        counters, notes = _counters_of(records)
        outputs = lengths_of([Request([], [], record.output_tokens) for record in records])
        imported = ImportedRecords(counters, engine, definition, "", len(records), outputs, skipped=skipped)
        if requests:
            notes.append(f"{len(requests):,} of {len(records):,} requests list their rounds; all are read by histogram")
    lengths = sorted({record.spec_tokens for record in records if record.spec_tokens is not None})
    if len(lengths) > 1:
        notes.append(f"requests of several draft lengths ({', '.join(map(str, lengths))})")
    if engine == "vllm":
        notes.append("tokens that vLLM accepted beyond the limit on output tokens are counted, though never output")
    return replace(imported, notes=tuple(notes))


def _counters_of(records: Sequence[Record]) -> tuple[Counters, list[str]]:
    """Counters of histograms; exact for any draft lengths where every record has histograms by length."""
    by_length = [record.by_length for record in records if record.by_length is not None]
    if len(by_length) == len(records):
        return _counters_by_length(by_length), []
    depth = max(length for record in records for length, times in record.histogram.items() if times)
    depth = max([depth, *(record.spec_tokens or 0 for record in records)])
    times_of = np.zeros(depth + 1, dtype=np.int64)
    for record in records:
        for length, times in record.histogram.items():
            times_of[length if times else 0] += times
    return rates.counters_of_histogram(times_of, sum(record.drafted for record in records), DETAILED)


def _counters_by_length(records: Sequence[Mapping[int, Sequence[int]]]) -> Counters:
    depth = max(length for record in records for length, times in record.items() if any(times))
    if not depth:
        raise InputError("nothing was drafted in any round; give the files of a speculative run")
    drafted, accepted = np.zeros(depth, dtype=np.int64), np.zeros(depth, dtype=np.int64)
    for record in records:
        for length, times in record.items():
            drafted[:length] += sum(times)
            for most, rounds in enumerate(times):
                accepted[:most] += rounds
    return Counters(drafted, accepted)
