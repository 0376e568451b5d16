"""The report of a comparison of hardware: an HTML page with its table, curves and tornadoes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.replaying.intervals import Estimate, against_baseline
from specsim.report import hardware_figures as figures
from specsim.report import page
from specsim.report.table import PAGE, SPEEDUP, TERMINAL, THREE, TWO, Column, as_html, plain

Row = Mapping[str, Any]
MILLISECONDS = plain(lambda seconds: f"{1e3 * seconds:.3f}")


def _widest(row: Row) -> str:
    top = row["tornado"][0]
    return f"{top['constant']}: {top['less']:.3f} to {top['more']:.3f}"


COLUMNS = (
    Column("GPU", "gpu"),
    Column("batch", "batch"),
    Column("decode step, ms", "token_s", MILLISECONDS),
    Column("draft step", "draft_step_s", MILLISECONDS),
    Column("s_d / s_t", "step_ratio", THREE),
    Column("speedup [95 %]", "speedup", SPEEDUP),
    Column("on tuning part", "train_speedup", THREE, only=PAGE),
    Column("tau", "tau", TWO),
    Column("most sensitive to", _widest, only=TERMINAL),
    Column("policy", "settings"),
)
DEFINITIONS = {
    "Speedup": "Decoding time without speculation over decoding time with the policy, both replayed over the sequences "
    "that were held out, with a 95 % interval over sequences. The interval is of the trace; what the roofline may be "
    "off by is not in it, and the tornado shows what that would do.",
    "s_d, s_t": "Seconds of a draft step, and of a token without speculation: means over the contexts that the trace "
    "meets. At a batch, the whole batch's.",
    "tau": page.METRICS["tau"],
    "Roofline": "An operation takes the longer of reading its bytes and computing its FLOPs, plus its launch. "
    "Ceilings are the datasheet's, derated equally on every GPU; nothing was measured on them.",
    "Tornado": "A constant is made smaller and larger by the share shown, and the same policy replayed without "
    'tuning again. "Both" changes a constant for target and drafter together, as other hardware '
    "would; the others for that model alone, as other kernels would.",
}


def render_comparison(document: Row) -> str:
    """Render `comparison_result` as a self-contained HTML page; the same document gives the same bytes."""
    return page.page(comparison_result(document))


def comparison_result(document: Row) -> page.Result:
    """What a page shows of a comparison of hardware.

    document : what `specsim cost compare --json` prints
    """
    options, rows, parts = document["options"], document["rows"], document["sequences"]
    best = max(rows, key=lambda row: float(row["speedup"]["estimate"]))
    speedup = Estimate(**best["speedup"])
    recorded = document["recorded"]
    made = (
        f"Acceptance is that of {recorded['target']} with {recorded['drafter']}, "
        f"{page.decoding_text(recorded['decoding'])}; times are a roofline's of {options['target']} with "
        f"{options['drafter']}, weights {options['weights']}. Policies were tuned on {parts['tuning']:,} sequences and "
        f"predicted on {parts['holdout']:,} others."
    )
    verdict = page.speculation_text(f"{best['settings']} on {best['gpu']} at batch {best['batch']}", speedup)
    if len(rows) > 1 and against_baseline(speedup) == "faster":
        slower = [
            f"{row['gpu']} at batch {row['batch']}"
            for row in rows
            if against_baseline(Estimate(**row["speedup"])) == "slower"
        ]
        verdict += f" Do not speculate on {', '.join(slower)}." if slower else ""
    engine = f" and {options['engine']}'s overhead" if options["engine"] else ""
    boxes = []
    for row in rows:
        predicted, cost = Estimate(**row["speedup"]), row.get("cost", f"data sheet{engine}")
        where = f"{row['gpu']}, batch {row['batch']}, s_d / s_t {row['step_ratio']:.3f}"
        boxes.append((f"{predicted:.2f}", f"{where}: {page.spread_text(predicted, cost, row.get('cost_band'))}"))
    share = document["share"]
    drawn = (
        (
            "Predicted speedup",
            figures.speedups(rows),
            "Of the policy that was best on the tuning part. Bars are 95 % intervals, which devices on the same "
            "sequences share, so that overlapping bars alone are no tie.",
        ),
        (
            "s_d / s_t over the context",
            figures.step_ratios(rows, document["contexts"]),
            "A draft step in tokens without speculation: what speculation costs. Over the context, as reading the "
            "caches takes over, the ratio nears that of the two models' caches.",
        ),
        (
            "Sensitivity of the speedup to roofline constants",
            figures.tornadoes(rows, share),
            f"Every constant of the roofline {100 * share:.0f} % less and more, each alone; the black line is the "
            f"speedup as predicted. Shown are at most {figures.MOST_BARS}, the most sensitive first.",
        ),
    )
    body = [
        page.lead(made),
        page.tiles(boxes),
        page.heading("Devices"),
        as_html("devices", COLUMNS, rows),
        page.heading("Figures"),
        page.stack((page.figure("wide", *parts) for parts in drawn), "grid figures"),
    ]
    if document["skipped"]:
        body += [page.heading("Left out"), page.facts((row["gpu"], row["reason"]) for row in document["skipped"])]
    body += [
        page.heading("How it was made"),
        page.facts(options.items()),
        page.heading("Definitions"),
        *page.definitions(DEFINITIONS),
    ]
    title = f"{options['target']} with {options['drafter']}, by hardware"
    return page.Result(
        "Speculative decoding on hardware that is not at hand", title, verdict, body, page.notes_of(document)
    )
