"""How well seconds are measured, by the length of turns and by load: `python -m studies measurement`.

The baseline twice and fixed draft lengths decode the same prompts, taking turns of 1 to 16 rounds and of whole
sequences, on a machine left alone and beside a process that keeps a core busy in bursts. The two baselines differ by
chance alone (the A/A test); rounds by their place in a turn show what a turn's beginning costs, and so how far short
turns bias a speedup. All turn lengths are run within each repeat, so that they meet the same machine.

The report has as well what `runs.py` collected of whole runs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.experiment.timing import Arm, Timings, decode_sequence, make_arm, warm_up
from realrun.measure.interleaving import TURN_ROUNDS
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import study_prompts
from realrun.provenance import provenance
from specsim.cli.console import progress_bar
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.policy.registry import make_policy
from specsim.replaying.intervals import Estimate, ratio_interval
from specsim.report.table import SPEEDUP, Column, plain
from studies.common import Config, Document, cached
from studies.figures import line_panels
from studies.measurement import runs
from studies.report import Report, machine_line

BASELINE, NULL = 0, 1  # arms
SPREAD = plain(lambda value: f"{value:.4f}")
TIMINGS = "timings.json"
RECORDED = (TIMINGS, runs.RUNS)
WHOLE = 10**9  # rounds of a turn that lasts a whole sequence
BURSTS = """
import random, sys, time
busy, rest = [float(x) for x in sys.argv[1:3]], [float(x) for x in sys.argv[3:5]]
draw = random.Random(0)
while True:
    end = time.perf_counter() + draw.uniform(*busy)
    while time.perf_counter() < end:
        pass
    time.sleep(draw.uniform(*rest))
"""


@contextmanager
def beside(programs: Iterable[Sequence[str]]) -> Iterator[None]:
    """Run these Python programs, each with its arguments, meanwhile."""
    with ExitStack() as stack:
        for program in programs:
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", *program]))
            stack.callback(process.kill)
        yield


def load_of(name: str, config: Config) -> AbstractContextManager[None]:
    """Another process that computes in bursts, or nothing."""
    numbers = [str(value) for value in (*config["busy_s"], *config["rest_s"])]
    return beside([] if name == "idle" else [[BURSTS, *numbers]])


def arms_of(config: Config) -> tuple[list[Arm], Any]:
    """Two baselines and the fixed draft lengths, and the pair."""
    pair = load_pair(config["target"], dtype=config["dtype"], threads=config["threads"], drafter=config["drafter"])
    sampler = Sampler(config["mode"], config["temperature"], seed=config["seed"])
    policies = [None, None, *(make_policy("fixed_k", {"k": k}) for k in config["draft_lengths"])]
    return [make_arm(str(policy), policy, pair, sampler) for policy in policies], pair


def measure(config: Config, progress: Progress) -> Document:
    """Seconds of every round: by load, turn length, arm, sequence and repeat."""
    arms, pair = arms_of(config)
    prompts = study_prompts(pair.tokenizer, config["prompts"])
    sampler = Sampler(config["mode"], config["temperature"], seed=config["seed"])
    trace = record(pair, prompts, RecordSettings(1, config["max_new_tokens"], sampler))
    warm_up(arms, prompts, trace)
    order = np.random.default_rng(config["seed"])
    seconds: dict[str, dict[str, list[Any]]] = {}
    places: dict[str, list[Any]] = {}
    steps = len(config["loads"]) * config["repeats"] * len(config["turns"])
    done = 0
    for load in config["loads"]:
        timings = {turn: Timings() for turn in config["turns"]}
        with load_of(load, config):
            for repeat in range(config["repeats"]):
                for turn in order.permutation(config["turns"]).tolist():
                    length = turn or WHOLE
                    for index, prompt in enumerate(prompts):
                        decoded = decode_sequence(
                            arms, prompt, trace, index, [None] * len(arms),
                            seed=config["seed"], order=order, turn_rounds=length, shift=repeat % length,
                        )  # fmt: skip
                        for arm, run in enumerate(decoded):
                            timings[turn].add(arm, index, run)
                    done += 1
                    progress(load, done, steps)
        seconds[load] = {
            str(turn): [
                {
                    "typical": turn_timings.seconds(arm, range(len(prompts))).tolist(),
                    "sums": [[run.seconds for run in turn_timings.runs[arm, index]] for index in range(len(prompts))],
                }
                for arm in range(len(arms))
            ]
            for turn, turn_timings in timings.items()
        }
        places[load] = [
            [places_of(timings[config["places_of"]], arm, index, config["places_of"]) for index in range(len(prompts))]
            for arm in range(len(arms))
        ]
    return {
        "seconds": seconds,
        "places": places,
        "arms": ["baseline", "null", *(f"K = {k}" for k in config["draft_lengths"])],
        "output_tokens": int(trace.output_tokens.sum()),
        "environment": provenance(pair.device, pair.number_type),
        "device": pair.device.type,
        "dtype": config["dtype"],
    }


def places_of(timings: Timings, arm: int, sequence: int, turn: int) -> list[float]:
    """What rounds take by their place in a turn, over the turn's last round [turn]; medians over the turns.

    Of turns whose rounds draft alike, which those at the end of a text may not.
    """
    ratios = []
    for repeat, run in enumerate(timings.runs[arm, sequence]):
        for start in range(-(repeat % turn) % turn, len(run.rounds) - turn + 1, turn):  # as turns are shifted
            rounds = run.rounds[start : start + turn]
            if len({round_.drafted for round_ in rounds}) == 1:
                ratios.append([round_.seconds / rounds[-1].seconds for round_ in rounds])
    return np.median(ratios, axis=0).tolist()  # type: ignore[no-any-return]


def main(out: Path, config: Config) -> None:
    """Measure, unless it is done, and write the report."""
    collected = out / runs.RUNS
    with progress_bar() as progress:
        timings = cached(out / TIMINGS, lambda: measure(config, progress))
    if not collected.is_file():
        raise InputError(f"{collected} is missing; collect it with `python -m studies.measurement.runs FOLDER...`")
    report(config, timings, runs.read_runs(collected)).write(out)


def report(config: Config, timings: Document, whole: runs.Sets) -> Report:
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
        f"{runs.spread_percent(whole):.2f} % from run to run.",
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
            "Runs of the same commit: "
            + "; ".join(
                f"{of_set['set']}, {of_set['runs']} runs with noise floors up to "
                f"{of_set['noise_floor_percent_high']:.2f} % and a standard deviation of "
                f"{of_set['between_runs_percent']:.2f} % from run to run"
                for of_set in sets
            )
            + ".",
        ],
    )


def row_of(timings: Document, load: str, turn: int) -> dict[str, str | float | dict[str, float]]:
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
