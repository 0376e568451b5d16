"""Report on the papers' systems and ablations: their effects in the papers and on a small target."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specsim.replaying.intervals import ratio_interval
from specsim.report.table import Column, plain
from studies.common import Config, Document
from studies.figures import dots, point
from studies.papers.tables import read_table
from studies.report import Report, load_line, machine_line

AGREES, DISAGREES, UNDECIDED, NOT_RUN = "agrees", "disagrees", "not significant", "not run"
KEYS = ("estimate", "low", "high")
COUNT = plain(lambda value: f"{value}" if value else "")
Runs = Mapping[str, Document]
Row = Mapping[str, Any]


def cell(place: str) -> float:
    """Return what a paper prints at TABLE | KEYS | COLUMN; for EESD's r_d, the tau that follows from it."""
    table, *keys, column = place.split(" | ")
    value = read_table(table).row(*keys).number(column)
    return 1 / (1 - value) if column == "r_d" else value


def find(runs: Runs, row: str) -> tuple[Document, Row] | None:
    """Return the run and the row of "RUN: POLICY"; None if it was not run."""
    name, _, policy = row.partition(": ")
    run = runs.get(name, {})
    found = run.get("rows", run.get("arms", {})).get(policy)
    return None if found is None else (run, found)


def ratio(runs: Runs, changed: str, base: str, of: str) -> dict[str, float] | None:
    """Return the ratio of the changed row's speedup or tau to that of the base; None if one of them was not run.

    The interval resamples prompts, the same for both rows. Each speedup is over the baseline of its own run.
    """
    rows = find(runs, changed), find(runs, base)
    if rows[0] is None or rows[1] is None:
        return None
    (run_a, a), (run_b, b) = rows
    if "acceleration_rate" in a:  # typical acceptance: outputs differ, so intervals count as independent
        (one, *ends), (other, *other_ends) = ([arm["acceleration_rate"][k] for k in KEYS] for arm in (a, b))
        value = one / other
        pairs = zip(ends, reversed(other_ends), strict=True)
        below, above = (math.hypot(math.log(end / one), math.log(far / other)) for end, far in pairs)
        return {"estimate": value, "low": value * math.exp(-below), "high": value * math.exp(above)}
    if of == "tau":
        tops, bottoms = ([n / t for n, t in zip(row["rounds"], row["tokens"], strict=True)] for row in (b, a))
    else:
        tops, bottoms = b["seconds"], a["seconds"]
        if run_a is not run_b:
            scales = zip(run_b["baseline_s"], run_a["baseline_s"], strict=True)
            bottoms = [s * own / others for s, (own, others) in zip(bottoms, scales, strict=True)]
    return ratio_interval(tops, bottoms).as_dict()


def percent(ratio: Mapping[str, float]) -> dict[str, float]:
    """Return a ratio's change from 1, in percent."""
    return {key: 100 * (ratio[key] - 1) for key in KEYS}


def verdict(papers: float, ours: Mapping[str, float] | None) -> str:
    """Return whether the sign of our change, if it is significant, is that of the paper's. None : not run"""
    if ours is None:
        return NOT_RUN
    if ours["low"] <= 0 <= ours["high"]:
        return UNDECIDED
    return AGREES if (ours["estimate"] > 0) == (papers > 0) else DISAGREES


def ablation(runs: Runs, line: Sequence[Any]) -> dict[str, Any]:
    """Return the change that an ablation of config.toml makes in its paper and on this target."""
    paper, name, changed, base, of, says = line
    printed = None if isinstance(says, int) else 100 * (cell(says[0]) / cell(says[1]) - 1)
    found = ratio(runs, changed, base, of)
    ours = None if found is None else percent(found)
    run = find(runs, changed)
    prompts = None if run is None else len(run[0].get("baseline_s", ())) or run[0]["prompts"]
    sign = says if printed is None else printed
    return {
        "paper": paper,
        "ablation": name,
        "of": of,
        "paper_sign": "+" if sign > 0 else "-",
        "paper_percent": printed,
        "ours_percent": ours,
        "prompts": prompts,
        "verdict": verdict(sign, ours),
        "changed": changed,
        "base": base,
    }


def system(runs: Runs, name: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a system's forecast and measured speedup and tau, beside those that its paper prints."""
    found = find(runs, line["row"])
    _, row = found if found else ({}, {})
    speedup = line.get("speedup")
    places = [speedup] if isinstance(speedup, str) else speedup or []
    forecast = row.get("forecast")
    return {
        "system": name,
        "row": line["row"],
        "papers_tau": cell(line["tau"]) if "tau" in line else None,
        "papers_speedup": cell(places[0]) / math.prod(map(cell, places[1:])) if places else None,
        "tau": row.get("tau", row.get("acceleration_rate", {}).get("estimate")),
        "forecast": forecast,
        "speedup": row.get("measured"),
        "rounds_identical_percent": row.get("rounds_identical_percent"),
        "rounds_truncated_percent": 100 * row["truncated_share"] if "truncated_share" in row else None,
        "verdict": "run" if found else NOT_RUN,
    }


def counted(paper: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Count a paper's ablations by verdict, and name those that disagree."""
    own = [row for row in rows if row["paper"].partition(",")[0] == paper]
    counts = Counter(row["verdict"] for row in own)
    against = "; ".join(row["ablation"] for row in own if row["verdict"] == DISAGREES)
    return {
        "paper": paper,
        "ablations": len(own),
        **{v: counts[v] for v in (AGREES, DISAGREES, UNDECIDED, NOT_RUN)},
        "against": against,
    }


def between(values: Iterable[float]) -> str:
    """Return the range of these values as text."""
    ends = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:.3g}" for end in (ends[0], ends[-1])))


def report(config: Config, runs: Runs, trainings: Mapping[str, Document]) -> Report:
    """Return the report. runs : results of the runs that were done, by name; trainings : by drafter"""
    rows = [ablation(runs, line) for line in config["ablations"]["rows"]]
    systems = [system(runs, name, line) for name, line in config["systems"].items()]
    papers = list(dict.fromkeys(row["paper"].partition(",")[0] for row in rows))
    counts = Counter(row["verdict"] for row in rows)
    shown = [counted(paper, rows) for paper in papers]
    done = [row for row in systems if row["speedup"]]
    fastest = max(done, key=lambda row: row["speedup"]["estimate"])
    measured = {name: run for name, run in runs.items() if "rows" in run}
    every = [row for run in measured.values() for row in run["rows"].values()]
    exact = [row["rounds_identical_percent"] for row in every if row["rounds_identical_percent"] is not None]
    whole = [row for row in every if row["rounds_identical_percent"] is not None and not row["truncated_share"]]
    errors = sorted(
        abs(100 * (row["forecast"]["estimate"] / row["measured"]["estimate"] - 1)) for row in every if row["forecast"]
    )
    drawn = [row for row in rows if row["ours_percent"]]
    first = next(iter(measured.values()))
    return Report(
        question="Do the papers' ablations have the same sign on a small target?",
        answer=f"Of {len(rows)} ablations {len(rows) - counts[NOT_RUN]} were run here: {counts[AGREES]} agree in sign, "
        f"{counts[DISAGREES]} disagree and {counts[UNDECIDED]} are not significant. Of {len(done)} systems that were "
        f"run under their papers' policies, the fastest is {fastest['system']} at "
        f"{fastest['speedup']['estimate']:.2f} times the baseline.",
        figure=dots(
            [
                (f"{row['paper']}: {row['ablation']}", {"ours": row["ours_percent"], "paper": paper_point(row)})
                for row in drawn
            ],
            "ablations",
            "Change by each ablation",
            "change of speedup or tau, %; 95 % intervals; a paper's sign without a size is drawn at +-1 %",
            level=0,
        ),
        figure_name="ablations",
        caption="Change of speedup or tau by each ablation, here and in its paper",
        columns=[
            Column("paper", "paper"),
            Column("ablations", "ablations"),
            *(Column(name, name, COUNT) for name in (AGREES, DISAGREES, UNDECIDED, NOT_RUN)),
            Column("disagree", "against"),
        ],
        shown=shown,
        table=[*systems, *rows],
        trust=[
            f"Prompts: {between(run['sequences']['holdout'] for run in measured.values())} of the target's held-out "
            f"prompts a run (column prompts), at most {config['max_new_tokens']} tokens each; few, so small "
            "effects are not significant.",
            machine_line(config | {"target": config["decoded"]}, first),
            load_line(measured)
            + (
                " Times are CPU time of the process, which other processes move less."
                if config["clock"] == "cpu"
                else ""
            ),
            "Noise floor (A/A test, the baseline run twice): "
            f"{between(run['noise_floor_percent'] for run in measured.values())} %. Intervals (95 %) are over held-out "
            "prompts; where two runs are compared, each speedup is over its own run's baseline.",
            f"Rounds: identical in replay and real run for {sum(value == 100 for value in exact)} of {len(exact)} "
            f"policies that replay exactly ({sum(row['rounds_identical_percent'] == 100 for row in whole)} of "
            f"{len(whole)} whose trees the trace holds whole). Forecasts were written before any held-out prompt was "
            f"decoded; their median error is {errors[len(errors) // 2]:.1f} %.",
            f"{len(trainings)} drafters were trained once each, on {config['training']['shared'].split()[1]} million "
            "tokens (options in config.toml), far less than in the papers: a training's effect may change sign at full "
            "length, and an interval over prompts does not include the spread of trainings.",
            "The papers' targets have 7 to 13 billion parameters. table.csv has each system beside its paper's tau and "
            "speedup, and each ablation beside the paper's change.",
        ],
    )


def paper_point(row: Row) -> dict[str, float]:
    """Return a paper's change, in percent, for the figure; 1 percent where the paper states only its sign."""
    size = row["paper_percent"]
    return point((1.0 if row["paper_sign"] == "+" else -1.0) if size is None else size)
