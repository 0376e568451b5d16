"""The report of `realrun board`: all drafters with their best policies, as a page and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specsim.io.errors import InputError
from specsim.io.files import write_text
from specsim.report import leaderboard_figures as figures
from specsim.report import page
from specsim.report.documents import DRAFTER_COLUMNS, drafters_columns, drafters_rows, error_table
from specsim.report.table import as_csv, as_html, behind_leader

Row = Mapping[str, Any]
KIND = "specsim-drafter-leaderboard"
CSV_COLUMNS = (
    "rank", "drafter", "role", "policy", "form", "settings", "own_target", "best_of_drafter", "speedup", "speedup_low",
    "speedup_high", "tied_with_leader", "leader_minus_this", "leader_minus_this_low", "leader_minus_this_high",
    "measured", "measured_low", "measured_high", "error_percent", "rounds_identical_percent",
    "output_identical_percent", "tau", "v_d", "r_d", "hm", "train_speedup",
)  # fmt: skip

DEFINITIONS = {
    "Speedup": "Decoding time without speculation over decoding time with the drafter and its policy, over all "
    "held-out prompts, measured by really decoding; of a board that was not decoded, predicted by replay under "
    "measured costs.",
    "Forecast": "The speedup that tuning promised before anything was decoded: on the tuning prompts, at costs that "
    "were profiled before. Its best is the choice, which is compared with the measured best.",
    "Wall clock": page.WALL_CLOCK,
    "From the run's own rounds": "Replay at the costs of the very rounds that were measured: it decomposes the "
    "measured time, and is no forecast.",
    "Equal accounting": "All rows share the plain target's baseline time, the prompts and their split. Rows take "
    "turns of two rounds on every prompt, so that drift of the machine affects all rows equally. Costs are measured "
    "on those rounds.",
    "Without loops": "The speedup over prompts whose text does not repeat itself: more than half of its trigrams are "
    "distinct. What drafts by repetition gains on the others.",
    "Its paper's": "The policy that the drafter's own paper drafts with, tuned like the others.",
    "Own target": "A drafter that was trained together with its own target. That target has the plain target's "
    "architecture, so the plain target's baseline time is used. Its text differs, so its seconds are scaled to the "
    "baseline's number of tokens. Only speed is compared, not the quality of the text.",
    "Fixed K, adaptive chain, tree": "The best policy of each kind that the drafter supports; policy and settings are "
    "chosen by the speedup on the tuning prompts. A star marks the drafter's best kind there.",
    "Interval": "95 % over prompts, and it holds for all rows at once, because the leader is picked on the same "
    "prompts. It does not contain the error of the measured costs: what was measured shows how large that is.",
    "To the leader": "Speedup of the first row less that of the row, on the same prompts. A row whose interval "
    "contains 0 is marked as not significant: these prompts do not show that it is slower than the leader.",
    "Error": f"From the run's own rounds / measured {page.MINUS} 1.",
    "Rounds identical": "Share of replayed rounds that the real run repeated exactly; a round that asked for "
    "more nodes than were recorded may not be.",
    **page.METRICS,
    "s_d / s_t": "Time of a draft step, mean over the depth, over that of an autoregressive step.",
}


def write_drafters_table(path: Path, document: Mapping[str, Any]) -> None:
    """One CSV line per row, best first; speedups as ratios."""
    rows = enumerate(document["rows"], start=1)
    flat = ({"rank": rank, **row, "leader_minus_this": behind_leader(row)} for rank, row in rows)
    write_text(path, as_csv(CSV_COLUMNS, flat))


def render_drafters(document: Mapping[str, Any]) -> str:
    """Render `drafters_result` as a self-contained HTML page; the same document gives the same bytes."""
    return page.page(drafters_result(document))


def drafters_result(document: Mapping[str, Any]) -> page.Result:
    """What a page shows of a leaderboard of drafters.

    document : what `realrun board --json` prints. Raises InputError for another document.
    """
    if document.get("kind") != KIND or not document.get("rows"):
        raise InputError(f"report: the document is not a {KIND} with rows; give what `realrun board` wrote")
    rows = document["rows"]
    drawn = page.figure(
        "wide",
        "Ranking",
        figures.drafters(rows),
        "Green rows are the leader and those that do not differ significantly (95 %) from it. All rows share the "
        "prompts, so two rows may differ significantly although their bars overlap.",
    )
    times = page.figure(
        "wide",
        "Where the time goes",
        figures.time_per_token(
            {"rows": rows, "baseline_token_seconds": document["autoregressive_token_seconds"]}, "drafters"
        ),
        "Replayed time per output token by what it is spent on; the dashed line is autoregressive decoding.",
    )
    verdict, *main = _lead(document)
    body = [
        *main,
        page.heading(f"Drafters and policies, by {'predicted' if rows[0]['measured'] is None else 'measured'} speedup"),
        as_html("drafters", drafters_columns(measured=rows[0]["measured"] is not None), drafters_rows(document)),
        *error_table(document),
        page.stack([drawn, times]),
        page.heading("The drafters"),
        as_html("about", DRAFTER_COLUMNS, document["drafters"]),
    ]
    if document["skipped"]:
        left_out: dict[tuple[str, str], list[str]] = {}
        for row in document["skipped"]:
            left_out.setdefault((row["policy"], row["reason"]), []).append(row["drafter"])
        pairs = ((f"{policy} with {', '.join(names)}", reason) for (policy, reason), names in left_out.items())
        body += [page.heading("Not compared", 3), page.facts(pairs)]
    body += [
        page.heading("How it was made"),
        page.facts(_facts(document)),
        page.heading("Definitions"),
        *page.definitions(DEFINITIONS),
    ]
    return page.Result(
        "Drafters, each with its best policies",
        f"Drafters of {document['target']}",
        verdict,
        body,
        page.notes_of(document),
    )


def _lead(document: Mapping[str, Any]) -> tuple[str, str, str]:
    rows, sequences = document["rows"], document["sequences"]
    top = rows[0]
    ties = [row for row in rows if row["tied_with_leader"]]
    choice = [page.choice_text(document["choice"])] if document.get("choice") else []
    by, kind, speedup = "By prediction", "predicted", top["speedup"]
    costs = {"cost": f"measured on {document['device']}"}
    if top["measured"] is not None:
        by, kind, speedup, costs = "As measured", "measured", top["measured"], {}
    made = (
        f"Policies were tuned for each of {len(document['drafters'])} drafters on {sequences['tuning']:,} prompts and "
        f"replayed on {sequences['holdout']:,} others, {document['output_tokens']:,} output tokens, under "
        f"{page.decoding_text(document['decoding'])}."
    )
    verdict = f"{by}: {page.speculation_text(top['label'], speedup, document['noise_floor_percent'] or 0.0)}"
    if ties:
        verdict += f" Not significantly slower: {', '.join(row['label'] for row in ties)}."
    boxes = [
        (f"{speedup['estimate']:.2f}", f"best {kind} speedup, {top['label']}: {page.spread_text(speedup, costs)}"),
        (f"{len(ties) + 1} of {len(rows)}", "policies may be the fastest: differences not significant"),
    ]
    measured = [row for row in rows if row["measured"] is not None]
    if measured:
        error = document["errors"]["forecast"]["median_abs_percent"]
        verdict += f" Forecasts miss them by {error:.1f} % in the median."
        boxes += [(f"{error:.1f} %", f"median absolute error of {len(measured)} forecasts")]
        made += " " + " ".join([page.forecast_text(document), *choice, *page.wall_clock_text(rows)])
    return verdict, page.lead(made), page.tiles(boxes)


def _facts(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    sequences, floor = document["sequences"], document["noise_floor_percent"]
    repeats = document["options"]["repeats"]
    return [
        ("target", f"{document['target']}, {document['dtype']} on {document['device']}"),
        ("decoding", page.decoding_text(document["decoding"])),
        ("prompts", page.prompts_text(document["prompts"])),
        *(
            []
            if floor is None
            else [("machine", page.machine_text(document)), ("measured", page.repeats_text(repeats))]
        ),
        ("sequences", f"{sequences['tuning']:,} for tuning, {sequences['holdout']:,} held out"),
        ("autoregressive step, predicted", f"{1e3 * document['autoregressive_token_seconds']:.2f} ms"),
        *([] if floor is None else [("noise floor", f"{floor:.2f} %")]),
        *((key.replace("_", " "), value) for key, value in document["options"].items()),
        *document["environment"].items(),
    ]
