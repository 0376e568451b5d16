"""Acceptance rates of a static tree's nodes: how often the candidate of each rank is right at each depth."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.trace.trace import Trace

RANKS = 10  # candidates per depth that rates are counted for
CURE = "ranks exclude each other, so give the differences: top1, top2 - top1, ..."


SUM_SLACK = 1e-9  # by which the sum of the rates of a depth may exceed 1


def rates_of(trace: Trace, ranks: int = RANKS) -> Floats:
    """Rates [D, ranks] of a trace: how often the target's token has each rank, by depth.

    Counted over the positions whose earlier tokens were all among these ranks, since no tree
    that goes so deep could hold the others: rates by depth, as Sequoia's positional acceptance
    (Chen et al. 2024), but given that the round got so far. All 0 beyond what is recorded.
    """
    if trace.true_rank is None:
        raise InputError("the trace has no column true_rank, from which trees are learned; record it again")
    rates = np.zeros((trace.depth, ranks))
    reached = np.ones(len(trace.true_rank), dtype=bool)
    for depth, rank in enumerate(trace.true_rank.T):
        reached = reached & (rank >= 0)
        count = np.bincount(np.minimum(rank[reached], ranks), minlength=ranks)[:ranks]
        rates[depth] = count / max(reached.sum(), 1)
        reached = reached & (rank < ranks)
    return rates


def read_rates(path: Path) -> Floats:
    """Rates [K, R] from a CSV file: a line per depth, a column per rank, such as

        depth,top1,top2,top3
        1,0.61,0.12,0.06
        2,0.48,0.11,0.06

    The header may be missing, and then the depth column is, too. InputError says where it is malformed.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [
                (number, line) for number, line in enumerate(csv.reader(file), start=1) if any(map(str.strip, line))
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no CSV text ({error}); give lines of rates, such as 0.61,0.12,0.06") from None
    if lines and not _is_number(lines[0][1][0]):
        header = [cell.strip().lower() for cell in lines.pop(0)[1]]
        if header[0] != "depth":
            raise InputError(f"{path}: the header starts with {header[0]!r}; write depth,top1,top2,... or leave it out")
        for wanted, (number, line) in enumerate(lines, start=1):
            if not _is_number(line[0]) or float(line[0]) != wanted:
                raise InputError(f"{path}, line {number}: depth {line[0]!r} where {wanted} is due; count from 1")
        lines = [(number, line[1:]) for number, line in lines]
    if not lines or not lines[0][1]:
        raise InputError(f"{path} has no rates; give a line per depth, such as 0.61,0.12,0.06")
    for number, line in lines:
        if len(line) != len(lines[0][1]):
            raise InputError(f"{path}, line {number}: {len(line)} rates where the first line has {len(lines[0][1])}")
        for cell in line:
            if not _is_number(cell):
                raise InputError(f"{path}, line {number}: {cell!r} is not a number; give a rate from 0 to 1")
    rates = np.array([[float(cell) for cell in line] for _, line in lines])
    check_rates(rates, str(path))
    # A list of ranks by probability falls along every row; top-k accuracies as trainers log them rise.
    if rates.shape[1] > 1 and (np.diff(rates, axis=1) >= 0).all() and (np.diff(rates, axis=1) > 0).any():
        raise InputError(f"{path}: rates rise from rank to rank in every line, as cumulative top-k accuracies; {CURE}")
    return rates


def check_rates(rates: Floats, where: str) -> None:
    """InputError unless these are chances [K, R] of exclusive events in every row."""
    if rates.ndim != 2 or 0 in rates.shape:
        raise InputError(f"{where}: an array of shape {rates.shape}; give a row per depth, a column per rank")
    for depth, row in enumerate(rates, start=1):
        if not ((row >= 0) & (row <= 1)).all():  # also catches NaN
            raise InputError(f"{where}: a rate at depth {depth} is outside [0, 1]; give shares, not percent")
        if row.sum() > 1 + SUM_SLACK:
            raise InputError(
                f"{where}: the rates at depth {depth} sum to {row.sum():.6g}, as cumulative top-k accuracies; {CURE}"
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
