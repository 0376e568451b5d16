"""Fit shares of the ceilings and seconds of a launch, an all-reduce, a sequence and other prompts to published runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from specsim.cost.roofline.hardware import Derating, usual_derating
from specsim.cost.roofline.passes import seconds_of
from specsim.io.arrays import Floats, Ints, Seconds
from studies.published.cases import Case

MICROSECOND = 1e-6
FREE = {"memory": (0.4, 1.0), "launch_us": (0.5, 100.0), "all_reduce_us": (0.1, 60.0), "sequence_us": (0.1, 100.0)}
START = {"memory": 0.8, "launch_us": 5.0, "all_reduce_us": 10.0, "sequence_us": 5.0}
SERVERS = (
    "sglang",
    "tensorrt-llm",
)  # engines with a fitted `prompt_share`; that of vLLM is 1, because it prefills within decoding steps
SHARES = np.arange(0, 2.01, 0.05)
COMPUTE, OVERLAP = 0.75, 0.77  # measured on an H100, see studies/gpu_passes: too few published runs determine them
OUTLIER = 0.1  # relative error from which on a run counts less


@dataclass(frozen=True)
class Parameters:
    """A derating, the time per sequence, and `RooflineCost.prompt_share` of each of `SERVERS`."""

    memory: float
    launch_us: float
    all_reduce_us: float
    sequence_us: float
    prompt_shares: tuple[float, ...] = (1.0,) * len(SERVERS)

    @property
    def derating(self) -> Derating:
        launch_s, all_reduce_s = (MICROSECOND * us for us in (self.launch_us, self.all_reduce_us))
        return Derating(self.memory, COMPUTE, launch_s, OVERLAP, all_reduce_s)

    @property
    def sequence_s(self) -> float:
        return MICROSECOND * self.sequence_us

    @classmethod
    def without_engine(cls) -> Parameters:
        """Return the parameters of a roofline without an engine."""
        usual = usual_derating()
        assert (usual.compute, usual.overlap) == (COMPUTE, OVERLAP)
        return cls(usual.memory, usual.launch_s / MICROSECOND, usual.all_reduce_s / MICROSECOND, 0.0)


@dataclass(frozen=True)
class Cells:
    """Operations of all cases [R] and cases [N] as arrays.

    work : arguments of `seconds_of`, each [R]
    case, times : [R], the case of each operation, and how often it counts
    sequences : [N], in the batch of each case
    prompts : [R, 2], 1 for operations that prefill other requests' prompts in that engine of `SERVERS`, else 0
    """

    work: tuple[Floats, ...]
    case: Ints
    times: Floats
    sequences: Floats
    prompts: Floats

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Cells:
        rows, prompts = [], []
        for number, case in enumerate(cases):
            for term in case.terms:
                for operation in term.operations:
                    memory, flops, link = term.passes.ceilings(operation.products)
                    peak_s = float(operation.bytes) / memory, float(operation.flops) / flops
                    sent_s = float(operation.link_bytes) / (link or 1.0)
                    rows.append((*peak_s, operation.launches, sent_s, operation.all_reduces, number, term.times))
                    prompts.append([term.prompts and case.about["engine"] == engine for engine in SERVERS])
        *work, case_of, times = np.array(rows, dtype=np.float64).T
        sequences = np.array([float(case.sequences) for case in cases])
        return cls(tuple(work), case_of.astype(np.int64), times, sequences, np.array(prompts, dtype=np.float64))

    def seconds(self, parameters: Parameters) -> Seconds:
        """Predict the seconds of every case [N]."""
        shares = 1 + self.prompts @ (np.array(parameters.prompt_shares) - 1)
        of_operations = shares * self.times * np.asarray(seconds_of(*self.work, (1.0, 1.0, 1.0), parameters.derating))
        passes_s: Seconds = np.bincount(self.case, of_operations, len(self.sequences))
        return passes_s + self.sequences * parameters.sequence_s


def robust(errors: Floats, systems: Sequence[str]) -> Floats:
    """Weight relative errors [N] so that every system counts the same and errors beyond `OUTLIER` count less.

    The sum of squares is that of the soft L1 loss, 2 (sqrt(1 + (error / OUTLIER)^2) - 1), over systems of equal weight.
    """
    count = Counter(systems)
    weight = np.array([count[system] ** -0.5 for system in systems])
    loss = 2 * (np.sqrt(1 + (errors / OUTLIER) ** 2) - 1)
    return np.asarray(np.sign(errors) * OUTLIER * np.sqrt(loss) * weight)


def fitted(cases: Sequence[Case]) -> Parameters:
    """Fit to cases; every system counts the same."""
    cells, measured = Cells.of(cases), np.array([case.measured_s for case in cases])
    systems = [case.system for case in cases]
    low, high = np.log(np.array([*FREE.values()])).T

    def parameters(x: Floats) -> Parameters:
        return Parameters(**dict(zip(FREE, np.exp(x).tolist(), strict=True)))

    def errors(x: Floats) -> Floats:
        return robust(np.log(cells.seconds(parameters(x)) / measured), systems)

    at_one = parameters(least_squares(errors, np.log([*START.values()]), bounds=(low, high)).x)
    return replace(
        at_one, prompt_shares=prompt_shares(cells, measured, [case.about["engine"] for case in cases], at_one)
    )


def prompt_shares(cells: Cells, measured: Seconds, engines: Sequence[str], at_one: Parameters) -> tuple[float, ...]:
    """Fit the `prompt_share` of each of `SERVERS`, which minimises the median error of its runs."""
    whole, none = (cells.seconds(replace(at_one, prompt_shares=(share,) * len(SERVERS))) for share in (1.0, 0.0))
    medians = []
    for engine in SERVERS:
        own = np.array([name == engine for name in engines])
        predicted = none[own] + SHARES[:, None] * (whole - none)[own]
        medians.append(np.median(abs(np.log(predicted / measured[own])), axis=1) if own.any() else abs(SHARES - 1))
    return tuple(float(SHARES[median.argmin()]) for median in medians)
