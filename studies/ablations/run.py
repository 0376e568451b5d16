"""The papers' systems and ablations on one small target: `python -m studies ablations`.

Every run of config.toml trains its drafter, records, forecasts, and then really decodes held-out prompts. Results are
cached, so an interrupted study continues. Runs listed in `later` are skipped.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from studies.ablations.report import report
from studies.ablations.sure_tree import SureTree
from studies.ablations.training import DONE, train_drafter, train_predictor
from studies.common import Config, Document, cached, claim, named, prompts_of, record_settings

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
