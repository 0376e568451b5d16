"""The tables of the study, from plain documents of validations and boards; every number comes from the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from specsim.policy.registry import TREE_POLICIES
from specsim.report.markdown import markdown_table, verdict
from specsim.speedup.intervals import Comparison, beyond_floor, interval_text, paired_difference, ratio_difference
from studies.words import first_best, measured_verdict, share_text

Document = Mapping[str, Any]
Row = Mapping[str, Any]

PAPER_K, HEADS = 5, 4
NAMES = {"vdm": "VDM", "medusa-1": "MEDUSA-1", "eagle": "EAGLE", "edd": "EDD"}
TREES = {"vct": "VCT", "cape": "CAPE", "eagle2": "EAGLE-2", "pct": "PCT", "hardware_pct": "hardware-aware PCT"}
PAPER_LENGTHS = ("medusa-1", "vdm", "eagle", "edd")  # by rising mean tau in the paper's table 1
PAPER_SPEEDUPS = ("vdm", "medusa-1", "eagle", "edd")  # by rising speedup there, in 15 of its 16 cells
PAPER_FORMS = {"vct": "10 a level", "cape": "7, 5, 3, 1", "eagle2": "50 nodes", "pct": "of the costs"}
PAPER_TREES = ("vct", "cape", "eagle2", "pct")  # by rising speedup in the paper's table 2, in 14 of its 16 cells


def fixed(document: Document) -> Row:
    """The row of the paper's draft length, of MEDUSA of as many tokens as it has heads."""
    wanted = HEADS if document["drafter_kind"] == "medusa" else PAPER_K
    return next(row for row in document["rows"] if row["policy"] == "fixed_k" and row["params"]["k"] == wanted)


def best(document: Document, *names: str) -> Row:
    """Of these policies' rows the one that was predicted best on the tuning prompts."""
    row = first_best(row for row in document["rows"] if row["policy"] in names)
    assert row is not None, f"none of {names} was run"
    return row


def chains(document: Document) -> list[str]:
    """Names of the chain policies that were run."""
    return sorted({row["policy"] for row in document["rows"]} - set(TREE_POLICIES))


def shown_chains(document: Document) -> list[Row]:
    """A drafter's rows that are shown: at the paper's draft length, and under its best chain policy if another."""
    usual, top = fixed(document), best(document, *chains(document))
    return [usual, top] if top["label"] != usual["label"] else [usual]


def drafters_table(documents: Mapping[str, Document]) -> list[str]:
    """Table 1: every drafter at the paper's draft length and under its best chain policy."""
    columns = [
        "drafter",
        "policy",
        "alpha = tau / K",
        "acceptance rate v_d",
        "tau",
        "from own rounds",
        "measured",
        "error %",
    ]
    rows = []
    for drafter, document in documents.items():
        for row in shown_chains(document):
            alpha = f"{row['tau'] / row['params']['k']:.2f}" if row["policy"] == "fixed_k" else ""
            numbers = (alpha, f"{row['v_d']:.3f}", f"{row['tau']:.2f}")
            cells = (interval_text(row["predicted"]), interval_text(row["measured"]), f"{row['error_percent']:+.1f}")
            rows.append([NAMES[drafter], row["label"], *numbers, *cells])
    return markdown_table(columns, rows)


def ladder_rows(documents: Mapping[str, Document]) -> list[tuple[str, Row]]:
    """Every drafter at the paper's draft length and under its best chain, and EDD's trees, by name."""
    found = []
    for drafter, document in documents.items():
        shown = shown_chains(document) + [row for row in document["rows"] if row["policy"] in TREES]
        found += [(f"{NAMES[drafter]}, {row['label']}", row) for row in shown]
    return found


def training_table(documents: Mapping[str, Document], facts: Mapping[str, Document]) -> list[str]:
    """What each drafter is and has seen, what a draft step costs, and how often its first token is right.

    facts : what the drafters' files say, by drafter
    """
    columns = ["drafter", "trained parameters", "tokens seen, M", "text", "s_d / s_t", "first token accepted %"]
    rows = []
    for drafter, document in documents.items():
        fact = facts[drafter]
        text = f"{fact['text']['corpus']}, {100 * fact['text']['generated_share']:.0f} % the target's own"
        cells = (f"{fact['parameters']:,}", f"{fact['tokens'] / 1e6:.2f}", text, f"{document['step_ratio']:.3f}")
        rows.append([NAMES[drafter], *cells, f"{100 * document['first_token_accepted_share']:.1f}"])
    return markdown_table(columns, rows)


def trees_table(document: Document, rounds: pd.DataFrame) -> list[str]:
    """Table 2: every candidate tree on EDD, with the best chain. rounds : all real rounds"""
    columns = [
        "tree",
        "policy",
        "tau",
        "drafted",
        "verified",
        "rounds truncated %",
        "v_d",
        "from own rounds",
        "measured",
    ]
    found = [("best chain", best(document, *chains(document)))]
    found += [(TREES[row["policy"]], row) for row in document["rows"] if row["policy"] in TREES]
    rows = []
    for name, row in found:
        mine = rounds[rounds["policy"] == row["label"]]
        cells = (f"{row['tau']:.2f}", *(f"{mine[key].mean():.1f}" for key in ("drafted", "verified")))
        speeds = (interval_text(row["predicted"]), interval_text(row["measured"]), f"{row['error_percent']:+.1f}")
        rows.append([name, row["label"], *cells, share_text(row), f"{row['v_d']:.3f}", *speeds])
    return markdown_table([*columns, "error %"], rows)


def paper_cost_table(board: Document) -> list[str]:
    """The same trees replayed at other costs, each policy's best form, with its difference to PCT."""
    tops = {name: row for name in TREES if (row := top(board, name)) is not None}
    rows = []
    for name, row in tops.items():
        gain = verdict(board_difference(board, row, tops["pct"])) if name != "pct" and "pct" in tops else ""
        cells = (f"{row['tau']:.2f}", f"{row['mean_draft_tokens']:.1f}", share_text(row))
        rows.append([TREES[name], row["label"], *cells, interval_text(row["speedup"]), gain])
    return markdown_table(["tree", "policy", "tau", "verified", "rounds truncated %", "speedup", "less PCT"], rows)


def top(board: Document, policy: str) -> Row | None:
    """The row of a board that is best of this policy's on the tuning prompts."""
    return first_best(row for row in board["rows"] if row["policy"] == policy)


def board_difference(board: Document, a: Row, b: Row) -> Comparison:
    """Speedup of one row of a board less that of another."""
    return paired_difference(board["baseline_s"], a["sequence_seconds"], b["sequence_seconds"])


def paper_form(board: Document, policy: str) -> Row | None:
    """The row of a board with this policy as the paper runs it."""
    rows = (row for row in board["rows"] if row["policy"] == policy and PAPER_FORMS[policy] in row["label"])
    return next(rows, None)


def compared(document: Document, first: Sequence[str], second: Sequence[str]) -> str:
    """How much faster the best form of the first policies really was than the best one of the second, in words."""
    return measured_verdict(document, best(document, *first), best(document, *second))


def acceptance_lengths_apart(a: tuple[Row, pd.DataFrame], b: tuple[Row, pd.DataFrame]) -> bool:
    """Whether the acceptance lengths of two rows differ significantly (95 %); each with its drafter's real rounds."""

    def counts(row: Row, rounds: pd.DataFrame) -> tuple[Any, Any]:
        mine = rounds[rounds["policy"] == row["label"]]
        return row["sequence_tokens"], mine.groupby("sequence_id").size().to_numpy()

    return ratio_difference(*counts(*a), *counts(*b)).significant


def speedups_apart(a: Document, b: Document, row_a: Row, row_b: Row) -> bool:
    """Whether the measured speedups of two rows differ, each over its own run's baseline.

    Significantly (95 %), and by more than the larger of the runs' noise floors.
    """
    key, base = "sequence_seconds", "autoregressive_sequence_seconds"
    floor = max(one["noise_floor_percent"] for one in (a, b))
    speedups = (sum(run[base]) / sum(row[key]) for run, row in ((a, row_a), (b, row_b)))
    separated = ratio_difference(a[base], row_a[key], b[base], row_b[key]).significant
    return separated and beyond_floor(floor, *speedups)
