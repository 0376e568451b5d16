"""Calibrate costs on measurements: a roofline on a profile or on an engine's times, a profile on a probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.files import KIND, VERSION, CostLike, as_cost, cost_path, read_cost, read_cost_document
from specsim.cost.grid import GridPairCost
from specsim.cost.probe import PROBE_KIND, Probe, rescaled, with_probe
from specsim.cost.profile import PROFILE_KIND, Profile, ProfileCost
from specsim.cost.roofline.calibration import calibrate as fit
from specsim.cost.roofline.cost import RooflineCost
from specsim.cost.roofline.document import calibration_document
from specsim.cost.roofline.formats import find_format, read_weights, stored_weights
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.roofline.point_calibration import Fitted, Point, calibrated_on_points
from specsim.io.errors import InputError
from specsim.io.files import file_digest

PRODUCTS_OF = {"float8": "float8", "nvfp4": "float4"}  # types of products by the weights' format


def calibrate(cost: CostLike, measured: CostLike) -> RooflineCost | ProfileCost:
    """Fit a roofline's costs to a measured profile, or rescale a profile to what a probe found.

    Parameters
    ----------
    cost : RooflineCost, ProfileCost, str, Path or mapping
        Roofline costs, as `read_cost` takes them; what share of the ceilings is reached, and what a round takes
        besides its passes, is fitted. With a probe, a profile.
    measured : ProfileCost, BatchProfileCost, GridPairCost, str, Path or mapping
        What `realrun profile`, `realrun batch-profile` or `realrun probe` measured, of the same target and drafter.

    Returns
    -------
    RooflineCost or ProfileCost
        Calibrated. A roofline's `covered` holds the calibrated ranges, and its notes name extrapolation; for profiles
        see `specsim.cost.probe.with_probe`.

    Raises
    ------
    InputError
        If no pass of the target was measured, or a probe's contexts are not within the profile's.
    TypeError
        For `cost` that is not a roofline, or with a probe not a profile, or `measured` that is neither.

    References
    ----------
    Branch, Coleman, Li 1999, the bounded least squares of ``scipy.optimize.least_squares``.

    Examples
    --------
    >>> import specsim
    >>> document = {"kind": "specsim-cost", "version": 1, "form": "roofline", "source": "an example",
    ...     "date": "2026-01-01", "target": "llama-2-7b", "drafter": "llama-68m", "hardware": "a100"}
    >>> roofline, profile = specsim.read_cost(document), specsim.read_cost("example:lab-deep-model")
    >>> fitted = specsim.calibrate(document, "example:lab-deep-model")
    >>> step_s = float(profile.autoregressive_step(100))
    >>> bool(abs(fitted.autoregressive_step(100) - step_s) < abs(roofline.autoregressive_step(100) - step_s))
    True
    """
    probe = _document(measured)
    if probe.get("kind") == PROBE_KIND:
        return with_probe(as_cost(cost), Probe.from_json(probe))
    roofline, profile = as_cost(cost), as_cost(measured)
    if not isinstance(roofline, RooflineCost):
        raise TypeError(f"cost is {roofline}; expected roofline costs, such as 'example:llama-3.1-8b-eagle-h100'")
    if not isinstance(profile, ProfileCost | GridPairCost | BatchProfileCost):
        raise TypeError(f"measured is {profile}; expected what `realrun profile` or `realrun batch-profile` wrote")
    return fit(roofline, profile)


def calibrated_document(cost: str | PathLike[str], measured: str | PathLike[str]) -> dict[str, Any]:
    """Calibrate costs, as `calibrate` does, and make the document of a cost file, with digests of both files.

    Parameters
    ----------
    cost, measured : str or Path
        Files, or names of `specsim cost list` and `specsim example --list`.

    Returns
    -------
    dict
        `read_cost` reads it.

    Raises
    ------
    InputError
        For files that `calibrate` refuses, and for a probe of another pair than the profile's, or with other settings.
    """
    document, seen = _document(cost), _document(measured)
    kind = document.get("kind")
    if seen.get("kind") == PROBE_KIND:
        if kind != PROFILE_KIND:
            raise InputError(f"{cost} is not a profile; give one of `realrun profile`, which a probe rescales")
        read_cost(cost)
        sources = {"profile": _source_as_dict(cost, document), "probe": _source_as_dict(measured, seen)}
        return rescaled(Profile.from_json(document, str(cost)), Probe.from_json(seen), sources).as_dict()
    if kind != KIND or document.get("form") != "roofline":
        raise InputError(f"{cost} has no form roofline; give a roofline for a profile, or a profile for a probe")
    fitted = calibrate(cost, measured)
    assert isinstance(fitted, RooflineCost)
    origin = _source_as_dict(measured, seen)
    source = f"{document['source']}; calibrated on {origin['digest']} of {origin['date']}"
    return {**document, "source": source, "calibration": calibration_document(fitted)}


def data_sheet_document(
    hardware: str,
    target: str,
    drafter: str,
    weights: str | None = None,
    tensor_parallel: int = 1,
    engine: str | None = None,
    dtype: str | None = None,
    cache: str | None = None,
) -> dict[str, Any]:
    """Write down the roofline of a GPU's data sheet, and what an engine adds, as a cost file has it.

    dtype : dtype of hidden states; default: `Hardware.state_dtype`
    weights : a format, or "experts=mxfp4,..."; default: the format in which the target is stored, see `stored_weights`

    Matrices in float8 and nvfp4 are multiplied in float8 and float4 where the GPU can, as engines do.
    """
    sheet, chosen, stored = find_hardware(hardware), None if weights is None else read_weights(weights), ""
    if chosen is None and (found := stored_weights(target)):
        chosen, stored = found
    products = PRODUCTS_OF.get(chosen) if isinstance(chosen, str) else None
    return {
        "kind": KIND,
        "version": VERSION,
        "form": "roofline",
        "source": f"roofline of the data sheet: {sheet.title or sheet.name}",
        "date": sheet.date,
        "target": target,
        "drafter": drafter,
        "hardware": sheet.name,
        "dtype": find_format(dtype or sheet.state_dtype),
        "weights": chosen,
        "activations": products if products in sheet.flops else None,
        "tensor_parallel": tensor_parallel,
        "engine": engine,
        **({"cache": find_format(cache)} if cache else {}),
        **({"stored": stored} if stored else {}),
    }


def document_on_points(
    cost: str | PathLike[str] | Mapping[str, Any], points: Sequence[Point]
) -> tuple[dict[str, Any], Fitted]:
    """Calibrate a roofline on measured times per output token, and make the document of a cost file.

    Parameters
    ----------
    cost : str, Path or mapping
        Roofline, as `read_cost` takes it.
    points : sequence of Point

    Returns
    -------
    dict
        `read_cost` reads it.
    Fitted
        With the errors at the points.

    Raises
    ------
    InputError
        For costs that are no roofline, and for points that `calibrated_on_points` refuses.
    """
    document, roofline = _document(cost), as_cost(cost)
    if not isinstance(roofline, RooflineCost):
        raise InputError(f"{cost} has no form roofline; measured points calibrate a roofline")
    fitted = calibrated_on_points(roofline, points)
    measured = "; ".join(map(str, points))
    source = f"{document['source']}; calibrated on {len(points)} measured points: {measured}"
    return {**document, "source": source, "calibration": calibration_document(fitted.cost)}, fitted


def _document(costs: object) -> Mapping[str, Any]:
    """Return the document of a file, a name or a mapping; an empty one for anything else."""
    document = read_cost_document(cost_path(costs)) if isinstance(costs, str | PathLike) else costs
    return document if isinstance(document, Mapping) else {}


def _source_as_dict(path: str | PathLike[str], document: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the digest of a cost file, and when its costs were measured, if it says that."""
    provenance = document.get("provenance")
    date = provenance.get("date") if isinstance(provenance, dict) else None
    return {"digest": file_digest(cost_path(path)), "date": date}
