"""onnxruntime-genai's statistics: `generator.get_speculative_stats()` of each request as JSON or JSON Lines, sums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from specsim.engines.formats.reading import count, json_records
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.errors import InputError
from specsim.io.json import checked

STATS = "give json.dumps(generator.get_speculative_stats()) of onnxruntime-genai, a line per request"
INSTEAD = "read get_speculative_stats() after every token: rounds and their drafts are its differences"


class Stats(TypedDict):
    """Counts of a request. Tokens after the first rejected one are proposed, but not evaluated."""

    rounds: int
    draft_tokens_proposed: int
    draft_tokens_evaluated: int
    draft_tokens_accepted: int
    tokens_emitted: int
    standard_fallback_steps: int


def read_stats(paths: Sequence[Path]) -> ImportedRecords:
    """Sum the requests' counts; rejected rates are made of proposed tokens, as other engines make them."""
    skipped = Skipped()
    sums = dict.fromkeys(Stats.__annotations__, 0)
    outputs = []
    for name, record in json_records(paths, skipped, invalid=STATS):
        stats = checked(record, name, Stats, invalid=STATS)
        counts = {key: count(stats[key], f"{name}: {key}") for key in sums}
        rounds, proposed, evaluated, accepted, emitted, fallback = counts.values()
        if not accepted <= evaluated <= min(proposed, accepted + rounds):
            raise InputError(
                f"{name}: impossible counts: {proposed} drafted tokens, {evaluated} evaluated, {accepted} accepted in "
                f"{rounds} rounds; export again"
            )
        if not rounds:
            skipped["requests without speculation"] += 1
            continue
        outputs.append(emitted + fallback)
        for key, times in counts.items():
            sums[key] += times
    rounds, proposed, evaluated, accepted, _, fallback = sums.values()
    if not proposed:
        raise InputError(f"{paths[0]} holds no round with a draft; {STATS}")
    return ImportedRecords(
        None,
        "onnxruntime-genai",
        requests=len(outputs),
        output_tokens=tuple(outputs),
        sums=(rounds, proposed, accepted),
        averages={"acceptance_rate (of evaluated drafts)": accepted / evaluated},
        skipped=skipped,
        instead=INSTEAD,
        plain_steps=fallback,
    )
