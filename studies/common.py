"""Shared parts of the studies: configuration, jobs whose results are cached in files, and where they ran.

A study is a folder with config.toml, run.py, and the report that it wrote: `python -m studies edd`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from realrun.decode.sampling import Sampler
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import recorded_trace
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import Prompt, read_prompts
from specsim.cost.calibrate import data_sheet_document
from specsim.cost.files import as_cost, read_cost
from specsim.cost.model import CostModel
from specsim.cost.profile import ProfileCost
from specsim.cost.table import context_range
from specsim.io.arrays import Seconds
from specsim.io.errors import InputError
from specsim.io.examples import TASKS
from specsim.io.files import write_json
from specsim.io.progress import Progress
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.trace.files import read_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

Config = Mapping[str, Any]
Document = dict[str, Any]

REPLAYED = "replayed.json"  # the document that `validation` makes, and reads where it is
VALIDATED = (REPLAYED, "profile.json", "rounds.parquet", "trace/*")  # what reports are made of
DRAFTS = {"greedy-draft": "greedy", "rejection": "sampled"}  # modes at a temperature, by how the drafter drafts
MOST_TRUNCATED = 0.05  # share of a row's rounds; a row with more is not compared


def claim(out: Path, config: Config) -> None:
    """Write the configuration into the folder; InputError if the folder has results of another configuration."""
    used = out / "config.json"
    if used.is_file() and json.loads(used.read_text()) != config:
        raise InputError(f"{out} holds results of another configuration; give another folder")
    write_json(dict(config), used)


def cached(done: Path, make: Callable[[], Document]) -> Document:
    """Return the document in this file; make and write it if it is missing."""
    if not done.is_file():
        write_json(make(), done)
    return dict(json.loads(done.read_text()))


def named(report: Progress, name: str) -> Progress:
    """Return progress whose steps begin with this name."""

    def show(what: str, done: int, total: int) -> None:
        report(f"{name}: {what}", done, total)

    return show


def load(config: Config, drafter: str | Path = "model") -> Pair:
    """Load the study's target with the lab's draft model, another drafter of the lab, or a drafter in a folder."""
    return load_pair(config["target"], dtype=config["dtype"], threads=config["threads"], drafter=str(drafter))


def record_settings(run: Config, config: Config, *, trees: bool = False) -> RecordSettings:
    """Return the settings of a recording in this way of decoding."""
    sampler = Sampler(run["mode"], run["temperature"], seed=config["seed"])
    nodes = (config["tree_nodes"], config["tree_width"]) if trees else ()
    return RecordSettings(config["depth"], config["max_new_tokens"], sampler, *nodes)


def prompts_of(pair: Pair, config: Config) -> list[Prompt]:
    """Return the study's prompts, of the bundled tasks."""
    return read_prompts(TASKS, pair.tokenizer, config["prompts"])


def recorded(folder: Path, pair: Pair, run: Config, config: Config, report: Progress) -> dict[str, Trace]:
    """Record the study's prompts at a temperature with each kind of drafts for the same output; by mode.

    Finished sequences are kept in this folder, and read where they are there.
    """
    traces: dict[str, Trace] = {}
    texts: dict[int, list[int]] = {}
    prompts, numbers = prompts_of(pair, config), np.arange(0, config["prompts"], config["every"])
    for mode, drafts in DRAFTS.items():
        settings = record_settings({**run, "mode": mode}, config)
        count = partial(named(report, f"T = {run['temperature']:g}, {drafts} drafts"), "record")
        where = folder / mode / "trace"
        traces[mode] = recorded_trace(pair, prompts, settings, where, count, sequences=numbers, texts=texts)
        outputs = np.split(traces[mode].token, traces[mode].offsets[1:-1])
        texts = {number: tokens.tolist() for number, tokens in zip(numbers.tolist(), outputs, strict=True)}
    return traces


def gpu_costs(gpu: Config) -> CostModel:
    """Return the costs of a GPU, models and an engine that nobody measured here, by data sheet and published runs."""
    return as_cost(data_sheet_document(gpu["gpu"], gpu["target"], gpu["drafter"], engine=gpu["engine"]))


@dataclass(frozen=True, repr=False)
class NearestContext(ProfileCost):
    """A measured grid on which contexts beyond the measured ones take the times of the nearest."""

    def _along_context(self, values: Seconds, context: npt.ArrayLike) -> Seconds:
        return super()._along_context(values, np.clip(context, self.contexts[0], self.contexts[-1]))


def smollm2_costs() -> tuple[CostModel, Document]:
    """Return the costs of SmolLM2 with EAGLE that the study of policies measured, and that run's document."""
    folder = Path(__file__).parent / "policies" / "recorded" / "greedy"
    measured = read_cost(folder / "profile.json")
    assert isinstance(measured, ProfileCost)
    return NearestContext(**vars(measured)), json.loads((folder / REPLAYED).read_text())


def about_smollm2_costs(load: Document) -> str:
    """Return where `smollm2_costs` are from. load : of that run"""
    return (
        "Nothing was timed here: the CPU's costs are those that the study of policies measured in greedy decoding, "
        f"while other processes used {load['others_percent']:.0f} % of the CPUs' time (load); contexts beyond its "
        "profile's take the times of the nearest. A replay has no noise floor."
    )


def middle_too(trace: Trace) -> list[int]:
    """Return the lowest, middle and highest context of the trace's rounds."""
    low, high = context_range(trace)
    return [low, (low + high) // 2, high]


def validation(
    folder: Path,
    drafter: str | Callable[[], Path],
    kinds: Sequence[type[Policy]] | Callable[[Pair], Sequence[type[Policy]]],
    run: Config,
    config: Config,
    report: Progress,
    *,
    trees: bool = False,
) -> Document:
    """Record, profile, tune, predict and really decode with this drafter; read where it is there.

    With what `with_replays` adds. drafter : its name, or a function that trains it and gives its folder. kinds :
    policies to compare, or a function of the pair that says which
    """
    done = folder / REPLAYED
    if done.is_file():
        return dict(json.loads(done.read_text()))
    if not (folder / "validation.json").is_file():
        pair = load(config, drafter() if callable(drafter) else drafter)
        settings = ValidationSettings(
            record=record_settings(run, config, trees=trees),
            kinds=tuple(kinds(pair) if callable(kinds) else kinds),
            trials=config["trials"],
            repeats=config["repeats"],
            tuning_share=config["tuning_share"],
            seed=config["seed"],
        )
        progress = named(report, f"{folder.parent.name}/{folder.name}")  # a drafter has a folder in every run's
        validate(pair, prompts_of(pair, config), settings, folder, progress)
    document = json.loads((folder / "validation.json").read_text())
    document = with_replays(document, read_trace(folder / "trace"), read_cost(folder / "profile.json"), config)
    write_json(document, done)
    return document


def parts(trace: Trace, config: Config) -> tuple[Trace, Trace]:
    """Split a trace into its tuning and held-out sequences."""
    tuning, held = split_sequences(trace, tuning_share=config["tuning_share"], seed=config["seed"])
    return trace.select(tuning), trace.select(held)


def with_replays(document: Document, trace: Trace, cost: CostModel, config: Config) -> Document:
    """The validation with what its rows do in replay, and the ratio of s_d to s_t.

    train_speedup : of every row, on the tuning prompts, on which the best of several is chosen
    truncated_share : of its rounds on the held-out prompts, those that asked for nodes that were not recorded
    """
    train, holdout = (PricedTrace(part, cost) for part in parts(trace, config))
    rows = []
    for row in document["rows"]:
        policy = make_policy(row["policy"], row["params"])
        train_speedup = train.replay(policy, seed=config["seed"]).speedup
        share = truncated_share(holdout.replay(policy, seed=config["seed"]))
        rows.append({**row, "train_speedup": train_speedup, "truncated_share": share})
    step_ratio = PricedTrace(trace, cost).table().step_ratio
    return {**document, "rows": rows, "step_ratio": step_ratio}


def truncated_share(replayed: Replay) -> float:
    """Return the share of rounds that asked for nodes that the trace does not hold."""
    return 0.0 if replayed.truncated is None else float(replayed.truncated.sum() / replayed.num_rounds.sum())


def run_title(run: Config) -> str:
    """Return how a run's way of decoding is called in reports."""
    return "greedy" if run["mode"] == "greedy" else f"T = {run['temperature']:g}"


def about_prompts(config: Config, document: Config) -> str:
    """Return which prompts a study used."""
    tuning, held = (document["sequences"][part] for part in ("tuning", "holdout"))
    return (
        f"{tuning + held} of specsim's tasks of six kinds, at most {config['max_new_tokens']} tokens each, {tuning} "
        f"for tuning and {held} held out"
    )


def about_machine(document: Config) -> str:
    """Return where and when a study ran."""
    where = document["environment"]
    return f"{where['device']}, {where['threads']} thread, {document['dtype']}, {where['date'][:10]}"
