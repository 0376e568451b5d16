"""The picture of the benefit: `python -m docs.benefit` writes docs/figures/benefit.svg.

Speedup of Llama-3.1-8B with EAGLE-3 on an H100 by draft length and by load, as predicted from published acceptance
lengths and data sheets, beside what was published.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from docs.pages import HOME
from specsim.cost.calibrate import data_sheet_document
from specsim.cost.files import read_cost, with_batch
from specsim.report.drawing import DASHED, DOT, MEASURED, PREDICTED, styled, svg
from studies.published.cases import AT_EARLY, CONTEXT, LIKE, read_csv

FIGURE = HOME / "figures" / "benefit.svg"
TABLE, LOADED_K = "EAGLE-3's paper, table 3", 3
PAIR = ("h100", "llama-3.1-8b", "eagle3")


def by_length() -> tuple[list[int], list[float], list[float]]:
    """Draft lengths, and their predicted and published speedups, of one request at a time in vLLM."""
    cost = read_cost(data_sheet_document(*PAIR, engine=f"vllm{AT_EARLY}"))
    lengths, predicted, published = [], [], []
    for run in read_csv("speculation.csv"):
        if run["source"] == LIKE and run["drafter"] == "eagle3":
            k = int(run["steps"])
            step_s = float(cost.autoregressive_step(CONTEXT))
            lengths.append(k)
            predicted.append(float(run["acceptance"]) * step_s / cost.round_seconds(k, CONTEXT))
            published.append(float(run["speedup"]))
    return lengths, predicted, published


def by_load() -> tuple[list[int], list[float], list[float]]:
    """Requests at once, and predicted and published speedups of K = 3 in SGLang, whose table has no acceptance."""
    (tau,) = [
        float(run["acceptance"])
        for run in read_csv("speculation.csv")
        if run["source"] == LIKE and run["drafter"] == "eagle3" and int(run["steps"]) == LOADED_K
    ]
    alone = read_cost(data_sheet_document(*PAIR, engine=f"sglang{AT_EARLY}"))
    batches, predicted, published = [], [], []
    for run in read_csv("by_batch.csv"):
        if run["source"] == TABLE and run["drafter"] == "eagle3":
            cost = with_batch(alone, int(run["batch"]))
            step_s = float(cost.autoregressive_step(CONTEXT))
            batches.append(int(run["batch"]))
            predicted.append(tau * step_s / cost.round_seconds(LOADED_K, CONTEXT))
            published.append(float(run["speedup"]))
    return batches, predicted, published


@styled()
def benefit() -> str:
    """The picture as an <svg>."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = (
        (by_length(), "Which K? One request at a time, vLLM of 2025", "draft tokens K"),
        (by_load(), f"Until when? K = {LOADED_K}, SGLang of 2025", "requests at once"),
    )
    for axes, ((x, predicted, published), title, label) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        axes.axhline(1, **DASHED)
        axes.plot(x, predicted, "-", color=PREDICTED, linewidth=2, label="predicted")
        axes.plot(x, published, "D", color=MEASURED, markersize=6, label="published measurement", **DOT)
        axes.set_title(title)
        axes.set_xlabel(label)
    figure.axes[0].set_ylabel("speedup (without speculation = 1)")
    figure.axes[0].set_ylim(0.9)
    figure.axes[1].legend(loc="upper right")
    text = svg(figure, "benefit", "Speedup of Llama-3.1-8B with EAGLE-3 on an H100 by draft length and by load")
    return text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) if "xmlns=" not in text else text


if __name__ == "__main__":
    FIGURE.write_text(benefit())
