"""The report on drafters: how far an hour on two CPU cores trains the papers' drafters for SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specsim.replaying.intervals import ratio_interval
from specsim.report.page import comparable_text
from specsim.report.table import SPEEDUP, TWO, Column, plain
from studies.common import Config, Document, about_prompts
from studies.comparisons import best_by, first_best, table_rows
from studies.figures import line_panels, point
from studies.papers.tables import read_table
from studies.report import Report, load_line, machine_line

SPACE = "SPACE"
FLAT = 0.01  # what a curve that is called flat gained at most at its end
PERCENT = plain(lambda value: f"{100 * value:.0f}")
SPEEDS = ("forecast", "measured", "tau", "v_d", "rounds_identical_percent")  # of the board's rows
EDD_TASKS = {"conversation": "mt_bench", "arithmetic": "gsm8k", "summary": "cnn_dm", "code": "humaneval"}
SPACE_TASKS = {"summary": "xsum", "code": "humaneval_x"}
ADAEDL_TASKS = {"summary": "cnn_dm", "question": "dolly_15k", "translation": "wmt_19"}
EESD_TABLES = {"conversation": 13, "arithmetic": 10, "summary": 11, "code": 12}

Row = Mapping[str, Any]


def published(drafter: str, thompson: str = "Beta-TS") -> dict[str, dict[str, float]]:
    """Return tau and speedup that a paper prints for a drafter with Llama 2, by kind of task; empty if none does.

    EDD's table 1 (7B, chains of five), SPACE's table 1 (7B, k = 5), and EESD's tables 10 to 13 (13B, adaptive
    lengths), which print the share r_d of tokens that were drafted: tau = 1 / (1 - r_d). MEDUSA-2's are of Vicuna-7B
    (MEDUSA's tables 1 and 2), and AdaEDL's table 1 has speeds of a draft model with Llama 2 7B (7 tokens at most).

    thompson : EESD's sampling
    """
    if drafter in ("VDM", "MEDUSA-1", "EAGLE", "EDD"):
        table = read_table("edd_1")
        rows = {kind: table.row("LLaMA2-Chat-7B", drafter, name) for kind, name in EDD_TASKS.items()}
        return {kind: {"tau": row.number("tau"), "speedup": row.number("speedup")} for kind, row in rows.items()}
    if drafter == SPACE:
        table = read_table("space_1")
        rows = {kind: table.row("LLaMA-2-7B", name) for kind, name in SPACE_TASKS.items()}
        return {k: {"tau": row.number("tokens_per_step"), "speedup": row.number("speedup")} for k, row in rows.items()}
    if drafter in ("EESD", "Self-SD"):
        method = f"EESD (+{thompson})" if drafter == "EESD" else "Self SD"
        rows = {kind: read_table(f"eesd_{n}").row("LLaMA-2-13B", method) for kind, n in EESD_TABLES.items()}
        return {k: {"tau": 1 / (1 - row.number("r_d")), "speedup": row.number("speedup")} for k, row in rows.items()}
    if drafter == "MEDUSA-2":
        tau = read_table("medusa_1").row("Vicuna-7B").number("acceleration_rate")
        return {"conversation": {"tau": tau, "speedup": read_table("medusa_2").row("MEDUSA-2").number("speedup")}}
    if drafter.startswith("draft"):
        plain, adaedl = (read_table("adaedl_1").row("7", method) for method in ("Autoregressive", "AdaEDL"))
        return {kind: {"speedup": adaedl.number(c) / plain.number(c)} for kind, c in ADAEDL_TASKS.items()}
    return {}


def span(values: Sequence[float]) -> str:
    """Return the lowest and highest value; empty if there is none."""
    ends = [f"{value:.2f}" for value in (min(values), max(values))] if values else [""]
    return " to ".join(dict.fromkeys(ends))


def still_rising(curve: Sequence[Sequence[float]]) -> bool:
    """Return whether the agreement rose between the last two measurements."""
    return curve[-1][1] - curve[-2][1] > FLAT


def report(
    config: Config,
    board: Document,
    space: Document,
    trainings: Mapping[str, Document],
    tasks: Mapping[str, Mapping[str, Document]],
) -> Report:
    """Return the report.

    board : of all drafters but SPACE; space : its validation; trainings : by drafter; tasks : acceptance by drafter,
    then by kind of task
    """
    curves = {name: training["curve"] for name, training in trainings.items()}
    rising = [name for name, curve in curves.items() if still_rising(curve)]
    rows = [with_own_interval(row, board) for row in board["rows"]]
    best = best_by(rows, "drafter")
    ks = first_best(space["rows"])
    assert ks is not None
    best[SPACE] = {**ks, "forecast": ks["predicted"]}
    order = sorted(tasks, key=lambda name: -best[name]["measured"]["estimate"])
    shown = [shown_row(name, best[name], trainings.get(name, {}), tasks[name]["all"]) for name in order]
    faster = [name for name in order if best[name]["measured"]["low"] > 1]
    boards = {"board": board, SPACE: space}
    return Report(
        question="How far do the papers' drafters come for SmolLM2 in an hour on two CPU cores?",
        answer=f"The fastest is {order[0]} at {best[order[0]]['measured']['estimate']:.2f} times the baseline; "
        f"significantly faster than the baseline: {', '.join(faster) or 'none'}. "
        f"Agreement with the target was still rising when the budget ended for {', '.join(rising) or 'none'} "
        f"({len(rising)} of {len(curves)}) and was flat for the others.",
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
            Column("tokens trained", lambda row: f"{row['tokens_trained']:,}" if row["tokens_trained"] else ""),
            Column("first token accepted, %", "first_accepted", PERCENT),
            Column("tau at K = 5", "tau", TWO),
            Column("tau in papers", "papers"),
            Column("best policy", "policy"),
            Column("measured speedup", "measured", SPEEDUP),
        ],
        shown=shown,
        table=[
            *(
                {"drafter": name, "task": kind, **figures, "papers_tau": published(name).get(kind, {}).get("tau")}
                for name, kinds in tasks.items()
                for kind, figures in kinds.items()
            ),
            *({name: row[name] for name in ("drafter", "policy", "role", "settings", *SPEEDS)} for row in rows),
            *table_rows("greedy", [{**row, "ladder": {"eq14": None}} for row in space["rows"]], drafter=SPACE),
            *(
                {"drafter": name, "tokens_trained": tokens, "held_out_agreement": value}
                for name, curve in curves.items()
                for tokens, value in curve
            ),
        ],
        trust=[
            f"Prompts: {about_prompts(config, board)}.",
            machine_line(config, board),
            load_line(boards),
            "Noise floor (A/A test, the baseline run twice): "
            + ", ".join(f"{document['noise_floor_percent']:.1f} % ({name})" for name, document in boards.items())
            + ". Intervals (95 %) are over held-out prompts, of each row alone.",
            *comparable_text([document["baseline"]["ms_per_token"] for document in boards.values()]),
            "Forecasts were written before any held-out prompt was decoded. Their median error is "
            f"{board['errors']['forecast']['median_abs_percent']:.1f} %; that of replays at the same run's costs is "
            f"{board['errors']['decomposition']['median_abs_percent']:.1f} %.",
            "Drafters were trained by `realrun train` (options in config.toml) on SmolLM2's answers to specsim's "
            "training questions, in bfloat16, beside other work on the machine. EAGLE's weights are those that ship, "
            "trained on a GPU on 18 million tokens. SPACE tunes the target, and its baseline is the tuned target.",
            "Held-out text holds the questions too, which are easier to predict than answers, so agreement there is "
            "higher than acceptance in decoding. Learning rates fall to zero by the end of a training.",
            "The papers' tau are the lowest and highest over tasks, of Llama 2 with 7 billion parameters (EESD: 13 "
            "billion, adaptive lengths). EAGLE's and MEDUSA-1's are from the EDD paper.",
        ],
    )


def with_own_interval(row: Row, board: Document) -> Row:
    """Return a leaderboard's row with the interval of its speedup alone, in place of that for all rows at once."""
    measured = ratio_interval(board["baseline_sequence_seconds"], row["measured_sequence_seconds"])
    return {**row, "measured": measured.as_dict()}


def shown_row(name: str, best: Row, training: Document, acceptance: Document) -> Row:
    """Return a drafter's row of the short table. best : its policy that was best on the tuning prompts"""
    return {
        "drafter": name,
        "tokens_trained": training.get("tokens"),
        **acceptance,
        "papers": span([figures["tau"] for figures in published(name).values()]),
        "policy": best.get("form", best["label"]),
        "measured": best["measured"],
    }
