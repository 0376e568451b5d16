"""Acceptance models as JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specsim.acceptance.difficulty import Difficulty
from specsim.acceptance.iid import IID
from specsim.acceptance.per_position import PerPosition
from specsim.acceptance.synthetic import AcceptanceModel
from specsim.errors import InputError
from specsim.files import read_json, write_json

KIND, VERSION = "specsim-acceptance", 1
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


def load_model(path: Path | str) -> AcceptanceModel:
    """Read a model; InputError says what is wrong with the file."""
    path = Path(path)
    make = "make a model with `specsim acceptance fit`"
    document = read_json(path, str(path), missing=make, invalid="fit the model again")
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InputError(f"{path} is no acceptance model; make one with `specsim acceptance fit`")
    if document.get("version") != VERSION:
        raise InputError(f"{path} has version {document.get('version')}, this program reads {VERSION}; fit it again")
    name = document.get("model")
    if name not in MODELS:
        raise InputError(f"{path}: unknown acceptance model {name!r}; known: {', '.join(MODELS)}")
    try:
        model: AcceptanceModel = MODELS[name](**_tuples(document["parameters"]))
    except (TypeError, KeyError) as error:
        raise InputError(f"{path}: parameters do not fit the model {name} ({error}); fit it again") from None
    return model


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
