"""What was imported, as files that specsim reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from specsim.acceptance.sources import Counters, Rounds, verified_by_depth
from specsim.engines.definitions import DEFINITIONS, POSITIONS
from specsim.engines.formats.imported import Imported
from specsim.engines.formats.requests import neutral_text
from specsim.errors import InputError
from specsim.files import replacing, write_json, write_table, write_text
from specsim.trace.files import write_trace
from specsim.trace.trace import Trace

METADATA = b"specsim.import"


def about(imported: Imported) -> dict[str, Any]:
    """Where the numbers come from, for the file."""
    conventions = imported.conventions
    return {
        "engine": imported.engine,
        "version": imported.version,
        "definition": imported.definition,
        "first_token": None if conventions is None else conventions.first_token,
        "clips_draft": None if conventions is None else conventions.clips_draft,
        "counts_empty": None if conventions is None else conventions.counts_empty,
        "requests": imported.requests,
        "notes": [*imported.notes],
        "skipped": dict(imported.skipped),
    }


def write_imported(imported: Imported, path: Path, *, overwrite: bool = False) -> None:
    """Write a trace folder, rounds as .parquet, counters as .json, or, of rounds, AIPerf's records as .jsonl."""
    source = imported.source
    if source is None:
        raise InputError(f"of sums and averages no acceptance by position follows; {imported.instead}")
    if isinstance(source, Trace):
        if path.suffix:
            raise InputError(f"--out {path}: this source gives a trace; name a folder, such as --out trace")
        with_origin = dataclasses.replace(source, meta={**source.meta, "import": about(imported)})
        write_trace(with_origin, path, overwrite=overwrite)
    elif path.suffix == ".jsonl":
        write_text(path, neutral_text(imported))
    elif isinstance(source, Rounds):
        _check_suffix(path, ".parquet", "rounds")
        with replacing(path) as temporary:
            write_table(rounds_table(source, imported), temporary)
    else:
        _check_suffix(path, ".json", "counters")
        write_json(counters_document(source, imported), path)


def _check_suffix(path: Path, suffix: str, what: str) -> None:
    if path.suffix != suffix:
        raise InputError(f"--out {path}: this source gives {what}; name a {suffix}, such as --out {what}{suffix}")


def rounds_table(rounds: Rounds, imported: Imported) -> Any:
    """Columns as `specsim.acceptance.sources.read_rounds` takes them, and where they come from in the metadata."""
    import pyarrow as pa

    columns = {"drafted": rounds.drafted, "accepted": rounds.accepted, "sequence_id": rounds.sequence_id, "t": rounds.t}
    table = pa.table({name: pa.array(values) for name, values in columns.items() if values is not None})
    return table.replace_schema_metadata({METADATA: json.dumps(about(imported)).encode()})


def counters_document(counters: Counters, imported: Imported) -> dict[str, Any]:
    """As `specsim.acceptance.sources.read_counters` takes it."""
    counts = {"drafted": counters.drafted.tolist(), "accepted": counters.accepted.tolist()}
    return counts | about(imported)


def summary(imported: Imported) -> dict[str, Any]:
    """What was found, in numbers: the engine's beside specsim's."""
    totals = imported.totals
    rounds, drafted, accepted = imported.sums
    if totals is not None:
        rounds, drafted, accepted = totals.rounds, totals.drafted, totals.accepted
    found: dict[str, Any] = {
        **about(imported),
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "output_tokens": None if imported.output_tokens is None else sum(imported.output_tokens),
        "averages": dict(imported.averages),
        "printed": [],
    }
    if totals is not None:
        for one in DEFINITIONS:
            if one.engine in ("specsim", imported.engine):
                value = one.value(totals)
                if (one.engine, one.quantity) == ("specsim", POSITIONS) and imported.source is not None:
                    accepted_so, verified = verified_by_depth(imported.source)  # rounds tell more than their counters
                    value = (accepted_so / np.maximum(verified, 1)).tolist()
                if np.isfinite(value).all():
                    found["printed"].append(
                        {
                            "engine": one.engine,
                            "quantity": one.quantity,
                            "printed": one.printed,
                            "formula": one.formula,
                            "value": value,
                        }
                    )
    elif rounds and accepted is not None:
        found["averages"]["1 + accepted / rounds"] = 1 + accepted / rounds
    if totals is None and drafted and accepted is not None:
        found["averages"]["accepted / drafted"] = accepted / drafted
    return found
