"""The tables of the study, from plain documents of validations and boards; every number comes from the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from specsim.policy.registry import TREE_POLICIES
from specsim.report.markdown import markdown_table, verdict
from specsim.speedup.intervals import Comparison, interval_text, paired_difference, ratio_difference

Document = Mapping[str, Any]
Row = Mapping[str, Any]

PAPER_K, HEADS = 5, 4
MOST_NODES = 64  # verified on average in a pass at one price
NAMES = {"vdm": "VDM", "medusa-1": "MEDUSA-1", "eagle": "EAGLE", "edd": "EDD"}
TREES = {"vct": "VCT", "cape": "CAPE", "eagle2": "EAGLE-2", "pct": "PCT", "hardware_pct": "hardware-aware PCT"}
PAPER_DRAFTERS = ("medusa-1", "vdm", "eagle", "edd")  # by rising mean tau in the paper's table 1
PAPER_ABLATION = {  # speedups of table 3
    "EDD + PCT": 3.04,
    "without states": 2.58,
    "without KL": 2.86,
    "one block length": 2.95,
    "without expected time gain": 2.73,
    "leaves kept": 2.95,
}
PAPER_FORMS = {"vct": "10 a level", "cape": "7, 5, 3, 1", "eagle2": "50 nodes", "pct": "of the costs"}
PAPER_TREES = ("vct", "cape", "eagle2", "pct")  # by rising mean speedup in the paper's table 2


def fixed(document: Document) -> Row:
    """The row of the paper's draft length, of MEDUSA of as many tokens as it has heads."""
    wanted = HEADS if document["drafter_kind"] == "medusa" else PAPER_K
    return next(row for row in document["rows"] if row["policy"] == "fixed_k" and row["params"]["k"] == wanted)


def best(document: Document, *names: str) -> Row:
    """Of these policies' rows the one that was predicted best on the tuning prompts."""
    rows = (row for row in document["rows"] if row["policy"] in names)
    return max(rows, key=lambda row: float(row["train_speedup"]))


def chains(document: Document) -> list[str]:
    """Names of the chain policies that were run."""
    return sorted({row["policy"] for row in document["rows"]} - set(TREE_POLICIES))


def drafters_table(documents: Mapping[str, Document]) -> list[str]:
    """Table 1: every drafter at the paper's draft length and under its best chain policy."""
    columns = ["drafter", "policy", "alpha = tau / K", "acceptance rate v_d", "tau", "predicted", "measured", "error %"]
    rows = []
    for drafter, document in documents.items():
        usual = fixed(document)
        for row in (usual, best(document, *chains(document))):
            alpha = f"{row['tau'] / row['params']['k']:.2f}" if row["policy"] == "fixed_k" else ""
            numbers = (alpha, f"{row['v_d']:.3f}", f"{row['tau']:.2f}")
            cells = (interval_text(row["predicted"]), interval_text(row["measured"]), f"{row['error_percent']:+.1f}")
            rows.append([NAMES[drafter], row["label"], *numbers, *cells])
    return markdown_table(columns, rows)


def training_table(documents: Mapping[str, Document]) -> list[str]:
    """What each drafter is and has seen, what a draft step costs, and how often its first token is right."""
    columns = ["drafter", "trained parameters", "tokens seen, M", "text", "s_d / s_t", "first token accepted %"]
    rows = []
    for drafter, document in documents.items():
        fact = document["facts"]
        text = f"{fact['text']['corpus']}, {100 * fact['text']['generated_share']:.0f} % the target's own"
        cells = (f"{fact['parameters']:,}", f"{fact['tokens'] / 1e6:.2f}", text, f"{document['step_ratio']:.3f}")
        rows.append([NAMES[drafter], *cells, f"{100 * document['first_token_accepted_share']:.1f}"])
    return markdown_table(columns, rows)


def trees_table(document: Document, rounds: pd.DataFrame) -> list[str]:
    """Table 2: every candidate tree on EDD, with the best chain. rounds : all real rounds"""
    columns = ["tree", "policy", "tau", "drafted", "verified", "v_d", "predicted", "measured", "error %"]
    found = [("best chain", best(document, *chains(document)))]
    found += [(TREES[row["policy"]], row) for row in document["rows"] if row["policy"] in TREES]
    rows = []
    for name, row in found:
        mine = rounds[rounds["policy"] == row["label"]]
        cells = (f"{row['tau']:.2f}", *(f"{mine[key].mean():.1f}" for key in ("drafted", "verified")))
        speeds = (interval_text(row["predicted"]), interval_text(row["measured"]), f"{row['error_percent']:+.1f}")
        rows.append([name, row["label"], *cells, f"{row['v_d']:.3f}", *speeds])
    return markdown_table(columns, rows)


def paper_cost_table(board: Document) -> list[str]:
    """The same trees replayed at the paper's costs, each policy's best form, with its difference to PCT."""
    tops = {name: row for name in TREES if (row := top(board, name)) is not None}
    rows = []
    for name, row in tops.items():
        gain = verdict(board_difference(board, row, tops["pct"])) if name != "pct" else ""
        cells = (f"{row['tau']:.2f}", f"{row['mean_draft_tokens']:.1f}", f"{100 * row['truncated_share']:.1f}")
        rows.append([TREES[name], row["label"], *cells, interval_text(row["speedup"]), gain])
    return markdown_table(["tree", "policy", "tau", "verified", "truncated %", "speedup", "less PCT"], rows)


def top(board: Document, policy: str) -> Row | None:
    """The row of a board that was best of this policy's on the tuning prompts, of those that verify few enough nodes.

    The paper has one price for a pass, whatever it holds; VCT's full tree of 363 nodes would not fit (errata B11).
    """
    rows = [row for row in board["rows"] if row["policy"] == policy and row["mean_draft_tokens"] <= MOST_NODES]
    return max(rows, key=lambda row: row["train_speedup"], default=None)


def too_large(board: Document) -> str:
    """The forms of trees that `top` leaves out, in words."""
    rows = [row for row in board["rows"] if row["policy"] in TREES and row["mean_draft_tokens"] > MOST_NODES]
    texts = (f"{r['label']} ({r['mean_draft_tokens']:.0f} nodes, {r['speedup']['estimate']:.2f})" for r in rows)
    return "; ".join(texts) or "none"


def board_difference(board: Document, a: Row, b: Row) -> Comparison:
    """Speedup of one row of a board less that of another."""
    return paired_difference(board["baseline_s"], a["sequence_seconds"], b["sequence_seconds"])


def paper_form(board: Document, policy: str) -> Row:
    """The row of a board with this policy as the paper runs it."""
    return next(row for row in board["rows"] if row["policy"] == policy and PAPER_FORMS[policy] in row["label"])


def form(board: Document, policy: str, mark: str = "") -> Row:
    """The row of this policy with this among its settings; the first one by default."""
    return next(row for row in board["rows"] if row["policy"] == policy and mark in row["settings"])


def untuned(board: Document, policy: str, leaf: float) -> Row:
    """The untuned row of this policy with this threshold of leaves."""
    return next(
        row
        for row in board["rows"]
        if row["policy"] == policy and not row["tuned"] and row["params"]["leaf_threshold"] == leaf
    )


def ablation_table(rows: Mapping[str, Row], board: Document) -> list[str]:
    """Table 3. rows : what is left out -> row of a board, the whole first. board : one of theirs, for the baseline"""
    whole = next(iter(rows.values()))
    table = []
    for name, row in rows.items():
        gain = "" if row is whole else verdict(board_difference(board, row, whole))
        paper = f"{PAPER_ABLATION[name]:.2f}"
        cells = (f"{row['v_d']:.3f}", f"{row['tau']:.2f}", f"{100 * row['truncated_share']:.1f}")
        table.append([name, *cells, interval_text(row["speedup"]), gain, paper])
    columns = ["variant", "v_d", "tau", "truncated %", "speedup", "less the whole", "the paper's speedup"]
    return markdown_table(columns, table)


def sweep_table(rows: Mapping[int, Mapping[str, Row]], usual: int, board: Document) -> list[str]:
    """Figure 5 as numbers. rows : layers below the states -> what -> row of a board"""
    table = []
    for split, found in rows.items():
        cells = [str(split)]
        for what, row in found.items():
            gain = "" if split == usual else verdict(board_difference(board, row, rows[usual][what]))
            cells += [f"{row['tau']:.2f}", interval_text(row["speedup"]), gain]
        table.append(cells)
    columns = [f"{text}, {name}" for name in rows[usual] for text in ("tau", "speedup", f"less that of {usual}")]
    return markdown_table(["layers below", *columns], table)


def compared(document: Document, first: Sequence[str], second: Sequence[str]) -> Comparison:
    """How much faster the best form of the first policies really was than the best one of the second."""
    both = (best(document, *names)["sequence_seconds"] for names in (first, second))
    return paired_difference(document["autoregressive_sequence_seconds"], *both)


def acceptance_lengths_apart(a: tuple[Row, pd.DataFrame], b: tuple[Row, pd.DataFrame]) -> bool:
    """Whether the acceptance lengths of two rows differ significantly (95 %); each with its drafter's real rounds."""

    def counts(row: Row, rounds: pd.DataFrame) -> tuple[Any, Any]:
        mine = rounds[rounds["policy"] == row["label"]]
        return row["sequence_tokens"], mine.groupby("sequence_id").size().to_numpy()

    return ratio_difference(*counts(*a), *counts(*b)).separated


def speedups_apart(a: Document, b: Document, row_a: Row, row_b: Row) -> bool:
    """Whether the measured speedups of two rows differ significantly (95 %), each over its own run's baseline."""
    key, base = "sequence_seconds", "autoregressive_sequence_seconds"
    return ratio_difference(a[base], row_a[key], b[base], row_b[key]).separated


def order_of(
    values: Mapping[str, float],
    expected: Sequence[str],
    names: Mapping[str, str],
    apart: Callable[[str, str], bool],
    reason: str,
) -> str:
    """The order found, in words, and whether it is the paper's; the likely reason where it is not.

    apart : whether two of them differ significantly (95 %); ~ stands between neighbours that do not
    """
    ours = [name for name in expected if name in values]
    found = sorted(ours, key=lambda name: values[name])
    text = "".join(
        f"{names[name]} ({values[name]:.2f})" + (" < " if apart(name, after) else " ~ ")
        for name, after in pairwise(found)
    )
    text += f"{names[found[-1]]} ({values[found[-1]]:.2f})"
    if found == ours:
        return f"{text}; as in the paper."
    paper = f"{text}; the paper has {' < '.join(names[name] for name in ours)}"
    turned = [(b, a) for i, a in enumerate(ours) for b in ours[i + 1 :] if values[a] > values[b] and apart(a, b)]
    if not turned:
        return f"{paper}, and no two that stand the other way differ significantly (95 %)."
    pairs = ", ".join(f"{names[low]} below {names[high]}" for low, high in turned)
    return f"{paper}; significantly different (95 %): {pairs}. {reason}"
