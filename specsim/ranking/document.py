"""A leaderboard as JSON and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.files import write_json, write_text
from specsim.report.table import as_csv, behind_leader

if TYPE_CHECKING:
    from specsim.ranking.leaderboard import Board


RESULT = "leaderboard.json"
CSV_COLUMNS = (
    "trace", "max_draft", "rank", "label", "policy", "tuned", "speedup", "speedup_low", "speedup_high",
    "tied_with_leader", "leader_minus_this", "leader_minus_this_low", "leader_minus_this_high", "v_d", "r_d", "hm",
    "tau", "mean_draft_tokens", "oracle_regret", "learned_rule_gap", "train_speedup", "seeds", "settings",
)  # fmt: skip


def trace_names(traces: Sequence[Path]) -> list[str]:
    """Folder names, with as much of the path as tells them apart; a trace given twice is an error."""
    from specsim.errors import InputError

    paths = [path.resolve() for path in traces]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"trace {path} is given twice; give each once")
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return ["/".join(path.parts[-parts:]) for path in paths]


def as_document(boards: Sequence[Board], options: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form of a run; also everything that its report shows."""
    from specsim.ranking.combined import combined

    groups = []
    for depth in dict.fromkeys(board.max_draft for board in boards):
        together = [board for board in boards if board.max_draft == depth]
        standings = [
            {"label": one.label, "speedup": one.speedup, "mean_rank": one.mean_rank, "ranks": one.ranks}
            for one in combined(together)
        ]
        if len(together) > 1 and standings:
            groups.append({"max_draft": depth, "traces": [b.trace for b in together], "standings": standings})
    return {
        "kind": "specsim-leaderboard",
        "version": 1,
        "options": dict(options),
        "boards": [board.as_dict() for board in boards],
        "combined": groups,
    }


def write_results(folder: Path, document: Mapping[str, Any]) -> None:
    """leaderboard.json, leaderboard.csv and report.html, each whole or not at all."""
    from specsim.report.leaderboard import render_leaderboard

    write_json(document, folder / RESULT, indent=2)
    write_text(folder / "leaderboard.csv", results_csv(document))
    write_text(folder / "report.html", render_leaderboard(document))


def results_csv(document: Mapping[str, Any]) -> str:
    """One line per row of every board; speedups as ratios, lengths in tokens."""
    return as_csv(
        CSV_COLUMNS,
        (
            {
                **row,
                "trace": board["trace"],
                "max_draft": board["max_draft"],
                "rank": rank,
                "leader_minus_this": behind_leader(row),
            }
            for board in document["boards"]
            for rank, row in enumerate(board["rows"], start=1)
        ),
    )
