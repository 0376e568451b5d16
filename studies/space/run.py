"""SPACE on the lab: `python -m studies.space.run [OUT]`.

Validates every k (recorded, profiled, predicted, really decoded on this machine) beside policies that verify
fewer of the candidates, and replays the same trace where a pass costs the same whatever its size. A second start
goes on with what is there. What SAR-SFT does to the target is in studies/training.

Writes OUT/figures/ and OUT/report.md, in which every number comes from the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.pair import LAB_WEIGHTS
from specsim.cli.console import progress_bar
from specsim.cost.model import ConstantCost
from specsim.files import write_text
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.registry import POLICIES
from specsim.replaying.priced import PricedTrace
from specsim.report.drawing import DOT, MEASURED, PREDICTED, estimates, spans, styled, svg
from specsim.report.markdown import accuracy, ladder_table, markdown_table, trust_table
from specsim.report.page import comparable_text
from specsim.speedup.intervals import interval_text, ratio_interval
from specsim.trace.files import read_trace
from studies.common import (
    VALIDATED,
    Config,
    Document,
    about_machine,
    about_prompts,
    claim,
    parts,
    run_study,
    validation,
)
from studies.words import about_target, first_best, highest, told_apart

RECORDED = ("config.json", *(f"*/{name}" for name in VALIDATED))
DRAFTER = "space"
PAPER_K = 5  # figure 6
ALIKE_PERCENT = 0.01  # by which replays differ as no price can be quite nothing


class EveryK(SpaceK):
    """Every k that the target was trained for."""

    name = "space_k"
    variants = tuple(Variant(f"k = {k}", {"k": k}, tuned=False) for k in range(1, 6))


def free_passes(folder: Path, config: Config) -> Document:
    """Every k on the held-out prompts, were a pass of any size one step and a candidate nothing.

    In the form of a validation, as if it had been measured.
    """
    _, holdout = parts(read_trace(folder / "trace"), config)
    priced = PricedTrace(holdout, ConstantCost(1e-9, 1.0))
    rows = []
    for k in range(1, config["masks"] + 1):
        seconds = priced.replay(SpaceK(k)).speculative_s
        speedup = ratio_interval(priced.baseline_s, seconds).as_dict()
        rows.append({"policy": "space_k", "params": {"k": k}, "measured": speedup, "sequence_seconds": seconds})
    return {"rows": rows, "autoregressive_sequence_seconds": priced.baseline_s, "noise_floor_percent": ALIKE_PERCENT}


def ks(document: Document) -> dict[int, Mapping[str, Any]]:
    """The rows of every k."""
    rows = {row["params"]["k"]: row for row in document["rows"] if row["policy"] == "space_k"}
    return dict(sorted(rows.items()))


def k_table(document: Document, rounds: pd.DataFrame, free: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Tokens a pass and speedup against k (figure 6), and policies that verify fewer candidates.

    rounds : all real rounds. free : speedups by k were all passes of one price
    """
    columns = [
        "policy",
        "tokens a pass",
        "v_d",
        "tokens fed",
        "from own rounds",
        "measured",
        "error %",
        "passes at one price",
    ]
    others = [row for row in document["rows"] if row["policy"] != "space_k"]
    masks = max(free)
    rows = []
    for row in (*ks(document).values(), *others):
        k = row["params"]["k"] if row["policy"] == "space_k" else None
        verified = rounds.loc[rounds["policy"] == row["label"], "drafted"]
        fed = f"{(masks + 1) * (verified.mean() + 1):.1f}" if k is None else str((k + 1) ** 2)
        speeds = (interval_text(row["predicted"]), interval_text(row["measured"]), f"{row['error_percent']:+.1f}")
        rows.append(
            [row["label"], f"{row['tau']:.2f}", f"{row['v_d']:.3f}", fed, *speeds, interval_text(free[k]) if k else ""]
        )
    return markdown_table(columns, rows)


def fastest(document: Document) -> str:
    """The fastest k with all that it is not told apart from, and whether that is the paper's."""
    rows = {str(k): row for k, row in ks(document).items()}
    speedups = {k: row["measured"]["estimate"] for k, row in rows.items()}
    names = {k: k for k in (*rows, str(PAPER_K))}
    return highest(speedups, str(PAPER_K), names, lambda a, b: told_apart(document, rows[a], rows[b]))


def findings(document: Document, free: Document) -> str:
    """Which k was fastest, whether that is the paper's, and what the best on the tuning prompts was worth."""
    row = first_best(ks(document).values())
    assert row is not None
    return (
        f"Fastest k when really run: {fastest(document)}. Were all passes of one price: {fastest(free)}. The k that is "
        f"best on the tuning prompts, {row['params']['k']}, was measured at {interval_text(row['measured'])}."
    )


@styled()
def against_k(documents: Mapping[str, Document]) -> str:
    """Tokens a pass, and predicted and measured speedup, against k (figure 6)."""
    figure = Figure(figsize=(4.1 * len(documents), 3.3), layout="constrained")
    panels = figure.subplots(1, len(documents), squeeze=False, sharey=True)[0]
    for axes, (name, document) in zip(panels, documents.items(), strict=True):
        rows = ks(document)
        at = list(rows)
        axes.bar(at, [row["tau"] for row in rows.values()], width=0.5, color="#c9dcec", label="tokens a pass")
        for key, color, marker, shift in (("predicted", PREDICTED, "o", -0.06), ("measured", MEASURED, "D", 0.06)):
            value, low, high = estimates([row[key] for row in rows.values()])
            x = [k + shift for k in at]
            axes.errorbar(x, value, yerr=spans(value, low, high), fmt="none", ecolor=color, elinewidth=1.2)
            axes.plot(x, value, f"{marker}-", color=color, markersize=5, label=f"{key} speedup", **DOT)
        axes.set_xticks(at)
        axes.set_xlabel("k, candidates a pass")
        axes.set_title(name)
    panels[0].set_ylabel("tokens a pass; speedup")
    marks, labels = panels[0].get_legend_handles_labels()
    figure.legend(marks, labels, loc="outside upper right", ncols=3)
    return svg(figure, "k", "Tokens a pass and speedup against k")


def report_text(config: Config, runs: Mapping[str, Document], out: Path) -> str:
    """The whole report as Markdown."""
    one = next(iter(runs.values()))
    ours = read_drafter(LAB_WEIGHTS / DRAFTER).facts
    lines = [
        "# SPACE, on the lab",
        "",
        f"{about_prompts(config, one)}; {about_machine(one)}. {about_target(config)} "
        "Speedups over autoregressive decoding with the same tuned target, with 95 % intervals over sequences. "
        "Tokens a pass are the paper's average tokens. A pass of k feeds 1 + k (k + 2) tokens; a policy that verifies "
        "m of the candidates still has a group of all masks below each, (m + 1) (masks + 1) tokens. The last column "
        "has the speedup if a pass took as long as one of a single token.",
        "",
        f"The target learned {ours['masks']} masks from {ours['tokens'] / 1e6:.2f} M tokens "
        f"({ours['parameters']:,} parameters, {ours['seconds']:.0f} s), and every k uses the first k of them, where "
        "figure 6 of the paper tunes a target for each.",
        "",
    ]
    for name, document in runs.items():
        free = free_passes(out / name, config)
        rounds = pd.read_parquet(out / name / "rounds.parquet")
        lines += [
            f"## {name}",
            "",
            findings(document, free),
            "",
            *k_table(document, rounds, {k: row["measured"] for k, row in ks(free).items()}),
            *trust_table({name: document}, config["repeats"]),
            accuracy(row["error_percent"] for row in document["rows"]),
            "",
            *ladder_table((row["label"], row) for row in document["rows"]),
        ]
    lines += [*comparable_text(runs), "", "![Against k](figures/k.svg)", ""]
    return "\n".join(lines)


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    kinds: tuple[type[Policy], ...] = (EveryK, *(POLICIES[name] for name in config["others"]))
    one_pass = {**config, "depth": config["masks"]}
    with progress_bar() as report:
        runs = {
            run["name"]: validation(out / run["name"], DRAFTER, kinds, run, one_pass, report) for run in config["runs"]
        }
    write_text(out / "figures" / "k.svg", against_k(runs))
    write_text(out / "report.md", report_text(config, runs, out))


if __name__ == "__main__":
    run_study(main, __file__)
