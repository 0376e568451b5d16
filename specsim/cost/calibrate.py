"""Fit a roofline's costs to measured costs, as objects, files or mappings."""

from __future__ import annotations

from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.files import CostLike, as_cost
from specsim.cost.grid import GridPairCost
from specsim.cost.profile import ProfileCost
from specsim.cost.roofline.calibration import calibrate as fit
from specsim.cost.roofline.cost import RooflineCost


def calibrate(cost: CostLike, measured: CostLike) -> RooflineCost:
    """Fit a roofline's costs to a measured profile of the same target and drafter.

    Parameters
    ----------
    cost : RooflineCost, str, Path or mapping
        Roofline costs, as `read_cost` takes them; what share of the ceilings is reached, and what a round takes
        besides its passes, is fitted.
    measured : ProfileCost, BatchProfileCost, GridPairCost, str, Path or mapping
        What `realrun profile` or `realrun batch-profile` measured.

    Returns
    -------
    RooflineCost
        Calibrated; `covered` holds the calibrated ranges, and notes name extrapolation.

    Raises
    ------
    InputError
        If no pass of the target was measured.
    TypeError
        For `cost` that is not a roofline, or `measured` that is not a profile.

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
    roofline, profile = as_cost(cost), as_cost(measured)
    if not isinstance(roofline, RooflineCost):
        raise TypeError(f"cost is {roofline}; expected roofline costs, such as 'example:llama-3.1-8b-eagle-h100'")
    if not isinstance(profile, ProfileCost | GridPairCost | BatchProfileCost):
        raise TypeError(f"measured is {profile}; expected what `realrun profile` or `realrun batch-profile` wrote")
    return fit(roofline, profile)
