"""Read the result files of campaigns, shipped with the package or in any folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from specsim.io.errors import InputError
from specsim.io.json import checked, read_json

SHIPPED = Path(__file__).parents[1] / "data"
CAMPAIGN_KIND, GRID_KIND = "specsim-campaign", "specsim-cost-grid"


class Made(TypedDict):
    """Where and when it was made."""

    device: NotRequired[str]
    date: NotRequired[str]


class AnyResult(TypedDict):
    """Any result file; the place and the date may stand outside of provenance."""

    kind: str
    provenance: NotRequired[Made | None]
    device: NotRequired[str]
    date: NotRequired[str]


class Stage(AnyResult):
    """What a stage of a campaign wrote."""

    stage: str
    complete: bool
    reduced: bool
    error: NotRequired[str]
    grids: NotRequired[dict[str, dict[str, Any]]]


SHAPES: dict[str, Any] = {CAMPAIGN_KIND: Stage}


@dataclass(frozen=True)
class Result:
    """One result file: what it is, where and when it was made.

    content : a Trace; a GridCost, or for a profile a GridCost per model; else the parsed document
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
    """Read and check every result file in a folder; InputError for a malformed file."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give a folder that `realrun campaign` wrote")
    files = sorted([*folder.glob("*.json"), *folder.glob("*.zip")])
    return [read_result(path) for path in files]


def read_result(path: Path) -> Result:
    """Read a result file by its kind."""
    if path.suffix == ".zip":
        return _trace(path)
    again = "run its stage again"
    document = read_json(path, str(path), missing=again, invalid=again)
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(kind, str):
        raise InputError(f"{path} names no kind, so it is not a result file; move it elsewhere")
    checked(document, str(path), SHAPES.get(kind, AnyResult), invalid=again)
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
    elif kind == GRID_KIND:
        from specsim.cost.grid import grid_from_json

        content = grid_from_json(document, str(path))
        summary = str(document.get("model", ""))
    return Result(path.name, kind, str(made.get("device", "unknown")), str(made.get("date", "")), summary, content)


def _trace(path: Path) -> Result:
    from specsim.trace.files import read_trace

    trace = read_trace(path)
    made, decoding = trace.meta.get("provenance", {}), trace.meta["decoding"]
    mode = decoding if isinstance(decoding, str) else decoding["mode"]
    summary = f"{trace.sequences} sequences, {len(trace.token)} tokens, {mode}"
    device, date = str(made.get("device", "unknown")), str(made.get("date", ""))
    return Result(path.name, "specsim-trace", device, date, summary, trace)
