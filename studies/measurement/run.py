"""How well seconds are measured, by the length of turns and by load: `python -m studies measurement`.

The baseline twice and fixed draft lengths decode the same prompts, taking turns of 1 to 16 rounds and of whole
sequences, on a machine left alone and beside a process that keeps a core busy in bursts. The two baselines differ by
chance alone (the A/A test); rounds by their place in a turn show what a turn's beginning costs, and so how far short
turns bias a speedup. All turn lengths are run within each repeat, so that they meet the same machine.

The report has as well what `runs.py` collected of whole runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.experiment.timing import Arm, Timings, decode_in_turns, make_arm, warm_up
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import study_prompts
from realrun.provenance import provenance
from specsim.cli.console import progress_bar
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.policy.registry import make_policy
from studies.common import Config, Document, cached
from studies.measurement import runs
from studies.measurement.report import report

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
            for _ in range(config["repeats"]):
                for turn in order.permutation(config["turns"]).tolist():
                    decode_in_turns(
                        arms,
                        prompts,
                        trace,
                        timings[turn],
                        seed=config["seed"],
                        order=order,
                        turn_rounds=turn or WHOLE,
                    )
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
    report(config, timings, json.loads(collected.read_text())["sets"]).write(out)
