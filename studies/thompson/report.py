"""What the report says of the comparisons: tables, findings and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from specsim.report.drawing import ADAPTIVE, DOT, MEASURED, MUTED, PREDICTED, estimates, spans, styled, svg
from specsim.report.markdown import markdown_table
from specsim.speedup.intervals import Estimate, ratio_interval
from studies.common import Config, Document, about_machine, about_prompts
from studies.thompson import gains
from studies.thompson.gains import DRAWN, DRAWN_EACH, FIXED, FIXED_EACH
from studies.words import about_target

MEASURED_COSTS, CHEAP = "measured costs", "cheap drafter"
ALL, EXTREME = "all", "least and most accepting"
LEARNED = (gains.WEAK, gains.STRONG, gains.TUNED, gains.CALI)
COMPARED = (FIXED_EACH, DRAWN, DRAWN_EACH, *LEARNED)
CROSSING = (gains.WEAK, gains.STRONG, gains.TUNED, DRAWN_EACH)
DRAFTERS = {"model": "draft model", "eagle": "EAGLE"}
COLUMNS = ["accepted: mean, spread", "K", "speedup of K", *(f"{label} %" for label in COMPARED)]
LINES = {  # of the figure
    FIXED_EACH: (PREDICTED, "o"),
    DRAWN_EACH: (ADAPTIVE, "^"),
    gains.TUNED: (MEASURED, "D"),
    gains.WEAK: (MUTED, "s"),
}
Pools = Mapping[
    str, Mapping[tuple[str, str], Mapping[str, Document]]
]  # by cost, by run and drafter, by pool of prompts
Synthetic = Mapping[str, Mapping[str, Mapping[float, Document]]]  # by cost, by drafter, by spread


def gains_of(documents: Sequence[Document], label: str) -> list[Estimate]:
    """What one way to choose lengths gains over the best fixed K, where it was compared."""
    return [value for one in documents if (value := gains.gain(one, label)) is not None]


def text(value: Estimate | None) -> str:
    """A gain in percent with its interval."""
    return "" if value is None else f"{value.estimate:+.1f} [{value.low:+.1f}, {value.high:+.1f}]"


def cells_of(document: Document) -> list[str]:
    """What a comparison says, as cells: prompts and acceptance, the best fixed K, and the gains over it."""
    accepted, best = document["acceptance"], gains.rows_of(document)[FIXED]
    speedup = ratio_interval(document["baseline_s"], best["seconds"])
    return [
        f"{accepted['mean']:.3f}, {accepted['spread']:.3f}",
        best["settings"].removeprefix("K = "),
        str(speedup),
        *(text(gains.gain(document, label)) for label in COMPARED),
    ]


def pool_table(documents: Mapping[tuple[str, str], Mapping[str, Document]]) -> list[str]:
    """The gains over the best fixed K on recorded prompts."""
    rows = [
        [run, DRAFTERS[drafter], f"{pool} ({found['prompts']['holdout']})", *cells_of(found)]
        for (run, drafter), pools in documents.items()
        for pool, found in pools.items()
    ]
    return markdown_table(["run", "drafter", "prompts", *COLUMNS], rows)


def spread_table(documents: Mapping[str, Mapping[float, Document]]) -> list[str]:
    """The gains over the best fixed K on synthetic prompts."""
    rows = [
        [DRAFTERS[drafter], f"{spread:g}", *cells_of(found)]
        for drafter, found_at in documents.items()
        for spread, found in found_at.items()
    ]
    return markdown_table(["drafter", "spread", *COLUMNS], rows)


def counted(values: list[Estimate]) -> str:
    """How many gains are significantly above and below 0, and between which estimates they lie."""
    better, worse = sum(value.low > 0 for value in values), sum(value.high < 0 for value in values)
    low, high = (pick(value.estimate for value in values) for pick in (min, max))
    return f"{low:+.1f} to {high:+.1f} % (better in {better} of {len(values)}, worse in {worse})"


def pool_findings(documents: Pools, pool: str) -> list[str]:
    """What the recorded prompts say: of the bound, of drawing, of both, and of Thompson sampling."""
    found = [pools[pool] for cells in documents.values() for pools in cells.values()]
    each = gains_of(found, DRAWN_EACH)
    lost = sum(value.high < 0 for value in each)
    lines = [
        "- The best K of each prompt in hindsight, which no other K that is kept through a prompt can exceed: "
        f"{counted(gains_of(found, FIXED_EACH))}.",
        "- Lengths drawn geometrically, with the probability that is best on the tuning prompts: "
        f"{counted(gains_of(found, DRAWN))}.",
        f"- The same with the best probability of each prompt in hindsight: {counted(each)}. In {lost} of {len(each)} "
        "cells drawn lengths are worse than the best fixed K even so: there none of the probabilities, kept through a "
        "prompt, makes up for being drawn from, however well it is learned.",
    ]
    lines += [f"- {label}: {counted(values)}." for label in LEARNED if (values := gains_of(found, label))]
    return [*lines, ""]


def crossing_table(documents: Mapping[str, Mapping[float, Document]]) -> list[str]:
    """From which spread on each way to choose lengths passes the best fixed K, and what hindsight would gain there."""
    rows = []
    for drafter, found in documents.items():
        cells = [DRAFTERS[drafter]]
        for label in CROSSING:
            passed = gains.passes_from(list(zip(found, gains_of([*found.values()], label), strict=True)))
            bound = None if passed is None else gains.gain(found[passed], FIXED_EACH)
            cells.append("at none tried" if bound is None else f"from {passed:g} on; {text(bound)}")
        rows.append(cells)
    return markdown_table(["drafter", *CROSSING], rows)


@styled()
def against_spread(documents: Synthetic, recorded_spread: Mapping[str, float]) -> str:
    """Gains over the best fixed K against the spread of acceptance over prompts."""
    drafters = list(next(iter(documents.values())))
    figure = Figure(figsize=(4.1 * len(drafters), 3.1 * len(documents)), layout="constrained")
    panels = figure.subplots(len(documents), len(drafters), squeeze=False, sharex=True, sharey="row")
    for (cost, by_drafter), row in zip(documents.items(), panels, strict=True):
        for (drafter, found), axes in zip(by_drafter.items(), row, strict=True):
            axes.axhline(0, color=MUTED, linewidth=0.9)
            axes.axvline(recorded_spread[drafter], color=MUTED, linewidth=0.9, linestyle=":")
            at = list(found)
            for label, (color, marker) in LINES.items():
                value, low, high = estimates(one.as_dict() for one in gains_of([*found.values()], label))
                axes.errorbar(at, value, yerr=spans(value, low, high), fmt="none", ecolor=color, elinewidth=1.1)
                axes.plot(at, value, f"{marker}-", color=color, markersize=4.5, label=label, **DOT)
            axes.set_title(f"{DRAFTERS[drafter]}, {cost}")
        row[0].set_ylabel("gain over the best fixed K, %")
    for axes in panels[-1]:
        axes.set_xlabel("spread of acceptance over prompts")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return svg(figure, "spread", "Gain over the best fixed K against the spread of acceptance over prompts")


def report_text(
    config: Config,
    found: Document,
    pools: Pools,
    synthetic: Synthetic,
) -> str:
    """The whole report as Markdown. found : where it ran, and the spread of acceptance over prompts by drafter"""
    measured = next(iter(pools.values()))
    sequences = next(iter(measured.values()))[ALL]["prompts"]
    ran = {**found, "sequences": sequences}
    wanted = config["synthetic"]
    own = ", ".join(f"{spread:.2f} ({DRAFTERS[drafter]})" for drafter, spread in found["spreads"].items())
    percent = f"{100 * config['extreme_share']:g} %"
    lines = [
        "# Thompson sampling of draft lengths against a fixed K",
        "",
        f"{about_prompts(config, ran)}; {about_machine(ran)}. {about_target(config)} No policy "
        "was really run: all is replayed on recorded traces, round for round what a real run would do. Gains are of "
        "speed over that of the fixed K that is best on the tuning prompts, in percent, with 95 % intervals over the "
        f"prompts reported on, paired; what draws is averaged over {config['replay_seeds']} replays. "
        f"**{MEASURED_COSTS}**: a profile of this machine. **{CHEAP}**: s_d / s_t = {config['cost_ratio']:g} and "
        "nothing else.",
        "",
        "After every drafted token Beta-TS draws whether to go on, with its estimate of acceptance as the probability "
        "(EESD, Algorithm 2; the spread of the posterior has no effect, docs/errata.md A9). Once it has learned, its "
        f"lengths are geometric. So three things decide, each a column: what knowing the prompt gains ({FIXED_EACH}), "
        f"what drawing costs ({DRAWN}: one probability for all prompts), and both together ({DRAWN_EACH}: the "
        f"best of {len(config['keeps'])} probabilities). Hindsight looks at the very text that it is reported on, so "
        "it bounds from above what is learned of a prompt and kept through it.",
        "",
        "## On the lab's prompts",
        "",
        *pool_findings(pools, ALL),
    ]
    for cost, documents in pools.items():
        lines += [f"### {cost}", "", *pool_table(documents)]
    lines += [
        "## On recorded prompts of very different acceptance",
        "",
        f"The {percent} of the prompts above that accept least and the {percent} that accept most (rows "
        f'"{EXTREME}"), of tuning prompts and of reported ones each. They are chosen by what was accepted of this '
        "very drafter's drafts, which favours whatever adapts.",
        "",
        *pool_findings(pools, EXTREME),
        "## On synthetic prompts of growing spread",
        "",
        f"{wanted['prompts']} prompts to tune on and {wanted['prompts']} others to report on, "
        f"{config['max_new_tokens']} tokens each. Every prompt has an acceptance probability of its own, with which "
        "its tokens are accepted independently, so that it is equally easy from end to end; over prompts it follows a "
        f"Beta distribution whose mean is that of the drafter in run {wanted['run']} and whose spread (standard "
        f"deviation) grows. The spread of the recorded prompts, dotted in the figure, is {own}.",
        "",
        "![Against spread](figures/spread.svg)",
        "",
    ]
    for cost, by_drafter in synthetic.items():
        lines += [
            f"### {cost}, synthetic",
            "",
            "From which spread on each is significantly faster than the best fixed K, and what the best K of each "
            "prompt in hindsight gains at that spread, in percent:",
            "",
            *crossing_table(by_drafter),
            *spread_table(by_drafter),
        ]
    return "\n".join(lines)
