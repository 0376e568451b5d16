"""Rooflines against measured costs: `python -m studies roofline`.

Profiles the lab's target at several depths, with several drafters and in batches. The report calibrates a roofline on
every other cell of each profile, and compares it with the cells that it has not seen. A second start goes on with what
is there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from realrun.measure.batches import profile_batches
from realrun.measure.profile import profile
from realrun.pairs.pair import load_pair
from specsim.cli.console import progress_bar
from specsim.io.progress import Progress
from studies.common import Config, Document, cached, claim
from studies.roofline.report import report

PROFILE = "profile.json"
RECORDED = ("config.json", f"*/{PROFILE}")
SETTINGS = ("contexts", "depth", "seed")  # of a profile


def cases(config: Config) -> list[tuple[str, str]]:
    """Return targets and drafters that are profiled."""
    *_, last = config["targets"]
    return [*((target, "model") for target in config["targets"]), *((last, drafter) for drafter in config["drafters"])]


def case_name(target: str, drafter: str) -> str:
    """Return the name of a case's folder."""
    return f"{target.replace(':', '-')}-{drafter}"


def profiled(target: str, drafter: str, config: Config) -> Document:
    """Measure a case."""
    pair = load_pair(target, dtype=config["dtype"], threads=config["threads"], drafter=drafter)
    return profile(pair, **{key: config[key] for key in SETTINGS}, tree_tokens=0)


def profiled_in_batches(target: str, config: Config, progress: Progress) -> Document:
    """Measure batches of a target."""
    pair = load_pair(target, dtype=config["dtype"], threads=config["threads"])
    return profile_batches(
        pair, **config["in_batches"]["probes"], seed=config["seed"], progress=partial(progress, f"batches of {target}")
    )


def main(out: Path, config: Config) -> None:
    """Profile what is not there, and write the report."""
    claim(out, config)
    documents: dict[tuple[str, str], Document] = {}
    batched: dict[str, Document] = {}
    with progress_bar() as progress:
        for number, case in enumerate(cases(config)):
            progress("profile", number, len(cases(config)))
            documents[case] = cached(out / case_name(*case) / PROFILE, partial(profiled, *case, config))
        for target in config["in_batches"]["targets"]:
            done = out / case_name(target, "batches") / PROFILE
            batched[target] = cached(done, partial(profiled_in_batches, target, config, progress))
    report(config, documents, batched).write(out)
