"""The one reader of cost files: profiles, files that a person wrote, and those that ship under a name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from specsim.cost.batch_profile import (
    BATCH_PROFILE_KIND,
    BATCH_PROFILE_VERSION,
    BatchProfileCost,
    batch_profile_from_json,
)
from specsim.cost.linear import LinearCost
from specsim.cost.model import ConstantCost, CostModel
from specsim.cost.profile import GRID_KIND, PROFILE_KIND, PROFILE_VERSION, profile_from_json
from specsim.cost.roofline.cost import RooflineCost
from specsim.cost.silicon.cost import SiliconCost
from specsim.cost.written import KIND, check_written, shipped_costs, written_cost
from specsim.errors import InputError
from specsim.json_files import checked, read_json


class Constants(TypedDict):
    """Of a file with the papers' two numbers alone."""

    s_d: float
    s_t: float


def read_cost(path: Path | str, *, batch: int | None = None) -> CostModel:
    """Read what things cost on a machine.

    Parameters
    ----------
    path : Path or str
        A profile made by `realrun profile`; a file that you wrote (see `specsim.cost.written`), such as
        {"s_d": seconds, "s_t": seconds}; or the name of one that ships, see `specsim cost list`.
    batch : int, optional
        Sequences in lockstep, of linear, roofline and silicon costs.

    Returns
    -------
    CostModel
        Seconds per call.

    Raises
    ------
    InputError
        For a file that is missing, or holds no costs, and for a batch of costs that know none.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, section 3.4 (costs as s_d and s_t, whose ratio is its c).

    Examples
    --------
    >>> import pathlib, tempfile, specsim
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "cost.json")
    ...     _ = file.write_text('{"s_d": 0.001, "s_t": 0.010}')
    ...     specsim.read_cost(file)
    ConstantCost(s_d=0.001, s_t=0.01)
    >>> specsim.read_cost("vllm-llama3.1-8b-eagle-h100").step_s
    0.00120683946
    """
    shipped = shipped_costs()
    where = shipped.get(str(path), Path(path)) if not Path(path).exists() else Path(path)
    cost = _read(where)
    if batch is None:
        return cost
    try:
        return with_batch(cost, batch)
    except InputError as error:
        raise InputError(f"cost file {path}: {error}") from None


def with_batch(cost: CostModel, batch: int) -> CostModel:
    """The costs of so many sequences in lockstep; InputError where they know no batches."""
    if not isinstance(cost, LinearCost | RooflineCost | SiliconCost | BatchProfileCost):
        raise InputError("knows no batches; give linear, roofline or silicon costs, or grids with --draft-cost")
    return replace(cost, batch=batch)


def _read(path: Path) -> CostModel:
    name = f"cost file {path}"
    make = "make one with `realrun profile`, or choose one of `specsim cost list`"
    data = read_json(path, name, missing=make, invalid="make it again")
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == KIND:
        return written_cost(check_written(data, str(path)), str(path))
    if kind == PROFILE_KIND:
        if data.get("version") != PROFILE_VERSION:
            raise InputError(
                f"{name} has version {data.get('version')}, this program reads {PROFILE_VERSION}; profile again"
            )
        return profile_from_json(data, str(path))
    if kind == BATCH_PROFILE_KIND:
        if data.get("version") != BATCH_PROFILE_VERSION:
            raise InputError(
                f"{name} has version {data.get('version')}, this program reads {BATCH_PROFILE_VERSION}; measure again"
            )
        return batch_profile_from_json(data, str(path))
    if isinstance(data, dict) and set(data) >= {"s_d", "s_t"}:
        checked(data, name, Constants, invalid="give s_d and s_t in seconds")
        try:
            return ConstantCost(float(data["s_d"]), float(data["s_t"]))
        except InputError as error:
            raise InputError(f"{name}: {error}; give s_d and s_t in seconds") from None
    if kind == GRID_KIND:
        raise InputError(
            f"{name} is a {GRID_KIND} of one model, a prediction needs the drafter's; name that with --draft-cost"
        )
    raise InputError(f"{name} is neither a profile nor s_d and s_t; {make}")
