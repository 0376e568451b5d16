"""What a claim of a real run comes out as, by the document that `realrun validate` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specsim.arrays import Floats
from specsim.claims.claim import RunSubject
from specsim.claims.measured import (
    Measured,
    PerSequence,
    Stamp,
    as_measured,
    found_at,
    from_columns,
    is_number,
    positive,
    stamp_of,
)
from specsim.errors import InputError
from specsim.json_files import read_json

VALIDATION_KIND = "specsim-validation"
TOTAL = ("draft_s", "policy_s", "verify_s", "other_s")
PARTS = {  # quantity -> the columns of rounds.parquet that it sums
    **{f"{part.removesuffix('_s')}_ms_per_token": (part,) for part in TOTAL},
    "ms_per_token": TOTAL,
}
COUNTED = {  # quantity -> the column of rounds.parquet whose mean over rounds it is
    "mean_drafted_tokens": "drafted",
    "mean_verified_tokens": "verified",
}
TIMED = {  # quantity -> its columns of its row and document
    "speedup": ("autoregressive_sequence_seconds", "sequence_seconds"),
    "tokens_per_s": ("sequence_tokens", "sequence_seconds"),
}


def read_validation(path: Path) -> dict[str, Any]:
    """The document of a validation, given as its folder or file; InputError if it is none."""
    path = path / "validation.json" if path.is_dir() else path
    document = read_json(path, f"validation {path}", missing="make it with `realrun validate`", invalid="make it again")
    if not isinstance(document, dict) or document.get("kind") != VALIDATION_KIND:
        raise InputError(f"{path} is no validation; give what `realrun validate` wrote")
    return document


def run_columns(document: Mapping[str, Any], row: Mapping[str, Any], quantity: str, where: str) -> PerSequence | None:
    """The columns of a measured quantity of a row; None of one that is not timed."""
    if quantity not in TIMED:
        return None
    columns = TIMED[quantity]
    both = {**document, **row}
    top, bottom = (positive(both.get(name), f"{where}: {name}") for name in columns)
    if top.shape != bottom.shape:
        raise InputError(f"{where}: {columns[0]} and {columns[1]} are of different lengths; validate again")
    tokens = row.get("sequence_tokens")
    return PerSequence(top, bottom, ("validation", tuple(tokens) if isinstance(tokens, list) else None))


def floor_percent(document: Mapping[str, Any], where: str) -> float:
    """The noise floor of a validation."""
    floor: Any = document.get("noise_floor_percent")
    if not is_number(floor) or floor < 0:
        raise InputError(f"{where}: noise_floor_percent is no percentage; validate again")
    return float(floor)


def of_run(subject: RunSubject, home: Path) -> Measured:
    path = home / subject.validation
    document, where = read_validation(path), str(path)
    if subject.policy is None:
        if subject.quantity == "speedup":
            raise InputError(f"{where}: whose speedup is claimed is not said; give policy")
        return as_measured(found_at(document, [subject.quantity], where), where)
    row = find_row(document, subject.policy, where)
    if subject.quantity in (*PARTS, *COUNTED):
        rounds = (path if path.is_dir() else path.parent) / "rounds.parquet"
        return from_columns(round_columns(rounds, row, subject.quantity, where))
    columns = run_columns(document, row, subject.quantity, where)
    if columns is None:
        return as_measured(found_at(row, [subject.quantity], where), where)
    found = from_columns(columns, floor_percent=floor_percent(document, where))
    tokens = positive(row.get("sequence_tokens"), f"{where}: sequence_tokens")
    seconds = positive(row.get("sequence_seconds"), f"{where}: sequence_seconds"), tokens
    return replace(found, seconds=seconds)


def round_columns(path: Path, row: Mapping[str, Any], quantity: str, where: str) -> PerSequence:
    """Of a row's rounds, by sequence [S]: milliseconds of a part, and its tokens; or a count's sum, and rounds."""
    columns, label = _read_rounds(path, stamp_of(path)), row.get("label")
    tokens = positive(row.get("sequence_tokens"), f"{where}: sequence_tokens")
    mine = columns["policy"] == label
    ids, first, which = np.unique(columns["sequence_id"][mine], return_index=True, return_inverse=True)
    if len(ids) != len(tokens):
        raise InputError(f"{path} has rounds of {len(ids)} sequences by {label!r}, not {len(tokens)}; validate again")
    order = first.argsort()  # in which they were decoded

    def by_sequence(weights: Floats | None) -> Floats:
        return np.bincount(which, weights)[order].astype(np.float64)

    if quantity in COUNTED:
        counts = columns[COUNTED[quantity]][mine].astype(np.float64)
        return PerSequence(by_sequence(counts), by_sequence(None), ("rounds", str(path)))
    spent_ms = 1e3 * np.sum([columns[part][mine] for part in PARTS[quantity]], axis=0)
    return PerSequence(by_sequence(spent_ms), tokens, ("rounds", str(path)))


@lru_cache(maxsize=8)  # many claims are of one run
def _read_rounds(path: Path, stamp: Stamp) -> dict[str, Any]:
    from specsim.parquet_files import FLOATS, INTEGERS, TEXT, read_table

    columns = {"policy": TEXT} | dict.fromkeys(["sequence_id", *COUNTED.values()], INTEGERS)
    columns |= dict.fromkeys(TOTAL, FLOATS)
    table = read_table(path, columns, invalid="give a validation beside its rounds.parquet")
    return {name: np.asarray(table.column(name).to_numpy(zero_copy_only=False)) for name in columns}


def find_row(document: dict[str, Any], policy: str, where: str) -> dict[str, Any]:
    """The row of a validation with this label, or of this policy."""
    rows = document.get("rows")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for key in ("label", "policy"):
        found = [row for row in rows if row.get(key) == policy]
        if len(found) == 1:
            return dict(found[0])
    known = ", ".join(str(row.get("label")) for row in rows[:20])
    raise InputError(f"{where}: {len(found)} rows are of policy {policy!r}; name one of {known}")
