"""What the figures of the report on chain policies are evaluated from: traces, replayed again, and real runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from studies.claims import HOME, config, recorded
from studies.printed import LADDER, Figure
from studies.run_figures import MEDIAN, OF_RUN, is_median_of_ladder, measured_difference, of_row

STUDY = "chain_policies"
QUANTITIES = {
    "speedup": "speedup",
    "v_d": "v_d",
    "r_d": "r_d",
    "tau": "tau",
    "mean draft": "mean_draft_tokens",
    "regret": "oracle_regret",
}
BY_LENGTH = {  # of the table by maximal draft length, the policy
    "Base-SPD, best K": "fixed_k",
    "Max-Confidence": "max_confidence",
    "AdaEDL": "adaedl",
    "RenewalStop": "renewal_stop",
}
LEARNS = {"renewal_stop": ("lookahead", "signal")}  # policy -> what is set, the rest is learned
QUESTION = "question (difference of speedups, paired)"


def not_claimed(figure: Figure) -> str:
    if is_median_of_ladder(figure):
        return MEDIAN
    if "mean loss over lambda" in figure.column:
        return "a mean over a sweep of settings"
    if figure.row.get("policy") == "oracle":
        return "the oracle's, from which every row's regret is claimed"
    return ""


def unit(figure: Figure) -> tuple[float, float]:
    return (0.01, 0.0) if figure.column == "regret" else (1.0, 0.0)


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    """results : the study's, with the leaderboards that it writes"""

    def subject(figure: Figure) -> dict[str, Any]:
        row, column = figure.row, figure.column
        if "D" in row:
            cost = figure.section.partition(" / ")[2]
            rows = board(results, row["run"], cost, int(row["D"]))
            label = best(rows, BY_LENGTH[column])
            return replay(row["run"], cost, rows[label], int(row["D"]))
        if "run" in row:
            return {"document": recorded(STUDY, row["run"], "replayed.json"), "at": OF_RUN[column]}
        run, _, rest = figure.section.partition(": ")
        if rest == "really run":
            return really_run(run, figure)
        cost, depth = rest.removeprefix("replayed, ").split(", D = ")
        rows = board(results, run, cost, int(depth))
        if QUESTION in row:
            both = [replay(run, cost, rows[label], int(depth)) for label in asked(rows, row[QUESTION])]
            own = [{key: one[key] for key in ("policy", "settings", "replays") if key in one} for one in both]
            return {"trace": both[0]["trace"], "cost": both[0]["cost"], "tuning_share": share(), "difference": own}
        return {**replay(run, cost, rows[row["policy"]], int(depth)), "quantity": QUANTITIES[column]}

    return subject


def really_run(run: str, figure: Figure) -> dict[str, Any]:
    """Of what was really run; predictions are replayed again, but for policies that learned."""
    row, column, document = figure.row, figure.column, recorded(STUDY, run, "replayed.json")
    label = row.get(LADDER) or row["policy"].rpartition(" (")[0]
    found = ran(run)
    if column.startswith("RenewalStop less"):
        renewal = next(name for name, (policy, set_) in found.items() if policy == "renewal_stop" and set_["lookahead"])
        return measured_difference(document, renewal, label)
    policy, params = found[label]
    if column == "predicted" and policy not in LEARNS:
        return {**replayed_at(run, "measured costs"), "policy": policy, "settings": params}
    return of_row(document, label, column)


def replay(run: str, cost: str, row: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """A row of a leaderboard of drafts up to this depth, replayed again."""
    params, policy = row["params"], row["policy"]
    kept = {key: params[key] for key in LEARNS.get(policy, params)}
    limit = {} if depth == config(STUDY)["depth"] else {"max_draft_tokens": depth}
    times = {} if row["seeds"] == 1 else {"replays": row["seeds"]}
    return {**replayed_at(run, cost), "policy": policy, "settings": kept, **limit, **times}


def replayed_at(run: str, cost: str) -> dict[str, Any]:
    measured = recorded(STUDY, run, "profile.json")
    prices = {"measured costs": measured, "cheap drafter": {"s_d": config(STUDY)["cost_ratio"] * 1e-2, "s_t": 1e-2}}
    return {"trace": recorded(STUDY, run, "trace"), "cost": prices[cost], "tuning_share": share()}


def share() -> float:
    return float(config(STUDY)["tuning_share"])


@cache
def ran(run: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The policies that were really run, by label."""
    rows = json.loads((HOME / STUDY / "recorded" / run / "replayed.json").read_text())["rows"]
    return {row["label"]: (row["policy"], row["params"]) for row in rows}


@cache
def board(results: Path, run: str, cost: str, depth: int) -> dict[str, dict[str, Any]]:
    """The rows of a leaderboard, by label."""
    boards = json.loads((results / run / cost.replace(" ", "-") / "leaderboard.json").read_text())["boards"]
    (found,) = (one for one in boards if one["max_draft"] == depth)
    return {row["label"]: row for row in found["rows"]}


def best(rows: Mapping[str, Mapping[str, Any]], *policies: str) -> str:
    """Of these policies' rows the one that is best on the tuning prompts, by label."""
    mine = [label for label, row in rows.items() if row["policy"] in policies]
    return max(mine, key=lambda label: float(rows[label]["train_speedup"]))


def asked(rows: Mapping[str, Mapping[str, Any]], question: str) -> list[str]:
    """Which two rows a question compares, by label."""
    from studies.chain_policies.questions import QUESTIONS

    (both,) = ((a, b) for text, a, b in QUESTIONS if text == question)
    return [one if isinstance(one, str) else best(rows, *one) for one in both]
