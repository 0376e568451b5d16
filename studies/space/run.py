"""SPACE on the lab: `python -m studies space`.

Validates every k (recorded, profiled, predicted, really decoded on this machine) beside policies that verify
fewer of the candidates, and replays the same trace where a pass costs the same whatever its size. A second start
goes on with what is there. What SAR-SFT does to the target is in studies/training.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from specsim.cli.console import progress_bar
from specsim.cost.model import ConstantCost
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.registry import POLICIES
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import read_trace
from studies.common import REPLAYED, Config, Document, cached, claim, parts, run_title, validation
from studies.space.report import report

FREE = "free_passes.json"
RECORDED = ("config.json", *(f"*/{name}" for name in (REPLAYED, FREE, "profile.json")))
DRAFTER = "space"


class EveryK(SpaceK):
    """Every k that the target was trained for."""

    name = "space_k"
    variants = tuple(Variant(f"k = {k}", {"k": k}, tuned=False) for k in range(1, 6))


def free_passes(folder: Path, config: Config) -> Document:
    """Return the speedup of every k on the held-out prompts if a pass of any size took one step."""
    _, holdout = parts(read_trace(folder / "trace"), config)
    priced = PricedTrace(holdout, ConstantCost(1e-9, 1.0))
    seconds = {k: priced.replay(SpaceK(k)).speculative_s for k in range(1, config["masks"] + 1)}
    return {str(k): ratio_interval(priced.baseline_s, own).as_dict() for k, own in seconds.items()}


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    kinds: tuple[type[Policy], ...] = (EveryK, *(POLICIES[name] for name in config["others"]))
    one_pass = {**config, "depth": config["masks"]}
    runs, free = {}, {}
    with progress_bar() as progress:
        for run in config["runs"]:
            folder = out / run["name"]
            runs[run_title(run)] = validation(folder, DRAFTER, kinds, run, one_pass, progress)
            free[run_title(run)] = cached(folder / FREE, partial(free_passes, folder, config))
    report(config, runs, free).write(out)
