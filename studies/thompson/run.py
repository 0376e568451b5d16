"""Thompson sampling of draft lengths against a fixed K: `python -m studies thompson`.

Records the drafter of config.toml with greedy and with sampled drafts, and replays fixed, geometric and learned draft
lengths on the recorded prompts, and on synthetic prompts of growing spread that accept as greedy drafts do in the mean,
at a CPU's measured costs and at a GPU's. A second start goes on with what is there.
"""

from __future__ import annotations

from pathlib import Path

from specsim.acceptance.generate import generate
from specsim.cli.console import progress_bar
from specsim.cost.model import CostModel
from specsim.replaying.priced import PricedTrace
from studies.common import Config, Document, cached, claim, gpu_costs, load, parts, recorded, smollm2_costs
from studies.thompson.gains import PerPrompt, comparison
from studies.thompson.report import CPU, GPU, report

FOUND = "found.json"  # all comparisons, of which the report is made
RECORDED = ("config.json", FOUND)


def synthetic(mean: float, spread: float, cost: CostModel, config: Config) -> Document:
    """Compare on synthetic prompts, of which as many are tuned on as reported on."""
    sizes = config["synthetic"]["prompts"], config["max_new_tokens"], config["depth"]
    seeds = config["seed"], config["seed"] + 1
    train, held = (PricedTrace(generate(PerPrompt(mean, spread), *sizes, seed), cost) for seed in seeds)
    return comparison(train, held, config)


def find(out: Path, config: Config) -> Document:
    """Return all that the report is made of: comparisons by costs, and by costs and spread."""
    measured, source = smollm2_costs()
    costs = {CPU: measured, GPU: gpu_costs(config["gpu"])}
    with progress_bar() as progress:
        traces = recorded(out, load(config, config["drafter"]), config, config, progress)
        trace = next(iter(traces.values()))
        mean, spreads = PerPrompt.fit(trace).mean, config["synthetic"]["spreads"]
        found: Document = {"recorded": {}, "synthetic": {}}
        for name, cost in costs.items():
            found["recorded"][name] = {
                mode: comparison(*(PricedTrace(part, cost) for part in parts(drafted, config)), config)
                for mode, drafted in traces.items()
            }
            of_spreads = found["synthetic"].setdefault(name, {})
            for done, spread in enumerate(spreads, start=1):
                of_spreads[f"{spread:g}"] = synthetic(mean, spread, cost, config)
                progress(f"synthetic, {name}", done, len(spreads))
    return {**found, "environment": trace.meta["provenance"], "dtype": trace.meta["dtype"], "load": source["load"]}


def main(out: Path, config: Config) -> None:
    """Run what is not there yet and write the report."""
    claim(out, config)
    report(config, cached(out / FOUND, lambda: find(out, config))).write(out)
