"""Subjects of claims that are real runs: numbers of the document that `realrun validate` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specsim.claims.claim import RunSubject
from specsim.claims.measured import Measured, PerSequence, as_measured, from_columns, is_number, positive, value_at
from specsim.io.errors import InputError
from specsim.io.json import read_json

VALIDATION_KIND = "specsim-validation"
TIMED = {  # quantity -> its columns of its row and document
    "speedup": ("autoregressive_sequence_seconds", "sequence_seconds"),
    "tokens_per_s": ("sequence_tokens", "sequence_seconds"),
}


def read_validation(path: Path) -> dict[str, Any]:
    """Read the document of a validation, given as its folder or file."""
    path = path / "validation.json" if path.is_dir() else path
    document = read_json(path, f"validation {path}", missing="make it with `realrun validate`", invalid="make it again")
    if not isinstance(document, dict) or document.get("kind") != VALIDATION_KIND:
        raise InputError(f"{path} is not a validation; give what `realrun validate` wrote")
    return document


def run_columns(document: Mapping[str, Any], row: Mapping[str, Any], quantity: str, where: str) -> PerSequence | None:
    """The columns of a timed quantity of a row; None for other quantities."""
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
        raise InputError(f"{where}: noise_floor_percent is not a percentage; validate again")
    return float(floor)


def of_run(subject: RunSubject, home: Path) -> Measured:
    path = home / subject.validation
    document, where = read_validation(path), str(path)
    if subject.policy is None:
        if subject.quantity == "speedup":
            raise InputError(f"{where}: which row's speedup is claimed; give policy")
        return as_measured(value_at(document, [subject.quantity], where), where)
    row = find_row(document, subject.policy, where)
    columns = run_columns(document, row, subject.quantity, where)
    if columns is None:
        return as_measured(value_at(row, [subject.quantity], where), where)
    measured = from_columns(columns, floor_percent=floor_percent(document, where))
    tokens = positive(row.get("sequence_tokens"), f"{where}: sequence_tokens")
    seconds = positive(row.get("sequence_seconds"), f"{where}: sequence_seconds"), tokens
    return replace(measured, seconds=seconds)


def find_row(document: dict[str, Any], policy: str, where: str) -> dict[str, Any]:
    """The row of a validation with this label, or of this policy."""
    rows = document.get("rows")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for key in ("label", "policy"):
        matching = [row for row in rows if row.get(key) == policy]
        if len(matching) == 1:
            return dict(matching[0])
    known = ", ".join(str(row.get("label")) for row in rows[:20])
    raise InputError(f"{where}: {len(matching)} rows are of policy {policy!r}; choose a label: {known}")
