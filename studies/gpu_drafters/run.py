"""The papers' drafters trained and decoding on one GPU: `python -m studies gpu_drafters`.

The real run is four stages of `realrun gpu`, and `realrun board` in float32 on a CPU with the weights that came back.
Results of these commands in OUT/gpu_drafters/gpu are used as they are, on any machine, and kept without what the report
does not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realrun.drafters.registry import DRAFTERS
from realrun.gpu import run_stages
from specsim.cli.console import progress_bar
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.report.table import Column
from studies.common import Config, Document
from studies.comparisons import best_by, first_best
from studies.drafters.report import published, span, with_own_interval
from studies.figures import lines_over_dots, point
from studies.report import Report, load_line, machine_line

TEXT, TRAIN = "text", "train"  # stages
DECODED = {"decode-greedy": "greedy", "decode-sampled": "temperature 0.8"}  # what they are called here
SHOWN = 8
KNOWN = ("forecast", "text_known", "costs_known", "decomposition")  # errors of a board
FLOAT32 = "float32"  # a board of some of these drafters on a CPU
SAME_TEXT = "same_text_rounds_identical_percent"
LETTERS = 80  # of a reason
POLICIES = {kind.name: kind.paper_policy for kind in DRAFTERS.values()} | {"model": "adaedl"}  # papers', by drafter
OWN_TARGET = "their text is not the baseline's, and speedups are for equally many tokens"

STAGES = (TEXT, TRAIN, *DECODED)
RECORDED = tuple(f"{name}.json" for name in (*STAGES, FLOAT32))
POINTS = 24  # of a training's curve
GPU = "gpu"  # folder of the stages' whole results
ALL = ("complete", "left", "error", "reduced", "provenance", "seconds")
READ = {  # by what a stage's result holds it in, beside ALL; "" for the result itself
    "": ("tokens", "tokens_per_second"),
    "trainings": ("tokens", "seconds", "curve", "error"),
    "board": ("target", "dtype", "environment", "output_tokens", "drafters", "load", "noise_floor_percent", "baseline",
              "baseline_sequence_seconds", "prompts", "sequences", "errors", "forecast", "options", "left_out",
              "typical"),
    "rows": ("drafter", "role", "policy", "form", "settings", "own_target", "train_speedup", "forecast", "tau", "v_d",
             "measured", "text_known", "costs_known", "rounds_identical_percent", "output_identical_percent",
             "same_text_rounds_identical_percent", "measured_sequence_seconds"),
}  # fmt: skip


def thinned(curve: Sequence[Any]) -> list[Any]:
    """Return at most about POINTS points of a curve, its last among them."""
    return [*curve[:-1][:: 1 + len(curve) // POINTS], *curve[-1:]]


def read_of(document: Mapping[str, Any], what: str) -> Document:
    return {key: document[key] for key in READ[what] if key in document}


def kept(result: Document) -> Document:
    """Return what the report reads of a stage's result."""
    if "stage" not in result:
        return result
    document = {key: result[key] for key in ALL if key in result} | read_of(result, "")
    if "trainings" in result:
        document["trainings"] = {
            name: read_of({**one, "curve": thinned(one.get("curve", []))}, "trainings")
            for name, one in result["trainings"].items()
        }
    if "board" in result:
        rows = [read_of(row, "rows") for row in result["board"]["rows"]]
        document["board"] = {**read_of(result["board"], "board"), "rows": rows}
    return document


def main(out: Path, config: Config) -> None:
    """Run the stages, unless there are results, and write the report."""
    if torch.cuda.is_available() and not any((out / name).is_file() for name in RECORDED):
        with progress_bar() as progress:
            run_stages(
                out / GPU, minutes=config["minutes"], stages=STAGES, target=config["target"], seed=config["seed"],
                progress=progress,
            )  # fmt: skip
    for path in [out / GPU / name for name in RECORDED]:
        if path.is_file():
            write_json(kept(json.loads(path.read_text())), out / path.name)
    results = {Path(name).stem: json.loads((out / name).read_text()) for name in RECORDED if (out / name).is_file()}
    if TRAIN not in results or not any("board" in results.get(stage, {}) for stage in DECODED):
        raise InputError(
            f"the study gpu_drafters trains and decodes on a GPU, and {out / GPU} has no results of `realrun gpu`; "
            "run it on a GPU"
        )
    report(config, results).write(out)


def report(config: Config, results: Mapping[str, Document]) -> Report:
    """Return the report. results : of stages, by their names; some may be missing or incomplete"""
    trainings = results[TRAIN].get("trainings", {})
    boards = {run: results[stage]["board"] for stage, run in DECODED.items() if "board" in results.get(stage, {})}
    rows = {run: [with_own_interval(row, board) for row in board["rows"]] for run, board in boards.items()}
    best = {run: best_by(of_run, "drafter") for run, of_run in rows.items()}
    first = next(iter(boards))
    own = {name: row for name in best[first] if (row := papers_row(name, boards[first], rows[first]))}
    decoded = dict.fromkeys(name for of_run in best.values() for name in of_run)
    shown = [name for name in config["table"] if name in decoded][:SHOWN]
    shown.sort(key=lambda name: -speedup(best, name))
    facts = {run: {drafter["name"]: drafter for drafter in board["drafters"]} for run, board in boards.items()}
    curves = {name: training["curve"] for name, training in trainings.items() if training.get("curve")}
    columns = [
        Column("drafter", "drafter"),
        Column("M tokens trained: agreement, first token accepted, %", "trained"),
        Column("tau (in papers)", "tau"),
        Column("best policy (its paper's)", "policy"),
        *(Column(f"{run}: forecast, measured", run) for run in boards),
        Column("speedup in papers", "papers"),
    ]
    return Report(
        question="Do the papers' drafters, trained for minutes on one GPU, pay there, and was it forecast?",
        answer=f"{paying(best, config['table'], boards[first])} {forecast_errors(rows, boards)}",
        figure=lines_over_dots(
            "held-out text",
            {n: ([tokens / 1e6 for tokens, _ in c], [point(100 * value) for _, value in c]) for n, c in curves.items()},
            ("million tokens of training", "agreement with the target, %"),
            {
                run: [
                    (name, {"forecast": of_run[name]["forecast"], "measured": of_run[name]["measured"]})
                    for name in sorted(of_run, key=lambda name: -speedup(best, name))
                ]
                for run, of_run in best.items()
            },
            "speedup, baseline = 1; 95 % intervals",
            "drafters",
            level=1.0,
        ),
        figure_name="drafters",
        caption="Held-out agreement by tokens of training, and speedups of each drafter's best policy",
        columns=columns,
        shown=[
            {
                "drafter": name,
                "trained": trained(trainings.get(name, {}), facts[first].get(name, {})),
                "tau": in_papers(next(best[run][name] for run in best if name in best[run])["tau"], name),
                "policy": policies(best[first].get(name), own.get(name)),
                **{run: speeds(best[run][name]) for run in boards if name in best[run]},
                "papers": span([figures["speedup"] for figures in papers(name).values()]),
            }
            for name in shown
        ],
        table=table(trainings, boards, rows, facts, curves),
        trust=[
            prompts(boards),
            machine_line(config, boards[first]),
            load_line(boards),
            "Noise floor (A/A test, the baseline run twice): "
            + ", ".join(f"{board['noise_floor_percent']:.1f} % ({run})" for run, board in boards.items())
            + ". Intervals (95 %) are over held-out prompts, of each row alone.",
            median_errors(boards),
            identical(rows),
            *in_float32(results.get(FLOAT32)),
            f"The policy of the drafter's paper was the best on the tuning prompts for "
            f"{sum(row['policy'] == best[first][name]['policy'] for name, row in own.items())} of {len(own)} drafters "
            f"({first}).",
            about_training(results),
            *beside(best, config["table"]),
            *tuned_targets(rows[first]),
            "The papers' figures are the lowest and highest over tasks, with models of 7 billion parameters (EESD and "
            "Self-SD: 13 billion). For draft models they are AdaEDL's.",
            *left_out(results),
        ],
    )


def speedup(best: Mapping[str, Mapping[str, Document]], name: str) -> float:
    """Return the measured speedup of a drafter's best policy in the first run that has it."""
    return float(next(of_run[name] for of_run in best.values() if name in of_run)["measured"]["estimate"])


def papers_row(name: str, board: Document, rows: Sequence[Document]) -> Document | None:
    """Return the row of the policy that the drafter's paper proposes; None if it was not decoded."""
    kind = next(drafter["kind"] for drafter in board["drafters"] if drafter["name"] == name)
    return first_best(row for row in rows if row["drafter"] == name and row["policy"] == POLICIES.get(kind))


def papers(name: str) -> dict[str, dict[str, float]]:
    return published(name, thompson="Cali-TS")


def trained(training: Document, facts: Document) -> str:
    """Return how far a drafter was trained, and how often its first token is accepted."""
    accepted = f"{100 * facts['first_token_accepted_share']:.0f}" if facts else ""
    if not training.get("curve"):
        return accepted
    return f"{training['tokens'] / 1e6:.2f}: {100 * training['curve'][-1][1]:.0f}, {accepted}"


def in_papers(tau: float, name: str) -> str:
    taus = span([figures["tau"] for figures in papers(name).values() if "tau" in figures])
    return f"{tau:.2f} ({taus})" if taus else f"{tau:.2f}"


def policies(best: Document | None, own: Document | None) -> str:
    """Return the best policy, and that of the paper with its speedup unless it is the same."""
    if best is None:
        return ""
    if own is None or own["policy"] == best["policy"]:
        return str(best["policy"])
    return f"{best['policy']} ({own['policy']}: {own['measured']['estimate']:.2f})"


def speeds(row: Document) -> str:
    measured = row["measured"]
    interval = f"[{measured['low']:.2f}, {measured['high']:.2f}]"
    return f"{row['forecast']['estimate']:.2f}, {measured['estimate']:.2f} {interval}"


def paying(best: Mapping[str, Mapping[str, Document]], trained_here: Sequence[str], board: Document) -> str:
    """Return which of the drafters that were trained pay, in a sentence."""
    parts = []
    for run, of_run in best.items():
        measured = {name: row["measured"] for name, row in of_run.items() if name in trained_here}
        ranked = sorted(measured, key=lambda name: -measured[name]["estimate"])
        faster = [name for name in ranked if measured[name]["low"] > 1]
        which = ", ".join(f"{name} {measured[name]['estimate']:.2f}" for name in faster or ranked[:1])
        where = "in greedy decoding" if run == "greedy" else f"at {run}"
        drafters = f" drafters trained on one {board['environment']['device']}" * (not parts)
        verb = " are significantly faster than no speculation" * (not parts)
        count = f"{len(faster)} of {len(ranked)}{drafters}{verb}"
        parts.append(f"{count} {where} ({'' if faster else 'at best '}{which})")
    return f"{', and '.join(parts)}."


def forecast_errors(rows: Mapping[str, Sequence[Document]], boards: Mapping[str, Document]) -> str:
    """Return how far the forecasts of all rows are off, in a sentence."""
    pairs = np.array(
        [(row["forecast"]["estimate"], row["measured"]["estimate"]) for of_run in rows.values() for row in of_run]
    )
    errors = 100 * abs(pairs[:, 0] / pairs[:, 1] - 1)
    right = int(np.sum((pairs[:, 0] > 1) == (pairs[:, 1] > 1)))
    sealed = all(board["forecast"]["sealed"] for board in boards.values())
    return (
        f"The forecasts{', written before any held-out prompt was decoded,' if sealed else ''} are off by a median of "
        f"{np.median(errors):.1f} % (90th percentile {np.quantile(errors, 0.9):.1f} %) over {len(pairs)} policies, and "
        f"for {right} of them forecast and measurement agree on whether the policy is faster than no speculation."
    )


def prompts(boards: Mapping[str, Document]) -> str:
    """Return which prompts were decoded."""
    texts = []
    for run, board in boards.items():
        done, planned = board["sequences"]["holdout"], board["forecast"]["sequences"]["holdout"]
        repeats = "once" if board["options"]["repeats"] == 1 else f"{board['options']['repeats']} times"
        texts.append(
            f"{done} of {planned} held out, {board['output_tokens'] / done:.0f} tokens each, {repeats} by each of "
            f"{len(board['rows'])} policies, {board['baseline']['ms_per_token']:.2f} ms a baseline token ({run})"
        )
    first = next(iter(boards.values()))
    tuning = f"{first['prompts']['count']} of specsim's tasks, {first['sequences']['tuning']} for tuning"
    return f"Prompts: {tuning}. Decoded in time: {'; '.join(texts)}."


def median_errors(boards: Mapping[str, Document]) -> str:
    """Return the median errors of the forecasts, and of replays that know more."""
    texts = []
    for run, board in boards.items():
        known = [board["errors"].get(key, {}).get("median_abs_percent") for key in KNOWN]
        texts.append(f"{', '.join('n.a.' if error is None else f'{error:.1f}' for error in known)} % ({run})")
    return (
        "Median error of the forecast, then with the text known, with the run's costs known, and with both: "
        f"{'; '.join(texts)}."
    )


def identical(rows: Mapping[str, Sequence[Document]]) -> str:
    """Return for how many rows the real run repeated the replay's rounds."""
    found = [row for of_run in rows.values() for row in of_run if row["rounds_identical_percent"] is not None]
    full = sum(row["rounds_identical_percent"] == 100 for row in found)
    least = min(found, key=lambda row: float(row["rounds_identical_percent"]))
    fewest = f"; the fewest are {least['rounds_identical_percent']:.1f} % ({least['drafter']}, {least['policy']})"
    same = [float(row[SAME_TEXT]) for row in found if row.get(SAME_TEXT) is not None]
    before = (
        f" Before the first token that differs, {np.median(same):.1f} % are (median of {len(same)} policies; lowest "
        f"{min(same):.1f} %): numbers of low precision round differently in passes of different lengths, and where two "
        "tokens are nearly as likely, another one is chosen."
    )
    return (
        f"All rounds are identical in replay and real run for {full} of {len(found)} policies"
        f"{fewest if full < len(found) else ''}.{before if same and full < len(found) else ''}"
    )


def in_float32(board: Document | None) -> list[str]:
    """Return how many of a board's policies repeated the replay's rounds on a CPU, and which drafters paid there."""
    if board is None:
        return []
    same = [float(row["rounds_identical_percent"]) for row in board["rows"]]
    best: dict[str, float] = {}
    for row in board["rows"]:
        best[row["drafter"]] = max(best.get(row["drafter"], 0.0), row["measured"])
    speeds = ", ".join(f"{name} {value:.2f}" for name, value in sorted(best.items(), key=lambda item: -item[1]))
    return [
        f"With the same weights in float32 on a CPU, all rounds are identical for {sum(one == 100 for one in same)} of "
        f"{len(same)} policies (least {min(same):.1f} %). Best policy of each drafter there, "
        f"{board['sequences']['holdout']} prompts beside other work ({board['load']['others_percent']:.0f} % of the "
        f"CPUs' time): {speeds}."
    ]


def about_training(results: Mapping[str, Document]) -> str:
    """Return the text and the time of the trainings."""
    text, together = results.get(TEXT, {}), f"All trainings together took {results[TRAIN]['seconds']:.0f} s"
    if "tokens" not in text:
        return f"{together}."
    return (
        f"{together}, on {text['tokens'] / 1e6:.2f} M tokens that the target wrote there at "
        f"{text['tokens_per_second']:,.0f} tokens/s. Held-out text is of the same kind, questions and answers."
    )


def beside(best: Mapping[str, Mapping[str, Document]], trained_here: Sequence[str]) -> list[str]:
    """Return the speedups of drafters that were not trained here."""
    others = [
        f"{name} {row['measured']['estimate']:.2f} ({run})"
        for run, of_run in best.items()
        for name, row in of_run.items()
        if name not in trained_here
    ]
    return [f"Not trained here: {', '.join(others)}."] if others else []


def tuned_targets(rows: Sequence[Document]) -> list[str]:
    names = dict.fromkeys(row["drafter"] for row in rows if row["own_target"])
    return [f"Drafters with a tuned target ({', '.join(names)}): {OWN_TARGET}."] if names else []


def left_out(results: Mapping[str, Document]) -> list[str]:
    """Return what failed or was left out, with its reason."""
    reasons = {stage: result.get("left") or result.get("error") for stage, result in results.items()}
    reasons |= {stage: "not run" for stage in (TEXT, *DECODED) if stage not in results}
    reasons |= {name: training.get("error") for name, training in results[TRAIN].get("trainings", {}).items()}
    for stage, run in DECODED.items():
        board = results.get(stage, {}).get("board", {})
        reasons |= {f"{name}, {run}": reason for name, reason in board.get("left_out", {}).items()}
        reasons |= {f"{name}, typical acceptance": one.get("reason") for name, one in board.get("typical", {}).items()}
    names: dict[str, dict[str, None]] = {}
    for name, reason in reasons.items():
        if reason:
            names.setdefault(reason[:LETTERS].rstrip(". "), {})[name] = None
    texts = [f"{', '.join(of_reason)} ({reason})" for reason, of_reason in names.items()]
    return [f"Failed or left out: {'; '.join(texts)}."] if texts else []


def table(
    trainings: Document,
    boards: Mapping[str, Document],
    rows: Mapping[str, Sequence[Document]],
    facts: Mapping[str, Mapping[str, Document]],
    curves: Mapping[str, Sequence[Sequence[float]]],
) -> list[Document]:
    """Return all rows: policies, drafters, MEDUSA's typical acceptance, papers' figures and trainings."""
    names = ("drafter", "policy", "settings", "tau", "v_d", "forecast", "text_known", "costs_known", "measured",
             "rounds_identical_percent", SAME_TEXT, "output_identical_percent")  # fmt: skip
    return [
        *(
            {
                "run": run,
                **{name: row.get(name) for name in names},
                "error_percent": 100 * (row["forecast"]["estimate"] / row["measured"]["estimate"] - 1),
                "papers_policy": int(row is papers_row(row["drafter"], boards[run], of_run)),
            }
            for run, of_run in rows.items()
            for row in of_run
        ),
        *(
            {"run": run, "drafter": name, "first_accepted": fact["first_token_accepted_share"],
             "cost_ratio": fact["step_ratio"]}
            for run, drafters in facts.items() for name, fact in drafters.items()
        ),
        *(
            {"run": run, "drafter": name, "policy": f"{one['policy']}, {arm['arm']}",
             "settings": f"epsilon={arm.get('epsilon', '')}", "tau": arm["acceleration_rate"]["estimate"]}
            for run, board in boards.items() for name, one in board.get("typical", {}).items()
            for arm in one.get("arms", [])
        ),
        *(
            {"drafter": name, "task": kind, **{f"papers_{key}": value for key, value in figures.items()}}
            for name in dict.fromkeys(row["drafter"] for of_run in rows.values() for row in of_run)
            for kind, figures in papers(name).items()
        ),
        *(
            {"drafter": name, "tokens_trained": tokens, "held_out_agreement": value}
            for name, curve in curves.items() for tokens, value in curve
        ),
        *(
            {"drafter": name, "tokens_trained": training["tokens"], "seconds_trained": training["seconds"]}
            for name, training in trainings.items() if "tokens" in training
        ),
    ]  # fmt: skip
