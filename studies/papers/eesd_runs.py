"""The rows of EESD's detailed tables 10 to 13, and what v_d and r_d say of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from studies.papers.record import slug
from studies.papers.tables import Interval, Row, read_table, stated

DETAILED = {"eesd_10": "gsm8k", "eesd_11": "xsum", "eesd_12": "humaneval", "eesd_13": "mt_bench"}
AUTOREGRESSIVE = "Auto-regressive"
BETA, CALI = "EESD (+Beta-TS)", "EESD (+Cali-TS)"
SHORT = {"Vanilla SD": "Vanilla", "Self SD": "Self-SD", "Medusa": "Medusa", BETA: "Beta-TS", CALI: "Cali-TS"}


class Run(NamedTuple):
    """One measured run: a method with its drafter, on one target and dataset."""

    dataset: str
    row: Row
    baseline: Row

    @property
    def target(self) -> str:
        return self.row["target"]

    @property
    def method(self) -> str:
        return self.row["method"]

    @property
    def arm(self) -> str:
        """The method, with its draft model where it has one."""
        drafter = self.row["drafter"]
        return SHORT[self.method] + ("" if drafter == "self" else f" {drafter}")

    @property
    def group(self) -> str:
        """The end of names of what is said of target and arm."""
        return slug(self.target, self.arm)

    @property
    def slug(self) -> str:
        """The end of names of what is said of this run."""
        return f"{slug(self.dataset)}.{self.group}"

    @property
    def size(self) -> str:
        return "70B" if "70B" in self.target else "13B"

    def __getattr__(self, column: str) -> float:
        return self.row.number(column)

    def intervals(self, *columns: str) -> tuple[Interval, ...]:
        return tuple(self.row.interval(column) for column in columns)


@cache
def runs() -> tuple[Run, ...]:
    """All runs with drafts, table by table."""
    found = []
    for table, dataset in DETAILED.items():
        rows = read_table(table).rows
        baselines: Mapping[str, Row] = {row["target"]: row for row in rows if row["method"] == AUTOREGRESSIVE}
        found += [Run(dataset, row, baselines[row["target"]]) for row in rows if row["method"] != AUTOREGRESSIVE]
    return tuple(found)


def run(dataset: str, target: str, method: str, drafter: str = "self") -> Run:
    """One of them."""
    key = (dataset, target, method, drafter)
    return next(one for one in runs() if (one.dataset, one.target, one.method, one.row["drafter"]) == key)


def output_tokens() -> float:
    """Tokens of each run, which all times are of."""
    return stated("eesd", "output_tokens").number("value")


def accepted_per_round(r_d: float) -> float:
    """Accepted tokens per round, of which one more is the target's own."""
    return r_d / (1 - r_d)


def drafted_per_round(v_d: float, r_d: float) -> float:
    return accepted_per_round(r_d) / v_d


def implied_cost_ratio(v_d: float, r_d: float, speedup: float) -> float:
    """T_d / T_t for which Eq. 14 gives this speedup."""
    return v_d * (1 / speedup - 1 + r_d) / r_d


def accept_prob(v_d: float, r_d: float) -> tuple[float, float]:
    """Chances that drafting continues and that a token is accepted, for i.i.d. acceptance and geometric lengths.

    The mean length is 1 / (1 - continue) and the mean number accepted accept / (1 - accept continue).
    """
    accepted = accepted_per_round(r_d)
    go_on = 1 - 1 / drafted_per_round(v_d, r_d)
    return go_on, accepted / (1 + accepted * go_on)
