"""Fit llama.cpp's share of the ceilings and its overheads to published passes and rounds.

Errors of a verification pass or a round are those of its ratio to the decode step of the same run. For decode steps of
the same GPU differ by up to a third between machines, and a speedup depends on the ratio alone. Metal is not in the
fit: its cost follows from `Hardware.reread`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import Overheads, RooflineCost, find_drafter
from specsim.cost.roofline.hardware import Derating, find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.io.arrays import Floats
from studies.published.cases import MILLISECOND, read_csv
from studies.published.fit import COMPUTE, MICROSECOND, OUTLIER, OVERLAP

DATE = "2026-11"
ALL_REDUCE_S = 5.4e-6  # as for other engines; by default llama.cpp splits layers, not matrices, over devices
# Bounds and start of the fit: share of the memory bandwidth, kernel launch (us), `Roofline.vector`, overheads (ms) of a
# draft step and of a round. 16-bit weights on an RTX 3090 reach 94 % of the bandwidth; packed weights also take
# time to unpack, so the bound is lower.
LOW, START, HIGH = [0.4, 0.3, 0.05, 1e-3, 1e-3], [0.85, 4.0, 0.4, 0.1, 0.5], [0.92, 60.0, 3.0, 5.0, 10.0]


def read_runs() -> list[dict[str, str]]:
    """Return the published runs. With "rows", the tokens of a pass, a run is a pass; else it is a round."""
    return read_csv("llamacpp.csv")


def measured_s(run: Mapping[str, str]) -> float:
    """Return the seconds of a run's pass or round."""
    return float(run["rows"] or run["acceptance"]) / float(run["tokens_per_s"])


def bare_cost(run: Mapping[str, str]) -> RooflineCost:
    """Return the costs of a run's models and GPU, without an engine."""
    hardware = find_hardware(run["gpu"])
    model = find_architecture(run["target"])
    target = Roofline(model, hardware, dtype=hardware.state_dtype, weights=run["weights"], cache=run["cache"] or None)
    return RooflineCost(target, find_drafter("mtp", model))


def predicted_s(cost: RooflineCost, run: Mapping[str, str]) -> float:
    """Predict the seconds of a run's pass or round."""
    context = int(run["context"])
    if run["rows"]:
        return float(cost.target.seconds(int(run["rows"]), context))
    return cost.round_seconds(int(run["k"]), context)


def with_parameters(cost: RooflineCost, parameters: Floats) -> RooflineCost:
    """Return costs with these parameters, in the order of `LOW`."""
    memory, launch_us, vector, draft_ms, round_ms = parameters.tolist()
    overheads = Overheads(draft_step_s=MILLISECOND * draft_ms, round_s=MILLISECOND * round_ms)
    return replace(cost.with_passes(derating=derating(memory, launch_us), vector=vector), overheads=overheads)


def derating(memory: float, launch_us: float) -> Derating:
    """Return the derating for a share of the memory bandwidth and the microseconds of a launch."""
    return Derating(memory, COMPUTE, MICROSECOND * launch_us, OVERLAP, ALL_REDUCE_S)


def log_errors(runs: list[dict[str, str]], seconds: Floats) -> Floats:
    """Return log(predicted / measured) of decode steps, and of the ratios of other runs to their decode step [N]."""
    errors = np.log(seconds / [measured_s(run) for run in runs])
    steps = {_of(run): number for number, run in enumerate(runs) if run["rows"] == "1"}
    return np.array([error - (0.0 if steps.get(_of(run), number) == number else errors[steps[_of(run)]])
                     for number, (run, error) in enumerate(zip(runs, errors, strict=True))])  # fmt: skip


def _of(run: Mapping[str, str]) -> tuple[str, ...]:
    return run["gpu"], run["target"], run["weights"]


def fitted(runs: list[dict[str, str]]) -> Floats:
    """Fit the parameters; every source weighs the same."""
    from scipy.optimize import least_squares

    number = Counter(run["source"] for run in runs)
    weight = np.array([number[run["source"]] ** -0.5 for run in runs])

    def robust(x: Floats) -> Floats:
        return np.asarray(OUTLIER * np.arcsinh(errors_of(runs, np.exp(x)) / OUTLIER) * weight)

    bounds = np.log(LOW), np.log(HIGH)
    found = np.exp(least_squares(robust, np.log(START), bounds=bounds, diff_step=1e-3).x)
    return np.array([float(f"{value:.2g}") for value in found])


def errors_of(runs: list[dict[str, str]], parameters: Floats) -> Floats:
    """Return the errors of runs under these parameters, see `log_errors`."""
    return log_errors(runs, np.array([predicted_s(with_parameters(bare_cost(run), parameters), run) for run in runs]))


def document() -> dict[str, Any]:
    """Return the document of specsim/cost/roofline/llamacpp.json, with errors on GPUs that a fit left out."""
    runs = [run for run in read_runs() if not any(find_hardware(run["gpu"]).reread)]
    memory, launch_us, vector, draft_ms, round_ms = fitted(runs).tolist()
    off: list[float] = []
    gpus = {run["gpu"] for run in runs}
    for gpu in gpus:
        seen, unseen = ([run for run in runs if (run["gpu"] == gpu) == held] for held in (False, True))
        errors = np.abs(np.expm1(errors_of(unseen, fitted(seen))))
        off += [100 * error for error, run in zip(errors.tolist(), unseen, strict=True) if run["rows"] != "1"]
    return {
        "engines": {"llamacpp": "llama.cpp"},
        "derating": asdict(derating(memory, launch_us)),
        "overheads": {"llamacpp": {"draft_step_s": MILLISECOND * draft_ms, "round_s": MILLISECOND * round_ms}},
        "vector": vector,
        "remark": f"with llama.cpp's overheads, fitted to {len(runs)} published passes and rounds on {len(gpus)} GPUs; "
        f"passes and rounds on GPUs left out were a median {np.median(off):.0f} % off (90th percentile "
        f"{np.quantile(off, 0.9):.0f} %), none was on a CPU",
        "source": "fitted to studies/published/data/llamacpp.csv; compute and overlap as on an H100",
        "date": DATE,
    }
