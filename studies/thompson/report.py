"""The report on Thompson sampling of draft lengths: when it beats a fixed K."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.replaying.intervals import Estimate, ratio_interval
from specsim.report.table import SPEEDUP, TEXT, Column
from studies.common import Config, Document, about_prompts
from studies.figures import line_panels
from studies.report import Report, machine_line
from studies.thompson import gains
from studies.thompson.gains import DRAWN, DRAWN_EACH, FIXED, FIXED_EACH

MEASURED_COSTS, CHEAP = "measured costs", "cheap drafter"
ALL, EXTREME = "all", "least and most accepting"
LEARNED = (gains.WEAK, gains.STRONG, gains.TUNED, gains.CALI)
COMPARED = (FIXED_EACH, DRAWN, DRAWN_EACH, *LEARNED)
DRAFTERS = {"model": "draft model", "eagle": "EAGLE"}
LINES = (FIXED_EACH, DRAWN_EACH, gains.TUNED, gains.WEAK)  # of the figure

Row = Mapping[str, Any]


def report(config: Config, results: Document) -> Report:
    """Return the report. results : comparisons on recorded and on synthetic prompts, and where they ran"""
    recorded = [
        row_of(document, costs=cost, drafter=DRAFTERS[drafter], prompts=pool)
        for cost, runs in results["pools"].items()
        for drafters in runs.values()
        for drafter, pools in drafters.items()
        for pool, document in pools.items()
    ]
    synthetic = [
        row_of(document, costs=cost, drafter=DRAFTERS[drafter], prompts=f"synthetic, spread {spread}")
        for cost, drafters in results["synthetic"].items()
        for drafter, documents in drafters.items()
        for spread, document in documents.items()
    ]
    ran = {
        **results,
        "sequences": {"tuning": recorded[0]["tuning_prompts"], "holdout": recorded[0]["held_out_prompts"]},
    }
    whole = [row for row in recorded if row["prompts"] == ALL]
    spreads = ", ".join(f"{spread:.2f} ({DRAFTERS[drafter]})" for drafter, spread in results["spreads"].items())
    return Report(
        question="When does Thompson sampling beat a fixed draft length?",
        answer=f"On the lab's prompts tuned Beta-TS changes the speed by {span(whole, gains.TUNED)} against the best "
        f"fixed K. Random draft lengths alone change it by {span(whole, DRAWN)}; knowing each prompt's best K in "
        f"hindsight changes it by {span(whole, FIXED_EACH)}. On synthetic prompts tuned Beta-TS beats the best fixed K "
        f"{crossings(results)}.",
        figure=line_panels(spread_panels(results), ("spread of acceptance over prompts", "gain over fixed K, %"),
                           "spread", level=0.0),
        figure_name="spread",
        caption=f"Gain over the best fixed K by spread of acceptance over synthetic prompts; the lab's spread is "
        f"{spreads}",
        columns=[
            Column("costs", "costs"),
            Column("drafter", "drafter"),
            Column("prompts", "prompts"),
            Column("speedup of the best fixed K", "fixed_k_speedup", SPEEDUP),
            *(Column(f"{label}, %", lambda row, label=label: percent(row[label]), TEXT)
              for label in (FIXED_EACH, DRAWN, gains.TUNED)),
        ],
        shown=recorded,
        table=[*recorded, *synthetic],
        trust=[
            f"Prompts: {about_prompts(config, ran)}. Intervals (95 %) are over held-out prompts, paired. \"{EXTREME}\" "
            f"takes {100 * config['extreme_share']:g} % from each end, chosen by this drafter's own acceptance, which "
            "favours whatever adapts.",
            machine_line(config, results),
            "Nothing was timed but cost profiles, so load and a noise floor were not recorded. All policies are "
            "replayed on recorded traces; policies that draw are "
            f"averaged over {config['replay_seeds']} replays. \"{CHEAP}\" sets s_d / s_t to {config['cost_ratio']:g}.",
            "After every drafted token Beta-TS draws whether to go on, so its learned lengths are geometric "
            "(docs/errata.md, A9). Hindsight chooses on the very text that it is reported on: it bounds what can be "
            "learned.",
        ],
    )  # fmt: skip


def row_of(document: Document, **names: str) -> Row:
    """Return a comparison as a row of table.csv. names : of costs, drafter and prompts"""
    best = gains.rows_of(document)[FIXED]
    changes = {label: gains.gain(document, label) for label in COMPARED}
    return {
        **names,
        "tuning_prompts": document["prompts"]["tuning"],
        "held_out_prompts": document["prompts"]["holdout"],
        "acceptance": document["acceptance"]["mean"],
        "acceptance_spread": document["acceptance"]["spread"],
        "fixed_k": best["settings"],
        "fixed_k_speedup": ratio_interval(document["baseline_s"], best["seconds"]).as_dict(),
        **{label: change.as_dict() for label, change in changes.items() if change is not None},
    }


def percent(value: Mapping[str, float]) -> str:
    """Return a gain in percent with its interval."""
    return f"{value['estimate']:+.1f} [{value['low']:+.1f}, {value['high']:+.1f}]"


def span(rows: list[Row], label: str) -> str:
    """Return the least and the largest gain of several comparisons."""
    values = [row[label]["estimate"] for row in rows]
    return f"{min(values):+.1f} to {max(values):+.1f} %"


def crossings(results: Document) -> str:
    """Return from which spread on tuned Beta-TS is significantly faster than the best fixed K, by drafter and costs."""
    texts = []
    for cost, drafters in results["synthetic"].items():
        for drafter, documents in drafters.items():
            values = {float(spread): gain_of(document, gains.TUNED) for spread, document in documents.items()}
            passed = gains.passes_from(list(values.items()))
            where = "at no spread tried" if passed is None else f"from a spread of {passed:g} on"
            texts.append(f"{where} ({DRAFTERS[drafter]}, {cost})")
    return ", ".join(texts)


def gain_of(document: Document, label: str) -> Estimate:
    """Return a gain that was compared."""
    value = gains.gain(document, label)
    assert value is not None
    return value


def spread_panels(results: Document) -> dict[str, dict[str, tuple[list[float], list[dict[str, float]]]]]:
    """Return the figure's lines: gains over the spread, a panel for each drafter and costs."""
    return {
        f"{DRAFTERS[drafter]}, {cost}": {
            label: (
                [float(spread) for spread in documents],
                [gain_of(document, label).as_dict() for document in documents.values()],
            )
            for label in LINES
        }
        for cost, drafters in results["synthetic"].items()
        for drafter, documents in drafters.items()
    }
