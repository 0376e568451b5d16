"""Write leaderboards as JSON and CSV, and combine several into a ranking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from specsim.io.files import write_json, write_text
from specsim.replaying.intervals import Estimate
from specsim.report.board import BoardOptions, Combined, Leaderboard, StandingRow
from specsim.report.table import as_csv, behind_leader

if TYPE_CHECKING:
    import pandas as pd

    from specsim.compare.leaderboard import Board


RESULT = "leaderboard.json"
TABLES = (".tex", ".csv")  # endings of files that hold a table for a paper
CSV_COLUMNS = (
    "trace", "max_draft", "rank", "label", "policy", "tuned", "speedup", "speedup_low", "speedup_high",
    "tied_with_leader", "leader_minus_this", "leader_minus_this_low", "leader_minus_this_high", "v_d", "r_d", "hm",
    "tau", "mean_draft_tokens", "oracle_regret", "learned_rule_gap", "train_speedup", "seeds", "settings",
)  # fmt: skip


def trace_names(traces: Sequence[Path]) -> list[str]:
    """Shortest ends of the paths that are unique; InputError for a trace given twice."""
    from specsim.io.errors import InputError

    paths = [path.resolve() for path in traces]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"trace {path} is given twice; give each once")
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return ["/".join(path.parts[-parts:]) for path in paths]


def combined(boards: Sequence[Board]) -> list[StandingRow]:
    """Standings over boards of several traces, best geometric mean first; only what ran on all of them."""
    ranks = [{row.label: place for place, row in enumerate(board.rows, start=1)} for board in boards]
    speedups = [{row.label: row.speedup.estimate for row in board.rows} for board in boards]
    standings = []
    for name in (name for name in ranks[0] if all(name in board for board in ranks)):
        mean, own = sum(math.log(board[name]) for board in speedups) / len(boards), [board[name] for board in ranks]
        standings.append(StandingRow(name, math.exp(mean), own, sum(own) / len(own)))
    return sorted(standings, key=lambda standing: -standing.speedup)


def as_document(boards: Sequence[Board], options: BoardOptions) -> Leaderboard:
    """What leaderboard.json holds; also everything that its report shows."""
    groups = []
    for depth in dict.fromkeys(board.max_draft for board in boards):
        together = [board for board in boards if board.max_draft == depth]
        standings = combined(together)
        if len(together) > 1 and standings:
            groups.append(Combined(depth, [board.trace for board in together], standings))
    return Leaderboard(1, options, [board.document for board in boards], groups)


def write_results(folder: Path, document: Leaderboard) -> None:
    """leaderboard.json, leaderboard.csv and report.html, each whole or not at all."""
    from specsim.report.leaderboard import render_leaderboard

    write_json(document.as_dict(), folder / RESULT, indent=2)
    write_text(folder / "leaderboard.csv", results_csv(document))
    write_text(folder / "report.html", render_leaderboard(document))


def results_csv(document: Leaderboard) -> str:
    """Write a line per row of every board; speedups as ratios, lengths in tokens."""
    rows = [
        {**asdict(row), "trace": board.trace, "max_draft": board.max_draft, "rank": rank}
        for board in document.boards
        for rank, row in enumerate(board.rows, start=1)
    ]
    return as_csv(CSV_COLUMNS, [{**row, "leader_minus_this": behind_leader(row)} for row in rows])


def paper_table(document: Leaderboard) -> pd.DataFrame:
    """Tabulate the rows of every board as Spec-Bench does: speedup by task, mean accepted tokens, overall speedup.

    The overall speedup has its 95 % interval. The first row of a board is the baseline, the last the oracle.
    """
    import pandas as pd  # slow to import, and a leaderboard without such a table does not need it

    boards = document.boards
    rows: list[dict[str, str | float]] = []
    for board in boards:
        named = {"Trace": board.trace} if len(boards) > 1 else {}
        tasks = dict.fromkeys(board.rows[0].domain_speedups, 1.0)
        rows.append({**named, "Method": "autoregressive", **tasks, "#MAT": 1.0, "Overall": 1.0})
        rows += [
            {**named, "Method": row.label, **row.domain_speedups, "#MAT": row.tau, **_overall(row.speedup)}
            for row in board.rows
        ]
        rows.append({**named, "Method": f"oracle of {board.oracle_of}", **_overall(board.oracle)})
    table = pd.DataFrame(rows)
    last = ["#MAT", "Overall", "Low", "High"]
    return table[[*table.columns.difference(last, sort=False), *last]]  # tasks of later boards before the last ones


def _overall(speedup: Estimate) -> dict[str, float]:
    return {"Overall": speedup.estimate, "Low": speedup.low, "High": speedup.high}


def table_text(document: Leaderboard, ending: str) -> str:
    """Write `paper_table` as LaTeX (booktabs) or CSV; ending : one of `TABLES`.

    In LaTeX, bold are the leader of each board and the policies that are not significantly slower.
    """
    table = paper_table(document)
    if ending == ".csv":
        return str(table.to_csv(index=False, float_format="%.4f"))
    shown = table.drop(columns=["Low", "High"]).astype({"Overall": object})
    for at, (speedup, low, high) in enumerate(table[["Overall", "Low", "High"]].itertuples(index=False)):
        shown.loc[at, "Overall"] = f"{speedup:.2f}" if low != low else f"{speedup:.2f} [{low:.2f}, {high:.2f}]"
    bold = []
    for board in document.boards:
        bold += [False, *(at == 0 or row.tied_with_leader for at, row in enumerate(board.rows)), False]
    style = shown.style.hide(axis="index").format(precision=2, escape="latex", na_rep="--")
    style = style.format_index(axis=1, escape="latex")
    style = style.apply(lambda column: ["textbf:--rwrap;" if each else "" for each in bold], subset=["Overall"])
    caption = (
        "Predicted speedup over decoding without speculation, with 95\\,\\% intervals over sequences, simultaneous for "
        "all policies. Bold: not significantly slower than the fastest."
    )
    return f"% \\usepackage{{booktabs}}\n{style.to_latex(hrules=True, caption=caption)}"
