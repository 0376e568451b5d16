"""SmolLM2-135M-Instruct with EAGLE and with prompt lookup: `python -m studies smollm2`.

Runs what `realrun validate` does, as README's first command, with each drafter: the forecast is written before the
held-out prompts are decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from realrun.decode.sampling import Sampler
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.measure.record import RecordSettings
from realrun.pairs.prompts import read_prompts
from specsim.cli.console import progress_bar
from specsim.io.examples import TASKS
from specsim.io.progress import Progress
from specsim.policy.registry import POLICIES
from specsim.report.experiment import Row, Validation
from specsim.report.table import ERROR, SPEEDUP, TWO, Column
from studies.common import Config, load, named
from studies.figures import dots
from studies.report import TENTH, Report, load_line, machine_line

SHOWN = 8
RESULT = "validation.json"
RECORDED = (f"*/{RESULT}",)


def validated(folder: Path, drafter: str, config: Config, progress: Progress) -> Validation:
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
    return Validation.read(folder / RESULT)


def main(out: Path, config: Config) -> None:
    """Validate each drafter, and write the report."""
    with progress_bar() as progress:
        make = partial(validated, config=config)
        results = {
            name: make(folder=out / name, drafter=name, progress=named(progress, name)) for name in config["drafters"]
        }
    report(config, results).write(out)


def report(config: Config, results: Mapping[str, Validation]) -> Report:
    """Return the report. results : validations by drafter"""
    rows = [(drafter, row) for drafter, result in results.items() for row in result.rows]
    rows.sort(key=lambda named: -named[1].measured)
    choices = {drafter: result.choice.forecast for drafter, result in results.items() if result.choice is not None}
    chosen = [(drafter, row) for drafter in results for of, row in rows if of == drafter and row.label == choices[of]]
    first = next(iter(results.values()))
    return Report(
        question="What does speculative decoding gain for SmolLM2 on a CPU?",
        answer="With the policy that its forecast chose beforehand, "
        + " and ".join(
            f"{drafter} is {row.measured:.2f} times as fast as decoding without speculation (forecast "
            f"{row.forecast:.2f})"
            for drafter, row in chosen
        )
        + ". By kind of task the best policies reach "
        + " and ".join(f"{range_of(result)} with {name}" for name, result in results.items())
        + ".",
        figure=dots(
            [(name_of(*named), {"predicted": named[1].forecast, "measured": named[1].measured}) for named in rows],
            "speedups",
            "SmolLM2-135M-Instruct on a CPU thread",
            "speedup, baseline = 1; 95 % intervals",
            level=1,
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
        shown=[
            {**row.as_cells(), "drafter": drafter, "forecast_error_percent": forecast_error_percent(row)}
            for drafter, row in rows[:SHOWN]
        ],
        table=[
            {
                "drafter": drafter,
                **{name: getattr(row, name) for name in ("policy", "label", "tau")},
                "forecast_error_percent": forecast_error_percent(row),
                **{name: getattr(row, name) for name in ("rounds_identical_percent", "tokens_per_s")},
                **{name: float(getattr(row, name)) for name in ("forecast", "measured", "wall_clock_speedup")},
                "measured_low": row.measured.low,
                "measured_high": row.measured.high,
            }
            for drafter, row in rows
        ],
        trust=[
            "Prompts: of specsim's tasks of six kinds, greedy decoding, at most "
            f"{config['max_new_tokens']} tokens each; "
            + ", ".join(
                f"{result.sequences.tuning} for tuning and {result.sequences.holdout} held out ({name})"
                for name, result in results.items()
            )
            + ". Rounds identical in replay and real run, the fewest of any policy: "
            + f"{min(row.rounds_identical_percent or 0.0 for _, row in rows):.1f} %.",
            f"{machine_line(config, first.as_dict())} Tokens per second without speculation: "
            + ", ".join(f"{result.baseline.tokens_per_s:.1f} ({name})" for name, result in results.items())
            + f". Time: {config['minutes']:g} minutes for each drafter.",
            load_line({name: result.as_dict() for name, result in results.items()}),
            "Noise floor (A/A test, the baseline run twice): "
            + ", ".join(f"{result.noise_floor_percent:.1f} % ({name})" for name, result in results.items())
            + ". Intervals (95 %) are over held-out prompts, and wide because they are few.",
            "The EAGLE drafter was trained for minutes, on text that the target wrote.",
        ],
    )


def forecast_error_percent(row: Row) -> float | None:
    """Return by how many percent the forecast is above the measured speedup; None without a forecast."""
    return 100 * (row.forecast / row.measured - 1) if row.forecast is not None else None


def name_of(drafter: str, row: Row) -> str:
    """Write drafter and policy, with the switches that tell its variants apart."""
    switches = re.findall(r"\w+=(?:True|False)", row.label)
    return f"{drafter}, {row.policy}{''.join(f' ({switch})' for switch in switches)}"


def range_of(result: Validation) -> str:
    """Write the range, over kinds of task, of the speedup of the best policy."""
    gains = {kind: part.measured_speedup_best for kind, part in result.domains.items()}
    least, most = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    return f"{gains[least]:.2f} ({least}) to {gains[most]:.2f} ({most})"
