"""JSON files of acceptance models."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from specsim.acceptance.difficulty import Difficulty
from specsim.acceptance.models import IID, AcceptanceModel, PerPosition, parameters_of
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.json import checked, read_json

KIND, VERSION = "specsim-acceptance", 1
AGAIN = "fit the model again"
MODELS: dict[str, Any] = {kind.name: kind for kind in (IID, PerPosition, Difficulty)}


def as_document(model: AcceptanceModel, fitted_to: dict[str, Any] | None = None) -> dict[str, Any]:
    """JSON document of a model, with a description of its data (`sources.describe`)."""
    return {
        "kind": KIND,
        "version": VERSION,
        "model": model.name,
        "parameters": parameters_of(model),
        "fitted_to": fitted_to or {},
    }


def save_model(model: AcceptanceModel, path: Path | str, fitted_to: dict[str, Any] | None = None) -> None:
    """Write a model as JSON."""
    write_json(as_document(model, fitted_to), path, indent=2)


def load_model(path: str | PathLike[str]) -> AcceptanceModel:
    """Read a model; InputError for any other file."""
    path = Path(path)
    make = "make a model with `specsim acceptance fit`"
    document = read_json(path, str(path), missing=make, invalid=AGAIN)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InputError(f"{path} is not an acceptance model; write a model with `specsim acceptance fit`")
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
    """Replace lists of a JSON value by tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
