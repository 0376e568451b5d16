"""The report on AdaEDL under rejection sampling: whether its score is a bound, and what its policy gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specsim.acceptance.formulas import adaedl_score
from specsim.replaying.intervals import Comparison, paired_difference, ratio_interval
from specsim.report.drawing import DOT, INK, MUTED, styled, svg
from specsim.report.table import Column
from specsim.trace.outcomes import DRAWS
from studies.adaedl.bound import Signals, bounding_gamma, correlations, fitted_gamma, gap, paper_ratio, violated
from studies.common import Config, Document, about_prompts
from studies.comparisons import difference_text
from studies.figures import COLORS
from studies.report import Report, machine_line

MEASURED, PAPER = "measured costs", "paper's s_d / s_t"
LAB_DRAFT, SMALL = "lab's draft model", "small draft model"
LONGEST, FIXED, CONFIDENT = "Base-SPD, longest draft", "fixed K, tuned", "Max-Confidence"
ADAEDL, TUNED = "AdaEDL, paper's gamma", "AdaEDL, gamma tuned"
IN_WORDS = {LONGEST: "Base-SPD with the longest draft", FIXED: "the tuned fixed K", CONFIDENT: "Max-Confidence"}
ASKED = ((ADAEDL, LONGEST), (ADAEDL, FIXED), (ADAEDL, CONFIDENT), (TUNED, ADAEDL))
BINS = 10


@dataclass(frozen=True)
class Cell:
    """A draft model at a temperature.

    drafted : mean recorded acceptance probability of drafted tokens, on the held-out prompts
    tuning, held : signals of the tuning and of the held-out prompts
    boards : replayed policies by cost
    """

    draft: str
    temperature: float
    drafted: float
    tuning: Signals
    held: Signals
    boards: Mapping[str, Document]

    def difference(self, cost: str, a: str, b: str) -> Comparison:
        """Return the speedup of policy a minus that of policy b."""
        board = self.boards[cost]
        seconds = {row["label"]: row["seconds"] for row in board["rows"]}
        return paired_difference(board["baseline_s"], seconds[a], seconds[b])

    def row(self, config: Config) -> dict[str, Any]:
        """Return the cell's row of table.csv."""
        score, confidence, difference = correlations(self.held)
        row = {
            "draft_model": self.draft,
            "temperature": self.temperature,
            "entropy_nats": float(self.held.entropy_nats.mean()),
            "acceptance_probability": float(self.held.acceptance.mean()),
            "recorded_acceptance": self.drafted,
            "score_correlation": score.as_dict(),
            "confidence_correlation": confidence.as_dict(),
            "correlation_difference": difference.as_dict(),
        }
        share = config["bounded_share"]
        gammas = {"paper": config["gamma"], "fitted": fitted_gamma(self.tuning)}
        for name, gamma in {**gammas, "bounding": bounding_gamma(self.tuning, share)}.items():
            row |= {
                f"gamma_{name}": gamma,
                f"violated_percent_{name}": violated(self.held, gamma).as_dict(),
                f"gap_{name}": gap(self.held, gamma).as_dict(),
            }
        for cost, board in self.boards.items():
            for policy in board["rows"]:
                speedup = ratio_interval(board["baseline_s"], policy["seconds"])
                row[f"speedup, {policy['label']}, {cost}"] = speedup.as_dict()
        return row


def report(config: Config, document: Document, cells: Sequence[Cell]) -> Report:
    """Return the report. document : where it ran and each draft model's parameters"""
    rows = [cell.row(config) for cell in cells]
    sizes = (len(np.unique(part.sequence)) for part in (cells[0].tuning, cells[0].held))
    ran = {**document, "sequences": dict(zip(("tuning", "holdout"), sizes, strict=True))}
    ratio, _ = paper_ratio(**config["table1"])
    parameters = ", ".join(f"{draft} {count:,}" for draft, count in document["parameters"].items())
    broken = [row["violated_percent_paper"]["estimate"] for row in rows]
    return Report(
        question="Is AdaEDL's score a lower bound under rejection sampling?",
        answer=f"{'No' if max(broken) > 0 else 'Yes'}: with the paper's gamma = {config['gamma']:g} it "
        f"exceeds the acceptance probability at {min(broken):.0f} to {max(broken):.0f} % of the positions, depending "
        "on temperature and draft model. "
        f"{counts(cells, MEASURED)}",
        figure=against_entropy(cells, config),
        figure_name="entropy",
        caption="Acceptance probability (tenths of the positions, 10th to 90th percentile) and AdaEDL's score by "
        "entropy of the draft",
        columns=[
            Column("draft model", "draft_model"),
            Column("T", lambda row: f"{row['temperature']:g}"),
            Column("score above 1 - TVD, %", lambda row: interval(row["violated_percent_paper"], 1)),
            Column("correlation of score", lambda row: interval(row["score_correlation"], 2)),
            Column("of confidence", lambda row: interval(row["confidence_correlation"], 2)),
            Column("AdaEDL less fixed K", f"{ADAEDL} less {FIXED}"),
            Column("less Max-Confidence", f"{ADAEDL} less {CONFIDENT}"),
        ],
        shown=[
            {
                **row,
                **{f"{a} less {b}": difference_text(cell.difference(MEASURED, a, b).difference) for a, b in ASKED[1:3]},
            }
            for cell, row in zip(cells, rows, strict=True)
        ],
        table=rows,
        trust=[
            f"Prompts: {about_prompts(config, ran)}. Intervals (95 %) are over held-out prompts, paired for "
            "differences.",
            machine_line(config, document),
            "Nothing was timed but cost profiles, so load and a noise floor were not recorded. "
            f"Policies are replayed, over {DRAWS} outcomes drawn from recorded "
            "acceptance probabilities. Replays go on with the recorded text after an accepted draft, so those of "
            "rejection sampling are approximate.",
            f"Draft models, parameters: {parameters}. The small model was trained for this study by the lab's recipe. "
            "lambda_0, which the paper does not give, is tuned.",
            f"The paper's s_d / s_t, {ratio:.3f}, is fitted to its table 1. {counts(cells, PAPER)}",
        ],
    )


def counts(cells: Sequence[Cell], cost: str) -> str:
    """Return the sentence that says in how many cells AdaEDL is significantly faster or slower than others."""
    texts = []
    for a, b in ASKED:
        differences = [cell.difference(cost, a, b).difference for cell in cells]
        faster, slower = sum(d.low > 0 for d in differences), sum(d.high < 0 for d in differences)
        than = "with tuned gamma than with the paper's" if a == TUNED else f"than {IN_WORDS[b]}"
        texts.append(f"{than} in {faster} (slower in {slower})")
    return (
        f"Replayed at {cost}, of {len(cells)} combinations of draft model and temperature, AdaEDL is significantly "
        f"faster {', '.join(texts)}."
    )


def interval(value: Mapping[str, float], digits: int) -> str:
    """Return an estimate with its interval."""
    return f"{value['estimate']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


@styled()
def against_entropy(cells: Sequence[Cell], config: Config) -> str:
    """Draw 1 - TVD by entropy of the draft, in tenths of the positions, and the score of the paper's gamma."""
    drafts = list(dict.fromkeys(cell.draft for cell in cells))
    figure = Figure(figsize=(4.4 * len(drafts), 3.6), layout="constrained")
    panels = figure.subplots(1, len(drafts), squeeze=False, sharex=True, sharey=True)[0]
    for draft, axes in zip(drafts, panels, strict=True):
        for cell, color in zip((cell for cell in cells if cell.draft == draft), COLORS, strict=False):
            order = np.argsort(cell.held.entropy_nats, kind="stable")
            tenths = np.array_split(order, BINS)
            x = np.array([cell.held.entropy_nats[rows].mean() for rows in tenths])
            y = np.array([cell.held.acceptance[rows].mean() for rows in tenths])
            ends = np.array([np.quantile(cell.held.acceptance[rows], [0.1, 0.9]) for rows in tenths]).T
            axes.errorbar(x, y, yerr=np.maximum([y - ends[0], ends[1] - y], 0), fmt="none", ecolor=color, alpha=0.6)
            axes.plot(x, y, "o-", color=color, markersize=4.5, label=f"T = {cell.temperature:g}", **DOT)
        axes.set_title(draft)
        axes.set_xlabel("entropy of the draft, nats")
    grid = np.linspace(0, max(np.quantile(cell.held.entropy_nats, 0.95) for cell in cells), 200)
    for axes in panels:
        axes.plot(grid, adaedl_score(grid, config["gamma"]), color=INK, label=f"score, gamma = {config['gamma']:g}")
        axes.axhline(0, color=MUTED, linewidth=0.8)
    panels[0].set_ylabel("acceptance probability 1 - TVD")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return svg(figure, "entropy", "Acceptance probability and AdaEDL's score against the entropy of the draft")
