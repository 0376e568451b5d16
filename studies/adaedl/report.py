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
from studies.adaedl.bound import Signals, bounding_gamma, correlations, paper_ratio, violated
from studies.common import Config, Document, about_prompts, about_smollm2_costs
from studies.comparisons import difference_text
from studies.figures import COLORS
from studies.report import Report, machine_line

MEASURED, PAPER = "measured costs", "paper's s_d / s_t"
LONGEST, FIXED, CONFIDENT = "Base-SPD, longest draft", "fixed K, tuned", "Max-Confidence"
ADAEDL, TUNED = "AdaEDL, paper's gamma", "AdaEDL, gamma tuned"
IN_WORDS = {LONGEST: "Base-SPD with the longest draft", FIXED: "the tuned fixed K", CONFIDENT: "Max-Confidence"}
ASKED = ((ADAEDL, LONGEST), (ADAEDL, FIXED), (ADAEDL, CONFIDENT), (TUNED, ADAEDL))
LESS = {"AdaEDL less Base-SPD": LONGEST, "less fixed K": FIXED, "less Max-Confidence": CONFIDENT}  # columns
BINS = 10


@dataclass(frozen=True)
class Cell:
    """A temperature.

    tuning, held : signals of the tuning and of the held-out prompts
    boards : replayed policies by cost
    """

    temperature: float
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
        score, confidence = correlations(self.held)
        bounding = bounding_gamma(self.tuning, config["bounded_share"])
        return {
            "temperature": self.temperature,
            "entropy_nats": float(self.held.entropy_nats.mean()),
            "acceptance_probability": float(self.held.acceptance.mean()),
            "score_correlation": score.as_dict(),
            "confidence_correlation": confidence.as_dict(),
            "violated_percent_paper": violated(self.held, config["gamma"]).as_dict(),
            "gamma_bounding": bounding,
            "violated_percent_bounding": violated(self.held, bounding).as_dict(),
            **{
                f"speedup, {policy['label']}, {cost}": ratio_interval(board["baseline_s"], policy["seconds"]).as_dict()
                for cost, board in self.boards.items()
                for policy in board["rows"]
            },
        }


def report(config: Config, document: Document, cells: Sequence[Cell]) -> Report:
    """Return the report. document : where it ran, and the load while costs were measured"""
    rows = [cell.row(config) for cell in cells]
    first = next(iter(document["rows"].values()))
    sizes = {part: len(first[part]) for part in ("tuning", "holdout")}
    ratio, _ = paper_ratio(**config["table1"])
    broken, toy = {row["temperature"]: row["violated_percent_paper"]["estimate"] for row in rows}, config["toy"]
    faster, slower = won_and_lost(cells, MEASURED, ADAEDL, FIXED)
    gammas = ", ".join(f"{row['gamma_bounding']:.2f} (T = {row['temperature']:g})" for row in rows)
    held = [row["violated_percent_bounding"]["estimate"] for row in rows]
    return Report(
        question="Is AdaEDL's score a lower bound under rejection sampling?",
        answer=f"{'No' if any(broken.values()) else 'Yes'}: on SmolLM2 with EAGLE the score with the paper's gamma = "
        f"{config['gamma']:g} exceeds the acceptance probability at "
        + ", ".join(f"{share:.1f} % (T = {temperature:g})" for temperature, share in broken.items())
        + f" of the positions. {counts(cells, MEASURED)}",
        figure=against_entropy(cells, config),
        figure_name="entropy",
        caption="Acceptance probability (tenths of the positions, 10th to 90th percentile) and AdaEDL's score by "
        "entropy of the draft",
        columns=[
            Column("T", lambda row: f"{row['temperature']:g}"),
            Column("score above 1 - TVD, %", lambda row: interval(row["violated_percent_paper"], 1)),
            Column("correlation of score", lambda row: interval(row["score_correlation"], 2)),
            Column("of confidence", lambda row: interval(row["confidence_correlation"], 2)),
            *(Column(title, title) for title in LESS),
        ],
        shown=[
            {
                **row,
                **{
                    title: difference_text(cell.difference(MEASURED, ADAEDL, b).difference) for title, b in LESS.items()
                },
            }
            for cell, row in zip(cells, rows, strict=True)
        ],
        table=rows,
        trust=[
            f"Prompts: {about_prompts(config, {'sequences': sizes})}. Intervals (95 %) are over held-out prompts, "
            f"paired for differences. EAGLE drafts from {document['draft_vocabulary']:,} tokens, so the distance holds "
            "what the target gives to others.",
            machine_line(config, document),
            f"{about_smollm2_costs(document['load'])} Policies are replayed over 16 outcomes drawn from recorded "
            "acceptance probabilities; replays go on with the recorded text after an accepted draft, so those of "
            "rejection sampling are approximate.",
            f"With gamma = {gammas} the score is below the acceptance probability at "
            f"{100 * config['bounded_share']:g} % of the tuning positions; on the held-out prompts it is above it at "
            f"{min(held):.1f} to {max(held):.1f} %. lambda_0, which the paper does not give, is tuned.",
            f"The paper's s_d / s_t, {ratio:.3f}, is fitted to its table 1. {counts(cells, PAPER)}",
            "The lab's toy models had shown the score above the acceptance probability at "
            f"{toy['violated_percent'][0]} to {toy['violated_percent'][1]} % of the positions, and AdaEDL slower than "
            f"the tuned fixed K in {toy['slower_than_fixed_k']} of {toy['cells']} cases. SmolLM2 "
            f"{'confirms' if any(broken.values()) else 'does not confirm'} that the score is no bound; AdaEDL is "
            f"slower than the tuned fixed K at {slower} of {len(cells)} temperatures, and faster at {faster}.",
        ],
    )


def won_and_lost(cells: Sequence[Cell], cost: str, a: str, b: str) -> tuple[int, int]:
    """Return in how many cells policy a is significantly faster than policy b, and in how many slower."""
    differences = [cell.difference(cost, a, b).difference for cell in cells]
    return sum(d.low > 0 for d in differences), sum(d.high < 0 for d in differences)


def counts(cells: Sequence[Cell], cost: str) -> str:
    """Return the sentence that says at how many temperatures AdaEDL is significantly faster or slower than others."""
    texts = []
    for a, b in ASKED:
        faster, slower = won_and_lost(cells, cost, a, b)
        than = "with tuned gamma than with the paper's" if a == TUNED else f"than {IN_WORDS[b]}"
        texts.append(f"{than} at {faster} (slower at {slower})")
    return f"Replayed at {cost}, of {len(cells)} temperatures, AdaEDL is significantly faster {', '.join(texts)}."


def interval(value: Mapping[str, float], digits: int) -> str:
    """Return an estimate with its interval."""
    return f"{value['estimate']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


@styled()
def against_entropy(cells: Sequence[Cell], config: Config) -> str:
    """Draw 1 - TVD by entropy of the draft, in tenths of the positions, and the score of the paper's gamma."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for cell, color in zip(cells, COLORS, strict=False):
        tenths = np.array_split(np.argsort(cell.held.entropy_nats, kind="stable"), BINS)
        x = np.array([cell.held.entropy_nats[rows].mean() for rows in tenths])
        y = np.array([cell.held.acceptance[rows].mean() for rows in tenths])
        ends = np.array([np.quantile(cell.held.acceptance[rows], [0.1, 0.9]) for rows in tenths]).T
        axes.errorbar(x, y, yerr=np.maximum([y - ends[0], ends[1] - y], 0), fmt="none", ecolor=color, alpha=0.6)
        axes.plot(x, y, "o-", color=color, markersize=4.5, label=f"T = {cell.temperature:g}", **DOT)
    grid = np.linspace(0, max(np.quantile(cell.held.entropy_nats, 0.95) for cell in cells), 200)
    axes.plot(grid, adaedl_score(grid, config["gamma"]), color=INK, label=f"score, gamma = {config['gamma']:g}")
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.set_xlabel("entropy of the draft, nats")
    axes.set_ylabel("acceptance probability 1 - TVD")
    figure.legend(loc="outside upper center", ncols=4)
    return svg(figure, "entropy", "Acceptance probability and AdaEDL's score against the entropy of the draft")
