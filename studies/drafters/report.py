"""The report on drafters: how far an hour on two CPU cores trains the papers' drafters for SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specsim.policy.registry import TREE_POLICIES
from specsim.report.table import SPEEDUP, TWO, Column, plain
from studies.common import Config, Document
from studies.comparisons import best_by, first_best, measured_verdict, table_rows
from studies.figures import line_panels, point
from studies.papers.tables import read_table
from studies.report import Report, trust_lines

FLAT = 0.01  # what a curve that is called flat gained at most in the last quarter of its tokens
PERCENT = plain(lambda value: f"{100 * value:.0f}")
TREES = ("vct", "cape", "eagle2", "pct")
EDD_TASKS = {"conversation": "mt_bench", "arithmetic": "gsm8k", "summary": "cnn_dm", "code": "humaneval"}
SPACE_TASKS = {"summary": "xsum", "code": "humaneval_x"}
EESD_TABLES = {"conversation": 13, "arithmetic": 10, "summary": 11, "code": 12}

Row = Mapping[str, Any]


def papers_tau(drafter: str) -> dict[str, float]:
    """Return the tau that a paper prints for a drafter with Llama 2, by kind of task; empty if none does.

    EDD's table 1 (7B, chains of five), SPACE's table 1 (7B, k = 5), and EESD's tables 10 to 13 (70B; adaptive lengths),
    which print the share r_d of tokens that were drafted: tau = 1 / (1 - r_d).
    """
    if drafter in ("VDM", "MEDUSA-1", "EAGLE", "EDD"):
        table = read_table("edd_1")
        return {kind: table.row("LLaMA2-Chat-7B", drafter, name).number("tau") for kind, name in EDD_TASKS.items()}
    if drafter == "SPACE":
        table = read_table("space_1")
        return {kind: table.row("LLaMA-2-7B", name).number("tokens_per_step") for kind, name in SPACE_TASKS.items()}
    if drafter == "EESD":
        rows = {
            kind: read_table(f"eesd_{n}").row("LLaMA-2-70B-chat", "EESD (+Beta-TS)") for kind, n in EESD_TABLES.items()
        }
        return {kind: 1 / (1 - row.number("r_d")) for kind, row in rows.items()}
    return {}


def still_rising(curve: Sequence[Sequence[float]]) -> bool:
    """Return whether the agreement rose in the last quarter of the tokens."""
    last = curve[-1]
    before = max((row for row in curve if row[0] <= 0.75 * last[0]), key=lambda row: row[0])
    return last[1] - before[1] > FLAT


def report(config: Config, documents: Mapping[str, Document]) -> Report:
    """Return the report. documents : of each drafter, its validation with its training and acceptance by task"""
    curves = {name: result["training"]["curve"] for name, result in documents.items() if result["training"]}
    rising = [name for name, curve in curves.items() if still_rising(curve)]
    shown = [shown_row(name, result) for name, result in documents.items()]
    best = max(shown, key=lambda row: row["measured"]["estimate"])
    faster = [row["drafter"] for row in shown if row["measured"]["low"] > 1]
    trees = best_by(documents["EDD"]["rows"], "policy")
    tree = max((trees[name] for name in TREES), key=lambda row: row["train_speedup"])
    chain = first_best(row for row in documents["EDD"]["rows"] if row["policy"] not in TREE_POLICIES)
    assert chain is not None
    return Report(
        question="How far do the papers' drafters come on SmolLM2 in an hour on two CPU cores?",
        answer=f"{best['drafter']} is fastest: it measures {best['measured']['estimate']:.2f} times the baseline "
        f"({best['policy']}); {', '.join(faster) if faster else 'no drafter'} "
        f"{'is' if len(faster) < 2 else 'are'} significantly faster than the baseline. Agreement with the target was "
        f"still rising at the end of training for {len(rising)} of {len(curves)} ({', '.join(rising) or 'none'}), so "
        "the order is one of training budgets, not of methods.",
        figure=line_panels(
            {
                "held-out text": {
                    name: ([tokens / 1e3 for tokens, _ in curve], [point(100 * value) for _, value in curve])
                    for name, curve in curves.items()
                }
            },
            ("thousand tokens of training", "agreement with the target, %"),
            "training",
        ),
        figure_name="training",
        caption="Positions of held-out text whose first drafted token is the target's, by tokens of training",
        columns=[
            Column("drafter", "drafter"),
            Column("tokens trained", "tokens_trained", plain(lambda value: f"{value:,.0f}")),
            Column("first token accepted, %", "first_accepted", PERCENT),
            Column("tau at K = 5", "tau", TWO),
            Column("tau in its paper", "paper"),
            Column("best policy", "policy"),
            Column("measured speedup", "measured", SPEEDUP),
        ],
        shown=shown,
        table=[
            *(
                {"drafter": name, "task": kind, **figures, "papers_tau": papers_tau(name).get(kind)}
                for name, result in documents.items()
                for kind, figures in {"all": result["all"], **result["tasks"]}.items()
            ),
            *(row for name, result in documents.items() for row in table_rows("greedy", result["rows"], drafter=name)),
            *(
                {"drafter": name, "tokens_trained": tokens, "held_out_agreement": value}
                for name, curve in curves.items()
                for tokens, value in curve
            ),
        ],
        trust=[
            *trust_lines(config, documents),
            "Trained by `realrun train` (options in config.toml) on questions that SmolLM2 made up and answered, in "
            "bfloat16, beside other work on the machine. EAGLE's weights are those that ship, trained on a GPU on "
            "18 million tokens.",
            "The papers' tau, lowest to highest over their tasks, are of Llama 2 with 7 to 70 billion parameters "
            "(EESD's from its share of drafted tokens, with adaptive lengths); EAGLE's is EDD's measurement of it.",
            f"EDD's best tree ({tree['policy']}) less its best chain ({chain['policy']}): "
            f"{measured_verdict(documents['EDD'], tree, chain)}.",
        ],
    )


def shown_row(name: str, document: Document) -> Row:
    """Return a drafter's row of the short table: its acceptance, and its policy that was best on the tuning prompts."""
    best = first_best(document["rows"])
    assert best is not None
    taus = papers_tau(name).values()
    training = document["training"] or {}
    return {
        "drafter": name,
        "tokens_trained": training.get("tokens"),
        **document["all"],
        "paper": f"{min(taus):.2f} to {max(taus):.2f}" if taus else "",
        "policy": f"{best['policy']}, {best['role']}" if best["role"] != best["policy"] else best["policy"],
        "measured": best["measured"],
    }
