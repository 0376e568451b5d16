"""The report on comparisons of versions: slowdowns found, and false alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specsim.report.table import Column
from studies.common import Config, Document
from studies.figures import dots
from studies.report import TENTH, Report, load_line, machine_line, median_load

Row = Mapping[str, Any]


def report(config: Config, machine: Document, comparisons: Sequence[Document]) -> Report:
    """Return the report. comparisons : of all cases, in any order"""
    by_case = {
        case["name"]: [document for document in comparisons if document["case"] == case["name"]]
        for case in config["cases"]
    }
    rows = [row_of(case, by_case[case["name"]]) for case in config["cases"]]
    built_in = [row for row in rows if row["percent"] == max(row["percent"] for row in rows)]
    equal = [row for row in rows if row["percent"] == 0]
    return Report(
        question="How small a slowdown does `realrun compare` find?",
        answer=f"In {config['minutes']:g} minutes it found {total(built_in, 'found')} of "
        f"{total(built_in, 'comparisons')} slowdowns of {built_in[0]['percent']:g} %. It called a version faster or "
        f"slower than itself in {total(equal, 'changes')} of {total(equal, 'comparisons')} comparisons.",
        figure=dots(
            [
                ("" if number else name, {row["label"]: row["slowdown_percent"] for row in document["rows"]})
                for name, documents in by_case.items()
                for number, document in enumerate(documents)
            ],
            "slowdowns",
            "Measured slowdowns",
            "change of the time per token, %, with the interval of the comparison; positive is slower",
            level=0,
        ),
        figure_name="slowdowns",
        caption="Measured change of the time per token in each comparison, by the slowdown built into the head",
        columns=[
            Column("slowdown built into the head", "case"),
            Column("comparisons", "comparisons"),
            Column("found slower", "found"),
            Column("any change reported", "changes"),
            Column("not decidable", "undecided"),
            Column("restarts", "restarts", TENTH),
            Column("minutes", "minutes", TENTH),
        ],
        shown=rows,
        table=[csv_row(document, row) for document in comparisons for row in document["rows"]],
        trust=[
            f"Prompts: {config['prompts']} of {config['max_new_tokens']} tokens, {config['mode']} decoding, "
            f"{config['policy']} with K = {config['settings']['k']}. A slowdown of drafting is a share of the whole "
            "round's time and leaves the baseline without speculation as it is.",
            machine_line(config, machine),
            f"{load_line({name: median_load(documents) for name, documents in by_case.items()})} Busy: another process "
            f"computes for {config['busy_s'][0]} to {config['busy_s'][1]} s and rests as long.",
            "Noise floor: within a restart, the time per token of a process has a standard deviation of "
            f"{100 * process_deviation(comparisons):.2f} % (A/A test: two processes of the base).",
            "Found slower: the verdict on the policy. Not decidable: at the end an interval still contains the limit "
            f"of {config['max_slowdown_percent']:g} %.",
        ],
    )


def row_of(case: Config, documents: Sequence[Document]) -> dict[str, Any]:
    """Count the verdicts of a case's comparisons."""
    verdicts = [[row["verdict"] for row in document["rows"]] for document in documents]
    return {
        "case": case["name"],
        "percent": case["percent"],
        "comparisons": len(documents),
        "found": sum(policy == "slower" for _, policy in verdicts),
        "changes": sum(bool({"slower", "faster"} & {*rows}) for rows in verdicts),
        "undecided": sum(any(row["exceeds"] is None for row in document["rows"]) for document in documents),
        "restarts": float(np.mean([document["restarts"] for document in documents])),
        "minutes": float(np.mean([document["spent_s"] for document in documents])) / 60,
    }


def total(rows: Sequence[Row], key: str) -> int:
    """Sum a column."""
    return sum(int(row[key]) for row in rows)


def process_deviation(comparisons: Sequence[Document]) -> float:
    """Compute by how much a process differs from another of the same version, as the logarithm's deviation."""
    tokens_ms = [np.array(row["restart_token_ms"]) for document in comparisons for row in document["rows"]]
    logs = np.concatenate([np.log(base) - np.log(null) for base, _, null in tokens_ms])
    return float(np.sqrt((logs**2).mean() / 2))


def csv_row(document: Document, row: Row) -> dict[str, Any]:
    """Return a row of table.csv."""
    keys = ("slowdown_percent", "null_percent", "verdict", "exceeds")
    named = {"case": document["case"], "policy": row["label"], "restarts": document["restarts"]}
    return {**named, **{key: row[key] for key in keys}}
