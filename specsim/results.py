"""Result files of campaigns: the ones that ship with the package, or those in any folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsim.errors import InputError

SHIPPED = Path(__file__).parent / "data"
CAMPAIGN_KIND = "specsim-campaign"


@dataclass(frozen=True)
class Result:
    """One result file: what it is, where and when it was made.

    content : a Trace; a GridCost, or for a profile one per model; else the parsed document
    """

    file: str
    kind: str
    device: str
    date: str
    summary: str
    content: Any

    @property
    def from_gpu(self) -> bool:
        return any(name in self.device for name in ("NVIDIA", "AMD Instinct"))


def list_results(folder: Path = SHIPPED) -> list[Result]:
    """Every result file in a folder, read and checked; InputError for one that is malformed."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; give one that `realrun campaign` wrote")
    files = sorted([*folder.glob("*.json"), *folder.glob("*.zip")])
    return [read_result(path) for path in files]


def read_result(path: Path) -> Result:
    """Read one result file by its kind."""
    if path.suffix == ".zip":
        return _trace(path)
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no readable JSON ({error}); run its stage again") from None
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(kind, str):
        raise InputError(f"{path} names no kind; it is no result file, move it elsewhere")
    made = document.get("provenance") or document
    content: Any = document
    summary = ""
    if kind == CAMPAIGN_KIND:
        state = "complete" if document["complete"] else f"unfinished: {document.get('error', 'out of time')}"
        summary = f"stage {document['stage']}, {state}{', reduced sizes' if document['reduced'] else ''}"
        if document["stage"] == "profile" and "grids" in document:
            from specsim.cost.grid import grid_from_json

            content = {name: grid_from_json(grid, f"{path}: {name}") for name, grid in document["grids"].items()}
            summary += f": {', '.join(content)}"
    elif kind == "speckernels-bench":
        failed = sum(row["error"] is not None for row in document["rows"])
        summary = f"{len(document['rows'])} rows, {failed} of them errors, {len(document['unfinished'])} cases left"
    elif kind == "specsim-cost-grid":
        from specsim.cost.grid import grid_from_json

        content = grid_from_json(document, str(path))
        summary = str(document.get("model", ""))
    return Result(path.name, kind, str(made.get("device", "unknown")), str(made.get("date", "")), summary, content)


def _trace(path: Path) -> Result:
    from specsim.trace.files import read_trace

    trace = read_trace(path)
    made = trace.meta["provenance"]
    summary = f"{trace.sequences} sequences, {len(trace.token)} tokens, {trace.meta['decoding']['mode']}"
    return Result(path.name, "specsim-trace", str(made["device"]), str(made["date"]), summary, trace)
