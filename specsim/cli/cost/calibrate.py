"""`specsim cost calibrate`: costs brought into line with what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specsim.cli.command import Answer
from specsim.cli.console import claim_file
from specsim.cli.options import OVERWRITE_FILE_HELP
from specsim.cli.settings import Settings, argument, setting


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Settings):
    """Which costs are calibrated on what."""

    cost: str = argument("Profile or roofline: cost file, or a name of `specsim cost list`.")
    measured: str = argument("What was measured: a probe for a profile, a profile for a roofline.")
    out: Path = setting(doc="Costs to write, JSON.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def calibrate(options: CalibrateOptions) -> Answer:
    """Calibrate costs on a measurement.

    A profile is rescaled to the state of the machine that a probe of `realrun probe` found. A roofline is fitted to a
    profile.

    Example: specsim cost calibrate profile.json probe.json --out now.json
    """
    from specsim.cost.calibrate import calibrated_document
    from specsim.io.files import write_json

    claim_file(options.out, overwrite=options.overwrite)
    document = calibrated_document(options.cost, options.measured)
    write_json(document, options.out)
    probed = document.get("probed")
    line = f"{options.cost}, calibrated on {options.measured}: {options.out}"
    if probed:
        passes = ", ".join(f"{factor:.3f}" for factor in probed["passes"])
        line += f"; passes of 1 to {len(probed['passes'])} tokens x {passes}, draft steps x {probed['drafting']:.3f}"
    return Answer(document, partial(print, line))
