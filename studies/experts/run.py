"""Where speculation pays on mixtures of experts: `python -m studies experts`.

Renders recorded figures alone: what passes of mixtures and of a dense model take at every batch, as NVIDIA's package
aiconfigurator-core interpolates it between measured operators.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from specsim.cost.roofline.architecture import find_architecture
from specsim.io.json import from_keys, read_json
from specsim.replaying.intervals import Estimate
from specsim.report.table import Column
from studies.common import Config, claim
from studies.figures import Line, line_panels
from studies.report import Report

SHOWN_BATCHES = (1, 4, 16, 64)
MEASURED = "experts.json"
RECORDED = ("config.json", MEASURED)


def main(out: Path, config: Config) -> None:
    """Write the report."""
    claim(out, config)
    path = out / MEASURED
    again = "run the study without --real, on its recorded figures"
    timings = from_keys(read_json(path, str(path), missing=again, invalid=again), Timings, str(path), again)
    report(config, timings).write(out)


@dataclass(frozen=True)
class Timing:
    """Seconds of a model at a batch: of a decode step, of drafting, and of verification, see `Report.trust`."""

    model: str
    routing: str
    batch: int
    token_s: float
    draft_s: float
    verify_s: dict[Literal["once", "separate"], float]


@dataclass(frozen=True)
class Timings:
    """What was recorded. tables : of which engine; layer_s : seconds of a layer of experts by tokens of a pass"""

    tables: str
    layer_s: dict[str, float]
    rows: list[Timing]


@dataclass(frozen=True)
class Row:
    """A row of table.csv: costs in baseline decode steps, and the least acceptance that pays; None if none does."""

    model: str
    batch: int
    verify_cost: Estimate
    round_cost: Estimate
    least_acceptance_low: float | None
    least_acceptance_high: float | None

    @property
    def span(self) -> str:
        """The range of the least acceptance that pays."""
        ends = self.least_acceptance_low, self.least_acceptance_high
        low, high = ("never" if value is None else f"{value:.2f}" for value in ends)
        return low if low == high else f"{low} to {high}"


def report(config: Config, timings: Timings) -> Report:
    """Return the report."""
    drafted = config["drafted"]
    rows = [row_of(timing, drafted) for timing in timings.rows]
    models = list(dict.fromkeys(row.model for row in rows))
    seconds = {int(tokens): s for tokens, s in timings.layer_s.items()}
    ratios = {n: seconds[n * (drafted + 1)] / s for n, s in seconds.items() if n * (drafted + 1) in seconds}
    worst = max(ratios, key=lambda n: ratios[n])
    lines: dict[str, Line] = {
        model: (
            [row.batch for row in rows if row.model == model],
            [row.verify_cost.as_dict() for row in rows if row.model == model],
        )
        for model in models
    }
    return Report(
        question="When does speculation pay on mixtures of experts?",
        answer=f"On a mixture of experts speculation pays least at small batches, where every verified token reads "
        f"more experts: verifying {drafted} drafted tokens takes a layer of experts {ratios[worst]:.2f} times a plain "
        f"step at batch {worst}, and {ratios[max(ratios)]:.2f} times at batch {max(ratios)}. The table shows the least "
        f"acceptance probability from which drafting {drafted} tokens with {config['drafter']} pays.",
        figure=line_panels({f"{config['hardware'].upper()}, context {config['context']}": lines},
                           ("batch", "verification, in baseline decode steps"), "verification", level=1.0, log_x=True),
        figure_name="verification",
        caption=f"Cost of verifying {drafted} drafted tokens, in baseline decode steps",
        columns=[
            Column("model", "model"),
            *(Column(f"batch {batch}", f"batch_{batch}") for batch in SHOWN_BATCHES),
        ],
        shown=[
            {"model": model, **{f"batch_{row.batch}": row.span for row in rows if row.model == model}}
            for model in models
        ],
        table=[asdict(row) for row in rows],
        trust=[
            f"Source: NVIDIA's measured operators (aiconfigurator-core 0.12.0, {timings.tables}) in bfloat16, one "
            "device. Nothing was run here, so there are no prompts, no load and no noise floor.",
            "Attention of several queries over a cache was not measured: a range is from the time of a single query to "
            "that of so many sequences.",
            "All drafted tokens are taken to be accepted with the same probability. Routing is balanced (as many "
            "experts as possible) or skewed by a power law.",
        ],
    )  # fmt: skip


def row_of(timing: Timing, drafted: int) -> Row:
    """Return the row of table.csv."""
    verify, round_ = (
        Estimate((low + high) / 2, low, high)
        for extra in (0.0, timing.draft_s)
        for low, high in [[(timing.verify_s[way] + extra) / timing.token_s for way in ("once", "separate")]]
    )
    routing = "dense" if find_architecture(timing.model).experts is None else timing.routing
    ends = (least_acceptance(cost, drafted) for cost in (round_.low, round_.high))
    return Row(f"{timing.model}, {routing}", timing.batch, verify, round_, *ends)


def least_acceptance(cost: float, drafted: int) -> float | None:
    """Return the least acceptance probability with which a round that costs so many baseline steps pays.

    The root a of 1 + a + ... + a^drafted = cost, the tokens of a round; 0 where it pays anyway, None where it never
    does.
    """
    from scipy.optimize import brentq

    def gain(a: float) -> float:
        return sum(a**n for n in range(drafted + 1)) - cost

    if gain(0.0) >= 0:
        return 0.0
    return None if gain(1.0) < 0 else float(brentq(gain, 0.0, 1.0))
