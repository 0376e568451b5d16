"""Runs of EESD's detailed tables 10 to 13, and what v_d and r_d imply about a run."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from studies.papers.record import slug
from studies.papers.tables import Row, read_table, stated

DETAILED = {"eesd_10": "gsm8k", "eesd_11": "xsum", "eesd_12": "humaneval", "eesd_13": "mt_bench"}
AUTOREGRESSIVE = "Auto-regressive"
BETA, CALI = "EESD (+Beta-TS)", "EESD (+Cali-TS)"
SHORT = {"Vanilla SD": "Vanilla", "Self SD": "Self-SD", "Medusa": "Medusa", BETA: "Beta-TS", CALI: "Cali-TS"}


class Run(NamedTuple):
    """One measured run: a method with its drafter on a target model and data set."""

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
        """Short name of the method, with its draft model if it has one."""
        drafter = self.row["drafter"]
        return SHORT[self.method] + ("" if drafter == "self" else f" {drafter}")

    @property
    def group(self) -> str:
        """End of the names of findings about target and arm."""
        return slug(self.target, self.arm)

    @property
    def slug(self) -> str:
        """End of the names of findings about this run."""
        return f"{slug(self.dataset)}.{self.group}"

    @property
    def size(self) -> str:
        return "70B" if "70B" in self.target else "13B"

    def __getattr__(self, column: str) -> float:
        return self.row.number(column)

    def cells(self, *columns: str) -> tuple[str, ...]:
        return tuple(self.row[column] for column in columns)

    @property
    def drafted(self) -> float:
        """Drafted tokens per round."""
        return drafted_per_round(self.v_d, self.r_d)

    @property
    def cost_ratio(self) -> float:
        """T_d / T_t for which Eq. 14 gives the printed speedup."""
        return implied_cost_ratio(self.v_d, self.r_d, self.speedup)

    @property
    def accept_prob(self) -> tuple[float, float]:
        """Probabilities that drafting continues and that a token is accepted: i.i.d. acceptance, geometric lengths.

        The mean length is 1 / (1 - continue), the mean number of accepted tokens accept / (1 - accept continue).
        """
        accepted = accepted_per_round(self.r_d)
        go_on = 1 - 1 / self.drafted
        return go_on, accepted / (1 + accepted * go_on)


@cache
def runs() -> tuple[Run, ...]:
    """All runs with speculation, table by table."""
    drafting = []
    for table, dataset in DETAILED.items():
        rows = read_table(table).rows
        baselines = {row["target"]: row for row in rows if row["method"] == AUTOREGRESSIVE}
        drafting += [Run(dataset, row, baselines[row["target"]]) for row in rows if row["method"] != AUTOREGRESSIVE]
    return tuple(drafting)


def find_run(dataset: str, target: str, method: str, drafter: str = "self") -> Run:
    """The run of this data set, target, method and drafter."""
    key = (dataset, target, method, drafter)
    return next(run for run in runs() if (run.dataset, *run.cells("target", "method", "drafter")) == key)


def output_tokens() -> float:
    """Output tokens of every run."""
    return stated("eesd", "output_tokens").number("value")


def accepted_per_round(r_d: float) -> float:
    """Accepted tokens per round, which also emits a token of the target."""
    return r_d / (1 - r_d)


def drafted_per_round(v_d: float, r_d: float) -> float:
    return accepted_per_round(r_d) / v_d


def implied_cost_ratio(v_d: float, r_d: float, speedup: float) -> float:
    """T_d / T_t for which Eq. 14 gives this speedup."""
    return v_d * (1 / speedup - 1 + r_d) / r_d
