"""TensorRT-LLM's iteration statistics (`/metrics` as JSON): sums of every iteration, without positions.

An iteration counts over its batch. The server keeps the last thousand only, so that polls may leave gaps and overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from specsim.acceptance.sources import Counters
from specsim.engines.formats.imported import Imported, count, definition_of, json_records
from specsim.errors import InputError
from specsim.json_files import checked

ENGINE = "tensorrt-llm"
INVALID = "give iteration statistics of TensorRT-LLM with specDecodingStats, as JSON or JSON Lines"
INSTEAD = "scrape trtllm_spec_decode_accepted_tokens_total by token_position and import it (prometheus)"


class Drafts(TypedDict):
    """Of an iteration."""

    numDraftTokens: int
    numAcceptedTokens: int
    numRequestsWithDraftTokens: int


class Iteration(TypedDict):
    """Of the server."""

    iter: int
    specDecodingStats: Drafts


def read_iterations(paths: Sequence[Path]) -> Imported:
    """Iterations, each once."""
    found, skipped = json_records(paths, invalid=INVALID)
    iterations: dict[int, tuple[int, int, int]] = {}
    without = again = 0
    for number, record in enumerate(found):
        if record.get("specDecodingStats") is None:
            without += 1
            continue
        name = f"record {number + 1}"
        one = checked(record, name, Iteration, invalid=INVALID)
        drafts = one["specDecodingStats"]
        numbers = (
            count(drafts["numRequestsWithDraftTokens"], f"{name}: numRequestsWithDraftTokens"),
            count(drafts["numDraftTokens"], f"{name}: numDraftTokens"),
            count(drafts["numAcceptedTokens"], f"{name}: numAcceptedTokens"),
        )
        if not numbers[2] <= numbers[1] or (numbers[1] > 0) != (numbers[0] > 0):
            raise InputError(f"{name}: {numbers[2]} of {numbers[1]} drafts accepted in {numbers[0]} requests cannot be")
        known = iterations.setdefault(one["iter"], numbers)
        again += known is not numbers
        if known != numbers:
            raise InputError(f"iteration {one['iter']} comes twice with other counts; give one server's run at a time")
    if without:
        skipped["iterations without speculation"] = without
    if again:
        skipped["iterations that came twice"] = again
    rounds, drafted, accepted = (
        (sum(column) for column in zip(*iterations.values(), strict=True)) if iterations else (0,) * 3
    )
    if not drafted:
        raise InputError(f"{paths[0]} holds no iteration with drafts; {INVALID}")
    missing = max(iterations) - min(iterations) + 1 - len(iterations) - without
    notes = (f"{missing:,} iterations between the first and the last are not there",) if missing > 0 else ()
    if drafted == rounds:  # of one token each
        source = Counters(np.array([rounds]), np.array([accepted]))
        return Imported(source, ENGINE, definition_of(ENGINE), notes=notes, skipped=skipped)
    return Imported(
        None, ENGINE, definition_of(ENGINE), sums=(rounds, drafted, accepted), notes=notes, skipped=skipped,
        instead=INSTEAD,
    )  # fmt: skip
