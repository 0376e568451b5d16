"""The report of `realrun board`: all drafters with their best policies, as a page and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from specsim.io.errors import InputError
from specsim.io.files import write_text
from specsim.report import leaderboard_figures as figures
from specsim.report import page
from specsim.report.documents import DRAFTER_COLUMNS, drafters_columns, drafters_rows, error_table
from specsim.report.experiment import DrafterBoard
from specsim.report.table import as_csv, as_html, behind_leader

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


def write_drafters_table(path: Path, board: DrafterBoard) -> None:
    """One CSV line per row, best first; speedups as ratios."""
    rows = enumerate((row.as_cells() for row in board.rows), start=1)
    flat = ({"rank": rank, **row, "leader_minus_this": behind_leader(row)} for rank, row in rows)
    write_text(path, as_csv(CSV_COLUMNS, flat))


def render_drafters(board: DrafterBoard) -> str:
    """Render `drafters_result` as a self-contained HTML page; the same document gives the same bytes."""
    return page.page(drafters_result(board, page.notes_of(board.as_dict())))


def drafters_result(board: DrafterBoard, notes: Sequence[str]) -> page.Result:
    """What a page shows of a leaderboard of drafters. notes : of its document

    Raises InputError if it has no row.
    """
    if not board.rows:
        raise InputError("report: the leaderboard has no rows; give what `realrun board` wrote")
    rows, measured = board.rows, board.rows[0].measured is not None
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
        figures.time_per_token(rows, board.autoregressive_token_seconds, "drafters"),
        "Replayed time per output token by what it is spent on; the dashed line is autoregressive decoding.",
    )
    verdict, *main = _lead(board)
    body = [
        *main,
        page.heading(f"Drafters and policies, by {'measured' if measured else 'predicted'} speedup"),
        as_html("drafters", drafters_columns(measured=measured), drafters_rows(board)),
        *error_table(board.errors),
        page.stack([drawn, times]),
        page.heading("The drafters"),
        as_html("about", DRAFTER_COLUMNS, map(asdict, board.drafters)),
    ]
    if board.skipped:
        left_out: dict[tuple[str, str], list[str]] = {}
        for row in board.skipped:
            left_out.setdefault((row.policy, row.reason), []).append(str(row.drafter))
        pairs = ((f"{policy} with {', '.join(names)}", reason) for (policy, reason), names in left_out.items())
        body += [page.heading("Not compared", 3), page.facts(pairs)]
    body += [
        page.heading("How it was made"),
        page.facts(_facts(board)),
        page.heading("Definitions"),
        *page.definitions(DEFINITIONS),
    ]
    return page.Result(
        "Drafters, each with its best policies",
        f"Drafters of {board.target}",
        verdict,
        body,
        notes,
    )


def _lead(board: DrafterBoard) -> tuple[str, str, str]:
    rows, top, sequences = board.rows, board.rows[0], board.sequences
    ties = [row.label for row in rows if row.tied_with_leader]
    by, kind, speedup, cost = "By prediction", "predicted", top.speedup, f"measured on {board.device}"
    if top.measured is not None:
        by, kind, speedup, cost = "As measured", "measured", top.measured, ""
    made = (
        f"Policies were tuned for each of {len(board.drafters)} drafters on {sequences.tuning:,} prompts and "
        f"replayed on {sequences.holdout:,} others, {board.output_tokens:,} output tokens, under "
        f"{page.decoding_text(board.decoding)}."
    )
    verdict = f"{by}: {page.speculation_text(top.label, speedup, board.noise_floor_percent or 0.0)}"
    if ties:
        verdict += f" Not significantly slower: {', '.join(ties)}."
    boxes = [
        (f"{speedup:.2f}", f"best {kind} speedup, {top.label}: {page.spread_text(speedup, cost)}"),
        (f"{len(ties) + 1} of {len(rows)}", "policies may be the fastest: differences not significant"),
    ]
    measured = sum(row.measured is not None for row in rows)
    if measured:
        error = board.errors["forecast"].median_abs_percent
        choice = [page.choice_text(board.choice)] if board.choice else []
        verdict += f" Forecasts miss them by {error:.1f} % in the median."
        boxes += [(f"{error:.1f} %", f"median absolute error of {measured} forecasts")]
        made += " " + " ".join([page.forecast_text(board.forecast, rows), *choice, *page.wall_clock_text(rows)])
    return verdict, page.lead(made), page.tiles(boxes)


def _facts(board: DrafterBoard) -> list[tuple[str, Any]]:
    sequences, floor = board.sequences, board.noise_floor_percent
    measured = []
    if floor is not None:
        measured = [("machine", page.machine_text(board)), ("measured", page.repeats_text(board.options.repeats))]
    return [
        ("target", f"{board.target}, {board.dtype} on {board.device}"),
        ("decoding", page.decoding_text(board.decoding)),
        ("prompts", page.prompts_text(board.prompts)),
        *measured,
        ("sequences", f"{sequences.tuning:,} for tuning, {sequences.holdout:,} held out"),
        ("autoregressive step, predicted", f"{1e3 * board.autoregressive_token_seconds:.2f} ms"),
        *([] if floor is None else [("noise floor", f"{floor:.2f} %")]),
        *((key.replace("_", " "), value) for key, value in asdict(board.options).items()),
        *board.environment.items(),
    ]
