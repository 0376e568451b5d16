"""What the report says: the score against what it bounds, the paper's policies, and the figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from specsim.report.drawing import DOT, INK, MUTED, styled, svg
from specsim.report.markdown import markdown_table, verdict
from specsim.speedup.formulas import adaedl_score
from specsim.speedup.intervals import Comparison, Estimate, paired_difference, ratio_interval
from specsim.trace.outcomes import DRAWS
from studies.adaedl.bound import Signals, bounding_gamma, correlations, fitted_gamma, gap, paper_ratio, violated
from studies.common import Config, Document, about_machine, about_prompts
from studies.words import REPLAYED_ORDERS, about_target, order_of

MEASURED, PAPER = "measured costs", "paper's s_d / s_t"
LAB_DRAFT, SMALL = "lab's draft model", "small draft model"
LONGEST, FIXED, CONFIDENT = "Base-SPD, longest draft", "fixed K, tuned", "Max-Confidence"
ADAEDL, TUNED = "AdaEDL, paper's gamma", "AdaEDL, gamma tuned"
POLICIES = (LONGEST, FIXED, CONFIDENT, ADAEDL, TUNED)
ASKED = ((ADAEDL, LONGEST), (ADAEDL, FIXED), (ADAEDL, CONFIDENT), (TUNED, ADAEDL))
PAPERS_ORDER = (LONGEST, CONFIDENT, ADAEDL)  # rising, in all data sets of table 1 at 7 tokens
BINS = 10
COLORS = ("#0072b2", "#007a5a", "#e69f00", "#d55e00")  # by temperature, rising


@dataclass(frozen=True)
class Found:
    """One draft model at one temperature.

    drafted : mean acceptance probability of drafted tokens, as recorded on the prompts reported on
    tuning, held : the signals of the prompts tuned on and of those reported on
    boards : by cost
    """

    temperature: float
    drafted: float
    tuning: Signals
    held: Signals
    boards: Mapping[str, Document]

    def gammas(self, config: Config) -> dict[str, float]:
        """The paper's gamma, and two that are fitted on the tuning prompts."""
        share = config["bounded_share"]
        return {
            "no, the paper's": config["gamma"],
            "least squares": fitted_gamma(self.tuning),
            f"bounds {100 * share:g} %": bounding_gamma(self.tuning, share),
        }


All = Mapping[tuple[str, str], Found]  # by draft model and run


def text(value: Estimate, digits: int = 3) -> str:
    return f"{value.estimate:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def signal_table(found: All) -> list[str]:
    """Entropy and acceptance, and how well the score and the confidence follow the acceptance."""
    rows = []
    for (draft, _), one in found.items():
        score, sure, less = correlations(one.held)
        rows.append(
            [
                draft,
                f"{one.temperature:g}",
                f"{one.held.entropy_nats.mean():.2f}",
                f"{one.held.acceptance.mean():.3f}",
                f"{one.drafted:.3f}",
                text(score),
                text(sure),
                verdict(as_comparison(less)),
            ]
        )
    columns = ["draft model", "T", "H, nats", "1 - TVD", "drafted tokens, as recorded", "correlation of the score"]
    return markdown_table([*columns, "of the confidence", "score less confidence"], rows)


def as_comparison(difference: Estimate) -> Comparison:
    """A difference that `verdict` can put in words."""
    return Comparison(difference, float("nan"), 2)


def gamma_table(found: All, config: Config) -> list[str]:
    """By gamma, how often the score is no bound, and how far below the acceptance it lies in the mean."""
    rows = []
    for (draft, _), one in found.items():
        for name, gamma in one.gammas(config).items():
            cells = [draft, f"{one.temperature:g}", name, f"{gamma:.3f}"]
            rows.append([*cells, text(violated(one.held, gamma), 1), text(gap(one.held, gamma))])
    columns = [
        "draft model",
        "T",
        "fitted",
        "gamma",
        "score above 1 - TVD, % of positions",
        "1 - TVD less the score, mean",
    ]
    return markdown_table(columns, rows)


def by_temperature(found: All, values: list[float], digits: int) -> str:
    """Values of all cells, the draft models' side by side at each temperature."""
    at: dict[float, list[str]] = {}
    for one, value in zip(found.values(), values, strict=True):
        at.setdefault(one.temperature, []).append(f"{value:.{digits}f}")
    return "; ".join(f"T = {temperature:g}: {' and '.join(said)}" for temperature, said in at.items())


def signal_findings(found: All, config: Config) -> list[str]:
    """What the two tables say."""
    cells = list(found.values())
    followed = [correlations(one.held) for one in cells]
    better = sum(less.low > 0 for *_, less in followed)
    worse = sum(less.high < 0 for *_, less in followed)
    gammas = [one.gammas(config) for one in cells]
    _, least, bound = gammas[0]
    broken = [violated(one.held, config["gamma"]).estimate for one in cells]
    below = [gap(one.held, config["gamma"]).estimate for one in cells]
    drafts = " and ".join(dict.fromkeys(draft for draft, _ in found))
    return [
        f"Of the {drafts}, on the prompts reported on:",
        "",
        f"- Positions where the score with gamma = {config['gamma']:g} exceeds 1 - TVD, so that it is no lower bound, "
        f"in percent: {by_temperature(found, broken, 1)}.",
        f"- 1 - TVD less that score, in the mean: {by_temperature(found, below, 2)}.",
        f"- gamma whose score is nearest to 1 - TVD: {by_temperature(found, [by[least] for by in gammas], 2)}. "
        f"gamma from which on {100 * config['bounded_share']:g} % of the tuning positions are bounded: "
        f"{by_temperature(found, [by[bound] for by in gammas], 2)}.",
        "- Correlation of the score with 1 - TVD, the same for every gamma: "
        f"{by_temperature(found, [score.estimate for score, *_ in followed], 2)}. It is significantly higher than that "
        f"of the confidence in {better} of {len(cells)} cells and lower in {worse}.",
        "",
    ]


def compare(board: Document, a: str, b: str) -> Comparison:
    """Speedup of one policy less that of another."""
    seconds = {row["label"]: row["seconds"] for row in board["rows"]}
    return paired_difference(board["baseline_s"], seconds[a], seconds[b])


def speedups_of(board: Document) -> dict[str, Estimate]:
    return {row["label"]: ratio_interval(board["baseline_s"], row["seconds"]) for row in board["rows"]}


def order(board: Document) -> str:
    """The paper's policies by rising speedup, and whether that is its order."""
    values = {label: value.estimate for label, value in speedups_of(board).items()}
    names = {LONGEST: "Base-SPD", CONFIDENT: "Max-Confidence", ADAEDL: "AdaEDL"}

    def apart(a: str, b: str) -> bool:
        return compare(board, a, b).significant

    return order_of(values, PAPERS_ORDER, names, apart)


def board_tables(found: All, cost: str) -> list[str]:
    """Speedups at one cost, what they say in pairs, and the settings behind them."""
    speeds, pairs, tuned = [], [], []
    for (draft, _), one in found.items():
        board = one.boards[cost]
        cells = [draft, f"{one.temperature:g}"]
        values = speedups_of(board)
        speeds.append([*cells, f"{board['step_ratio']:.3f}", *(text(values[label]) for label in POLICIES)])
        pairs.append([*cells, *(verdict(compare(board, a, b)) for a, b in ASKED), order(board)])
        by = {row["label"]: row["settings"] for row in board["rows"]}
        tuned.append(
            [
                *cells,
                str(by[FIXED]["k"]),
                f"{by[CONFIDENT]['lambda0']:.2f}",
                f"{by[ADAEDL]['lambda0']:.2f}",
                f"{by[TUNED]['gamma']:.2f}, {by[TUNED]['lambda0']:.2f}",
            ]
        )
    first = ["draft model", "T"]
    return [
        *markdown_table([*first, "s_d / s_t", *POLICIES], speeds),
        *markdown_table([*first, *(f"{a} less {b}" for a, b in ASKED), "order"], pairs),
        *markdown_table(
            [*first, "K", "Max-Confidence: lambda_0", "paper's gamma: lambda_0", "tuned: gamma, lambda_0"], tuned
        ),
    ]


def count(found: All, cost: str, a: str, b: str) -> str:
    """In how many cells one policy is significantly better or worse than another."""
    compared = [compare(one.boards[cost], a, b).difference for one in found.values()]
    better, worse = sum(d.low > 0 for d in compared), sum(d.high < 0 for d in compared)
    return f"{a} against {b}: better in {better} of {len(compared)} cells, worse in {worse}"


def side_of_one(value: Estimate) -> str:
    return "above 1" if value.low > 1 else "below 1" if value.high < 1 else "not decided"


def hottest(found: All, cost: str) -> str:
    """On which side of autoregressive decoding the policies are at the highest temperature."""
    top = max(one.temperature for one in found.values())
    said = []
    for (draft, _), one in found.items():
        if one.temperature == top:
            values = speedups_of(one.boards[cost])
            sides = (f"{label} {values[label].estimate:.2f} ({side_of_one(values[label])})" for label in POLICIES)
            said.append(f"{draft}: {', '.join(sides)}")
    return f"At T = {top:g}: {'; '.join(said)}."


@styled()
def against_entropy(found: All, config: Config) -> str:
    """1 - TVD by entropy of the draft, in tenths of the positions, and the score of the paper's gamma."""
    drafts = list(dict.fromkeys(draft for draft, _ in found))
    figure = Figure(figsize=(4.4 * len(drafts), 3.6), layout="constrained")
    panels = figure.subplots(1, len(drafts), squeeze=False, sharex=True, sharey=True)[0]
    largest = 0.0
    for draft, axes in zip(drafts, panels, strict=True):
        cells = [one for (name, _), one in found.items() if name == draft]
        for one, color in zip(cells, COLORS, strict=False):
            order = np.argsort(one.held.entropy_nats, kind="stable")
            tenths = np.array_split(order, BINS)
            x = np.array([one.held.entropy_nats[rows].mean() for rows in tenths])
            y = np.array([one.held.acceptance[rows].mean() for rows in tenths])
            low, high = (np.array([np.quantile(one.held.acceptance[rows], q) for rows in tenths]) for q in (0.1, 0.9))
            error = np.maximum([y - low, high - y], 0)
            axes.errorbar(x, y, yerr=error, fmt="none", ecolor=color, elinewidth=0.9, alpha=0.6)
            axes.plot(x, y, "o-", color=color, markersize=4.5, label=f"T = {one.temperature:g}", **DOT)
            largest = max(largest, float(x[-1]))
        axes.set_title(draft)
        axes.set_xlabel("entropy of the draft, nats")
    grid = np.linspace(0, largest, 200)
    for axes in panels:
        axes.plot(grid, adaedl_score(grid, config["gamma"]), color=INK, label=f"score, gamma = {config['gamma']:g}")
        axes.axhline(0, color=MUTED, linewidth=0.8)
    panels[0].set_ylabel("acceptance probability 1 - TVD")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return svg(figure, "entropy", "Acceptance probability and AdaEDL's score against the entropy of the draft")


def report_text(config: Config, document: Document, found: All) -> str:
    """The whole report as Markdown.

    document : where it ran, each draft model's parameters, and prices of its target's passes over 1, 2, ... tokens, of
    a token's without speculation
    """
    parameters, prices = document["parameters"], document["prices"]
    first = next(iter(found.values()))
    sizes = (len(np.unique(part.sequence)) for part in (first.tuning, first.held))
    ran = {**document, "sequences": dict(zip(("tuning", "holdout"), sizes, strict=True))}
    priced = "; ".join(f"{', '.join(f'{price:.2f}' for price in of)} ({draft})" for draft, of in prices.items())
    ratio, acceptance = paper_ratio(**config["table1"])
    small, explained = config["small"], ", ".join(f"{value:.2f}" for value in acceptance)
    lines = [
        "# AdaEDL under rejection sampling",
        "",
        f"{about_prompts(config, ran)}; {about_machine(ran)}. {about_target(config)} Two draft models: the "
        f"{LAB_DRAFT} ({parameters[LAB_DRAFT]:,} parameters), and a small one ({parameters[SMALL]:,}) trained for this "
        f"study by the same recipe, on {small['text_tokens'] / 1e6:g} M tokens of text and then on "
        f"{small['distill_tokens'] / 1e6:g} M with the target's distributions. Drafts of up to {config['depth']} "
        "tokens.",
        "",
        "Nothing was decoded under a policy: all is replayed on recorded traces. Replay of rejection sampling is "
        "approximate: a round is exact, but the text that follows an accepted draft is the recorded one. Every speedup "
        f"sums over {DRAWS} outcomes drawn from the recorded acceptance probabilities. Intervals are of 95 % over "
        "prompts, those of differences paired.",
        "",
        "## The score and what it bounds",
        "",
        "The score is 1 - sqrt(gamma H), H the entropy of the draft's distribution in nats; the paper calls it an "
        "approximate lower bound on the acceptance probability of the token to be drafted, which is 1 - TVD of the "
        "draft's distribution and the target's at the temperature. Both are computed exactly, at every position of the "
        "outputs that the target wrote. Beside it stands the mean recorded acceptance probability of the tokens that "
        "were drafted there, whose expectation is 1 - TVD.",
        "",
        *signal_findings(found, config),
        "![Against entropy](figures/entropy.svg)",
        "",
        "Dots are tenths of the positions by entropy, bars from their 10th to their 90th percentile.",
        "",
        *signal_table(found),
        "Two gammas are fitted on the tuning prompts of each row and reported on the others: the one whose score is "
        "nearest to 1 - TVD, and the least that bounds as many of the positions.",
        "",
        *gamma_table(found, config),
        "## Speedups",
        "",
        f"AdaEDL and Max-Confidence move lambda by Algorithm 1 with the paper's values; lambda_0, which the paper does "
        f"not give, is tuned for each, with {config['trials']} trials. **{MEASURED}**: a profile of this machine for "
        f"each draft model; a target pass over 1, 2, ... tokens takes {priced} of one token's without speculation. "
        f"**{PAPER}**: {ratio:.3f} for both draft models and nothing else, which explains the rates "
        f"of Base-SPD in table 1 best, with independent acceptance of {explained} on its three data sets. "
        f"{REPLAYED_ORDERS}",
        "",
    ]
    for cost in (MEASURED, PAPER):
        lines += [
            f"### {cost}",
            "",
            *(f"- {count(found, cost, a, b)}." for a, b in ASKED),
            f"- {hottest(found, cost)}",
            "",
        ]
        lines += board_tables(found, cost)
    return "\n".join(lines)
