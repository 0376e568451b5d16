"""What the studies' reports say alike: what the target is, which order was found, and what is not compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy.typing as npt

from realrun.pairs.pair import LAB_DEEP
from specsim.report.markdown import verdict
from specsim.speedup.intervals import Comparison, beyond_floor, paired_difference, ratio_interval
from studies.common import MOST_TRUNCATED, Config
from studies.costs import MOST_NODES

Row = Mapping[str, Any]
Told = Callable[[str, str], bool]  # whether two of several differ significantly (95 %)


def is_deepened(config: Config) -> bool:
    """Whether the study's target is the lab's with blocks added that pass their input on."""
    return str(config["target"]).partition(":")[0] == LAB_DEEP


def about_target(config: Config) -> str:
    """What the target is, in words that begin a paragraph."""
    if not is_deepened(config):
        return f"The target is {config['target']}."
    return (
        f"The target, {config['target']}, is the lab's, deepened by blocks that pass their input on: it has the "
        "acceptance of the trained model and the cost of a deep one."
    )


EESD = "eesd"


def has_uneven_blocks(config: Config, document: Mapping[str, Any]) -> bool:
    """Whether this was recorded while all identity blocks of the lab's deepened target stood behind its fourth layer.

    Costs of drafters that run some of the target's layers do not hold for the target as it is now.
    """
    return is_deepened(config) and "core_layers" not in (document.get("block_expansion") or {})


def about_uneven_blocks(config: Config, document: Mapping[str, Any]) -> str:
    """What is withdrawn of such a run and why; nothing of others."""
    if not has_uneven_blocks(config, document):
        return ""
    return (
        "EESD's speedups are withdrawn, though its predictions count below: all identity blocks stood behind layer 4 "
        "when this was recorded, so that its exit after 2 of 8 trained layers cost 2 of 40, 5 % of the target for the "
        "quality of 25 %. Self-SD was left out, because skipping identity blocks was free. Blocks are spread evenly "
        "since. "
    )


def without_withdrawn(config: Config, board: Config) -> Config:
    """The board without the rows of a drafter whose costs do not hold."""
    if not has_uneven_blocks(config, board):
        return board
    rows = [row for row in board["rows"] if row["drafter"] != EESD]
    return {**board, "rows": rows, "drafters": [drafter for drafter in board["drafters"] if drafter["name"] != EESD]}


def ordered(values: Mapping[str, float], names: Mapping[str, str], apart: Told) -> str:
    """All by rising value, < between neighbours that differ significantly and ~ between those that do not."""
    found = sorted(values, key=lambda name: values[name])
    text = "".join(
        f"{names[name]} ({values[name]:.2f})" + (" < " if apart(name, after) else " ~ ")
        for name, after in pairwise(found)
    )
    return text + f"{names[found[-1]]} ({values[found[-1]]:.2f})"


def order_of(values: Mapping[str, float], expected: Sequence[str], names: Mapping[str, str], apart: Told) -> str:
    """The order found, and whether it is the paper's.

    It is only where all neighbours of the paper's order differ significantly, that way round; it is not where any two
    differ significantly the other way round; else it is not decided.

    expected : the paper's order, by rising value, with perhaps more names than were run
    """
    ours = [name for name in expected if name in values]
    if len(ours) < 2:
        return "too few are compared for an order."
    text = ordered({name: values[name] for name in ours}, names, apart)
    paper = " < ".join(names[name] for name in ours)
    turned = [(b, a) for a, b in combinations(ours, 2) if values[a] > values[b] and apart(a, b)]
    if turned:
        pairs = ", ".join(f"{names[low]} below {names[high]}" for low, high in turned)
        return f"{text}; not as in the paper, which has {paper}: {pairs}."
    alike = [(a, b) for a, b in pairwise(ours) if not apart(a, b)]
    if alike:
        pairs = ", ".join(f"{names[a]} and {names[b]}" for a, b in alike)
        return f"{text}; not decided whether as in the paper, which has {paper}: {pairs} do not differ significantly."
    return f"{text}; as in the paper."


def highest(values: Mapping[str, float], expected: str, names: Mapping[str, str], apart: Told) -> str:
    """Which is highest, with all that do not differ significantly from it, and whether it is the paper's."""
    top = max(values, key=lambda name: values[name])
    found = [name for name in values if name == top or not apart(name, top)]
    text = ", ".join(names[name] for name in found)
    if found == [expected]:
        return f"{text}, as in the paper"
    word = "not decided whether" if expected in found else "not"
    return f"{text}; {word} as in the paper, which has {names[expected]}"


def measured_difference(document: Config, a: Row, b: Row) -> Comparison:
    """Speedup of one row of a validation less that of another, as measured."""
    own = (row["sequence_seconds"] for row in (a, b))
    return paired_difference(document["autoregressive_sequence_seconds"], *own)


def told_apart(document: Config, a: Row, b: Row) -> bool:
    """Whether two measured rows differ, significantly (95 %) and by more than the noise floor."""
    both = (row["measured"]["estimate"] for row in (a, b))
    return measured_difference(document, a, b).significant and beyond_floor(document["noise_floor_percent"], *both)


def measured_verdict(document: Config, a: Row | None, b: Row | None) -> str:
    """Measured speedup of one row less that of another and what it says; below the noise floor nothing is resolved."""
    if a is None or b is None:
        return "not really run"
    difference = measured_difference(document, a, b)
    text = verdict(difference)
    if not difference.significant or told_apart(document, a, b):
        return text
    return f"{text[: text.index(']') + 1]} below the noise floor"


REPLAYED_ORDERS = (
    "An order is called the paper's only where all its neighbours differ significantly (95 %, each pair for itself), "
    "and not decided where they do not; < stands between what the prompts tell apart, ~ where they do not."
)
ORDERS = f"{REPLAYED_ORDERS} Measured speedups differ only where they do by more than the noise floor, too."


def above_one(seconds: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]) -> list[bool]:
    """Of each of these speedups whether it is above 1, with 95 % confidence for all of them together.

    Each interval is of confidence 1 - 0.05 / n of n (Bonferroni's inequality; Dunn 1961, Multiple Comparisons Among
    Means, J. Am. Stat. Assoc. 56), so that the best of several is not favoured by there being several.

    seconds : of the baseline and of the row, per sequence [S]
    """
    confidence = 1 - 0.05 / max(len(seconds), 1)
    return [ratio_interval(base, own, confidence=confidence, repeats=20_000).low > 1 for base, own in seconds]


def share_text(row: Row) -> str:
    """The share of a row's rounds that the record truncates, in percent."""
    return f"{100 * row['truncated_share']:.2f}"


def truncated_rows(names: Sequence[str]) -> list[str]:
    """Which rows are left out as their rounds are truncated; nothing of none."""
    if not names:
        return []
    percent = 100 * MOST_TRUNCATED
    why = f"Left out, as more than {percent:g} % of their rounds ask for nodes that were not recorded:"
    return [f"{why} {'; '.join(names)}.", ""]


def not_compared(board: Config, priced: str = "") -> list[str]:
    """What is not on a board and why. priced : the costs' name, where they do not cover larger trees"""
    cut = [f"{one['policy']} ({100 * one['truncated_share']:.1f} %)" for one in board.get("left_out", ())]
    larger = "costs cover trees of up to"
    large = [one["policy"] for one in board["skipped"] if priced and larger in one["reason"]]
    other = [one for one in board["skipped"] if one["policy"] not in large]
    lines = []
    lines += truncated_rows(cut)
    if large:
        lines += [
            f"Not compared at {priced}, as they may verify more than {MOST_NODES} nodes: {'; '.join(large)}.",
            "",
        ]
    if other:
        lines += [f"Not on this board: {'; '.join(one['policy'] + ': ' + one['reason'] for one in other)}.", ""]
    return lines


def first_best(rows: Iterable[Row]) -> Row | None:
    """The row that is best on the tuning prompts, so that the reported ones do not flatter it; None of none."""
    return max(rows, key=lambda row: float(row["train_speedup"]), default=None)
