"""When drafting ahead pays: `python -m studies ahead`.

Counts prepared outcomes on traces that ship with the package, prices them by a GPU's data sheet and a CPU's profile,
and varies the cost ratio.
"""

from __future__ import annotations

from pathlib import Path

from specsim.cost.files import read_cost
from specsim.cost.model import ConstantCost, CostModel
from specsim.learn.draft_ahead import DraftAhead, draft_ahead
from studies.ahead.report import Case, report
from studies.common import Config

RECORDED: tuple[str, ...] = ()  # no real run


def compared(trace: str, cost: CostModel, config: Config) -> DraftAhead:
    """Compare drafting ahead with plain speculation at these costs."""
    return draft_ahead(trace, cost, outcomes=config["outcomes"], seed=config["seed"])


def main(out: Path, config: Config) -> None:
    """Compare at all costs, and write the report."""
    cases = []
    for case in config["cases"]:
        result = compared(case["trace"], read_cost(case["cost"]), config)
        cases.append(Case(case["trace"], case["machine"], result))
    by_ratio = {
        trace: {ratio: compared(trace, ConstantCost(s_d=ratio, s_t=1.0), config) for ratio in config["ratios"]}
        for trace in dict.fromkeys(case["trace"] for case in config["cases"])
    }
    report(cases, by_ratio).write(out)
