"""Drafters inside the lab's target (EESD, MEDUSA), beside its draft model: `python -m studies.drafters.run [OUT]`.

Validates every drafter of config.toml (recorded, profiled, tuned, predicted, really decoded on this
machine), and weighs speed against likelihood for MEDUSA's typical acceptance. A second start goes on
with what is there. EESD's ablation is in studies/training.

Writes OUT/figures/ and OUT/report.md, in which every number comes from the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specsim.cli.console import progress_bar
from specsim.files import write_text
from specsim.report.markdown import accuracy, ladder_table, trust_table
from studies.common import REPLAYED, Config, about_machine, about_prompts, claim, run_study
from studies.drafters import figures, tables
from studies.drafters.jobs import (
    cheap_jobs,
    drafter_facts,
    main_jobs,
    predictor_facts,
    typical_job,
)
from studies.words import EESD, about_target, about_uneven_blocks, has_uneven_blocks

RECORDED = ("config.json", "typical.json", *(f"*/*/{name}" for name in (REPLAYED, "rounds.parquet", "cheap.json")))


def report_text(config: Config, runs: tables.Runs, cheap: tables.Runs, typical: tables.Document, out: Path) -> str:
    """The whole report as Markdown."""
    one = next(iter(next(iter(runs.values())).values()))
    facts = drafter_facts(config["drafters"])
    lines = [
        "# Drafters inside the target, on the lab",
        "",
        f"{about_prompts(config, one)}; {about_machine(one)}. {about_target(config)} "
        f"{about_uneven_blocks(config, one)}"
        "Speedups over autoregressive decoding with 95 % intervals over sequences. v_d is the acceptance rate, r_d "
        "the share of the output that was drafted, HM their harmonic mean, tau the acceptance length in tokens per "
        "round. MEDUSA-2's output is its own tuned backbone's, the others' the target's.",
        "",
        "## The drafters",
        "",
        *tables.training_table(facts),
    ]
    for name, ran in runs.items():
        documents = without_withdrawn(config, ran)
        folders = {drafter: (out / name / drafter, document) for drafter, document in documents.items()}
        lines += [
            f"## {name}",
            "",
            *tables.findings(documents),
            *tables.main_table(documents),
            "Policies are the best of their kind on the tuning prompts. Truncated are rounds that asked for nodes that "
            "were not recorded.",
            "",
            *trust_table(ran, config["repeats"]),
            accuracy(row["error_percent"] for document in ran.values() for row in document["rows"]),
            "",
            *ladder_table(tables.ladder_rows(documents)),
            f"![Predicted and measured speedups](figures/speedups-{name}.svg)",
            "",
            f"![Speedup against K](figures/k-{name}.svg)",
            "",
            "What Thompson sampling adds to the best fixed K (EESD, Table 5):",
            "",
            *tables.generality_table(documents),
            f"Replays of the same traces, were a draft step {100 * config['cheap']['step_ratio']:g} % of a target step "
            "and a verification one target step, as a few layers of 40 to 80 would be, acceptance unchanged:",
            "",
            *tables.cheap_table({drafter: cheap[name][drafter] for drafter in documents}),
            "Where the milliseconds of a token go (EESD, Table 8):",
            "",
            *tables.breakdown_table(folders),
            "MEDUSA: speedup = acceleration rate / overhead, both measured, so that the last two columns must agree:",
            "",
            *tables.overhead_table({d: documents[d] for d in documents if d.startswith("medusa")}),
        ]
    lines += [
        "## The predictor of Cali-TS",
        "",
        "On held-out sequences; confidence is calibrated by Platt scaling. A predictor helps where its log-loss is "
        "below that of confidence, which costs nothing.",
        "",
        *tables.predictor_table(predictor_facts(config["drafters"])),
        "## Typical acceptance",
        "",
        f"MEDUSA-1 with {typical['policy']}, temperature {typical['temperature']:g}, delta = sqrt(epsilon) "
        "(MEDUSA, figure 7). The output is not the target's; how likely the target finds it stands for quality.",
        "",
        *tables.typical_table(typical),
        "![Typical acceptance](figures/typical.svg)",
        "",
    ]
    return "\n".join(lines)


def without_withdrawn(config: Config, documents: Mapping[str, tables.Document]) -> dict[str, tables.Document]:
    """The validations, by drafter, of those whose costs hold."""
    return {
        drafter: document
        for drafter, document in documents.items()
        if drafter != EESD or not has_uneven_blocks(config, document)
    }


def write_figures(folder: Path, runs: tables.Runs, typical: tables.Document) -> None:
    """All figures as SVG."""
    for name, documents in runs.items():
        points = tables.speedups(documents)
        lines = {
            drafter: {p["policy"]: p["predicted"]["estimate"] for p in points if p["drafter"] == drafter}
            for drafter in documents
        }
        write_text(folder / f"speedups-{name}.svg", figures.speedups(points, name))
        write_text(folder / f"k-{name}.svg", figures.against_k(documents, lines, name))
    write_text(folder / "typical.svg", figures.typical(typical["arms"]))


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    with progress_bar() as report:
        runs = {run["name"]: main_jobs(out, run, config, report) for run in config["runs"]}
        cheap = {run["name"]: cheap_jobs(out, run, config, report) for run in config["runs"]}
        typical = typical_job(out, config, runs[config["runs"][0]["name"]]["medusa-1"], report)
    write_figures(out / "figures", {name: without_withdrawn(config, ran) for name, ran in runs.items()}, typical)
    write_text(out / "report.md", report_text(config, runs, cheap, typical, out))


if __name__ == "__main__":
    run_study(main, __file__)
