"""Acceptance of every request: vLLM's per-request metrics, and AIPerf's engine-neutral records, which are also written.

vLLM gives `metrics.speculative_decoding` in a response where the server runs with `--per-request-spec-decode-metrics`
(0.32); the level `detailed` lists every round. AIPerf's `SpecDecodeAcceptanceRecord` (0.13) is the same of any engine,
with a sparse histogram.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED, Counters, Rounds
from specsim.engines import rates
from specsim.engines.definitions import BONUS, SHARE
from specsim.engines.formats.imported import (
    Imported,
    Request,
    as_rounds,
    by_number,
    check_request,
    count,
    definition_of,
    json_records,
    lengths_of,
)
from specsim.errors import InputError
from specsim.json_files import checked

DETAILED = "run the server with --per-request-spec-decode-metrics detailed and import its responses (vllm-requests)"
RESPONSES = (
    "give responses of vLLM with metrics.speculative_decoding, or its spec_decode_metrics, as JSON or JSON Lines"
)
RECORDS = "give AIPerf's SpecDecodeAcceptanceRecord as JSON Lines"
NEUTRAL = f"mean_acceptance_length = {BONUS}; draft_acceptance_rate = {SHARE}"


class Acceptance(TypedDict):
    """What both have."""

    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: NotRequired[int | None]
    per_step_accepted: NotRequired[list[int] | None]
    per_step_drafted: NotRequired[list[int] | None]


class VllmAcceptance(Acceptance):
    """The histogram counts rounds by their accepted tokens, from 0."""

    acceptance_histogram: list[int]


class NeutralAcceptance(Acceptance):
    """The histogram leaves out what never was."""

    engine: str
    acceptance_histogram: dict[str, int]
    completion_tokens: NotRequired[int | None]


class Record(NamedTuple):
    """A request by its histogram, and by its rounds where these are listed."""

    histogram: dict[int, int]
    drafted: int
    spec_tokens: int | None
    request: Request | None
    output_tokens: int | None


def read_vllm(paths: Sequence[Path]) -> Imported:
    """Responses of vLLM, or the metrics alone."""
    found, skipped = json_records(paths, invalid=RESPONSES)
    records, without = [], 0
    for number, one in enumerate(found):
        metrics = _metrics_of(one, f"record {number + 1}")
        if metrics is None or metrics.get("num_spec_steps") == 0:
            without += 1
            continue
        acceptance = checked(metrics, f"record {number + 1}", VllmAcceptance, invalid=RESPONSES)
        usage = one.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        records.append(
            _checked_record(acceptance, dict(enumerate(acceptance["acceptance_histogram"])), tokens, number + 1)
        )
    if without:
        skipped["requests without speculation (or with several samples, of which vLLM tells nothing)"] = without
    if not records:
        raise InputError(f"{paths[0]} holds no request with speculation; {RESPONSES}")
    return _imported(records, "vllm", definition_of("vllm"), skipped)


def _metrics_of(record: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Where vLLM put them: in the response, in an output's dictionary, or the record itself; None for none."""
    if "num_spec_steps" in record:
        return dict(record)
    places = [record.get("metrics"), record]
    for place, key in zip(places, ("speculative_decoding", "spec_decode_metrics"), strict=True):
        if isinstance(place, dict) and key in place:
            return checked(place[key], f"{name}: {key}", dict[str, Any] | None, invalid=RESPONSES)
    return None


def read_aiperf(paths: Sequence[Path]) -> Imported:
    """AIPerf's records, each a line of its own or below the key `spec_decode_acceptance`."""
    found, skipped = json_records(paths, invalid=RECORDS)
    records, engines, without = [], set(), 0
    for number, one in enumerate(found):
        inner = one.get("spec_decode_acceptance", one)
        if inner is None or (inner is one and "acceptance_histogram" not in one):
            without += 1
            continue
        acceptance = checked(inner, f"record {number + 1}", NeutralAcceptance, invalid=RECORDS)
        engines.add(acceptance["engine"])
        histogram = by_number(acceptance["acceptance_histogram"], f"record {number + 1}: acceptance_histogram")
        if acceptance["num_spec_steps"] == 0:
            without += 1
            continue
        records.append(_checked_record(acceptance, histogram, acceptance.get("completion_tokens"), number + 1))
    if without:
        skipped["requests without speculation"] = without
    if not records:
        raise InputError(f"{paths[0]} holds no request with speculation; {RECORDS}")
    if len(engines) > 1:
        raise InputError(f"records of several engines ({', '.join(sorted(engines))}); give one engine's at a time")
    return _imported(records, engines.pop(), NEUTRAL, skipped)


def _checked_record(acceptance: Acceptance, histogram: dict[int, int], tokens: Any, number: int) -> Record:
    """With the invariants of both: steps and accepted tokens are those of the histogram, and of the lists."""
    name = f"record {number}"
    steps = count(acceptance["num_spec_steps"], f"{name}: num_spec_steps")
    drafted = count(acceptance["num_draft_tokens"], f"{name}: num_draft_tokens")
    accepted = count(acceptance["num_accepted_draft_tokens"], f"{name}: num_accepted_draft_tokens")
    spec_tokens = acceptance.get("num_spec_tokens")
    if any(times < 0 or (times and most > MOST_DRAFTED) for most, times in histogram.items()):
        raise InputError(f"{name}: acceptance_histogram has counts that cannot be; export again")
    if sum(histogram.values()) != steps or sum(most * times for most, times in histogram.items()) != accepted:
        raise InputError(f"{name}: acceptance_histogram is not of {steps} steps with {accepted} accepted; export again")
    if accepted > drafted or (spec_tokens is not None and not 0 < spec_tokens <= MOST_DRAFTED):
        raise InputError(f"{name}: {accepted} of {drafted} drafted tokens accepted, {spec_tokens} a step; export again")
    output = None if tokens is None else count(checked(tokens, f"{name}: completion_tokens", int, invalid=""), name)
    lists = acceptance.get("per_step_drafted"), acceptance.get("per_step_accepted")
    request = None
    if lists[0] is not None and lists[1] is not None:
        request = Request(lists[0], lists[1], output)
        check_request(request, name)
        if (len(request.drafted), sum(request.drafted), sum(request.accepted)) != (steps, drafted, accepted):
            raise InputError(f"{name}: its steps are not the {steps} of {drafted} drafted tokens; export again")
    return Record(histogram, drafted, spec_tokens, request, output)


def _imported(records: Sequence[Record], engine: str, definition: str, skipped: Mapping[str, int]) -> Imported:
    listed = [record.request for record in records if record.request is not None]
    outputs = lengths_of([Request([], [], record.output_tokens) for record in records])
    notes: list[str]
    source: Rounds | Counters
    if len(listed) == len(records):
        source, notes = as_rounds(listed)
    else:
        source, notes = _of_histograms(records)
        if listed:
            notes.append(f"{len(listed):,} of {len(records):,} requests list their rounds; all are read by histogram")
    lengths = {record.spec_tokens for record in records} - {None}
    if len(lengths) > 1:
        notes.append(
            f"requests of several draft lengths ({', '.join(map(str, sorted(map(int, filter(None, lengths)))))})"
        )
    if engine == "vllm":
        notes.append("what vLLM accepted beyond the limit on output tokens is counted, though it was not output")
    return Imported(source, engine, definition, "", len(records), outputs, notes=tuple(notes), skipped=skipped)


def _of_histograms(records: Sequence[Record]) -> tuple[Counters, list[str]]:
    depth = max(most for record in records for most, times in record.histogram.items() if times)
    depth = max([depth, *(record.spec_tokens or 0 for record in records)])
    passed = np.zeros(depth + 1, dtype=np.int64)
    for record in records:
        for most, times in record.histogram.items():
            passed[: most + 1] += times
    drafted = sum(record.drafted for record in records)
    return rates.counters(int(passed[0]), drafted, passed[1:].tolist(), DETAILED)


def neutral_records(imported: Imported) -> list[dict[str, Any]]:
    """AIPerf's records of rounds; InputError where these are not known by request."""
    rounds = imported.source
    if not isinstance(rounds, Rounds) or rounds.sequence_id is None:
        raise InputError(
            "AIPerf's records are of requests, whose rounds this source does not tell; choose another --out"
        )
    found = []
    for number, sequence in enumerate(np.unique(rounds.sequence_id).tolist()):
        mine = rounds.select(rounds.sequence_id == sequence)
        drafted, accepted = mine.drafted.tolist(), mine.accepted.tolist()
        times = np.bincount(mine.accepted)
        found.append(
            {
                "engine": imported.engine,
                "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
                "draft_acceptance_rate": sum(accepted) / sum(drafted) if sum(drafted) else 0.0,
                "acceptance_histogram": {str(most): int(times[most]) for most in np.flatnonzero(times).tolist()},
                "num_accepted_draft_tokens": sum(accepted),
                "num_draft_tokens": sum(drafted),
                "num_spec_steps": len(accepted),
                "num_spec_tokens": drafted[0] if len(set(drafted)) == 1 else None,
                "completion_tokens": None if imported.output_tokens is None else imported.output_tokens[number],
                "per_step_accepted": accepted,
                "per_step_drafted": drafted,
            }
        )
    return found


def neutral_text(imported: Imported) -> str:
    """These records as JSON Lines."""
    return "".join(json.dumps(record) + "\n" for record in neutral_records(imported))
