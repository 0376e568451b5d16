"""`specsim cost calibrate`: costs brought into line with what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specsim.cli.command import Answer
from specsim.cli.console import claim_file, print_table
from specsim.cli.options import OVERWRITE_FILE_HELP, GpuSettings
from specsim.io.errors import InputError
from specsim.io.settings import argument, setting


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(GpuSettings):
    """Which costs are calibrated on what."""

    cost: str | None = argument(
        "Profile or roofline to calibrate: a cost file, or a name of `specsim cost list`. Leave it out with --gpu, "
        "--target and --drafter.",
        default=None,
    )
    measurement: str | None = argument(
        "What was measured: a probe for a profile, a profile for a roofline. Leave it out with --measured.",
        default=None,
    )
    measured: list[str] = setting(
        [],
        'Measured time per output token, as "batch=1 context=500 tpot_ms=7.07"; with speculation add k and acceptance, '
        'the output tokens of a round: "batch=1 context=500 k=3 acceptance=2.29 tpot_ms=4.29". Repeat for more.',
    )
    out: Path = setting(doc="Costs to write, JSON.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.measured) == (self.measurement is not None):
            raise InputError("give what was measured: a profile or probe, or points by --measured")
        if self.measurement is not None and self.gpu is not None:
            raise InputError("costs are given twice, as a file and by --gpu; leave one out")


def calibrate(options: CalibrateOptions) -> Answer:
    """Calibrate costs on a measurement.

    A profile is rescaled to the state of the machine that a probe of `realrun probe` found. A roofline is fitted to a
    profile, or to times per output token that an engine took: a time without speculation gives how much longer passes
    take than the roofline says, two of other batches or contexts also what a step takes beside them; a time with
    speculation gives what a round takes besides, two of other K also a draft step.

    Example: specsim cost calibrate --gpu h100 --target llama-3.1-8b --drafter eagle --measured "batch=1 context=500
    tpot_ms=7.07" --measured "batch=1 context=500 k=3 acceptance=2.29 tpot_ms=4.29" --out vllm.json
    """
    from specsim.cost.calibrate import calibrated_document, document_on_points
    from specsim.cost.roofline.point_calibration import read_point
    from specsim.io.files import write_json

    claim_file(options.out, overwrite=options.overwrite)
    if options.measured:
        points = [read_point(text) for text in options.measured]
        document, fitted = document_on_points(options.costs(options.cost), points)
        write_json(document, options.out)
        rows = [
            [str(point), f"{error:+.1f}", "-" if held is None else f"{held:+.1f}"]
            for point, error, held in zip(points, fitted.errors_percent, fitted.held_out_percent, strict=True)
        ]

        def show() -> None:
            print_table(
                f"{fitted.cost.subject}, calibrated on {len(points)} points: passes take {fitted.factor:.2f} times the "
                "data sheet's",
                ["measured", "error %", "error % if left out"],
                rows,
            )
            print(f"costs: {options.out}")

        return Answer(document, show)
    assert options.cost is not None and options.measurement is not None  # positional: no measurement without costs
    document = calibrated_document(options.cost, options.measurement)
    write_json(document, options.out)
    probed = document.get("probed")
    line = f"{options.cost}, calibrated on {options.measurement}: {options.out}"
    if probed:
        passes = ", ".join(f"{factor:.3f}" for factor in probed["passes"])
        line += f"; passes of 1 to {len(probed['passes'])} tokens x {passes}, draft steps x {probed['drafting']:.3f}"
    return Answer(document, lambda: print(line))
