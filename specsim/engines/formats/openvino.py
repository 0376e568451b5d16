"""OpenVINO GenAI: what its samples print of a request, and the tokens of every iteration (`m_batch_sizes`) as JSON.

Its own counts of drafted and accepted tokens leave out each request's last round. A round outputs a token beside those
that it accepts, and the prompt's pass one, so that output tokens - iterations are all that was accepted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NotRequired, TypedDict

from specsim.acceptance.sources import MOST_DRAFTED
from specsim.engines.formats.reading import Request, count, json_records, log_lines, rounds_of_requests
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.errors import InputError
from specsim.io.json import checked

PRINTED = "give what OpenVINO GenAI's speculative_decoding_lm prints, or JSON Lines of m_batch_sizes"
INSTEAD = "write json.dumps({'m_batch_sizes': [*metrics.raw_metrics.m_batch_sizes]}) of every request and import it"
LAST = "a last round may be cut at the limit on output tokens: what it accepted beyond it is not known"
FIELD = re.compile(r"^ {0,8}(Num generated token|Total iteration number|Num accepted token): {0,8}(\d{1,17})\b")


class Iterations(TypedDict):
    """Output tokens of the prompt's pass and of every round; K."""

    m_batch_sizes: list[int]
    num_assistant_tokens: NotRequired[int]


def read_printed(paths: Sequence[Path]) -> ImportedRecords:
    """Read a sample's output, or the iterations of requests."""
    with paths[0].open(encoding="utf-8", errors="replace") as file:
        is_json = file.read(4096).lstrip().startswith(("{", "["))
    return _iterations(paths) if is_json else _sample(paths)


def _sample(paths: Sequence[Path]) -> ImportedRecords:
    skipped = Skipped()
    requests: list[dict[str, int]] = []
    of_target = False
    for line in log_lines(paths, skipped):
        heading = line.strip()
        if heading in ("MAIN MODEL", "DRAFT MODEL"):
            of_target = heading == "MAIN MODEL"
            requests += [{}] if of_target else []
        elif of_target and (field := FIELD.match(line)):
            requests[-1][field[1]] = count(field[2], field[1])
    whole = [tuple(request.values()) for request in requests if len(request) == 3]
    if not whole:
        raise InputError(f"{paths[0]} holds no MAIN MODEL with tokens and iterations; {PRINTED}")
    if len(whole) < len(requests):
        skipped["requests cut off"] = len(requests) - len(whole)
    for output, iterations, accepted in whole:
        if not iterations <= output or accepted > output - iterations:
            raise InputError(
                f"{paths[0]}: {accepted} accepted tokens and {output} output in {iterations} iterations; export again"
            )
    accepted = sum(output - iterations for output, iterations, _ in whole)
    return ImportedRecords(
        None,
        "openvino",
        requests=len(whole),
        output_tokens=tuple(output for output, _, _ in whole),
        sums=(sum(iterations - 1 for _, iterations, _ in whole), None, accepted),
        averages={"accepted as printed, without last rounds": float(sum(printed for _, _, printed in whole))},
        notes=(LAST,),
        skipped=skipped,
        instead=INSTEAD,
    )


def _iterations(paths: Sequence[Path]) -> ImportedRecords:
    skipped = Skipped()
    requests, assumed = [], 0
    for name, record in json_records(paths, skipped, invalid=PRINTED):
        iterations = checked(record, name, Iterations, invalid=PRINTED)
        sizes = [count(size, f"{name}: m_batch_sizes", MOST_DRAFTED + 1) for size in iterations["m_batch_sizes"]]
        if len(sizes) < 2 or min(sizes) < 1:
            skipped["requests without rounds"] += 1
            continue
        k = iterations.get("num_assistant_tokens")
        assumed += k is None
        accepted = [size - 1 for size in sizes[1:]]
        drafted = [max(accepted) if k is None else k] * len(accepted)
        requests.append(Request(drafted, accepted, sum(sizes)).check(name))
    if not requests:
        raise InputError(f"{paths[0]} holds no request with rounds; {PRINTED}")
    imported = rounds_of_requests("openvino", requests, skipped)
    notes = [LAST]
    if assumed:
        notes.append("num_assistant_tokens is missing: drafts are taken to be as long as a request's longest accepted")
    return replace(imported, notes=(*imported.notes, *notes))
