"""The report on measurement: how exactly speedups are measured, by length of turns and by load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from realrun.measure.interleaving import TURN_ROUNDS
from specsim.io.arrays import Floats
from specsim.replaying.intervals import Estimate, ratio_interval
from specsim.report.table import SPEEDUP, Column, plain
from studies.common import Config, Document
from studies.figures import line_panels
from studies.measurement import runs
from studies.report import Report, machine_line

BASELINE, NULL = 0, 1  # arms
SPREAD = plain(lambda value: f"{value:.4f}")


def report(config: Config, timings: Document, whole: Mapping[str, Sequence[runs.Run]]) -> Report:
    """Return the report. timings : seconds by load, turn length and arm; whole : runs of the same commit, by set"""
    rows = [row_of(timings, load, turn) for load in config["loads"] for turn in config["turns"]]
    by_turn = {turn: {load: row_of(timings, load, turn) for load in config["loads"]} for turn in config["turns"]}
    busy = config["loads"][-1]
    at, sequence = by_turn[TURN_ROUNDS][busy], by_turn[0][busy]
    low, high = first_round_bias(timings, config)
    sets = runs.run_rows(whole)
    lengths = {turn: turn or config["max_new_tokens"] for turn in config["turns"]}
    return Report(
        question="How exactly are speedups measured?",
        answer=f"Beside a busy process, two identical baselines that take turns of {TURN_ROUNDS} rounds differ by a "
        f"standard deviation of {100 * at['spread']:.1f} % over prompts, against {100 * sequence['spread']:.1f} % when "
        f"they take turns of whole sequences. Speedups of whole runs of the same commit deviate by "
        f"{runs.pooled_percent(whole):.2f} % from run to run.",
        figure=line_panels(
            {
                load: {
                    name: (list(lengths.values()), [by_turn[turn][load][key] for turn in lengths])
                    for name, key in (("null ratio", "null_ratio"), ("medians of sums", "null_ratio_of_sums"))
                }
                for load in config["loads"]
            },
            ("rounds of a turn", "null ratio"),
            "null",
            level=1.0,
            log_x=True,
        ),
        figure_name="null",
        caption="Seconds of the baseline over those of a second, identical baseline, by length of turns (the last: a "
        "whole sequence)",
        columns=[
            Column("turn", "turn"),
            *(
                column
                for load in config["loads"]
                for column in (
                    Column(f"{load}: null ratio", f"{load}_null", SPEEDUP),
                    Column(f"{load}: spread", f"{load}_spread", SPREAD),
                    Column(f"{load}: speedup of K = 3", f"{load}_speedup", SPEEDUP),
                )
            ),
        ],
        shown=[
            {
                "turn": turn_name(turn),
                **{f"{load}_null": row["null_ratio"] for load, row in by_load.items()},
                **{f"{load}_spread": row["spread"] for load, row in by_load.items()},
                **{f"{load}_speedup": row["speedup, K = 3"] for load, row in by_load.items()},
            }
            for turn, by_load in by_turn.items()
        ],
        table=[*rows, *sets],
        trust=[
            f"Prompts: {config['prompts']} of {config['max_new_tokens']} tokens, {config['repeats']} repeats, "
            f"{config['mode']} sampling at T = {config['temperature']}. Intervals (95 %) and spreads (standard "
            "deviation) are over prompts.",
            machine_line(config, timings),
            f"Load: {busy} is another process that computes for {config['busy_s'][0]} to {config['busy_s'][1]} s and "
            "rests as long. All turn lengths are run within each repeat.",
            f"Short turns bias little: if only the first round of each turn were timed, speedups would be off by "
            f"{low:+.1f} to {high:+.1f} % (ends of 95 % intervals). Validations let turns end elsewhere in every "
            "repeat.",
            f"Runs of the same commit: {'; '.join(map(set_text, sets))}.",
        ],
    )


def set_text(row: Mapping[str, Any]) -> str:
    """Return the results of a set of runs in words."""
    return (
        f"{row['set']}, {row['runs']} runs with noise floors up to {row['noise_floor_percent_high']:.2f} % and a "
        f"standard deviation of {row['between_runs_percent']:.2f} % from run to run"
    )


def row_of(timings: Document, load: str, turn: int) -> dict[str, Any]:
    """Return the row of table.csv for a load and turn length."""
    baseline, null = (seconds_of(timings, load, turn, arm) for arm in (BASELINE, NULL))
    sums = [seconds_of(timings, load, turn, arm, typical=False) for arm in (BASELINE, NULL)]
    return {
        "machine": load,
        "turn": turn_name(turn),
        "null_ratio": ratio_interval(baseline, null).as_dict(),
        "spread": float((baseline / null).std(ddof=1)),
        "null_ratio_of_sums": ratio_interval(*sums).as_dict(),
        "spread_of_sums": float((sums[0] / sums[1]).std(ddof=1)),
        **{
            f"speedup, {name}": ratio_interval(baseline, seconds_of(timings, load, turn, arm)).as_dict()
            for arm, name in enumerate(timings["arms"])
            if arm > NULL
        },
    }


def seconds_of(timings: Document, load: str, turn: int, arm: int, *, typical: bool = True) -> Floats:
    """Return seconds per sequence [S]: each round at the median of its repeats, or the median of the repeats' sums."""
    seconds = timings["seconds"][load][str(turn)][arm]
    return np.array(seconds["typical"]) if typical else np.median(seconds["sums"], axis=1)


def first_round_bias(timings: Document, config: Config) -> tuple[float, float]:
    """Return by how many percent speedups would be off at most if first rounds of turns alone were timed."""
    ratios: list[Estimate] = []
    for load in config["loads"]:
        first = [np.array(arm)[:, 0] for arm in timings["places"][load]]
        ratios += [ratio_interval(first[BASELINE], own) for own in first[NULL + 1 :]]
    ends = [100 * (end - 1) for ratio in ratios for end in (ratio.low, ratio.high)]
    return min(ends), max(ends)


def turn_name(turn: int) -> str:
    """Return the length of a turn in words."""
    return "a sequence" if turn == 0 else "1 round" if turn == 1 else f"{turn} rounds"
