"""The tables of the study, from plain documents of validations; every number comes from the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from specsim.policy.registry import TREE_POLICIES
from specsim.report.markdown import markdown_table, verdict
from specsim.report.page import comparable_text
from specsim.speedup.intervals import beyond_floor, interval_text, paired_difference
from studies.words import above_one, first_best, measured_verdict, share_text

Document = Mapping[str, Any]
Row = Mapping[str, Any]
Runs = Mapping[str, Mapping[str, Document]]  # validations by way of decoding and drafter

TS = ("beta_ts", "cali_ts")


def best(document: Document, *names: str, tuned: bool = True) -> Row | None:
    """Of these policies' tuned forms the row that is best on the tuning prompts; None if none was run."""
    rows = [row for row in document["rows"] if row["policy"] in names and (row["role"] == "tuned" or not tuned)]
    return first_best(rows)


def contenders(document: Document) -> list[tuple[str, Row]]:
    """What a drafter's section shows: fixed K, each Thompson sampling, the best of other chains, the best tree."""
    others = ("max_confidence", "adaedl")
    found = [
        ("best fixed K", best(document, "fixed_k")),
        ("Beta-TS", best(document, "beta_ts")),
        ("Cali-TS", best(document, "cali_ts")),
        ("best threshold", best(document, *others)),
        ("Beta-TS on a tree", best(document, "beta_ts_tree")),
        ("best tree", best(document, *TREE_POLICIES, tuned=False)),
    ]
    return [(name, row) for name, row in found if row is not None]


def main_table(documents: Mapping[str, Document]) -> list[str]:
    """Every drafter under its contenders. documents : by drafter"""
    columns = ["drafter", "policy", "v_d", "r_d", "HM", "tau", "from own rounds", "measured", "error %"]
    columns += ["rounds identical %", "rounds truncated %"]
    rows = []
    for drafter, document in documents.items():
        for name, row in contenders(document):
            rows.append(
                [
                    drafter,
                    f"{name}: {row['label']}",
                    *(f"{row[key]:.3f}" for key in ("v_d", "r_d", "hm")),
                    f"{row['tau']:.2f}",
                    interval_text(row["predicted"]),
                    interval_text(row["measured"]),
                    f"{row['error_percent']:+.1f}",
                    f"{row['rounds_identical_percent']:.1f}",
                    share_text(row) if row["policy"] in TREE_POLICIES else "",
                ]
            )
    return markdown_table(columns, rows)


def ladder_rows(documents: Mapping[str, Document]) -> list[tuple[str, Row]]:
    """Every drafter's contenders by name."""
    found = [(drafter, one) for drafter, document in documents.items() for one in contenders(document)]
    return [(f"{drafter}, {name}: {row['label']}", row) for drafter, (name, row) in found]


def findings(documents: Mapping[str, Document]) -> list[str]:
    """What the numbers of one way of decoding say, as a list. documents : by drafter"""
    tops = {}
    for drafter, document in documents.items():
        name, row = max(contenders(document), key=lambda one: float(one[1]["train_speedup"]))
        tops[drafter] = (name, row)
    drafter, (name, row) = max(tops.items(), key=lambda item: float(item[1][1]["train_speedup"]))
    key, base = "sequence_seconds", "autoregressive_sequence_seconds"
    above = above_one([(documents[d][base], top[key]) for d, (_, top) in tops.items()])
    floors = {d: documents[d]["noise_floor_percent"] for d in tops}
    clear = [beyond_floor(floors[d], top["measured"]["estimate"], 1.0) for d, (_, top) in tops.items()]
    pays = [d for d, sure, far in zip(tops, above, clear, strict=True) if sure and far]
    rest = [d for d in tops if d not in pays]
    words = [gain.rpartition("] ")[2] for _, _, _, gain in gains(documents)]
    kinds = ("better", "not significant", "below the noise floor", "worse")
    counts = ", ".join(f"{words.count(word)} {word}" for word in kinds)
    best_of_all = (
        f"{drafter} under {name} ({row['label']}), measured at {interval_text(row['measured'])} on the others."
    )
    return [
        f"- {' '.join(comparable_text(documents)) or f'Best on the tuning prompts: {best_of_all}'}",
        f"- Above 1 under the policy that is best on the tuning prompts, by more than the noise floor and with 95 % "
        f"confidence for all {len(tops)} drafters together (Bonferroni): {', '.join(pays) or 'none'}; not so: "
        f"{', '.join(rest) or 'none'}.",
        f"- Thompson sampling against the tuned fixed K, really run, by drafter: {counts}.",
        "",
    ]


def gains(documents: Mapping[str, Document]) -> list[tuple[str, Row, Row, str]]:
    """Per drafter its best fixed K, its best Thompson sampling, and how much faster this one really was, in words."""
    found = []
    for drafter, document in documents.items():
        fixed, sampled = best(document, "fixed_k"), best(document, *TS)
        if fixed is not None and sampled is not None:
            found.append((drafter, fixed, sampled, measured_verdict(document, sampled, fixed)))
    return found


def generality_table(documents: Mapping[str, Document]) -> list[str]:
    """Table 5: what Thompson sampling adds to each drafter's best fixed K, over the same sequences."""
    rows = []
    for drafter, fixed, sampled, gain in gains(documents):
        predicted = sampled["predicted"]["estimate"] - fixed["predicted"]["estimate"]
        cells = (f"{row['measured']['estimate']:.3f}" for row in (fixed, sampled))
        rows.append([drafter, fixed["label"], sampled["label"], *cells, f"{predicted:+.3f}", gain])
    columns = ["drafter", "fixed K", "Thompson sampling", "measured, fixed", "measured, TS", "predicted gain", "gain"]
    return markdown_table(columns, rows)


def cheap_table(boards: Mapping[str, Document]) -> list[str]:
    """Replays with a cheap draft step: contenders' speedups, and Thompson sampling less the best fixed K.

    boards : by drafter, leaderboards as `specsim.ranking.leaderboard.Board.as_dict` has them
    """
    names = ("best fixed K", "Beta-TS", "Cali-TS", "best threshold")
    rows = []
    for drafter, board in boards.items():
        mine = [{**r, "role": "tuned" if r["tuned"] else "default", "predicted": r["speedup"]} for r in board["rows"]]
        found = dict(contenders({"rows": mine}))
        sampled, fixed = best({"rows": mine}, *TS), found["best fixed K"]
        gain = None
        if sampled is not None:
            gain = paired_difference(board["baseline_s"], sampled["sequence_seconds"], fixed["sequence_seconds"])
        cells = [f"{interval_text(found[name]['predicted'])}" if name in found else "" for name in names]
        rows.append([drafter, *cells, verdict(gain)])
    return markdown_table(["drafter", *names, "Thompson sampling less fixed K"], rows)


def breakdown_table(folders: Mapping[str, tuple[Path, Document]]) -> list[str]:
    """Table 8: where the time of a token goes, in milliseconds. folders : drafter -> (its job's folder, validation)"""
    columns = ["drafter", "policy", "drafting", "verification", "sampling (policy)", "others", "ms per token"]
    rows = []
    for drafter, (folder, document) in folders.items():
        rounds = pd.read_parquet(folder / "rounds.parquet")
        for name, row in contenders(document):
            if name not in ("best fixed K", "Beta-TS", "Cali-TS"):
                continue
            mine = rounds[rounds["policy"] == row["label"]]
            tokens = sum(row["sequence_tokens"])
            parts = [1e3 * mine[key].sum() / tokens for key in ("draft_s", "verify_s", "policy_s", "other_s")]
            cells = [f"{part:.3f} ({100 * part / sum(parts):.1f} %)" for part in parts]
            rows.append([drafter, row["label"], *cells, f"{sum(parts):.3f}"])
    return markdown_table(columns, rows)


def predictor_table(facts: Mapping[str, Document]) -> list[str]:
    """Cali-TS's predictor on held-out text, beside calibrated confidence. facts : by drafter, of its predictor"""
    rows = []
    for drafter, fact in facts.items():
        for name, values in fact["held_out"].items():
            cells = (f"{values[key]:.4f}" for key in ("log_loss_nats", "ece", "auc"))
            rows.append([drafter, name, *cells])
    return markdown_table(["drafter", "score", "log-loss, nats", "ECE", "area under ROC"], rows)


def overhead_table(documents: Mapping[str, Document]) -> list[str]:
    """MEDUSA: speedup = acceleration rate / overhead, from the measured rounds."""
    columns = ["drafter", "policy", "acceleration rate", "overhead", "rate / overhead", "measured speedup"]
    rows = []
    for drafter, document in documents.items():
        for name, row in contenders(document):
            rate, overhead = row["measured_tau"], row["overhead"]
            cells = (f"{rate:.3f}", f"{overhead:.3f}", f"{rate / overhead:.3f}", f"{row['measured']['estimate']:.3f}")
            rows.append([drafter, f"{name}: {row['label']}", *cells])
    return markdown_table(columns, rows)


def speedups(documents: Mapping[str, Document]) -> Sequence[Mapping[str, Any]]:
    """Predicted and measured speedup of every contender, for the figure."""
    return [
        {"drafter": drafter, "policy": name, "predicted": row["predicted"], "measured": row["measured"]}
        for drafter, document in documents.items()
        for name, row in contenders(document)
    ]


def typical_table(document: Document) -> list[str]:
    """Every threshold beside loss-free decoding."""
    columns = ["verification", "epsilon", "acceleration rate", "log-likelihood, nats per token", "distinct trigrams"]
    rows = []
    for arm in document["arms"]:
        epsilon = f"{arm['epsilon']:g}" if "epsilon" in arm else ""
        name = arm["arm"] + (", loss-free" if arm["loss_free"] else "")
        values = (interval_text(arm["acceleration_rate"]), interval_text(arm["log_likelihood_nats"]))
        rows.append([name, epsilon, *values, f"{arm['distinct_trigram_share']:.3f}"])
    return markdown_table(columns, rows)


def training_table(facts: Mapping[str, Document]) -> list[str]:
    """What was trained and what it took (EESD, Table 6). facts : of the drafters' files, by name"""
    columns = ["drafter", "trained parameters", "tokens seen, M", "seconds", "tokens/s", "held out"]
    rows = []
    for name, fact in facts.items():
        if "parameters" not in fact:
            held = f"first token accepted {fact['first_token_accepted_share']:.3f}"
            rows.append([name, "none", "", "", "", held])
            continue
        held = ", ".join(f"{key} {value:.3f}" for key, value in fact["held_out"]["end"].items())
        seconds = fact["seconds"]
        tokens = fact["tokens"]
        cells = (f"{fact['parameters']:,}", f"{tokens / 1e6:.2f}", f"{seconds:.0f}", f"{tokens / seconds:.0f}")
        rows.append([name, *cells, held])
    return markdown_table(columns, rows)
