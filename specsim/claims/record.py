"""Write claims from a replay, a validation, a leaderboard, or a benchmark's file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from specsim.claims.check import measure
from specsim.claims.claim import ReplaySubject
from specsim.claims.files import rounded
from specsim.claims.measured import VALIDATION_KIND
from specsim.io.errors import InputError
from specsim.io.examples import is_example
from specsim.io.json import read_json

REPLAYED_PERCENT = 0.1  # tolerance of what is computed; the same inputs give the same to far more digits
MEASURED_PERCENT = 3.0  # of measured speedups, above the noise floor of a sound run
TIMED_PERCENT = 20.0  # of single times, which have no baseline
LARGEST_ERROR_PERCENT = 3.0  # median, of a validation's predictions

Entry = dict[str, Any]


def replay_claim(
    trace: Path,
    cost: Path,
    policy: str,
    settings: Mapping[str, Any],
    quantity: str,
    home: Path,
    *,
    tolerance_percent: float | None = None,
) -> Entry:
    """The claim that a replay keeps its present value; its paths are relative to `home`.

    cost : a file, or the name of a shipped cost; policy : a name, or a FILE.py
    """
    subject = {
        "trace": str(trace) if is_example(trace) else os.path.relpath(trace, home),
        "cost": os.path.relpath(cost, home) if cost.exists() else str(cost),
        "policy": os.path.relpath(policy, home) if ".py" in policy else policy,
        "settings": dict(settings),
        "quantity": quantity,
    }
    percent = REPLAYED_PERCENT if tolerance_percent is None else tolerance_percent
    value = measure(msgspec.convert(subject, ReplaySubject), home).value
    return {"name": f"{quantity} of {subject['policy']}", **subject, **_expected(value, percent)}


def document_claims(path: Path, home: Path, *, tolerance_percent: float | None = None) -> list[Entry]:
    """The claims of a JSON document: every speedup or time in it, and the checks that make it sound."""
    path = path / "validation.json" if path.is_dir() else path
    document = read_json(path, f"file {path}", missing="check the path", invalid="make it again")
    if not isinstance(document, dict):
        raise InputError(f"{path} is not a measurement; give a validation, a leaderboard or a file of a benchmark")
    try:
        return _claims_of(document, path, os.path.relpath(path, home), tolerance_percent)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); make it again") from None


def _claims_of(document: Mapping[str, Any], path: Path, file: str, tolerance_percent: float | None) -> list[Entry]:
    if document.get("kind") == VALIDATION_KIND:
        return _of_validation(document, file, MEASURED_PERCENT if tolerance_percent is None else tolerance_percent)
    if isinstance(document.get("boards"), list):
        values = {
            f"{row['label']} on {board['trace']}, drafts up to {board['max_draft']}": (
                ["boards", number, "rows", {"label": row["label"]}, "speedup"],
                row["speedup"]["estimate"],
            )
            for number, board in enumerate(document["boards"])
            for row in board["rows"]
        }
    elif isinstance(document.get("benchmarks"), list):
        values = {
            row["fullname"]: (["benchmarks", {"fullname": row["fullname"]}, "stats", "median"], row["stats"]["median"])
            for row in document["benchmarks"]
        }
    else:
        raise InputError(f"{path} is not a measurement; give a validation, a leaderboard or a file of a benchmark")
    usual = REPLAYED_PERCENT if "boards" in document else TIMED_PERCENT
    percent = usual if tolerance_percent is None else tolerance_percent
    return [{"name": name, "document": file, "at": at, **_expected(value, percent)}
            for name, (at, value) in values.items()]  # fmt: skip


def _of_validation(document: Mapping[str, Any], file: str, percent: float) -> list[Entry]:
    """Every row's measured speedup, identical rounds where replays are exact, and the error of prediction."""
    entries: list[Entry] = []
    for row in document["rows"]:
        label = row["label"]
        subject = {"validation": file, "policy": label}
        entries.append({"name": f"speedup of {label}", **subject, **_expected(row["measured"]["estimate"], percent)})
        if row["rounds_identical_percent"] is not None:
            same = {"quantity": "rounds_identical_percent", "at_least": 100.0}
            entries.append({"name": f"rounds of {label}", **subject, **same})
    error = {"quantity": "median_abs_error_percent", "at_most": LARGEST_ERROR_PERCENT}
    return [*entries, {"name": "median error of prediction", "validation": file, **error}]


def _expected(value: float, percent: float) -> Entry:
    tolerance = {"tolerance_percent": percent}
    return {"expected": rounded(value, tolerance), **tolerance}
