"""All drafters of the lab's target on a leaderboard: `python -m studies board`.

Runs what `realrun board` does with the settings of config.toml, in each way of decoding. A second start goes on
with what is there.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from realrun.leaderboard.job import BoardSettings, named, run_leaderboard
from realrun.pairs.pair import LOOKUP, load_pair
from realrun.pairs.prompts import study_prompts
from specsim.cli.console import progress_bar
from specsim.io.files import write_json
from specsim.policy.registry import POLICIES
from studies.board.report import report
from studies.common import Config, Document, claim, record_settings, run_title

RECORDED = ("config.json", "*/board.json")


def board(out: Path, run: Config, config: Config) -> Document:
    """Return the leaderboard in this way of decoding; read where it is there."""
    done = out / run["name"] / "board.json"
    if done.is_file():
        return dict(json.loads(done.read_text()))
    settings = BoardSettings(
        record=record_settings(run, config, trees=True),
        kinds=tuple(POLICIES[name] for name in config["policies"]),
        trials=config["trials"],
        repeats=config["repeats"],
        tuning_share=config["tuning_share"],
        seed=config["seed"],
    )
    load = partial(load_pair, config["target"], dtype=config["dtype"], threads=config["threads"])
    plain = load(drafter=LOOKUP)
    pairs = {name: load(drafter=given, beside=plain) for name, given in named(None, config["target"]).items()}
    prompts = study_prompts(plain.tokenizer, config["prompts"])
    with progress_bar() as progress:
        document = run_leaderboard(pairs, plain, prompts, settings, out / run["name"], progress)
    write_json(document, done)
    return document


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    report(config, {run_title(run): board(out, run, config) for run in config["runs"]}).write(out)
