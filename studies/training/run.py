"""What training decides, on the lab: `python -m studies.training.run [OUT]`.

Trains, with every seed, the decoders of EDD's ablation, the early exits of EESD's, and EAGLE; records them, profiles
each structure on the deepened target, and replays. Trains MEDUSA's first head further and with more in it, and SPACE's
target at several learning rates. Nothing is really decoded but to record. A second start goes on with what is there.

Writes OUT/figures/ and OUT/report.md, in which every number comes from the runs; the report grows by a section
whenever one is finished.
"""

from __future__ import annotations

from pathlib import Path

from specsim.cli.console import progress_bar
from specsim.files import write_text
from specsim.progress import Progress
from specsim.speedup.intervals import ratio_interval
from studies.common import Config, claim, run_study
from studies.costs import MEASURED
from studies.training import decoders, exits, figures, heads, heat, sizes, text, trainings
from studies.training.replays import recorded
from studies.training.seeds import speedup, tau
from studies.training.trainings import WHOLE, trained


def decoder_section(out: Path, config: Config, report: Progress) -> list[str]:
    """EDD taken apart."""
    folders = trained(out, trainings.decoders(config), config["decoders"]["tokens"], config, report)
    traces = recorded(out, folders, config["runs"][0], config, report, trees=True)
    costs = decoders.costs(out, traces, next(iter(folders[WHOLE].values())), config, report)
    layers = decoders.sweep(traces, costs[MEASURED], config)
    panels = [("layers of the target below the states that EDD reads", layers)]
    title = "Acceptance length against the layer of the states"
    drawn = figures.sweeps(panels, tau, "acceptance length tau, tokens", "layers", title)
    write_text(out / "figures" / "layers.svg", drawn)
    return text.decoder_section(
        config,
        {name: decoders.ablation(traces, cost, config) for name, cost in costs.items()},
        {name: decoders.tuned(traces, cost, config) for name, cost in costs.items()},
        layers,
    )


def exit_section(out: Path, config: Config, report: Progress) -> list[str]:
    """EESD taken apart."""
    folders = trained(out, trainings.early_exits(config), config["early_exits"]["tokens"], config, report)
    traces = recorded(out, folders, config["runs"][0], config, report, trees=False)
    costs = exits.costs(out, traces, folders, config, report)
    swept = {what: exits.sweep(what, traces, costs, config) for what in ("N", "E")}
    panels = [("first N layers", swept["N"]), ("early-exit layers", swept["E"])]
    drawn = figures.sweeps(panels, speedup, "speedup", "exits", "Speedup of early exits")
    write_text(out / "figures" / "exits.svg", drawn)
    return text.exit_section(
        config,
        exits.rows(traces, costs, config),
        {what: (swept[what], exits.step_ratios(what, traces, costs, config)) for what in swept},
    )


def size_section(out: Path, config: Config, report: Progress) -> list[str]:
    """EDD beside EAGLE; the whole of EDD is that of its ablation."""
    tokens = config["decoders"]["tokens"]
    whole = {WHOLE: trainings.decoders(config)[WHOLE]}
    folders = trained(out, {**whole, **sizes.wanted(config)}, tokens, config, report)
    return text.size_section(sizes.lengths(out, folders, config, report), sizes.facts(folders))


def head_section(out: Path, config: Config, report: Progress) -> list[str]:
    """MEDUSA's first head."""
    found = heads.measure_heads(out, config, report)
    best = ratio_interval(found["attainable"]["attainable"], found["attainable"]["places"])
    write_text(out / "figures" / "heads.svg", figures.head_curves(heads.curves(found), best))
    return text.head_section(config, found)


def heat_section(out: Path, config: Config, report: Progress) -> list[str]:
    """SPACE's tunings."""
    found = heat.measure_heat(out, config, report)
    write_text(out / "figures" / "heat.svg", figures.heats(heat.points(found)))
    return text.heat_section(config, found)


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    lines = text.introduction(config)
    with progress_bar() as report:
        for section in (decoder_section, head_section, exit_section, size_section, heat_section):
            lines += section(out, config, report)
            write_text(out / "report.md", "\n".join(lines))


if __name__ == "__main__":
    run_study(main, __file__)
