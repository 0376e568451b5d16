"""MEDUSA: speedup is acceleration rate over overhead, and what the abstract makes of it."""

from __future__ import annotations

from collections.abc import Iterator

from studies.papers.record import Finding, finding, slug
from studies.papers.tables import image, read_table, stated

QUOTED = {"Vicuna-7B": "medusa2_speedup_vicuna_7b", "Vicuna-13B": "medusa2_speedup_vicuna_13b"}


def audit() -> Iterator[Finding]:
    """All findings of this file."""
    for row in read_table("medusa_1").rows:
        rate, overhead = row.interval("acceleration_rate"), row.interval("overhead")
        allowed = image(lambda a, b: a / b, rate, overhead)
        value = row.number("acceleration_rate") / row.number("overhead")
        target = slug(row["target"])
        if row["target"] in QUOTED:
            quoted = stated("medusa", QUOTED[row["target"]])
            agrees = allowed.meets(quoted.interval("value"))
            text = f"acceleration rate over overhead, {value:.3f}; the text quotes {quoted['value']}"
            places = (row.place(), quoted.place())
            erratum = "" if agrees else "F21"
            yield finding(
                f"medusa.speedup.{target}", value, "x", agrees, text, *places, within=allowed, erratum=erratum
            )
        else:
            text = "acceleration rate over overhead; no speedup is printed"
            yield finding(f"medusa.speedup.{target}", value, "x", "cannot decide", text, row.place(), within=allowed)
        baseline = row.number("quality") - row.number("quality_change")
        text = "the baseline's quality, that of MEDUSA-2 less its change"
        yield finding(f"medusa.baseline_quality.{target}", baseline, "", "supports", text, row.place("quality"))
    table2 = read_table("medusa_2")
    vicuna = read_table("medusa_1").row("Vicuna-7B")
    printed = table2.row("Baseline").number("quality")
    implied = vicuna.number("quality") - vicuna.number("quality_change")
    places = (table2.row("Baseline").place("quality"), vicuna.place("quality_change"))
    text = "the baseline's quality in table 2 is that of table 1"
    yield finding("medusa.baseline_quality_table2", printed, "", abs(printed - implied) < 1e-9, text, *places)
    yield from abstract()
    first, second = (stated("medusa", f"{name}_head_candidates").number("value") for name in ("first", "second"))
    candidates = stated("medusa", "candidates")
    text = "nodes of figure 2's tree, 2 and 2 x 3"
    yield finding("medusa.figure2_nodes", first + first * second, "nodes", "supports", text, candidates.place())
    agrees = first * second == candidates.number("value")
    yield finding("medusa.figure2_candidates", first * second, "sequences", agrees, "2 x 3", candidates.place())


def abstract() -> Iterator[Finding]:
    """What the abstract promises of both variants."""
    row = read_table("medusa_2").row("MEDUSA-1")
    least = stated("medusa", "medusa1_speedup_min")
    agrees = row.number("speedup") >= least.number("value")
    text = f"MEDUSA-1 on 7B prints {row['speedup']}, the abstract says over {least['value']}"
    places = (row.place("speedup"), least.place())
    yield finding("medusa.medusa1_speedup", row.number("speedup"), "x", agrees, text, *places, erratum="F22")
    most, category = stated("medusa", "medusa2_speedup_max"), stated("medusa", "medusa2_speedup_extraction")
    ratios = [one.number("acceleration_rate") / one.number("overhead") for one in read_table("medusa_1").rows]
    agrees = max(ratios) >= most.interval("value").low
    text = (
        f"MEDUSA-2's largest overall speedup by table 1, {max(ratios):.2f}; the abstract's {most['value']} is a "
        f"category's, {category['value']} on extraction"
    )
    yield finding("medusa.medusa2_speedup_max", max(ratios), "x", agrees, text, "medusa_1", most.place(), erratum="F22")
