"""Thompson sampling of draft lengths against a fixed K: `python -m studies thompson`.

Records the drafter of config.toml with greedy and with sampled drafts, and replays fixed, geometric and learned draft
lengths on the recorded prompts, and on synthetic prompts of growing spread that accept as greedy drafts do in the mean,
at a CPU's measured costs and at a GPU's. A second start goes on with what is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specsim.acceptance.generate import generate
from specsim.cli.console import progress_bar
from specsim.cost.model import CostModel
from specsim.replaying.intervals import interval_text
from specsim.replaying.priced import PricedTrace
from specsim.report.table import TEXT, Column
from studies.common import (
    DRAFTS,
    Config,
    Document,
    about_prompts,
    about_smollm2_costs,
    cached,
    claim,
    gpu_costs,
    load,
    parts,
    recorded,
    smollm2_costs,
)
from studies.comparisons import sign_text
from studies.figures import Line, line_panels
from studies.report import Report, machine_line
from studies.thompson.gains import CALI, DRAWN, DRAWN_EACH, FIXED_EACH, TUNED, WEAK, PerPrompt, comparison, passes_from

CPU, GPU = "CPU", "H100"
LINES = (FIXED_EACH, DRAWN_EACH, TUNED, WEAK)  # ways to choose draft lengths that the figure compares

Row = Mapping[str, Any]
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


def report(config: Config, results: Document) -> Report:
    """Return the report. results : comparisons on recorded and on synthetic prompts, and where they ran"""
    by_mode = {
        mode: [row_of(modes[mode], costs, f"recorded, {drafts} drafts") for costs, modes in results["recorded"].items()]
        for mode, drafts in DRAFTS.items()
    }
    recorded, sampled = by_mode.values()
    both = [*recorded, *sampled]
    synthetic = {
        costs: {spread: row_of(document, costs, f"synthetic, spread {spread}") for spread, document in spreads.items()}
        for costs, spreads in results["synthetic"].items()
    }
    shown = [
        row for rows in synthetic.values() for row in (rows[f"{spread:g}"] for spread in config["synthetic"]["shown"])
    ]
    first, toy, gpu = recorded[0], config["toy"], config["gpu"]
    sizes = {name: first[f"{name}_prompts"] for name in ("tuning", "holdout")}
    spread = f"{first['acceptance_spread']:.2f}"
    return Report(
        question="When does Thompson sampling beat a fixed draft length?",
        answer="On SmolLM2 with EAGLE, tuned Beta-TS changes the speed by "
        f"{by_costs(recorded, TUNED)} against the best fixed K with greedy drafts and by "
        f"{by_costs(sampled, TUNED)} with sampled ones. With greedy drafts prompts accept with a spread of "
        f"{spread}; on synthetic ones of the same mean tuned Beta-TS beats the best fixed K "
        f"{crossings(results)}.",
        figure=line_panels(spread_panels(results), ("spread of acceptance over prompts", "gain over fixed K, %"),
                           "spread", level=0.0),
        figure_name="spread",
        caption="Gain over the best fixed K by spread of acceptance over synthetic prompts; recorded prompts have a "
        f"spread of {spread}",
        columns=[
            Column("costs", "costs"),
            Column("prompts", "prompts"),
            Column("best fixed K", fixed_text, TEXT),
            *(Column(f"{label}, %", lambda row, label=label: percent(row.get(label)), TEXT)
              for label in (FIXED_EACH, DRAWN, TUNED, CALI)),
        ],
        shown=[*both, *shown],
        table=[*both, *(row for rows in synthetic.values() for row in rows.values())],
        trust=[
            f"Prompts: {about_prompts(config, {'sequences': sizes})}, at T = {config['temperature']:g}; first drafted "
            f"tokens are accepted at a rate of {first['acceptance']:.2f} (greedy drafts) and "
            f"{sampled[0]['acceptance']:.2f} (sampled). Intervals (95 %) are over held-out "
            "prompts, paired.",
            machine_line(config, results),
            f"{about_smollm2_costs(results['load'])} Policies that draw are averaged over {config['replay_seeds']} "
            "replays. Replays of greedy drafts are exact, those of sampled drafts unbiased, with one "
            "outcome of every position.",
            f"Conclusions that differ (greedy / sampled drafts): {changes(recorded, sampled)}.",
            f"No GPU was measured: the costs of the {GPU} are those of {gpu['target']} with {gpu['drafter']} on "
            f"{gpu['engine']}, by data sheet and published runs; acceptance is SmolLM2's.",
            "Beta-TS draws after every token whether to go on, so its lengths are geometric (docs/errata.md, A9). "
            "Cali-TS has calibrated confidence in the trained predictor's place, which synthetic prompts lack. "
            "Hindsight chooses on the text that it is reported on: a bound.",
            "The lab's toy target had shown, over drafters and costs, "
            f"{between(toy['tuned'])} for tuned Beta-TS, {between(toy['drawn'])} for geometric lengths and "
            f"{between(toy['hindsight'])} in hindsight. SmolLM2 shows {span(both, TUNED)}, "
            f"{span(both, DRAWN)} and {span(both, FIXED_EACH)}: {verdict(both, toy)}.",
        ],
    )  # fmt: skip


def row_of(document: Document, costs: str, prompts: str) -> Row:
    """Return a comparison as a row of table.csv."""
    return {
        "costs": costs,
        "prompts": prompts,
        **{f"{part}_prompts": count for part, count in document["prompts"].items()},
        "acceptance": document["acceptance"]["mean"],
        "acceptance_spread": document["acceptance"]["spread"],
        "fixed_k": document["k"],
        "fixed_k_speedup": document["speedup"],
        "fixed_k_tau": document["tau"],
        **document["gains"],
    }


def fixed_text(row: Row) -> str:
    """Return the best fixed K, its speedup and its tau."""
    return f"{interval_text(row['fixed_k_speedup'])}, K = {row['fixed_k']}, tau {row['fixed_k_tau']:.2f}"


def percent(value: Mapping[str, float] | None) -> str:
    """Return a gain in percent with its interval; "" where there is none."""
    return "" if value is None else f"{value['estimate']:+.1f} [{value['low']:+.1f}, {value['high']:+.1f}]"


def verdict(rows: Sequence[Row], toy: Config) -> str:
    """Return whether drawing lengths costs as much as on the toy target, and why it does not where the best K is 1."""
    if any(row[DRAWN]["low"] <= toy["drawn"][1] for row in rows):
        return "drawing lengths costs as much here"
    reason = ", because one token is the best fixed length and leaves nothing to draw"
    return f"drawing lengths costs less here{reason if all(row['fixed_k'] == 1 for row in rows) else ''}"


def changes(greedy: Sequence[Row], sampled: Sequence[Row]) -> str:
    """Return which ways to choose draft lengths are faster or slower than the best fixed K with one kind of drafts."""
    texts = []
    for greedy_row, sampled_row in zip(greedy, sampled, strict=True):
        costs = greedy_row["costs"]
        for label in (DRAWN, WEAK, TUNED, CALI):
            of_greedy, of_sampled = (sign_text(row[label]) for row in (greedy_row, sampled_row))
            if of_greedy != of_sampled:
                texts.append(f"{label} at {costs} costs ({of_greedy} / {of_sampled})")
        if greedy_row["fixed_k"] != sampled_row["fixed_k"]:
            texts.append(f"best fixed K at {costs} costs ({greedy_row['fixed_k']} / {sampled_row['fixed_k']})")
    return "; ".join(texts) or "none"


def by_costs(rows: Sequence[Row], label: str) -> str:
    """Return the gain at each of the costs."""
    return " and ".join(f"{percent(row[label])} % ({row['costs']})" for row in rows)


def span(rows: Sequence[Row], label: str) -> str:
    """Return the least and the largest gain of several comparisons."""
    values = [row[label]["estimate"] for row in rows]
    return between((min(values), max(values)))


def between(ends: Sequence[float]) -> str:
    """Return a range of gains in percent."""
    return f"{ends[0]:+.1f} to {ends[1]:+.1f} %"


def crossings(results: Document) -> str:
    """Return from which spread on tuned Beta-TS is significantly faster than the best fixed K, by costs."""
    texts = []
    for cost, documents in results["synthetic"].items():
        passed = passes_from([(float(spread), document["gains"][TUNED]) for spread, document in documents.items()])
        texts.append(f"{'at no spread tried' if passed is None else f'from a spread of {passed:g} on'} ({cost})")
    return ", ".join(texts)


def spread_panels(results: Document) -> dict[str, dict[str, Line]]:
    """Return the figure's lines: gains over the spread, a panel for each of the costs."""
    return {
        cost: {
            label: (
                [float(spread) for spread in documents],
                [document["gains"][label] for document in documents.values()],
            )
            for label in LINES
        }
        for cost, documents in results["synthetic"].items()
    }
