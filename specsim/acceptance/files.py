"""Acceptance models as JSON files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from specsim.acceptance.difficulty import Difficulty
from specsim.acceptance.iid import IID
from specsim.acceptance.per_position import PerPosition
from specsim.acceptance.synthetic import AcceptanceModel
from specsim.errors import InputError
from specsim.files import write_json
from specsim.json_files import checked, read_json

KIND, VERSION = "specsim-acceptance", 1
AGAIN = "fit the model again"
MODELS: dict[str, Any] = {kind.name: kind for kind in (IID, PerPosition, Difficulty)}


def as_document(model: AcceptanceModel, fitted_to: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON form of a model, with what it was fitted to (`sources.describe`)."""
    return {
        "kind": KIND,
        "version": VERSION,
        "model": model.name,
        "parameters": model.parameters(),
        "fitted_to": fitted_to or {},
    }


def save_model(model: AcceptanceModel, path: Path | str, fitted_to: dict[str, Any] | None = None) -> None:
    """Write a model as JSON."""
    write_json(as_document(model, fitted_to), path, indent=2)


def load_model(path: str | PathLike[str]) -> AcceptanceModel:
    """Read a model; InputError says what is wrong with the file."""
    path = Path(path)
    make = "make a model with `specsim acceptance fit`"
    document = read_json(path, str(path), missing=make, invalid=AGAIN)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InputError(f"{path} is no acceptance model; make one with `specsim acceptance fit`")
    if document.get("version") != VERSION:
        raise InputError(f"{path} has version {document.get('version')}, this program reads {VERSION}; fit it again")
    name = document.get("model")
    if not isinstance(name, str) or name not in MODELS:
        raise InputError(f"{path}: unknown acceptance model {name!r}; known: {', '.join(MODELS)}")
    hints = get_type_hints(MODELS[name])
    known = TypedDict("known", hints)  # type: ignore[misc]
    parameters = checked(document.get("parameters"), f"{path}: parameters of the model {name}", known, invalid=AGAIN)
    model: AcceptanceModel = MODELS[name](**_tuples({key: parameters[key] for key in hints}))
    return model


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
