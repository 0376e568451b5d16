"""What the studies share: their configuration, jobs that run once and are read again, and words of their reports.

A study is a folder with config.toml, run.py and the report that was written by it: `python -m studies.edd.run [OUT]`.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import study_prompts
from realrun.recording.record import RecordSettings
from realrun.validation.run import ValidationSettings, validate
from specsim.cost.model import CostModel
from specsim.errors import InputError
from specsim.files import write_json
from specsim.policy.base import Policy
from specsim.progress import Progress
from specsim.ranking.leaderboard import leaderboard
from specsim.trace.trace import Trace

Config = Mapping[str, Any]
Document = dict[str, Any]


def run_study(main: Callable[[Path, Config], None], file: str) -> None:
    """Run a study with the config.toml beside its file, into the folder that the command line names, else out/."""
    home = Path(file).parent
    config = tomllib.loads((home / "config.toml").read_text())
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else home / "out", config)


def claim(out: Path, config: Config) -> None:
    """Make the folder this configuration's; InputError if it holds results of another."""
    used = out / "config.json"
    if used.is_file() and json.loads(used.read_text()) != config:
        raise InputError(f"{out} holds results of another configuration; give another folder")
    write_json(dict(config), used)


def named(report: Progress, name: str) -> Progress:
    """Progress that says what it is of."""

    def show(what: str, done: int, total: int) -> None:
        report(f"{name}: {what}", done, total)

    return show


def load(config: Config, drafter: str | Path = "model") -> Pair:
    """The lab with its own draft model, with one of its drafters, or with one in a folder."""
    return load_pair(dtype=config["dtype"], threads=config["threads"], drafter=str(drafter))


def record_settings(run: Config, config: Config, *, trees: bool = False) -> RecordSettings:
    """What is recorded in this way of decoding."""
    sampler = Sampler(run["mode"], run["temperature"], seed=config["seed"])
    nodes = (config["tree_nodes"], config["tree_width"]) if trees else ()
    return RecordSettings(config["depth"], config["max_new_tokens"], sampler, *nodes)


def validation(
    folder: Path,
    drafter: str | Path,
    kinds: Sequence[type[Policy]] | Callable[[Pair], Sequence[type[Policy]]] | None,
    run: Config,
    config: Config,
    report: Progress,
    *,
    trees: bool = False,
    prompts: Callable[..., Any] = study_prompts,
) -> Document:
    """Record, profile, tune, predict and really decode with this drafter; read where it is there.

    kinds : policies to compare, or a function of the pair that says which; None: all
    """
    done = folder / "validation.json"
    if not done.is_file():
        pair = load(config, drafter)
        chosen = kinds(pair) if callable(kinds) else kinds
        settings = ValidationSettings(
            record=record_settings(run, config, trees=trees),
            kinds=None if chosen is None else tuple(chosen),
            trials=config["trials"],
            repeats=config["repeats"],
            tuning_share=config["tuning_share"],
            seed=config["seed"],
        )
        validate(pair, prompts(pair.tokenizer, config["prompts"]), settings, folder, named(report, folder.name))
    return dict(json.loads(done.read_text()))


def board(
    done: Path, name: str, trace: Trace, cost: CostModel, kinds: list[type[Policy]], config: Config, report: Progress
) -> Document:
    """The leaderboard of these policies on the trace at this cost; read where it is there."""
    if not done.is_file():
        (ranked,) = leaderboard(
            {name: trace},
            [cost],
            kinds=kinds,
            trials=config["trials"],
            tuning_share=config["tuning_share"],
            seed=config["seed"],
            sensitivity=False,
            progress=report,
        )
        write_json({**ranked.as_dict(), "baseline_s": ranked.baseline_s.tolist()}, done)
    return dict(json.loads(done.read_text()))


def about_prompts(config: Config, document: Config, rest: str = "report on") -> str:
    """Which prompts a study used. rest : what those were for that were not tuned on"""
    sequences = document["sequences"]
    return (
        f"{config['prompts']} prompts from library files that the lab was not trained on, {config['max_new_tokens']} "
        f"tokens each, {sequences['tuning']} to tune on and {sequences['holdout']} to {rest}"
    )


def about_machine(document: Config) -> str:
    """Where and when a study ran."""
    where = document["environment"]
    return f"{where['device']}, {where['threads']} thread, {document['dtype']}, {where['date'][:10]}"
