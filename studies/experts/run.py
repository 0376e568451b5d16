"""Where speculation pays on mixtures of experts: `python -m studies experts`.

Renders recorded figures alone: what passes of mixtures and of a dense model take at every batch, as NVIDIA's package
aiconfigurator-core interpolates it between measured operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specsim.cost.roofline.architecture import find_architecture
from specsim.io.json import read_json
from specsim.report.table import Column
from studies.common import Config, Document, claim
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
    report(config, read_json(path, str(path), dict[str, Any], missing=again, invalid=again)).write(out)


def report(config: Config, document: Document) -> Report:
    """Return the report. document : seconds by model, routing and batch"""
    drafted = config["drafted"]
    rows = [row_of(row, drafted) for row in document["rows"]]
    models = list(dict.fromkeys(row["model"] for row in rows))
    seconds = {int(tokens): s for tokens, s in document["layer_s"].items()}
    ratios = {n: seconds[n * (drafted + 1)] / s for n, s in seconds.items() if n * (drafted + 1) in seconds}
    worst = max(ratios, key=lambda n: ratios[n])
    lines: dict[str, Line] = {
        model: (
            [row["batch"] for row in rows if row["model"] == model],
            [row["verify_cost"] for row in rows if row["model"] == model],
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
            {
                "model": model,
                **{f"batch_{row['batch']}": span(row) for row in rows if row["model"] == model},
            }
            for model in models
        ],
        table=rows,
        trust=[
            f"Source: NVIDIA's measured operators (aiconfigurator-core 0.12.0, {document['tables']}) in bfloat16, one "
            "device. Nothing was run here, so there are no prompts, no load and no noise floor.",
            "Attention of several queries over a cache was not measured: a range is from the time of a single query to "
            "that of so many sequences.",
            "All drafted tokens are taken to be accepted with the same probability. Routing is balanced (as many "
            "experts as possible) or skewed by a power law.",
        ],
    )  # fmt: skip


def row_of(row: Mapping[str, Any], drafted: int) -> dict[str, Any]:
    """Return a row of table.csv: costs in baseline decode steps, and the least acceptance that pays."""
    verify, round_ = ([(row["verify_s"][way] + extra) / row["token_s"] for way in ("once", "separate")]
                      for extra in (0.0, row["draft_s"]))  # fmt: skip
    dense = find_architecture(row["model"]).experts is None
    low, high = (least_acceptance(cost, drafted) for cost in round_)
    return {
        "model": f"{row['model']}, dense" if dense else f"{row['model']}, {row['routing']}",
        "batch": row["batch"],
        "verify_cost": {"estimate": sum(verify) / 2, "low": verify[0], "high": verify[1]},
        "round_cost": {"estimate": sum(round_) / 2, "low": round_[0], "high": round_[1]},
        "least_acceptance_low": low,
        "least_acceptance_high": high,
    }


def span(row: Mapping[str, Any]) -> str:
    """Return the range of the least acceptance that pays."""
    ends = (row["least_acceptance_low"], row["least_acceptance_high"])
    low, high = ("never" if value is None else f"{value:.2f}" for value in ends)
    return low if low == high else f"{low} to {high}"


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
