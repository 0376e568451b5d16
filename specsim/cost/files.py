"""Read cost files: profiles, files that a person wrote, and shipped costs by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict

from specsim.cost.batch_profile import (
    BATCH_PROFILE_KIND,
    BATCH_PROFILE_VERSION,
    BatchProfileCost,
    batch_profile_from_json,
)
from specsim.cost.documents import KIND, cost_of_document, shipped_costs
from specsim.cost.joined import JOINED_COST_KIND, JoinedCost
from specsim.cost.linear import LinearCost
from specsim.cost.model import ConstantCost, CostModel, not_a_cost
from specsim.cost.probe import PROBE_KIND
from specsim.cost.profile import GRID_KIND, PROFILE_KIND, PROFILE_VERSION, profile_from_json
from specsim.cost.roofline.cost import RooflineCost
from specsim.io.errors import InputError
from specsim.io.examples import located
from specsim.io.json import checked, plain_json, read_json

MAKE = "make a profile with `realrun profile`, or choose one of `specsim cost list` or `specsim example --list`"


CostLike = CostModel | str | PathLike[str] | Mapping[str, Any]  # as every function takes costs


class JoinedDocument(TypedDict):
    """A file with the costs of several drafters, each as in its own file."""

    version: Literal[1]
    costs: list[Any]


class Constants(TypedDict):
    """A file with the papers' two numbers alone."""

    s_d: float
    s_t: float


def read_cost(cost: str | PathLike[str] | Mapping[str, Any], *, batch: int | None = None) -> CostModel:
    """Read the costs of a machine.

    Parameters
    ----------
    cost : str, Path or mapping
        A profile made by `realrun profile`; a file that you wrote (see `specsim.cost.documents`), such as
        {"s_d": seconds, "s_t": seconds}; the costs of several drafters, as `specsim join` writes them; or a name of
        `specsim cost list` or `specsim example --list`. A mapping is read like a file.
    batch : int, optional
        Sequences in lockstep, for batch-aware costs.

    Returns
    -------
    CostModel
        Seconds per call.

    Raises
    ------
    InputError
        For a missing file, a file without costs, and a batch for costs without batches.
    TypeError
        For anything but a path, a name or a mapping.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, section 3.4 (costs as s_d and s_t, whose ratio is its c).

    Examples
    --------
    >>> import specsim
    >>> specsim.read_cost({"s_d": 0.001, "s_t": 0.010})
    ConstantCost(s_d=0.001, s_t=0.01)
    >>> specsim.read_cost("vllm-llama3.1-8b-eagle-h100")
    LinearCost: decoding step 7.07 ms, draft step 0.74 ms at 1,000 cached tokens
    >>> round(float(specsim.read_cost("example:llama-3.1-8b-eagle-h100").autoregressive_step(1000)), 3)
    0.006
    """
    if isinstance(cost, Mapping):
        where, document = "(a mapping)", plain_json(cost, "cost file (a mapping)", invalid=MAKE)
    elif isinstance(cost, str | PathLike):
        where = str(cost_path(cost))
        document = read_cost_document(Path(where))
    else:
        raise not_a_cost(cost)
    model = _cost_of(document, where)
    if batch is None:
        return model
    try:
        return with_batch(model, batch)
    except InputError as error:
        raise InputError(f"cost file {where if isinstance(cost, Mapping) else cost}: {error}") from None


def as_cost(cost: object) -> CostModel:
    """Return a cost model, or read it from a path, a name or a mapping; TypeError for anything else."""
    if isinstance(cost, CostModel):
        return cost
    if isinstance(cost, str | PathLike | Mapping):
        return read_cost(cost)
    raise not_a_cost(cost)


def with_batch(cost: CostModel, batch: int) -> CostModel:
    """The costs of `batch` sequences in lockstep; InputError for costs without batches."""
    if not isinstance(cost, LinearCost | RooflineCost | BatchProfileCost):
        raise InputError("has no batches; give linear or roofline costs, or grids with --draft-cost")
    return replace(cost, batch=batch)


def cost_path(path: str | PathLike[str]) -> Path:
    """The file at this path, or the shipped file of this name."""
    path = located(path, "cost")
    return path if path.exists() else shipped_costs().get(str(path), path)


def read_cost_document(path: Path) -> Any:
    """The parsed JSON of a cost file, unchecked."""
    return read_json(path, f"cost file {path}", missing=MAKE, invalid="make it again")


def _cost_of(data: Any, path: str) -> CostModel:
    """The cost model of a parsed cost file."""
    name = f"cost file {path}"
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == KIND:
        return cost_of_document(data, path)
    if kind == JOINED_COST_KIND:
        parts = checked(data, name, JoinedDocument, invalid="join the costs again")["costs"]
        if any(isinstance(part, dict) and part.get("kind") == JOINED_COST_KIND for part in parts) or not parts:
            raise InputError(f"{name} does not hold the costs of single drafters; join them again")
        return JoinedCost(tuple(_cost_of(part, f"{path}, drafter {n}") for n, part in enumerate(parts, start=1)))
    if kind == PROFILE_KIND:
        if data.get("version") != PROFILE_VERSION:
            raise InputError(
                f"{name} has version {data.get('version')}, this program reads {PROFILE_VERSION}; profile again"
            )
        profile = profile_from_json(data, path)
        profile.check(f"cost profile {path}")
        return profile
    if kind == BATCH_PROFILE_KIND:
        if data.get("version") != BATCH_PROFILE_VERSION:
            raise InputError(
                f"{name} has version {data.get('version')}, this program reads {BATCH_PROFILE_VERSION}; measure again"
            )
        batches = batch_profile_from_json(data, path)
        batches.check(f"batch profile {path}", data.get("noise_floor") or 0.0)
        return batches
    if isinstance(data, dict) and set(data) >= {"s_d", "s_t"}:
        checked(data, name, Constants, invalid="give s_d and s_t in seconds")
        try:
            return ConstantCost(float(data["s_d"]), float(data["s_t"]))
        except InputError as error:
            raise InputError(f"{name}: {error}; give s_d and s_t in seconds") from None
    if kind == PROBE_KIND:
        raise InputError(f"{name} is a probe; rescale a profile with `specsim cost calibrate PROFILE PROBE --out FILE`")
    if kind == GRID_KIND:
        raise InputError(f"{name} is a {GRID_KIND} of the target only; name the drafter's grid with --draft-cost")
    raise InputError(f"{name} is neither a profile nor s_d and s_t; {MAKE}")
