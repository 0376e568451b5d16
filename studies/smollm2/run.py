"""SmolLM2-135M-Instruct with EAGLE and with prompt lookup: `python -m studies smollm2`.

Runs what `realrun validate` does, as README's first command, with each drafter: the forecast is written before the
held-out prompts are decoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from realrun.decode.sampling import Sampler
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.measure.record import RecordSettings
from realrun.pairs.prompts import read_prompts
from specsim.cli.console import progress_bar
from specsim.io.examples import TASKS
from specsim.io.progress import Progress
from specsim.policy.registry import POLICIES
from specsim.report.table import ERROR, SPEEDUP, TWO, Column
from studies.common import Config, Document, load, named
from studies.figures import speedup_dots
from studies.report import TENTH, Report, load_line, machine_line

SHOWN = 8
RESULT = "validation.json"
RECORDED = (f"*/{RESULT}",)


def validated(folder: Path, drafter: str, config: Config, progress: Progress) -> Document:
    """Return the validation of a drafter; read where it is there."""
    if not (folder / RESULT).is_file():
        pair = load(config, drafter)
        sampler = Sampler(config["mode"], config["temperature"], seed=config["seed"])
        settings = ValidationSettings(
            record=RecordSettings(config["depth"], config["max_new_tokens"], sampler),
            kinds=tuple(POLICIES[name] for name in config["policies"]),
            trials=config["trials"],
            repeats=config["repeats"],
            seed=config["seed"],
            minutes=config["minutes"],
        )
        validate(pair, read_prompts(TASKS, pair.tokenizer, config["prompts"]), settings, folder, progress)
    return dict(json.loads((folder / RESULT).read_text()))


def main(out: Path, config: Config) -> None:
    """Validate each drafter, and write the report."""
    with progress_bar() as progress:
        make = partial(validated, config=config)
        documents = {
            name: make(folder=out / name, drafter=name, progress=named(progress, name)) for name in config["drafters"]
        }
    report(config, documents).write(out)


def report(config: Config, documents: Mapping[str, Document]) -> Report:
    """Return the report. documents : validations by drafter"""
    rows = [row for drafter, document in documents.items() for row in drafter_rows(drafter, document)]
    rows.sort(key=lambda row: -float(row["measured"]["estimate"]))
    chosen = {name: next(row for row in rows if row["drafter"] == name and row["chosen"]) for name in documents}
    first = next(iter(documents))
    return Report(
        question="What does speculative decoding gain for SmolLM2 on a CPU?",
        answer="With the policy that its forecast chose beforehand, "
        + " and ".join(
            f"{name} is {row['measured']['estimate']:.2f} times as fast as decoding without speculation (forecast "
            f"{row['forecast']['estimate']:.2f})"
            for name, row in chosen.items()
        )
        + ". By kind of task the best policies reach "
        + " and ".join(f"{range_of(document)} with {name}" for name, document in documents.items())
        + ".",
        figure=speedup_dots(
            [(name_of(row), {**row, "predicted": row["forecast"]}) for row in rows],
            "speedups",
            "SmolLM2-135M-Instruct on a CPU thread",
        ),
        figure_name="speedups",
        caption="Speedups forecast before the held-out prompts were decoded, and measured",
        columns=[
            Column("drafter", "drafter"),
            Column("policy", "label"),
            Column("mean acceptance length (tau)", "tau", TWO),
            Column("forecast", "forecast", SPEEDUP),
            Column("measured", "measured", SPEEDUP),
            Column("forecast error, %", "forecast_error_percent", ERROR),
            Column("tokens per second", "tokens_per_s", TENTH),
        ],
        shown=rows[:SHOWN],
        table=[flat(row) for row in rows],
        trust=[
            "Prompts: of specsim's tasks of six kinds, greedy decoding, at most "
            f"{config['max_new_tokens']} tokens each; "
            + ", ".join(
                f"{d['sequences']['tuning']} for tuning and {d['sequences']['holdout']} held out ({name})"
                for name, d in documents.items()
            )
            + ". Rounds identical in replay and real run, the fewest of any policy: "
            + f"{min(row['rounds_identical_percent'] for row in rows):.1f} %.",
            f"{machine_line(config, documents[first])} Tokens per second without speculation: "
            + ", ".join(f"{d['baseline']['tokens_per_s']:.1f} ({name})" for name, d in documents.items())
            + f". Time: {config['minutes']:g} minutes for each drafter.",
            load_line(documents),
            "Noise floor (A/A test, the baseline run twice): "
            + ", ".join(f"{d['noise_floor_percent']:.1f} % ({name})" for name, d in documents.items())
            + ". Intervals (95 %) are over held-out prompts, and wide because they are few.",
            "The EAGLE drafter was trained for minutes, on text that the target wrote.",
        ],
    )


def drafter_rows(drafter: str, document: Document) -> list[dict[str, Any]]:
    """Return the rows of a validation, and which of them the forecast chose."""
    choice = document["choice"]["forecast"]
    return [
        {
            **row,
            "drafter": drafter,
            "chosen": row["label"] == choice,
            "forecast_error_percent": 100 * (row["forecast"]["estimate"] / row["measured"]["estimate"] - 1),
        }
        for row in document["rows"]
    ]


def name_of(row: Mapping[str, Any]) -> str:
    """Write drafter and policy, with the switches that tell its variants apart."""
    switches = re.findall(r"\w+=(?:True|False)", row["label"])
    return f"{row['drafter']}, {row['policy']}{''.join(f' ({switch})' for switch in switches)}"


def range_of(document: Document) -> str:
    """Write the range, over kinds of task, of the speedup of the best policy."""
    gains = {kind: float(part["measured_speedup_best"]) for kind, part in document["domains"].items()}
    least, most = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    return f"{gains[least]:.2f} ({least}) to {gains[most]:.2f} ({most})"


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what table.csv has of a row."""
    names = ("drafter", "policy", "label", "tau", "forecast_error_percent", "rounds_identical_percent", "tokens_per_s")
    speedups = {name: row[name]["estimate"] for name in ("forecast", "measured", "wall_clock_speedup")}
    intervals = {f"measured_{end}": row["measured"][end] for end in ("low", "high")}
    return {**{name: row[name] for name in names}, **speedups, **intervals}
