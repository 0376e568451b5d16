"""The report of a leaderboard: an HTML file with every board and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from specsim.io.errors import InputError
from specsim.report import leaderboard_figures as figures
from specsim.report.board import Combined, Leaderboard, RankedBoard
from specsim.report.documents import BOARD_COLUMNS, board_rows, token_s
from specsim.report.page import (
    METRICS,
    Result,
    decoding_text,
    definitions,
    facts,
    figure,
    heading,
    lead,
    macros,
    notes_of,
    page,
    recommendation_text,
    speculation_text,
    spread_text,
    stack,
    tiles,
)
from specsim.report.table import DASH, as_html

DEFINITIONS = {
    "Speedup": "Decoding time without speculation over decoding time with the policy, both replayed over all held-out "
    "sequences under the cost model.",
    "Interval": "95 %, and it holds for all rows at once, because the leader is picked on the same sequences: half its "
    "width bounds the largest difference between any two of the policies and no speculation, in standard errors. Of "
    "many sequences that bound is the bootstrap's, of few it is Student's t with Bonferroni's inequality.",
    "Leader": "The row with the largest speedup on these sequences.",
    "To the leader": "Speedup of the leader less that of the row, on the same sequences. A row whose interval contains "
    "0 is marked as not significant: these sequences do not show that it is slower than the leader.",
    "Tuned": "Settings searched on the tuning sequences alone. Forms that are not tuned run with the settings shown; "
    "RenewalStop and TimeGain learn the rest from the tuning sequences and the costs.",
    **METRICS,
    "Verified": "Drafted tokens that the target verified in a round, of a chain all of them: mean, and the range from "
    "the 10 % to the 90 % quantile.",
    "Oracle": "The least time in which any policy that knew all match lengths could have decoded these sequences, "
    "by dynamic programming; no real policy can reach it. The gap to the oracle is the time over the oracle's, less 1.",
    "Rule learned from the same signals": "The fastest rule found that sees what chain policies see (confidence, "
    "entropy, position in the draft, history), learned on the tuning sequences by optimal stopping with renewal "
    "reward. The gap to it is what a policy leaves unused; the rule's own gap to the oracle is mostly what no signal "
    "tells. It is a lower bound on the best such rule, so a gap below 0 is possible.",
    "Seeds": "A policy that draws random numbers is averaged over this many replays; others need a single replay.",
}


def render_leaderboard(document: Leaderboard) -> str:
    """Render `leaderboard_result` as a self-contained HTML page; the same document gives the same bytes."""
    return page(leaderboard_result(document, notes_of(document.as_dict())))


def leaderboard_result(document: Leaderboard, notes: Sequence[str]) -> Result:
    """What a page shows of a leaderboard. notes : of its document

    Raises InputError if it has no board.
    """
    boards = document.boards
    if not boards:
        raise InputError("report: the leaderboard has no boards; give a leaderboard's JSON")
    verdict, *body = _lead_of_board(boards[0]) if len(boards) == 1 else _lead_of_boards(boards, document.combined)
    if len(boards) > 1:
        body += [heading("All boards"), *_side_by_side(document)]
    for number, board in enumerate(boards):
        body += _board(board, f"b{number}", alone=len(boards) == 1)
    body += [heading("How it was made"), facts(_facts(document)), heading("Definitions"), *definitions(DEFINITIONS)]
    pairs = [f"{board.recorded.target} with {board.recorded.drafter}" for board in boards]
    title = "Predicted speedup of drafting policies: " + ", ".join(dict.fromkeys(pairs))
    return Result(_conditions(document), title, verdict, body, notes)


def _conditions(document: Leaderboard) -> str:
    """Name the traces, the costs with their batch, the recorded number type and date, and the prompts."""
    first, options = document.boards[0], document.options
    prompts = first.sequences.tuning + first.sequences.holdout
    parts = [
        ", ".join(dict.fromkeys(board.trace for board in document.boards)),
        f"costs: {options.cost}" if options.cost else "",
        f"batch {options.batch or 1}",
        f"recorded in {first.recorded.dtype} on {first.recorded.device}",
        f"{prompts:,} prompts",
        str(first.recorded.date or "")[:10],
    ]
    return " \u00b7 ".join(filter(None, parts))


def _lead_of_board(board: RankedBoard) -> tuple[str, str, str]:
    top, token = board.rows[0], token_s(board.rows[0])
    ties = sum(row.tied_with_leader for row in board.rows)
    made = (
        f"Every policy was tuned on {board.sequences.tuning:,} sequences and replayed on "
        f"{board.sequences.holdout:,} others, {board.output_tokens:,} output tokens."
    )
    verdict = f"Predicted. {speculation_text(top.label, top.speedup)}"
    if ties:
        others = "1 other" if ties == 1 else f"{ties} others"
        verdict += f" The difference to {others} is not significant."
    if board.unjudged:
        verdict += f" {board.unjudged}"
    baseline_s = board.baseline_token_seconds
    spread = spread_text(top.speedup, cost_band=board.cost_band)
    boxes = (
        (f"{top.speedup:.2f}", f"predicted held-out speedup, {top.label}: {spread}"),
        (f"{1 / token:,.1f} tok/s", f"{1e3 * token:.2f} ms per token of a request, predicted"),
        (f"{1 / baseline_s:,.1f} tok/s", f"{1e3 * baseline_s:.2f} ms per token, predicted, without speculation"),
        (
            f"{ties + 1} of {len(board.rows)}",
            "policies may be the fastest: differences not significant"
            if ties
            else "policies is the fastest: all differences are significant",
        ),
        (f"{board.oracle:.2f}", f"the oracle's speedup; the leader is {100 * top.oracle_regret:.0f} % slower"),
    )
    recommended = map(lead, recommendation_text(board))
    return verdict, stack([*recommended, lead(made)]), tiles(boxes)


def _lead_of_boards(boards: Sequence[RankedBoard], combined: Sequence[Combined]) -> tuple[str, str, str]:
    made = (
        f"On each of {len(boards)} boards every policy was tuned on a part of the trace's sequences and ranked on "
        "the others."
    )
    verdicts = []
    for group in combined:
        best = group.standings[0]
        verdicts.append(
            f"Over the {len(group.traces)} traces at drafts up to {group.max_draft}, {best.label} has the largest "
            f"geometric mean of speedups, {best.speedup:.3f}"
            + ("." if best.speedup > 1 else ": no policy is faster than no speculation.")
        )
    if not verdicts:
        fastest = max(boards, key=lambda board: board.rows[0].speedup)
        top = fastest.rows[0]
        verdicts = [f"{_board_name(fastest)}: {speculation_text(top.label, top.speedup)}"]
    boxes = ((f"{board.rows[0].speedup:.2f}", f"{_board_name(board)}: {board.rows[0].label}") for board in boards)
    return " ".join(verdicts), lead(made), tiles(boxes)


def _board(board: RankedBoard, name: str, *, alone: bool) -> list[str]:
    rows = board.rows
    parts = [
        heading("Policies, by held-out speedup" if alone else _board_name(board)),
        as_html("board", BOARD_COLUMNS, board_rows(board)),
    ]
    if board.skipped:
        parts += [heading("Not on this board", 3), facts((line.policy, line.reason) for line in board.skipped)]
    shown = [
        (
            "Ranking",
            figures.ranking(rows, board.oracle, name),
            "Green rows are the leader and those whose difference to it is not significant. Bars are 95 % intervals "
            "that hold for all rows at once; the difference of two overlapping bars may still be significant, because "
            "all policies run on the same sequences.",
        ),
        (
            "Where the time goes, and the gap to the oracle",
            figures.time_per_token(
                rows, board.baseline_token_seconds, name, board.oracle, [row.oracle_regret for row in rows]
            ),
            "Time per output token by what it was spent on. What lies right of the orange line is the gap: time that "
            "an oracle would have saved.",
        ),
        (
            "Verified tokens",
            figures.draft_lengths(rows, name),
            "How many drafted tokens each policy gave the target to verify; a fixed number is a single dark "
            "cell, except at the ends of outputs.",
        ),
    ]
    parts.append(stack(figure("wide", *texts) for texts in shown))
    return parts


def _side_by_side(document: Leaderboard) -> list[str]:
    boards, standings = document.boards, document.combined
    speedups = [{row.label: row.speedup.estimate for row in board.rows} for board in boards]
    order = [row.label for group in standings for row in group.standings]
    labels = list(dict.fromkeys([*order, *(label for board in speedups for label in board)]))
    means = [{row.label: row for row in group.standings} for group in standings]
    names = [_board_name(board) for board in boards]
    head = ["policy", *names]
    for group in standings:
        head += [f"all traces,\ndrafts to {group.max_draft}", "mean rank"]
    best = [max(board.values()) for board in speedups]
    lines = []
    for label in labels:
        cells = [label]
        for board, top in zip(speedups, best, strict=True):
            value = board.get(label)
            shown = "" if value is None else f"{value:.3f}"
            cells.append(DASH if value is None else macros().strong(shown) if value == top else shown)
        for mean in means:
            row = mean.get(label)
            cells += [f"{row.speedup:.3f}", f"{row.mean_rank:.1f}"] if row else [DASH, DASH]
        lines.append(("", cells))
    drawn = figures.side_by_side(names, labels, [[board.get(label) for board in speedups] for label in labels])
    caption = "Speedups of each policy on each board; a mark further right is faster."
    if standings:
        caption += " Policies are in the order of their geometric mean over the traces."
    return [
        macros().table("all", head, lines),
        stack([figure("wide", "Side by side", drawn, caption)]),
    ]


def _board_name(board: RankedBoard) -> str:
    return f"{board.trace}, drafts up to {board.max_draft}"


def _facts(document: Leaderboard) -> list[tuple[str, Any]]:
    options = [(name.replace("_", " "), value) for name, value in asdict(document.options).items() if value is not None]
    recorded = []
    for board in {board.trace: board for board in document.boards}.values():
        meta = board.recorded
        pair = f"{meta.target} with {meta.drafter}, {decoding_text(meta.decoding or 'unknown')}"
        recorded.append((f"trace {board.trace}", f"{pair}, {meta.dtype} on {meta.device}"))
    return recorded + options
