"""TensorRT-LLM's iteration statistics (`/metrics` as JSON): sums of every iteration, without positions.

An iteration counts over its batch. The server keeps only the last thousand, so that polls may leave gaps and overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from specsim.acceptance.sources import Counters
from specsim.engines.formats.reading import count, json_records
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.errors import InputError
from specsim.io.json import checked

ENGINE = "tensorrt-llm"
INVALID = "give iteration statistics of TensorRT-LLM with specDecodingStats, as JSON or JSON Lines"
INSTEAD = "scrape trtllm_spec_decode_accepted_tokens_total by token_position and import it (prometheus)"


class Drafts(TypedDict):
    """Drafts of an iteration."""

    numRequestsWithDraftTokens: int
    numDraftTokens: int
    numAcceptedTokens: int


class Iteration(TypedDict):
    """An iteration of the server."""

    iter: int
    specDecodingStats: Drafts


def read_iterations(paths: Sequence[Path]) -> ImportedRecords:
    """Read iterations, each once."""
    skipped = Skipped()
    iterations: dict[int, tuple[int, ...]] = {}
    for name, record in json_records(paths, skipped, invalid=INVALID):
        if record.get("specDecodingStats") is None:
            skipped["iterations without speculation"] += 1
            continue
        iteration: Iteration = checked(record, name, Iteration, invalid=INVALID)
        stats = iteration["specDecodingStats"]
        sums = tuple(count(stats[key], f"{name}: {key}") for key in Drafts.__annotations__)  # type: ignore[literal-required]
        rounds, drafted, accepted = sums
        if accepted > drafted or bool(drafted) != bool(rounds):
            raise InputError(f"{name}: {accepted} of {drafted} drafts accepted in {rounds} requests is impossible")
        number = iteration["iter"]
        if iterations.setdefault(number, sums) is not sums:
            skipped["iterations that came twice"] += 1
        if iterations[number] != sums:
            raise InputError(f"iteration {number} comes twice with other counts; give a single server's run")
    rounds, drafted, accepted = np.sum([*iterations.values(), (0, 0, 0)], axis=0).tolist()
    if not drafted:
        raise InputError(f"{paths[0]} holds no iteration with drafts; {INVALID}")
    missing = max(iterations) - min(iterations) + 1 - len(iterations) - skipped["iterations without speculation"]
    notes = (f"{missing:,} iterations between the first and the last are not there",) if missing > 0 else ()
    if drafted == rounds:  # of 1 token each
        source = Counters(np.array([rounds]), np.array([accepted]))
        return ImportedRecords(source, ENGINE, notes=notes, skipped=skipped)
    sums_of_all = rounds, drafted, accepted
    return ImportedRecords(None, ENGINE, sums=sums_of_all, notes=notes, skipped=skipped, instead=INSTEAD)
