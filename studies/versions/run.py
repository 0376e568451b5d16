"""How often `realrun compare` finds a slowdown of known size: `python -m studies versions`.

Base and head are copies of this checkout; the head waits a little in every round, or in drafting alone. Every
comparison is recorded in a file of its own, so that an interrupted study goes on.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from realrun.decode.sampling import Sampler
from realrun.pairs.prompts import study_prompts
from realrun.versions.compare import CompareSettings, compare
from specsim.cli.console import progress_bar
from specsim.io.progress import Progress
from specsim.policy.registry import make_policy
from studies.common import Config, Document, cached, load, named
from studies.measurement.run import load_of
from studies.versions.report import report

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
        document = compare(*sides, prompts, settings, Path(out), progress=progress)
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
