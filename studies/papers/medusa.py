"""MEDUSA: is the speedup the acceleration rate over the overhead, and does the abstract agree with the tables?"""

from __future__ import annotations

from collections.abc import Iterator

from studies.papers.record import Finding, finding, slug
from studies.papers.tables import read_table, recompute, stated

QUOTED = {"Vicuna-7B": "medusa2_speedup_vicuna_7b", "Vicuna-13B": "medusa2_speedup_vicuna_13b"}


def audit() -> Iterator[Finding]:
    """Yield all findings of this module."""
    table1, table2 = read_table("medusa_1"), read_table("medusa_2")
    ratios, baselines = {}, {}
    for row in table1.rows:
        target = row["target"]
        ratios[target], allowed = recompute(lambda a, b: a / b, row["acceleration_rate"], row["overhead"])
        name, text = f"medusa.speedup.{slug(target)}", "acceleration rate over overhead"
        if target in QUOTED:
            quoted = stated("medusa", QUOTED[target])
            agrees = allowed.meets(quoted.interval("value"))
            text += f", {ratios[target]:.3f}; the text quotes {quoted['value']}"
            places = [row.place(), quoted.place()]
            yield finding(name, ratios[target], "x", agrees, text, *places, within=allowed, flaw="F21")
        else:
            text += "; no speedup is printed"
            yield finding(name, ratios[target], "x", "cannot decide", text, row.place(), within=allowed)
        baselines[target] = row.number("quality") - row.number("quality_change")
        text = "quality of the baseline: that of MEDUSA-2 minus its change"
        name = f"medusa.baseline_quality.{slug(target)}"
        yield finding(name, baselines[target], "", "supports", text, row.place("quality"))

    baseline, vicuna = table2.row("Baseline"), table1.row("Vicuna-7B")
    printed = baseline.number("quality")
    same = abs(printed - baselines["Vicuna-7B"]) < 1e-9
    places = [baseline.place("quality"), vicuna.place("quality_change")]
    text = "quality of the baseline in table 2, compared with table 1"
    yield finding("medusa.baseline_quality_table2", printed, "", same, text, *places)

    row, least = table2.row("MEDUSA-1"), stated("medusa", "medusa1_speedup_min")
    agrees = row.number("speedup") >= least.number("value")
    text = f"MEDUSA-1 on 7B prints {row['speedup']}, the abstract says over {least['value']}"
    places = [row.place("speedup"), least.place()]
    yield finding("medusa.medusa1_speedup", row.number("speedup"), "x", agrees, text, *places, erratum="F22")
    most, category = stated("medusa", "medusa2_speedup_max"), stated("medusa", "medusa2_speedup_extraction")
    largest = max(ratios.values())
    text = (
        f"largest overall speedup of MEDUSA-2 by table 1, {largest:.2f}; the abstract's {most['value']} is that of one "
        f"category, {category['value']} on extraction"
    )
    agrees, places = largest >= most.interval("value").low, ["medusa_1", most.place()]
    yield finding("medusa.medusa2_speedup_max", largest, "x", agrees, text, *places, erratum="F22")

    first, second = (stated("medusa", f"{name}_head_candidates").number("value") for name in ("first", "second"))
    candidates = stated("medusa", "candidates")
    text = "nodes of figure 2's tree, 2 and 2 x 3"
    yield finding("medusa.figure2_nodes", first + first * second, "nodes", "supports", text, candidates.place())
    agrees = first * second == candidates.number("value")
    yield finding("medusa.figure2_candidates", first * second, "sequences", agrees, "2 x 3", candidates.place())
