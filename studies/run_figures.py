"""What figures that several studies print of a real run are evaluated from."""

from __future__ import annotations

from typing import Any

from studies.printed import LADDER, Figure

Subject = dict[str, Any]
BASELINE = ["autoregressive_sequence_seconds"]
SHARES = ("rounds truncated %", "first token accepted %")  # printed in percent, recorded as shares
OF_ROW = {
    "predicted": "predicted",
    "error %": "error_percent",
    "rounds identical %": "rounds_identical_percent",
    "rounds truncated %": "truncated_share",
    "v_d": "v_d",
    "r_d": "r_d",
    "HM": "hm",
    "tau": "tau",
}
OF_LADDER = {"Eq. 14": "eq14", "constant": "constant", "profile": "profile"}
OF_RUN = {
    "null arm": ["null_arm"],
    "noise floor %": ["noise_floor_percent"],
    "median error % (target 3)": ["median_abs_error_percent"],
    "90th percentile % (target 5)": ["p90_abs_error_percent"],
    "below the measured best by %": ["best", "loss_percent"],
}


def is_median_of_ladder(figure: Figure) -> bool:
    return figure.row.get(LADDER) == "median error"


MEDIAN = "a quantile over rows, each of which is claimed"


def of_row(document: str, label: str, column: str) -> Subject:
    """A figure of a validation's row; what was measured is summed again."""
    row = ["rows", {"label": label}]
    if column == "measured":
        return {"document": document, "at": BASELINE, "over": [*row, "sequence_seconds"]}
    if column in OF_LADDER:
        return {"document": document, "at": [*row, "ladder", OF_LADDER[column]]}
    return {"document": document, "at": [*row, OF_ROW[column]]}


def measured_difference(document: str, first: str, second: str) -> Subject:
    """Measured speedup of one row less that of another, by label."""
    rows = [{"at": BASELINE, "over": ["rows", {"label": label}, "sequence_seconds"]} for label in (first, second)]
    return {"document": document, "difference": rows}
