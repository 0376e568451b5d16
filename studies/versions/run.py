"""How often `realrun compare` finds a slowdown of known size: `python -m studies versions`.

Base and head are copies of this checkout; the head waits a little in every round, or in drafting alone. Every
comparison is recorded in a file of its own, so that an interrupted study goes on.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.pairs.prompts import study_prompts
from realrun.versions.compare import CompareSettings, compare
from specsim.cli.console import progress_bar
from specsim.io.progress import Progress
from specsim.policy.registry import make_policy
from specsim.report.table import Column
from studies.common import Config, Document, cached, load, named
from studies.figures import dots
from studies.measurement.run import load_of
from studies.report import TENTH, Report, load_line, machine_line, median_load

ROOT = Path(__file__).parents[2]
MACHINE, COMPARISONS = "machine.json", "comparisons"
RECORDED = (MACHINE, f"{COMPARISONS}/*.json")
KEPT = ("label", "slowdown_percent", "verdict", "exceeds", "round_time_percent", "null_percent", "restart_token_ms")
DECODER = Path("realrun", "decode", "decoder.py")
WAIT = """

def _wait(seconds: float) -> None:
    end = now() + seconds
    while now() < end:
        pass
"""
# Lines of the decoder before which it waits, and how long: a share of the round so far, or of the round before.
PLACES = {
    "round": ("        rounds.append(\n", "        _wait(SHARE * (now() - start))\n"),
    "draft": (
        "            proposed = now()\n",
        "            _wait(SHARE * rounds[-1].seconds if rounds and policy is not None else 0.0)\n",
    ),
}


def slowed(code: str, part: str, percent: float) -> str:
    """Return the decoder's code with a wait in every round or in drafting."""
    place, wait = PLACES[part]
    assert place in code, f"the decoder has no line {place!r}"
    return code.replace(place, wait.replace("SHARE", f"{percent / 100:g}") + place) + WAIT


@contextmanager
def checkouts(part: str, percent: float) -> Iterator[tuple[str, str]]:
    """Copy this checkout twice, and slow the second copy."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [Path(folder, name) for name in ("base", "head")]
        for side in sides:
            shutil.copytree(ROOT / "realrun", side / "realrun", ignore=shutil.ignore_patterns("__pycache__"))
            for package in ("specsim", "kernels"):
                (side / package).symlink_to(ROOT / package)
        if percent:
            decoder = sides[1] / DECODER
            decoder.write_text(slowed(decoder.read_text(), part, percent))
        yield str(sides[0]), str(sides[1])


def run_comparison(case: Config, number: int, config: Config, progress: Progress) -> Document:
    """Compare base and head once; return the part that the report is made of."""
    settings = CompareSettings(
        {name: config[name] for name in ("target", "drafter", "dtype", "threads")},
        [make_policy(config["policy"], config["settings"])],
        Sampler(config["mode"], config["temperature"], seed=config["seed"]),
        config["max_new_tokens"],
        config["seed"] + number,
        config["minutes"],
        config["max_slowdown_percent"],
        config["clock"],
    )
    prompts = study_prompts(load(config, config["drafter"]).tokenizer, config["prompts"])
    with (
        checkouts(case["part"], case["percent"]) as sides,
        tempfile.TemporaryDirectory() as out,
        load_of(case["load"], config),
    ):
        document = compare(*sides, prompts, settings, Path(out), progress=progress).as_dict()
    rows = [{key: row[key] for key in KEPT} for row in document["rows"]]
    return {"case": case["name"], "rows": rows, **{key: document[key] for key in ("restarts", "spent_s", "load")}}


def machine(config: Config) -> Document:
    """Describe the machine."""
    return {"environment": load(config, config["drafter"]).environment, "dtype": config["dtype"]}


def main(out: Path, config: Config) -> None:
    """Run the comparisons that are missing, one of each case after another, and write the report."""
    comparisons: list[Document] = []
    with progress_bar() as progress:
        where = cached(out / MACHINE, lambda: machine(config))
        for number in range(config["comparisons"]):
            for case in config["cases"]:
                name = f"{case['name']}, {number + 1} of {config['comparisons']}"
                done = out / COMPARISONS / f"{re.sub('[^a-z0-9.]+', '-', case['name']).strip('-')}-{number:02d}.json"
                make = partial(run_comparison, case, number, config, named(progress, name))
                comparisons.append(cached(done, make))
    report(config, where, comparisons).write(out)


def report(config: Config, machine: Document, comparisons: Sequence[Document]) -> Report:
    """Return the report. comparisons : of all cases, in any order"""
    by_case = {
        case["name"]: [document for document in comparisons if document["case"] == case["name"]]
        for case in config["cases"]
    }
    rows = [row_of(case, by_case[case["name"]]) for case in config["cases"]]
    built_in = [row for row in rows if row["percent"] == max(row["percent"] for row in rows)]
    equal = [row for row in rows if row["percent"] == 0]
    return Report(
        question="How small a slowdown does `realrun compare` find?",
        answer=f"In {config['minutes']:g} minutes it found {total(built_in, 'found')} of "
        f"{total(built_in, 'comparisons')} slowdowns of {built_in[0]['percent']:g} %. It called a version faster or "
        f"slower than itself in {total(equal, 'changes')} of {total(equal, 'comparisons')} comparisons.",
        figure=dots(
            [
                ("" if number else name, {row["label"]: row["slowdown_percent"] for row in document["rows"]})
                for name, documents in by_case.items()
                for number, document in enumerate(documents)
            ],
            "slowdowns",
            "Measured slowdowns",
            "change of the time per token, %, with the interval of the comparison; positive is slower",
            level=0,
        ),
        figure_name="slowdowns",
        caption="Measured change of the time per token in each comparison, by the slowdown built into the head",
        columns=[
            Column("slowdown built into the head", "case"),
            Column("comparisons", "comparisons"),
            Column("found slower", "found"),
            Column("any change reported", "changes"),
            Column("not decidable", "undecided"),
            Column("restarts", "restarts", TENTH),
            Column("minutes", "minutes", TENTH),
        ],
        shown=rows,
        table=[csv_row(document, row) for document in comparisons for row in document["rows"]],
        trust=[
            f"Prompts: {config['prompts']} of {config['max_new_tokens']} tokens, {config['mode']} decoding, "
            f"{config['policy']} with K = {config['settings']['k']}. A slowdown of drafting is a share of the whole "
            "round's time and leaves the baseline without speculation as it is.",
            machine_line(config, machine),
            f"{load_line({name: median_load(documents) for name, documents in by_case.items()})} Busy: another process "
            f"computes for {config['busy_s'][0]} to {config['busy_s'][1]} s and rests as long.",
            "Noise floor: within a restart, the time per token of a process has a standard deviation of "
            f"{100 * process_deviation(comparisons):.2f} % (A/A test: two processes of the base).",
            "Found slower: the verdict on the policy. Not decidable: at the end an interval still contains the limit "
            f"of {config['max_slowdown_percent']:g} %.",
        ],
    )


def row_of(case: Config, documents: Sequence[Document]) -> Document:
    """Count the verdicts of a case's comparisons."""
    verdicts = [[row["verdict"] for row in document["rows"]] for document in documents]
    return {
        "case": case["name"],
        "percent": case["percent"],
        "comparisons": len(documents),
        "found": sum(policy == "slower" for _, policy in verdicts),
        "changes": sum(bool({"slower", "faster"} & {*rows}) for rows in verdicts),
        "undecided": sum(any(row["exceeds"] is None for row in document["rows"]) for document in documents),
        "restarts": float(np.mean([document["restarts"] for document in documents])),
        "minutes": float(np.mean([document["spent_s"] for document in documents])) / 60,
    }


def total(rows: Sequence[Document], key: str) -> int:
    """Sum a column."""
    return sum(int(row[key]) for row in rows)


def process_deviation(comparisons: Sequence[Document]) -> float:
    """Compute by how much a process differs from another of the same version, as the logarithm's deviation."""
    tokens_ms = [np.array(row["restart_token_ms"]) for document in comparisons for row in document["rows"]]
    logs = np.concatenate([np.log(base) - np.log(null) for base, _, null in tokens_ms])
    return float(np.sqrt((logs**2).mean() / 2))


def csv_row(document: Document, row: Document) -> Document:
    """Return a row of table.csv."""
    keys = ("slowdown_percent", "null_percent", "verdict", "exceeds")
    named = {"case": document["case"], "policy": row["label"], "restarts": document["restarts"]}
    return {**named, **{key: row[key] for key in keys}}
