"""How well seconds are measured, by the length of turns and by load: `python -m studies.measurement.run [OUT]`.

The baseline twice and fixed draft lengths decode the same prompts, taking turns of 1 to 16 rounds and of whole
sequences, on a machine left alone and beside a process that keeps one core busy in bursts. The two baselines differ by
chance alone (the null test); rounds by their place in a turn show what a turn's beginning costs, and so how far short
turns bias a speedup. All turn lengths are run within each repeat, so that they meet the same machine.

Writes OUT/timings.json and OUT/report.md, which has as well what `runs.py` collected of whole runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import study_prompts
from realrun.profiling.turns import TURN_ROUNDS
from realrun.provenance import provenance
from realrun.recording.record import RecordSettings, record
from realrun.validation.timing import Arm, Timings, decode_in_turns, make_arm, warm_up
from specsim.arrays import Floats
from specsim.cli.console import progress_bar
from specsim.errors import InputError
from specsim.files import write_json, write_text
from specsim.policy.registry import make_policy
from specsim.progress import Progress
from specsim.report.markdown import markdown_table
from specsim.speedup.intervals import Estimate, interval_text, ratio_interval
from studies.common import Config, Document, about_machine, run_study
from studies.measurement import runs

RECORDED = ("timings.json", runs.RUNS)
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
def load_of(name: str, config: Config) -> Iterator[None]:
    """Another process that computes in bursts, or nothing."""
    if name == "idle":
        yield
        return
    numbers = [str(value) for value in (*config["busy_s"], *config["rest_s"])]
    other = subprocess.Popen([sys.executable, "-c", BURSTS, *numbers])
    try:
        yield
    finally:
        other.terminate()
        other.wait()


def arms_of(config: Config) -> tuple[list[Arm], Any]:
    """Two baselines and the fixed draft lengths, and the pair."""
    pair = load_pair(config["target"], dtype=config["dtype"], threads=config["threads"], drafter=config["drafter"])
    sampler = Sampler(config["mode"], config["temperature"], seed=config["seed"])
    policies = [None, None, *(make_policy("fixed_k", {"k": k}) for k in config["draft_lengths"])]
    return [make_arm(str(policy), policy, pair, sampler) for policy in policies], pair


def measure(config: Config, report: Progress) -> Document:
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
                    report(load, done, steps)
        seconds[load] = {
            str(turn): [
                {
                    "typical": found.seconds(arm, range(len(prompts))).tolist(),
                    "sums": [[run.seconds for run in found.runs[arm, index]] for index in range(len(prompts))],
                }
                for arm in range(len(arms))
            ]
            for turn, found in timings.items()
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
            if len({one.drafted for one in rounds}) == 1:
                ratios.append([one.seconds / rounds[-1].seconds for one in rounds])
    return np.median(ratios, axis=0).tolist()  # type: ignore[no-any-return]


def seconds_of(document: Document, load: str, turn: int, arm: int, *, typical: bool = True) -> Floats:
    """Per sequence [S]: each round at the median of its repeats, or the median of the repeats' sums."""
    found = document["seconds"][load][str(turn)][arm]
    return np.array(found["typical"]) if typical else np.median(found["sums"], axis=1)


def ratio(document: Document, load: str, turn: int, arm: int, *, typical: bool = True) -> Estimate:
    """The baseline's seconds over the arm's."""
    baseline, own = (seconds_of(document, load, turn, one, typical=typical) for one in (0, arm))
    return ratio_interval(baseline, own)


def turn_name(turn: int) -> str:
    return "a sequence" if turn == 0 else "1 round" if turn == 1 else f"{turn} rounds"


def null_table(document: Document, config: Config) -> list[str]:
    """The null arm by load and turn length."""
    rows = []
    for load in config["loads"]:
        for turn in config["turns"]:
            row = [load, turn_name(turn)]
            for typical in (True, False):
                baseline, null = (seconds_of(document, load, turn, arm, typical=typical) for arm in (0, 1))
                row += [
                    interval_text(ratio_interval(baseline, null).as_dict()),
                    f"{(baseline / null).std(ddof=1):.4f}",
                ]
            rows.append(row)
    columns = [
        "machine",
        "turn",
        "null ratio, rounds at their medians",
        "spread",
        "null ratio, medians of sums",
        "spread",
    ]
    return markdown_table(columns, rows)


def speedup_table(document: Document, config: Config) -> list[str]:
    """Speedups by load and turn length."""
    rows = [
        [
            load,
            turn_name(turn),
            *(interval_text(ratio(document, load, turn, arm).as_dict()) for arm in drafting(document)),
        ]
        for load in config["loads"]
        for turn in config["turns"]
    ]
    return markdown_table(["machine", "turn", *document["arms"][2:]], rows)


def drafting(document: Document) -> range:
    """The arms that draft."""
    return range(2, len(document["arms"]))


def place_table(document: Document, config: Config) -> list[str]:
    """What the rounds of a turn take by their place in it, and how far the first alone would bias a speedup."""
    rows = []
    for load in config["loads"]:
        baseline = np.array(document["places"][load][0])  # [S, turn]
        for arm, name in enumerate(document["arms"]):
            own = np.array(document["places"][load][arm])
            cells = [percent(ratio_interval(own[:, place], np.ones(len(own)))) for place in range(own.shape[1] - 1)]
            bias = percent(ratio_interval(baseline[:, 0], own[:, 0])) if arm else ""
            rows.append([load, name, *cells, bias])
    places = [f"round {place + 1}, %" for place in range(config["places_of"] - 1)]
    return markdown_table(["machine", "policy", *places, "speedup by first rounds alone, %"], rows)


def percent(ratio: Estimate) -> str:
    """A ratio as what it differs from 1 by, with its interval."""
    value, low, high = (100 * (end - 1) for end in (ratio.estimate, ratio.low, ratio.high))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def report_text(config: Config, document: Document, whole: Mapping[str, Sequence[runs.Run]]) -> str:
    """The whole report as Markdown. whole : whole runs, by set"""
    lines = [
        "# How well seconds are measured",
        "",
        f"{config['prompts']} prompts of {config['max_new_tokens']} tokens, {config['repeats']} repeats; target "
        f"{config['target']} (the lab's, deepened by blocks that pass their input on: acceptance of the trained model, "
        f"cost of a deep one), {config['mode']} sampling at T = {config['temperature']}; {about_machine(document)}. "
        f"Bursts: another process computes for {config['busy_s'][0]} to {config['busy_s'][1]} s and rests as long. "
        "All turn lengths are run within each repeat. Intervals (95 %) and spreads (standard deviation) over prompts.",
        "",
        "## Null test",
        "",
        "The baseline's seconds over those of a second baseline, which differ by chance alone. A round at its median "
        "is the repeat that took the median of all repeats of that round; a median of sums, the repeat whose whole "
        "sequence did.",
        "",
        *null_table(document, config),
        "",
        *verdict(document, config),
        "",
        "## Do short turns bias speedups?",
        "",
        "A turn's first round finds the caches full of other arms' data. What rounds of turns of "
        f"{config['places_of']} take, by their place, over the last of the same turn, less 1; the last column is by "
        "how much a speedup would be off if first rounds alone were timed, as in turns of 1 round:",
        "",
        *place_table(document, config),
        "",
        *bias_verdict(document, config),
        "",
        "Speedups by turn length:",
        "",
        *speedup_table(document, config),
        "",
        *runs.section(whole),
    ]
    return "\n".join(lines)


def verdict(document: Document, config: Config) -> list[str]:
    """Which turn length leaves the least spread, by load."""
    lines = []
    for load in config["loads"]:
        spreads = {}
        for turn in config["turns"]:
            baseline, null = (seconds_of(document, load, turn, arm) for arm in (0, 1))
            spreads[turn] = float((baseline / null).std(ddof=1))
        best = min(spreads, key=lambda turn: spreads[turn])
        lines.append(
            f"- {load}: the null ratio spreads least by turns of {turn_name(best)} ({spreads[best]:.4f}; whole "
            f"sequences {spreads[0]:.4f})."
        )
    return lines


def bias_verdict(document: Document, config: Config) -> list[str]:
    """The most that timing first rounds alone can bias a speedup, and what is done about it."""
    ends = []
    for load in config["loads"]:
        first = [np.array(own)[:, 0] for own in document["places"][load]]
        found = [ratio_interval(first[0], first[arm]) for arm in drafting(document)]
        ends += [100 * (end - 1) for one in found for end in (one.low, one.high)]
    return [
        f"By turns of 1 round, speedups would be off by {min(ends):+.1f} to {max(ends):+.1f} %, at the ends of these "
        f"intervals. Validations take turns of {turn_name(TURN_ROUNDS)} that end elsewhere in every repeat, and count "
        "each round at its median over the repeats; a round that began a turn in one is met within "
        "a turn by the other."
    ]


def main(out: Path, config: Config) -> None:
    """Measure, unless it is done, and write the report."""
    done = out / "timings.json"
    if not done.is_file():
        with progress_bar() as report:
            write_json(measure(config, report), done)
    if not (out / runs.RUNS).is_file():
        raise InputError(
            f"{out / runs.RUNS} is missing; collect it with `python -m studies.measurement.runs FOLDER...`"
        )
    whole = json.loads((out / runs.RUNS).read_text())["sets"]
    write_text(out / "report.md", report_text(config, json.loads(done.read_text()), whole))


if __name__ == "__main__":
    run_study(main, __file__)
