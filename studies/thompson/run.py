"""Thompson sampling of draft lengths against a fixed K: `python -m studies thompson`.

Records each drafter of config.toml in each way of decoding, measures what its rounds cost, and replays fixed, geometric
and learned draft lengths on all prompts, on the least and most accepting of them, and on synthetic prompts of
growing spread. A second start goes on with what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

from specsim.acceptance.generate import generate
from specsim.cli.console import progress_bar
from specsim.cost.files import read_cost
from specsim.cost.model import ConstantCost, CostModel
from specsim.io.progress import Progress
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from studies.common import Config, Document, cached, claim, load, middle_too, named, parts, profiled, recorded
from studies.thompson import gains
from studies.thompson.gains import PerPrompt
from studies.thompson.report import ALL, CHEAP, EXTREME, MEASURED_COSTS, report

FOUND = "found.json"  # all comparisons, of which the report is made
RECORDED = ("config.json", FOUND)


def costs_of(folder: Path, config: Config) -> dict[str, CostModel]:
    """Return the cost models by name; the measured costs lie in the folder."""
    return {MEASURED_COSTS: read_cost(folder / "profile.json"), CHEAP: ConstantCost(config["cost_ratio"] * 1e-2, 1e-2)}


def compared(done: Path, prompts: Callable[[], tuple[PricedTrace, PricedTrace]], config: Config) -> Document:
    """The comparison of draft lengths on prompts to tune on and to report on; read where it is there."""
    return cached(done, lambda: gains.comparison(*prompts(), config))


def recordings(out: Path, config: Config, progress: Progress) -> dict[tuple[str, str], tuple[Path, Trace]]:
    """Folder and trace of every run and drafter, with a profile in the folder."""
    pairs = {drafter: load(config, drafter) for drafter in config["drafters"]}
    recorded_in = {}
    for run, drafter in product(config["runs"], pairs):
        folder = out / run["name"] / drafter
        pair, of_drafter = pairs[drafter], named(progress, drafter)
        trace = recorded(folder / "trace", pair, run, config, of_drafter)
        profiled(folder / "profile.json", lambda pair=pair: pair, trace, of_drafter, contexts=middle_too(trace))  # type: ignore[misc]
        recorded_in[run["name"], drafter] = folder, trace
    return recorded_in


def on_records(folder: Path, trace: Trace, config: Config) -> Iterator[tuple[str, str, Document]]:
    """Yield the comparisons on a recording, each with the names of its costs and its pool."""

    def prompts(pool: str, cost: CostModel) -> tuple[PricedTrace, PricedTrace]:
        train, held = (PricedTrace(part, cost) for part in parts(trace, config))
        if pool == ALL:
            return train, held
        least_and_most = (part.select(gains.extremes(part.trace, config["extreme_share"])) for part in (train, held))
        return next(least_and_most), next(least_and_most)

    for (name, cost), pool in product(costs_of(folder, config).items(), (ALL, EXTREME)):
        done = folder / f"{name} {pool}.json".replace(" ", "-")
        yield name, pool, compared(done, partial(prompts, pool, cost), config)


def on_synthetic(
    folder: Path, mean: float, config: Config, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, float, Document]]:
    """Yield the comparisons on synthetic prompts of this mean acceptance, each with its cost's name and its spread."""
    wanted = config["synthetic"]

    def prompts(spread: float, cost: CostModel, seed: int) -> PricedTrace:
        model = PerPrompt(mean, spread)
        return PricedTrace(generate(model, wanted["prompts"], config["max_new_tokens"], config["depth"], seed), cost)

    def both(spread: float, cost: CostModel) -> tuple[PricedTrace, PricedTrace]:
        """Prompts to tune on, and others to report on."""
        return prompts(spread, cost, config["seed"]), prompts(spread, cost, config["seed"] + 1)

    cells = [(name, cost, spread) for name, cost in costs_of(folder, config).items() for spread in wanted["spreads"]]
    for done, (name, cost, spread) in enumerate(cells, start=1):
        file = folder / f"{name} synthetic {spread:g}.json".replace(" ", "-")
        yield name, spread, compared(file, partial(both, spread, cost), config)
        progress(done, len(cells))


def find(out: Path, config: Config) -> Document:
    """All that the report is made of: comparisons by cost, run, drafter and pool; and by cost, drafter and spread."""
    pools: Document = {}
    synthetic: Document = {}
    spreads = {}
    with progress_bar() as progress:
        recorded_in = recordings(out, config, progress)
        for (run, drafter), (folder, trace) in recorded_in.items():
            for cost, pool, document in on_records(folder, trace, config):
                pools.setdefault(cost, {}).setdefault(run, {}).setdefault(drafter, {})[pool] = document
        for drafter in config["drafters"]:
            folder, trace = recorded_in[config["synthetic"]["run"], drafter]
            recorded_prompts = PerPrompt.fit(trace)
            spreads[drafter] = recorded_prompts.spread

            def done(now: int, total: int, name: str = drafter) -> None:
                progress(f"synthetic, {name}", now, total)

            for cost, spread, document in on_synthetic(folder, recorded_prompts.mean, config, done):
                synthetic.setdefault(cost, {}).setdefault(drafter, {})[f"{spread:g}"] = document
    (_, first), *_ = recorded_in.values()
    ran = {"environment": first.meta["provenance"], "dtype": first.meta["dtype"]}
    return {**ran, "spreads": spreads, "pools": pools, "synthetic": synthetic}


def main(out: Path, config: Config) -> None:
    """Run what is not there yet and write the report."""
    claim(out, config)
    report(config, cached(out / FOUND, lambda: find(out, config))).write(out)
