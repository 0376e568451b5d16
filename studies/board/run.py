"""All drafters of the lab's target on a leaderboard: `python -m studies board`.

Runs what `realrun leaderboard` does with the settings of config.toml, in each way of decoding. A second start goes on
with what is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from realrun.leaderboard.job import BoardSettings, named, run_leaderboard
from realrun.pairs.pair import LOOKUP, load_pair
from realrun.pairs.prompts import study_prompts
from specsim.cli.console import progress_bar
from specsim.cost.files import read_cost
from specsim.cost.profile import ProfileCost
from specsim.io.files import write_json
from specsim.policy.registry import POLICIES, make_policy
from specsim.replaying.prediction import ladder
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.board.report import report
from studies.common import Config, Document, claim, parts, record_settings, run_title, truncated_share

RECORDED = ("config.json", "*/board.json")


def board(out: Path, run: Config, config: Config) -> Document:
    """Return the leaderboard in this way of decoding, with its replays; read where it is there."""
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
    folders = {name: out / run["name"] / name for name in pairs}
    traces = {name: read_trace(folder / "trace") for name, folder in folders.items()}
    costs = {name: read_cost(folder / "profile.json") for name, folder in folders.items()}
    document = with_replays(document, traces, costs, config)  # type: ignore[arg-type]  # no file of two numbers
    write_json(document, done)
    return document


def with_replays(
    document: Document, traces: Mapping[str, Trace], costs: Mapping[str, ProfileCost], config: Config
) -> Document:
    """Return the board with each row's prediction ladder and its share of truncated rounds; traces by drafter."""
    holdouts = {name: parts(trace, config)[1] for name, trace in traces.items()}
    rows = []
    for row in document["rows"]:
        holdout, cost = holdouts[row["drafter"]], costs[row["drafter"]]
        policy = make_policy(row["policy"], row["params"])
        steps = ladder(holdout, policy, cost, seed=config["seed"])
        share = truncated_share(PricedTrace(holdout, cost).replay(policy, seed=config["seed"]))
        rungs = {"eq14": steps.eq14, "constant": steps.constant, "profile": row["speedup"]["estimate"]}
        rows.append({**row, "ladder": {**rungs, "measured": row["measured"]["estimate"]}, "truncated_share": share})
    return {**document, "rows": rows}


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    report(config, {run_title(run): board(out, run, config) for run in config["runs"]}).write(out)
