"""The papers' systems and ablations on one small target: `python -m studies ablations`.

Every run of config.toml trains its drafter, records, forecasts, and then really decodes held-out prompts. Results are
cached, so an interrupted study continues. Runs listed in `later` are skipped.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.experiment.typical_acceptance import TypicalSettings, compare_typical
from realrun.lm.clock import use_clock
from realrun.pairs.pair import Pair, is_lab, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
from specsim.cli.console import progress_bar
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.policy.base import Policy, Variant, build_policy
from specsim.policy.registry import POLICIES
from specsim.replaying.intervals import Estimate, ratio_interval
from specsim.report.table import Column
from studies.ablations.sure_tree import SureTree
from studies.common import Config, Document, cached, claim, named, prompts_of, record_settings
from studies.figures import dots
from studies.papers.tables import read_table
from studies.report import Report, load_line, machine_line

DONE = "training.json"  # in the folder of a drafter's weights
AGREES, DISAGREES, UNDECIDED, NOT_RUN = "agrees", "disagrees", "not significant", "not run"
Runs = Mapping[str, Document]
LINES = ("drafters", "runs", "later", "systems", "ablations")  # tables that may change between two starts
RECORDED = ("config.json", "runs/*.json", f"drafters/*/{DONE}", f"predictors/*/{DONE}")
KINDS = {**POLICIES, SureTree.name: SureTree}
KEPT = ("predicted", "forecast", "measured", "error_percent", "rounds_identical_percent", "truncated_share", "params")
OF_RUN = ("environment", "dtype", "sequences", "load", "noise_floor_percent", "skipped", "decoding")


def variant_of(kind: type[Policy], text: str) -> Variant:
    """Return the policy's variant with this label, or a variant with these settings, such as "k = 10"."""
    for variant in kind.variants:
        if variant.label == text:
            return variant
    if "=" not in text:
        raise InputError(f"policy {kind.name} has no variant {text!r}; give one of its variants or NAME = VALUE")
    return Variant(text, tomllib.loads(f"settings = {{ {text} }}")["settings"], tuned=False)


def policies(names: Sequence[str]) -> list[type[Policy]]:
    """Return each policy once, with the variants that these rows name: "POLICY, VARIANT"."""
    chosen: dict[str, list[Variant]] = {}
    for name in names:
        policy, _, text = name.partition(", ")
        chosen.setdefault(policy, []).append(variant_of(KINDS[policy], text))
    return [
        type(kind.__name__, (kind,), {"variants": tuple(variants), "__module__": kind.__module__})
        for kind, variants in ((KINDS[policy], variants) for policy, variants in chosen.items())
    ]


def load(out: Path, run: Config, config: Config) -> tuple[Pair, list[Prompt]]:
    """Train the run's drafter and predictor unless they are there, and return its pair and prompts."""
    predictor = str(train_predictor(out, run["drafter"], config)) if run.get("predictor") else "auto"
    folder = str(train_drafter(out, run["drafter"], config))
    drafter = {"draft_model": folder} if run.get("independent") else {"drafter": folder}
    pair = load_pair(
        config["decoded"], dtype=config["dtype"], threads=config["threads"], predictor=predictor, **drafter
    )
    lab = is_lab(config["decoded"])
    return pair, lab_prompts(pair.tokenizer, config["prompts"]) if lab else prompts_of(pair, config)


def decoded(out: Path, name: str, run: Config, config: Config, progress: Progress) -> Document:
    """Record, forecast and really decode a run's policies; return a row for each, by its name in config.toml."""
    config = {"mode": "greedy", "temperature": 1.0, **config, **run}
    pair, prompts = load(out, run, config)
    record = record_settings(config, config, trees=config.get("trees", False))
    if top := {key: config[key] for key in ("top_k", "top_p") if key in config}:
        record = replace(record, sampler=replace(record.sampler, **top))
    options = {key: config[key] for key in ("trials", "repeats", "tuning_share", "seed")}
    settings = ValidationSettings(record=record, kinds=tuple(policies(run["policies"])), **options)
    folder = out / "validations" / name
    if not (folder / "validation.json").is_file():
        validate(pair, prompts, settings, folder, named(progress, name))
    document = json.loads((folder / "validation.json").read_text())
    rounds = pd.read_parquet(folder / "rounds.parquet").groupby(["policy", "sequence_id"], sort=True).size()
    rows = {}
    for label, tuned in json.loads((folder / "tuned.json").read_text()).items():
        same = (row for row in document["rows"] if row["params"] == tuned.get("params"))
        for row in (row for row in same if row["policy"] == label.partition(",")[0]):
            counts = {"seconds": row["sequence_seconds"], "tokens": row["sequence_tokens"]}
            rows[label] = {
                **{key: row.get(key) for key in KEPT},
                **counts,
                "rounds": rounds[row["label"]].tolist(),
                "tau": float(np.sum(row["sequence_tokens"]) / rounds[row["label"]].sum()),
            }
    baseline = {"baseline_s": document["autoregressive_sequence_seconds"]}
    return {**{key: document.get(key) for key in OF_RUN}, **baseline, "clock": config["clock"], "rows": rows}


def typical(out: Path, run: Config, config: Config, progress: Progress) -> Document:
    """Decode by typical acceptance, greedily and by sampling, with the tree that was tuned in another run."""
    pair, prompts = load(out, run, config)
    (kind,) = policies([run["policy"]])
    tuned = json.loads((out / "validations" / run["tree_of"] / "tuned.json").read_text())
    policy = build_policy(kind, tuned[run["policy"]]["params"])
    options = {"temperature": run["temperature"], "max_new_tokens": config["max_new_tokens"], "seed": config["seed"]}
    settings = TypicalSettings(epsilons=tuple(run["epsilons"]), **options)
    document = compare_typical(pair, prompts, policy, settings, partial(named(progress, "typical"), "decode"))
    arms = {arm["arm"] if "epsilon" not in arm else f"epsilon = {arm['epsilon']:g}": arm for arm in document["arms"]}
    return {"prompts": document["prompts"]["count"], "arms": arms}


def main(out: Path, config: Config) -> None:
    """Do the runs whose results are not there yet, and write the report."""
    claim(out, {key: value for key, value in config.items() if key not in LINES})
    runs = {}
    with progress_bar() as progress, use_clock(config["clock"]):
        for name, run in config["runs"].items():
            if name not in config["later"]:
                job = partial(typical, out) if "epsilons" in run else partial(decoded, out, name)
                runs[name] = cached(out / "runs" / f"{name}.json", partial(job, run, config, progress))
    trainings = {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob(f"drafters/*/{DONE}"))}
    report(config, runs, trainings).write(out)


def cell(place: str) -> float:
    """Return what a paper prints at TABLE | KEYS | COLUMN; for EESD's r_d, the tau that follows from it."""
    table, *keys, column = place.split(" | ")
    value = read_table(table).row(*keys).number(column)
    return 1 / (1 - value) if column == "r_d" else value


def find(runs: Runs, row: str) -> tuple[Document, Document] | None:
    """Return the run and the row of "RUN: POLICY"; None if it was not run."""
    name, _, policy = row.partition(": ")
    run = runs.get(name, {})
    found = run.get("rows", run.get("arms", {})).get(policy)
    return None if found is None else (run, found)


def ratio(runs: Runs, changed: str, base: str, of: str) -> Estimate | None:
    """Return the ratio of the changed row's speedup or tau to that of the base; None if one of them was not run.

    The interval resamples prompts, the same for both rows. Each speedup is over the baseline of its own run.
    """
    rows = find(runs, changed), find(runs, base)
    if rows[0] is None or rows[1] is None:
        return None
    (run_a, a), (run_b, b) = rows
    if "acceleration_rate" in a:  # typical acceptance: outputs differ, so intervals count as independent
        one, other = (Estimate(**arm["acceleration_rate"]) for arm in (a, b))
        below = math.hypot(math.log(one.low / one), math.log(other.high / other))
        above = math.hypot(math.log(one.high / one), math.log(other.low / other))
        return Estimate(one / other, one / other * math.exp(-below), one / other * math.exp(above))
    if of == "tau":
        tops, bottoms = ([n / t for n, t in zip(row["rounds"], row["tokens"], strict=True)] for row in (b, a))
    else:
        tops, bottoms = b["seconds"], a["seconds"]
        if run_a is not run_b:
            scales = zip(run_b["baseline_s"], run_a["baseline_s"], strict=True)
            bottoms = [s * own / others for s, (own, others) in zip(bottoms, scales, strict=True)]
    return ratio_interval(tops, bottoms)


def percent(ratio: Estimate) -> Estimate:
    """Return a ratio's change from 1, in percent."""
    return Estimate(*(100 * (value - 1) for value in (ratio.estimate, ratio.low, ratio.high)))


def verdict(papers: float, ours: Estimate | None) -> str:
    """Return whether the sign of our change, if it is significant, is that of the paper's. None : not run"""
    if ours is None:
        return NOT_RUN
    if ours.low <= 0 <= ours.high:
        return UNDECIDED
    return AGREES if (ours > 0) == (papers > 0) else DISAGREES


@dataclass(frozen=True)
class Ablation:
    """The change that an ablation of config.toml makes in its paper and on this target; a row of table.csv.

    of : "speedup" or "tau"; paper_percent : None where the paper states only the sign; ours_percent : None if not run
    changed, base : rows that are compared, "RUN: POLICY"
    """

    paper: str
    ablation: str
    of: str
    paper_sign: str
    paper_percent: float | None
    ours_percent: Estimate | None
    prompts: int | None
    verdict: str
    changed: str
    base: str

    @property
    def drawn(self) -> Estimate:
        """The paper's change, in percent, for the figure; 1 percent where the paper states only its sign."""
        size = self.paper_percent
        return Estimate.exact((1.0 if self.paper_sign == "+" else -1.0) if size is None else size)


def ablation(runs: Runs, line: Sequence[Any]) -> Ablation:
    """Compare two rows, as a line of config.toml says."""
    paper, name, changed, base, of, says = line
    printed = None if isinstance(says, int) else 100 * (cell(says[0]) / cell(says[1]) - 1)
    found = ratio(runs, changed, base, of)
    ours = None if found is None else percent(found)
    run = find(runs, changed)
    prompts = None if run is None else len(run[0].get("baseline_s", ())) or run[0]["prompts"]
    sign = says if printed is None else printed
    signed = "+" if sign > 0 else "-"
    return Ablation(paper, name, of, signed, printed, ours, prompts, verdict(sign, ours), changed, base)


@dataclass(frozen=True)
class System:
    """A system's forecast and measured speedup and tau, beside those that its paper prints; a row of table.csv."""

    system: str
    row: str
    papers_tau: float | None
    papers_speedup: float | None
    tau: float | None
    forecast: Estimate | None
    speedup: Estimate | None
    rounds_identical_percent: float | None
    rounds_truncated_percent: float | None
    verdict: str


def system(runs: Runs, name: str, line: Config) -> System:
    """Find a system's row, and what its paper prints."""
    found = find(runs, line["row"])
    _, row = found if found else ({}, {})
    speedup = line.get("speedup")
    places = [speedup] if isinstance(speedup, str) else speedup or []
    return System(
        system=name,
        row=line["row"],
        papers_tau=cell(line["tau"]) if "tau" in line else None,
        papers_speedup=cell(places[0]) / math.prod(map(cell, places[1:])) if places else None,
        tau=row.get("tau", row.get("acceleration_rate", {}).get("estimate")),
        forecast=Estimate(**row["forecast"]) if row.get("forecast") else None,
        speedup=Estimate(**row["measured"]) if row.get("measured") else None,
        rounds_identical_percent=row.get("rounds_identical_percent"),
        rounds_truncated_percent=100 * row["truncated_share"] if "truncated_share" in row else None,
        verdict="run" if found else NOT_RUN,
    )


def between(values: Iterable[float]) -> str:
    """Return the range of these values as text."""
    ends = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:.3g}" for end in (ends[0], ends[-1])))


def report(config: Config, runs: Runs, trainings: Mapping[str, Document]) -> Report:
    """Return the report. runs : results of the runs that were done, by name; trainings : by drafter"""
    rows = [ablation(runs, line) for line in config["ablations"]["rows"]]
    systems = [system(runs, name, line) for name, line in config["systems"].items()]
    by_paper: dict[str, list[Ablation]] = {}
    for row in rows:
        by_paper.setdefault(row.paper.partition(",")[0], []).append(row)
    counts = Counter(row.verdict for row in rows)
    speedups = {row.system: row.speedup for row in systems if row.speedup is not None}
    fastest = max(speedups, key=speedups.__getitem__)
    measured = {name: run for name, run in runs.items() if "rows" in run}
    every = [row for run in measured.values() for row in run["rows"].values()]
    exact = [row["rounds_identical_percent"] for row in every if row["rounds_identical_percent"] is not None]
    whole = [row for row in every if row["rounds_identical_percent"] is not None and not row["truncated_share"]]
    errors = sorted(
        abs(100 * (row["forecast"]["estimate"] / row["measured"]["estimate"] - 1)) for row in every if row["forecast"]
    )
    first = next(iter(measured.values()))
    return Report(
        question="Do the papers' ablations have the same sign on a small target?",
        answer=f"Of {len(rows)} ablations {len(rows) - counts[NOT_RUN]} were run here: {counts[AGREES]} agree in sign, "
        f"{counts[DISAGREES]} disagree and {counts[UNDECIDED]} are not significant. Of {len(speedups)} systems that "
        f"were run under their papers' policies, the fastest is {fastest} at {speedups[fastest]:.2f} times the "
        "baseline.",
        figure=dots(
            [
                (f"{row.paper}: {row.ablation}", {"ours": row.ours_percent, "paper": row.drawn})
                for row in rows
                if row.ours_percent is not None
            ],
            "ablations",
            "Change by each ablation",
            "change of speedup or tau, %; 95 % intervals; a paper's sign without a size is drawn at +-1 %",
            level=0,
        ),
        figure_name="ablations",
        caption="Change of speedup or tau by each ablation, here and in its paper",
        columns=[
            Column("paper", "paper"),
            Column("ablations", "ablations"),
            *(Column(name, name) for name in (AGREES, DISAGREES, UNDECIDED, NOT_RUN)),
            Column("disagree", "against"),
        ],
        shown=[
            {
                "paper": paper,
                "ablations": len(own),
                **Counter(row.verdict for row in own),
                "against": "; ".join(row.ablation for row in own if row.verdict == DISAGREES),
            }
            for paper, own in by_paper.items()
        ],
        table=[*map(asdict, systems), *map(asdict, rows)],
        trust=[
            f"Prompts: {between(run['sequences']['holdout'] for run in measured.values())} of the target's held-out "
            f"prompts a run (column prompts), at most {config['max_new_tokens']} tokens each; few, so small "
            "effects are not significant.",
            machine_line(config | {"target": config["decoded"]}, first),
            load_line(measured)
            + (
                " Times are CPU time of the process, which other processes move less."
                if config["clock"] == "cpu"
                else ""
            ),
            "Noise floor (A/A test, the baseline run twice): "
            f"{between(run['noise_floor_percent'] for run in measured.values())} %. Intervals (95 %) are over held-out "
            "prompts; where two runs are compared, each speedup is over its own run's baseline.",
            f"Rounds: identical in replay and real run for {sum(value == 100 for value in exact)} of {len(exact)} "
            f"policies that replay exactly ({sum(row['rounds_identical_percent'] == 100 for row in whole)} of "
            f"{len(whole)} whose trees the trace holds whole). Forecasts were written before any held-out prompt was "
            f"decoded; their median error is {errors[len(errors) // 2]:.1f} %.",
            f"{len(trainings)} drafters were trained once each, on {config['training']['shared'].split()[1]} million "
            "tokens (options in config.toml), far less than in the papers: a training's effect may change sign at full "
            "length, and an interval over prompts does not include the spread of trainings.",
            "The papers' targets have 7 to 13 billion parameters. table.csv has each system beside its paper's tau and "
            "speedup, and each ablation beside the paper's change.",
        ],
    )


def run_training(options: str, folder: Path) -> Document:
    """Run `realrun train` and return what it trained on and how long it took."""
    command = [sys.executable, "-m", "realrun", "train", *shlex.split(options), "--out", str(folder), "--json"]
    document = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {"options": options, "tokens": document.get("tokens"), "seconds": document.get("seconds")}


def train_drafter(out: Path, name: str, config: Config) -> Path:
    """Return the folder of a drafter's weights, trained unless it is there; "model" and other names as they are."""
    if name not in config["drafters"]:
        return Path(name)
    drafters = out / "drafters"
    options = config["drafters"][name].format(drafters=drafters)
    options += f" --target {config['target']} {config['training']['shared']} --cache {out / 'text'}"
    cached(drafters / name / DONE, lambda: run_training(options, drafters / name))
    return drafters / name


def train_predictor(out: Path, name: str, config: Config) -> Path:
    """Return the folder of Cali-TS's predictor for a drafter, trained unless it is there."""
    drafter, folder = train_drafter(out, name, config), out / "predictors" / name
    options = f"predictor --target {config['target']} --drafter {drafter} {config['training']['predictor']}"
    cached(folder / DONE, lambda: run_training(options, folder))
    return folder
