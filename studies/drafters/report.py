"""The report on drafters inside the target: do they pay, and under which policy?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from specsim.policy.registry import TREE_POLICIES
from specsim.replaying.intervals import beyond_floor
from specsim.report.drawing import ADAPTIVE, DOT, MEASURED, MUTED, PREDICTED, styled, svg
from specsim.report.table import Column
from studies.common import Config, Document
from studies.comparisons import (
    EESD,
    WITHDRAWN,
    above_one,
    board_rows,
    first_best,
    has_uneven_blocks,
    measured_columns,
    measured_verdict,
    rows_over_runs,
    table_rows,
)
from studies.figures import speedup_dots
from studies.report import Report, trust_lines

THOMPSON = ("beta_ts", "cali_ts")

Row = Mapping[str, Any]
Runs = Mapping[str, Mapping[str, Document]]  # documents of validations, by decoding mode, then by drafter


def report(config: Config, runs: Runs, cheap: Runs, typical: Document) -> Report:
    """Return the report. cheap : leaderboards at a cheap draft step; typical : typical acceptance of MEDUSA-1"""
    valid = {run: without_withdrawn(config, documents) for run, documents in runs.items()}
    first, documents = next(iter(valid.items()))
    withdrawn = len(valid[first]) < len(runs[first])
    shown = rows_over_runs({run: contenders(ran) for run, ran in valid.items()})
    return Report(
        question="Do drafters inside the target pay?",
        answer=f"{'Yes' if (names := paying(documents)) else 'No'}: in {first} decoding {len(names)} of "
        f"{len(documents)} drafters ({', '.join(names) or 'none'}) are significantly faster than the baseline under "
        f"their best policy, with 95 % confidence for all together. The measured speedup of Thompson sampling minus "
        f"that of the tuned fixed K is {'; '.join(thompson_gains(documents))}.",
        figure=speedup_dots([(row["name"], row) for row in shown], "speedups-greedy", "Drafters inside the target"),
        figure_name="speedups-greedy",
        caption=f"Predicted and measured speedup of each drafter under its best chain and tree, {first} decoding",
        columns=measured_columns([Column("drafter and policy", "name")], list(runs)),
        shown=shown,
        table=[
            *(
                row
                for run, ran in valid.items()
                for drafter, document in ran.items()
                for row in table_rows(run, document["rows"], drafter=drafter, costs="measured costs")
            ),
            *(
                row
                for run, boards in cheap.items()
                for drafter, board in boards.items()
                if drafter in valid[run]
                for row in board_rows(run, board, drafter=drafter, costs="cheap draft step, replayed only")
            ),
        ],
        trust=[
            *trust_lines(config, documents),
            *([WITHDRAWN] if withdrawn else []),
            "MEDUSA-2's output is its own tuned backbone's, the others' is the target's. table.csv has the same "
            f"traces replayed at a draft step of {100 * config['cheap']['step_ratio']:g} % of a target step, too.",
            typical_line(typical),
        ],
    )


def without_withdrawn(config: Config, documents: Mapping[str, Document]) -> dict[str, Document]:
    """Return the validations of the drafters whose costs hold."""
    return {
        drafter: document
        for drafter, document in documents.items()
        if drafter != EESD or not has_uneven_blocks(config, document)
    }


def contenders(documents: Mapping[str, Document]) -> dict[str, Row]:
    """Return each drafter's best fixed K, best adaptive chain, and best tree, by name."""
    rows = {}
    for drafter, document in documents.items():
        for policies in (("fixed_k",), ("beta_ts", "cali_ts", "max_confidence", "adaedl"), tuple(TREE_POLICIES)):
            row = first_best(row for row in document["rows"] if row["policy"] in policies)
            if row is not None:
                what = "chain" if len(policies) == 4 else policies[0]
                kind = "tree" if row["policy"] in TREE_POLICIES else what
                rows[f"{drafter}, {kind}"] = {**row, "name": f"{drafter}, {row['policy']}"}
    return rows


def paying(documents: Mapping[str, Document]) -> list[str]:
    """Return the drafters that are above 1 by more than the noise floor, with 95 % confidence for all together."""
    best = {drafter: first_best(document["rows"]) for drafter, document in documents.items()}
    rows = {drafter: row for drafter, row in best.items() if row is not None}
    baseline = "autoregressive_sequence_seconds"
    above = above_one([(documents[drafter][baseline], row["sequence_seconds"]) for drafter, row in rows.items()])
    return [
        drafter
        for (drafter, row), sure in zip(rows.items(), above, strict=True)
        if sure and beyond_floor(documents[drafter]["noise_floor_percent"], row["measured"]["estimate"], 1.0)
    ]


def thompson_gains(documents: Mapping[str, Document]) -> list[str]:
    """Return how much faster each drafter's best Thompson sampling really was than its tuned fixed K."""
    gains = []
    for drafter, document in documents.items():
        tuned = [row for row in document["rows"] if row["role"] == "tuned"]
        fixed = first_best(row for row in tuned if row["policy"] == "fixed_k")
        sampled = first_best(row for row in tuned if row["policy"] in THOMPSON)
        if fixed is not None and sampled is not None:
            gains.append(f"{drafter} {measured_verdict(document, sampled, fixed)}")
    return gains


def typical_line(typical: Document) -> str:
    """Return what typical acceptance gains in speed and loses in likelihood."""
    arms = {row["arm"]: row for row in typical["arms"]}  # of typical acceptance the last, with the largest epsilon
    loose, exact = arms["typical"], arms["sampling"]
    return (
        f"Typical acceptance (MEDUSA, lossy) at epsilon {loose['epsilon']:g} and temperature "
        f"{typical['temperature']:g}: {loose['acceleration_rate']['estimate']:.2f} tokens a verification step instead "
        f"of {exact['acceleration_rate']['estimate']:.2f}, at a log-likelihood of "
        f"{loose['log_likelihood_nats']['estimate']:.2f} instead of {exact['log_likelihood_nats']['estimate']:.2f} "
        "nats per token."
    )


@styled()
def typical_figure(typical: Document) -> str:
    """Draw acceleration rate against the target's log-likelihood of the output, over epsilon (MEDUSA, figure 7)."""
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.subplots()

    def places(arm: str) -> tuple[list[float], list[float]]:
        rows = [row for row in typical["arms"] if row["arm"] == arm]
        x, y = ([row[key]["estimate"] for row in rows] for key in ("acceleration_rate", "log_likelihood_nats"))
        return x, y

    x, y = places("typical")
    axes.plot(x, y, "o-", color=PREDICTED, markersize=5, label="typical acceptance", **DOT)
    thresholds = [row["epsilon"] for row in typical["arms"] if row["arm"] == "typical"]
    for place in (0, -1):  # those between crowd together
        label = f"epsilon {thresholds[place]:g}"
        axes.annotate(
            label, (x[place], y[place]), (0, -12), textcoords="offset points", fontsize=8, color=MUTED, ha="center"
        )
    for arm, color, marker in (("sampling", MEASURED, "D"), ("greedy", ADAPTIVE, "s")):
        axes.plot(*places(arm), marker, color=color, markersize=7, linestyle="none", label=f"{arm}, lossless", **DOT)
    axes.set_xlabel("acceleration rate, tokens per verification step")
    axes.set_ylabel("log-likelihood under the target, nats per token")
    axes.legend(loc="best")
    return svg(figure, "typical", "Likelihood and speed of typical acceptance")
