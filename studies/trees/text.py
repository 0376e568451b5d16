"""The study's report as Markdown; every number comes from the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from specsim.policy.registry import CHAIN_POLICIES, TREE_POLICIES
from specsim.report.markdown import errors_text, ladder_table, markdown_table, trust_table, verdict
from specsim.speedup.intervals import Comparison, Estimate, interval_text
from studies.common import about_machine, about_prompts
from studies.costs import KNEE, MEASURED, MOST_NODES, PAPER, about_costs
from studies.trees.facts import (
    Document,
    PaperAnswer,
    Rounds,
    Row,
    compare,
    first,
    opponents,
    tuned_best,
)
from studies.words import about_target, first_best, measured_verdict, not_compared

ABOUT_HALF = (0.4, 0.6)  # of the nodes
COMPARABLE = 0.95  # of the acceptance length
OURS = "hardware_pct"


@dataclass(frozen=True)
class Run:
    """All of one run that the report shows.

    document : the validation; all else is found once and kept in a file
    boards, rounds : by cost; held-out sequences; rounds in the order of the board's rows
    measured : rounds of the validation's rows, replayed
    sizes : dense and sparse points of `tree_figures.sizes`; record_ratio : recording over decoding alone
    calibration : `specsim.fitting.tree_calibration.compare`, with the bins of the figure
    """

    document: Document
    boards: Mapping[str, Document]
    rounds: Mapping[str, Sequence[Rounds]]
    measured: Sequence[Rounds]
    paper: PaperAnswer
    widths: Sequence[Mapping[str, float]]
    domains: Mapping[str, Mapping[str, Mapping[str, Any]]]
    sizes: tuple[Sequence[Document], Sequence[Document]]
    trees: Mapping[str, Any]
    calibration: Mapping[str, Mapping[str, float]]
    bins: Mapping[str, Document]
    record_ratio: float

    @classmethod
    def of(cls, document: Document, found: Document) -> Self:
        """found : the other fields as plain data, as JSON has them"""
        counted = {name: [Rounds(**row) for row in rows] for name, rows in found["rounds"].items()}
        measured, paper = [Rounds(**row) for row in found["measured"]], PaperAnswer.of(found["paper"])
        return cls(document, **{**found, "rounds": counted, "measured": measured, "paper": paper})


def report_text(config: Document, runs: Mapping[str, Run]) -> str:
    """The whole report. runs : by name, as far as they are done"""
    one = next(iter(runs.values())).document
    lines = [
        "# Tree policies on the lab",
        "",
        f"{about_prompts(config, one)}; "
        f"{config['tree_nodes']} nodes recorded per position, {config['tree_width']} children wide, {config['depth']} "
        f"deep; {about_machine(one)}. {about_target(config)} "
        "Speedups with 95 % intervals over sequences; differences are paired. The first row of a board did best on the "
        "very sequences reported, which flatters it; the best forms that are compared were chosen on the tuning "
        "sequences. tau is the acceptance length, tokens per round.",
        "",
        about_costs(config),
        "",
        "## How far to trust this",
        "",
        *trust_table({name: run.document for name, run in runs.items()}, config["repeats"]),
        "## Answers",
        "",
        *markdown_table(["question", *runs], answers(runs.values())),
    ]
    for name, run in runs.items():
        lines += run_section(name, run, config)
    return "\n".join(lines)


def answers(runs: Iterable[Run]) -> list[list[str]]:
    """(question, answer per run), each in a line."""
    asked: dict[str, Callable[[Run], str]] = {
        "absolute error of predicted speedups of tree policies": error_answer,
        "rounds of tree policies identical in replay and real run: median, least": identical_answer,
        "rounds truncated by the recorded trees: median, most": truncated_answer,
        "rounds neither identical nor truncated: most": unexplained_answer,
        "PCT's nodes and tau as shares of EAGLE-2's (the paper: about half the nodes, comparable tau)": lambda run: (
            paper_words(run.paper)
        ),
        **{
            f"{OURS} less {who}, {cost}": difference_answer(who, cost)
            for who in ("PCT, tuned", "EAGLE-2, tuned", "best chain policy")
            for cost in (MEASURED, PAPER)
        },
        f"{OURS} less PCT, tuned, really run": difference_answer("PCT, tuned", None),
        f"{OURS} less best chain policy, really run": difference_answer("best chain policy", None),
        **{f"policy best on the tuning prompts, {cost}": leader_answer(cost) for cost in (MEASURED, PAPER, KNEE)},
        "the one of those really run, as measured": fastest_answer,
        "log-loss and ECE of draft probability; calibrated": calibration_answer,
        "recording with trees over decoding alone, target at most 4": lambda run: f"{run.record_ratio:.2f}",
    }
    every = list(runs)
    return [[question, *(answer(run) for run in every)] for question, answer in asked.items()]


def tree_rows(run: Run) -> list[tuple[Row, Rounds]]:
    return [(r, m) for r, m in zip(run.document["rows"], run.measured, strict=True) if r["policy"] in TREE_POLICIES]


def error_answer(run: Run) -> str:
    return errors_text(row["error_percent"] for row, _ in tree_rows(run))


def identical_answer(run: Run) -> str:
    shares = [row["rounds_identical_percent"] for row, _ in tree_rows(run)]
    return f"{np.median(shares):.2f} %, {min(shares):.2f} %"


def truncated_answer(run: Run) -> str:
    shares = [100 * rounds.truncated for _, rounds in tree_rows(run)]
    return f"{np.median(shares):.2f} %, {max(shares):.2f} %"


def unexplained_answer(run: Run) -> str:
    """At least so many, for a truncated round may be identical."""
    left = [100 - row["rounds_identical_percent"] - 100 * rounds.truncated for row, rounds in tree_rows(run)]
    return f"{max(0.0, *left):.2f} %"


def paper_words(paper: PaperAnswer) -> str:
    """The shares, and what the prompts decide about them (95 %)."""
    if not paper.comparable:
        return "not compared: too few nodes were recorded"
    least, most = (side(paper.nodes_beyond(share)) for share in ABOUT_HALF)
    few = {(-1, -1): "fewer than half", (1, -1): "about half", (1, 1): "more than half"}.get((least, most))
    long = {-1: "shorter", 1: "comparable"}.get(side(paper.tau_beyond(COMPARABLE)))
    return (
        f"{100 * paper.node_share:.0f} % of the nodes ({few or 'not decided'}), {100 * paper.tau_ratio:.1f} % of tau "
        f"({long or 'not decided'})"
    )


def side(comparison: Comparison) -> int:
    """On which side of 0 the interval lies; 0 where it holds it."""
    return (comparison.difference.low > 0) - (comparison.difference.high < 0)


def difference_answer(who: str, cost: str | None) -> Callable[[Run], str]:
    """Answer of one run: difference of speedups of ours less another's, on a board or, without a cost, really run."""

    def answer(run: Run) -> str:
        return dict(differences(run, cost))[who]

    return answer


def differences(run: Run, cost: str | None) -> list[tuple[str, str]]:
    """(against whom, verdict)."""
    board = run.boards[cost or MEASURED]
    rows = run.document["rows"] if cost is None else board["rows"]
    ours = first(rows, lambda row: row["policy"] == OURS)
    found = opponents(board, run.document)
    if cost is None:
        return [(who, measured_verdict(run.document, ours, ran)) for who, _, ran in found]
    return [(who, verdict(compare(board["baseline_s"], ours, placed))) for who, placed, _ in found]


def leader_answer(cost: str) -> Callable[[Run], str]:
    def answer(run: Run) -> str:
        row = first_best(run.boards[cost]["rows"])
        return "none" if row is None else f"{row['label']}: {interval_text(row['speedup'])}"

    return answer


def fastest_answer(run: Run) -> str:
    row = first_best(run.document["rows"])
    assert row is not None
    return f"{row['label']}: {interval_text(row['measured'])}"


def calibration_answer(run: Run) -> str:
    return "; ".join(f"{v['log_loss_nats']:.4f} nats, {v['ece']:.4f}" for v in run.calibration.values())


def run_section(name: str, run: Run, config: Document) -> list[str]:
    return [
        f"## {name}: predicted and measured",
        "",
        *measured_section(run),
        f"## {name}: PCT against EAGLE-2, as in the paper",
        "",
        *paper_section(name, run, config),
        f"## {name}: {OURS} against the others",
        "",
        *opponents_section(run),
        *(line for cost in run.boards for line in board_section(name, run, cost)),
        f"## {name}: static trees by size",
        "",
        *size_section(name, run),
        f"## {name}: nodes by domain",
        "",
        *domain_section(name, run),
        f"## {name}: calibration of node probabilities",
        "",
        *calibration_section(name, run),
    ]


def measured_section(run: Run) -> list[str]:
    """Predicted beside measured, chains and trees, with their median errors."""
    cells = [
        [
            f"{r['label']} ({r['role']})",
            interval_text(r["predicted"]),
            interval_text(r["measured"]),
            f"{r['error_percent']:+.1f}",
            f"{r['rounds_identical_percent']:.2f}",
            f"{100 * rounds.truncated:.2f}" if r["policy"] in TREE_POLICIES else "",
            f"{r['tau']:.2f}",
            f"{r['measured_tau']:.2f}",
            f"{rounds.verified.estimate:.1f}",
            f"{rounds.passes:.2f}",
        ]
        for r, rounds in zip(run.document["rows"], run.measured, strict=True)
    ]
    columns = ["policy", "from own rounds", "measured", "error %", "rounds identical %", "rounds truncated %"]
    columns += ["tau", "tau, measured", "nodes verified", "draft passes"]
    chains = [r["error_percent"] for r in run.document["rows"] if r["policy"] in CHAIN_POLICIES]
    return [
        *markdown_table(columns, cells),
        f"Absolute error of tree policies: {error_answer(run)}; of chain policies: {errors_text(chains)}.",
        "",
        *ladder_table((r["label"], r) for r in run.document["rows"]),
    ]


def paper_section(name: str, run: Run, config: Document) -> list[str]:
    """The paper's claim on nodes and acceptance length, and its figure 6."""
    values, paper = config["paper"], run.paper
    ratio = values["s_d"] / values["s_t"]
    difference = paper.difference.difference
    nodes = round(paper.pct.verified.estimate)
    return [
        f"PCT with the paper's values (width {values['width']}, at most {values['max_depth']} levels, leaves from "
        f"{values['leaf_threshold']:g}, s_d / s_t = {ratio:.4f}; of the nodes the {MOST_NODES} likeliest), on all "
        "sequences, as nothing is tuned, verifies "
        f"{number(paper.pct.verified)} nodes per round; EAGLE-2, with 50 nodes, depth 6 and top 10, "
        f"{number(paper.eagle2.verified)}: {100 * paper.node_share:.0f} %. Acceptance length of PCT "
        f"{number(paper.pct.tau)}, of EAGLE-2 {number(paper.eagle2.tau)}, a ratio of {paper.tau_ratio:.3f}; of EAGLE-2 "
        f"with as many nodes as PCT has in the mean, {nodes}, {number(paper.small.tau)}. Draft passes per round: "
        f"{paper.pct.passes:.2f} and {paper.eagle2.passes:.2f}. Speedup of PCT less that of EAGLE-2, {PAPER}: "
        f"{difference.estimate:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}].",
        "",
        "The paper (figure 6): about half of EAGLE-2's nodes at a competitive length; its table 2 has 3.99 for both on "
        f'LLaMA2-Chat 7B, MT-bench. Here: {paper_words(paper)}. "About half" is {100 * ABOUT_HALF[0]:.0f} to '
        f'{100 * ABOUT_HALF[1]:.0f} %, "comparable" at least {100 * COMPARABLE:.0f} %, each said only where the 95 % '
        "interval lies on one side. Rounds truncated by the record: "
        f"PCT {100 * paper.pct.truncated:.2f} %, EAGLE-2 {100 * paper.eagle2.truncated:.2f} %.",
        "",
        *markdown_table(
            ["PCT's width", "nodes verified", "tau", "rounds truncated %"],
            [
                [f"{r['width']:.0f}", f"{r['nodes']:.1f}", f"{r['tau']:.3f}", f"{100 * r['truncated']:.2f}"]
                for r in run.widths
            ],
        ),
        *picture(name, "widths", "Acceptance length and nodes verified by PCT's expansion width; dashed: EAGLE-2"),
    ]


def opponents_section(run: Run) -> list[str]:
    """Differences of speedups, replayed at each cost and measured."""
    columns = [*run.boards, None]
    answers_by = [dict(differences(run, cost)) for cost in columns]
    rows = [[who, *(found[who] for found in answers_by)] for who in answers_by[0]]
    board = run.boards[MEASURED]
    static, chain = (tuned_best(board, names) for names in (static_names(), list(CHAIN_POLICIES)))
    ran = [tuned_best(run.document, names) for names in (static_names(), list(CHAIN_POLICIES))]
    named = [row["label"] if row else "none" for row in (static, chain, *ran)]
    return [
        f"Speedup of {OURS} less that of the other on the held-out sequences.",
        "",
        *markdown_table(["against", *(f"{cost}, replayed" for cost in run.boards), "really run"], rows),
        f"The best static tree and chain policy are those best on the tuning sequences: at {MEASURED} {named[0]} and "
        f"{named[1]}, of those really run {named[2]} and {named[3]}.",
        "",
    ]


def static_names() -> list[str]:
    return [name for name, kind in TREE_POLICIES.items() if kind.static]


def board_section(name: str, run: Run, cost: str) -> list[str]:
    """All policies at one cost."""
    board = run.boards[cost]
    rows = [
        [
            row["label"],
            interval_text(row["speedup"]),
            "not significant" if row["tied_with_leader"] else "",
            f"{row['tau']:.2f}",
            f"{rounds.verified.estimate:.1f}",
            f"{rounds.passes:.2f}",
            f"{100 * row['oracle_regret']:.1f} %",
            f"{100 * rounds.truncated:.2f}" if row["policy"] in TREE_POLICIES else "",
        ]
        for row, rounds in zip(board["rows"], run.rounds[cost], strict=True)
    ]
    oracle = ["oracle", interval_text(board["oracle"]), *[""] * 4, "0.0 %", ""]
    columns = ["policy", "speedup", "difference to the first", "tau", "nodes verified", "draft passes", "regret"]
    return [
        f"## {name}: all policies, {cost}",
        "",
        *markdown_table([*columns, "rounds truncated %"], [oracle, *rows]),
        *not_compared(board, PAPER if cost == PAPER else ""),
    ]


def size_section(name: str, run: Run) -> list[str]:
    """MEDUSA's figure 6, some of its points, and the trees that tuning chose."""
    dense, sparse = run.sizes
    costs = list(run.boards)
    rows = []
    for point in sparse:
        within = [one for one in dense if one["nodes"] <= point["nodes"]]
        if point["nodes"] in (4, 8, 16, 32, 64, 128, 256) and within:
            rows.append(
                [
                    str(point["nodes"]),
                    f"{point['tokens']:.3f}",
                    f"{max(within, key=lambda one: one['expected'])['tokens']:.3f}",
                    *(optional(point["speedups"][cost]) for cost in costs),
                ]
            )
    columns = ["nodes", "tau, sparse", "tau, best dense of at most as many", *(f"sparse: {cost}" for cost in costs)]
    return [
        "Which dense tree is the best is read off the tuning sequences, as the sparse trees are.",
        "",
        *markdown_table(columns, rows),
        *picture(name, "sizes", "Static trees, replayed on the held-out sequences: acceptance length, and speedup"),
        *picture(name, "trees", "The best static tree of each board, by the tuning sequences"),
    ]


def domain_section(name: str, run: Run) -> list[str]:
    rows = []
    for policy, by_domain in run.domains.items():
        for domain, one in by_domain.items():
            quarters = [f"{q:.0f}" for q in one["nodes_percentiles"]]
            cells = [f"{one['tau']:.2f}", f"{100 * one['truncated']:.2f}", f"{one['nodes_mean']:.1f}"]
            rows.append([policy, domain, *cells, *quarters])
    columns = ["policy", "domain", "tau", "rounds truncated %", "nodes, mean", "5 %", "25 %", "50 %", "75 %", "95 %"]
    return [
        *markdown_table(columns, rows),
        *picture(name, "domains", "Acceptance length and nodes verified by domain, held-out sequences"),
    ]


def calibration_section(name: str, run: Run) -> list[str]:
    rows = [[what, f"{v['log_loss_nats']:.4f}", f"{v['ece']:.4f}"] for what, v in run.calibration.items()]
    return [
        *markdown_table(["probability of a node, given its parent", "log-loss (nats)", "ECE"], rows),
        "Of the recorded children of true nodes, rounds from every held-out position. First children alone, as in the "
        f"paper's figure 3b: ECE {run.bins['first children']['ece']:.4f} (the paper: 0.019).",
        "",
        *picture(name, "reliability", "Draft probability of nodes against how often they are right"),
    ]


def picture(name: str, kind: str, caption: str) -> list[str]:
    return [f"![{caption}](figures/{name}-{kind}.svg)", "", f"*{caption}.*", ""]


def number(value: Estimate) -> str:
    return f"{value.estimate:.2f} [{value.low:.2f}, {value.high:.2f}]"


def optional(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
