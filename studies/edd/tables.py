"""The tables of the study, from plain documents of validations and boards; every number comes from the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specsim.bootstrap import Comparison, paired_difference
from specsim.policy import TREE_POLICIES
from specsim.report.markdown import interval, markdown_table, verdict

Document = Mapping[str, Any]
Row = Mapping[str, Any]

TARGET_PERCENT = 5.0  # median error of predictions
PAPER_K, HEADS = 5, 4
MOST_NODES = 64  # verified in a pass at one price
NAMES = {"vdm": "VDM", "medusa-1": "MEDUSA-1", "eagle": "EAGLE", "edd": "EDD"}
TREES = {"vct": "VCT", "cape": "CAPE", "eagle2": "EAGLE-2", "pct": "PCT", "hardware_pct": "hardware-aware PCT"}
PAPER_DRAFTERS = ("medusa-1", "vdm", "eagle", "edd")  # by rising mean tau in the paper's table 1
PAPER_FORMS = {"vct": "10 a level", "cape": "7, 5, 3, 1", "eagle2": "50 nodes", "pct": "of the costs"}
PAPER_TREES = ("vct", "cape", "eagle2", "pct")  # by rising mean speedup in the paper's table 2


def fixed(document: Document) -> Row:
    """The row of the paper's draft length, of MEDUSA of as many tokens as it has heads."""
    wanted = HEADS if document["drafter_kind"] == "medusa" else PAPER_K
    return next(row for row in document["rows"] if row["policy"] == "fixed_k" and row["params"]["k"] == wanted)


def best(document: Document, *names: str) -> Row | None:
    """Of these policies' rows the one predicted best."""
    rows = [row for row in document["rows"] if row["policy"] in names]
    return max(rows, key=lambda row: row["predicted"]["estimate"], default=None)


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
            assert row is not None
            alpha = f"{row['tau'] / row['params']['k']:.2f}" if row["policy"] == "fixed_k" else ""
            numbers = (alpha, f"{row['v_d']:.3f}", f"{row['tau']:.2f}")
            cells = (interval(row["predicted"]), interval(row["measured"]), f"{row['error_percent']:+.1f}")
            rows.append([NAMES[drafter], row["label"], *numbers, *cells])
    return markdown_table(columns, rows)


def training_table(documents: Mapping[str, Document]) -> list[str]:
    """What each drafter is and has seen, and what a draft step costs."""
    columns = ["drafter", "trained parameters", "tokens seen, M", "text", "s_d / s_t", "held out"]
    rows = []
    for drafter, document in documents.items():
        fact = document["facts"]
        held = ", ".join(f"{key} {value:.3f}" for key, value in fact["held_out"]["end"].items())
        text = f"{fact['text']['corpus']}, {100 * fact['text']['generated_share']:.0f} % the target's own"
        cells = (f"{fact['parameters']:,}", f"{fact['tokens'] / 1e6:.2f}", text, f"{document['step_ratio']:.3f}")
        rows.append([NAMES[drafter], *cells, held])
    return markdown_table(columns, rows)


def trees_table(document: Document, rounds: pd.DataFrame) -> list[str]:
    """Table 2: every candidate tree on EDD, with the best chain. rounds : all real rounds"""
    columns = ["tree", "policy", "tau", "drafted", "verified", "v_d", "predicted", "measured", "error %"]
    found = [("best chain", best(document, *chains(document)))]
    found += [(TREES[row["policy"]], row) for row in document["rows"] if row["policy"] in TREES]
    rows = []
    for name, row in found:
        assert row is not None
        mine = rounds[rounds["policy"] == row["label"]]
        cells = (f"{row['tau']:.2f}", *(f"{mine[key].mean():.1f}" for key in ("drafted", "verified")))
        speeds = (interval(row["predicted"]), interval(row["measured"]), f"{row['error_percent']:+.1f}")
        rows.append([name, row["label"], *cells, f"{row['v_d']:.3f}", *speeds])
    return markdown_table(columns, rows)


def paper_cost_table(board: Document) -> list[str]:
    """The same trees replayed at the paper's costs, each policy's best form, with its difference to PCT."""
    tops = {name: top(board, name) for name in TREES}
    pct = tops["pct"]
    assert pct is not None
    rows = []
    for name, row in tops.items():
        if row is None:
            continue
        gain = None
        if name != "pct":
            gain = paired_difference(board["baseline_s"], row["sequence_seconds"], pct["sequence_seconds"])
        cells = (f"{row['tau']:.2f}", f"{row['mean_draft_tokens']:.1f}", interval(row["speedup"]), verdict(gain))
        rows.append([TREES[name], row["label"], *cells])
    return markdown_table(["tree", "policy", "tau", "verified", "speedup", "less PCT"], rows)


def top(board: Document, policy: str) -> Row | None:
    """The row of a board that is best of this policy's, of those that verify few enough nodes.

    The paper has one price for a pass, whatever it holds; VCT's full tree of 363 nodes would not fit (ERRATA B11).
    """
    rows = [row for row in board["rows"] if row["policy"] == policy and row["mean_draft_tokens"] <= MOST_NODES]
    return max(rows, key=lambda row: row["speedup"]["estimate"], default=None)


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


def ablation_table(rows: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Table 3. rows : what is left out -> costs -> the row of a board"""
    first = next(iter(rows.values()))
    table = []
    for name, by_cost in rows.items():
        cells = [name]
        for row in by_cost.values():
            cells += [f"{row['v_d']:.3f}", f"{row['tau']:.2f}", interval(row["speedup"])]
        table.append(cells)
    columns = [f"{what}, {costs}" for costs in first for what in ("v_d", "tau", "speedup")]
    return markdown_table(["variant", *columns], table)


def sweep_table(rows: Mapping[int, Mapping[str, Row]]) -> list[str]:
    """Figure 5 as numbers. rows : layers below the states -> what -> row of a board"""
    first = next(iter(rows.values()))
    table = [
        [str(split), *(text for row in found.values() for text in (f"{row['tau']:.2f}", interval(row["speedup"])))]
        for split, found in rows.items()
    ]
    return markdown_table(
        ["layers below", *(f"{what}, {name}" for name in first for what in ("tau", "speedup"))], table
    )


def median_error_percent(documents: Sequence[Document]) -> float:
    """Median absolute error of the predictions of all rows."""
    return float(np.median([abs(row["error_percent"]) for document in documents for row in document["rows"]]))


def compared(document: Document, first: str, second: str) -> Comparison | None:
    """How much faster the best of the first policy really was than the best of the second."""
    a, b = best(document, first), best(document, second)
    if a is None or b is None:
        return None
    both = (a["sequence_seconds"], b["sequence_seconds"])
    return paired_difference(document["autoregressive_sequence_seconds"], *both)


def order_of(values: Mapping[str, float], expected: Sequence[str], names: Mapping[str, str], reason: str) -> str:
    """The order found, in words, and whether it is the paper's; the likely reason where it is not."""
    found = sorted((name for name in expected if name in values), key=lambda name: values[name])
    text = " < ".join(f"{names[name]} ({values[name]:.2f})" for name in found)
    if found == [name for name in expected if name in values]:
        return f"{text}; as in the paper."
    return f"{text}; the paper has {' < '.join(names[name] for name in expected)}. {reason}"
