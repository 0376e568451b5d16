"""The papers' drafters, trained for SmolLM2 on this machine: `python -m studies drafters`.

Trains each drafter of config.toml by its command, records the bundled tasks with it, tunes and forecasts its policies,
and decodes held-out prompts. A second start goes on with what is there.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specsim.acceptance.formulas import tokens_per_round
from specsim.cli.console import progress_bar
from specsim.cost.model import ConstantCost
from specsim.io.progress import Progress
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.registry import POLICIES, TREE_POLICIES
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.common import Config, Document, cached, claim, validation
from studies.drafters.report import report

FOUND = "found.json"
RECORDED = ("config.json", f"*/{FOUND}")
AGREEMENT = ("agreement", "head_1_agreement", "mask_1_agreement")  # of the first drafted token, by kind of training
UNUSED = ("error_parts", "sequence_tokens")  # of a row, and long


class PaperK(FixedK):
    """Fixed K, tuned and at the length of the EDD paper."""

    name = "fixed_k"
    variants = (Variant("tuned"), Variant("the paper's", {"k": 5}, tuned=False))


class EveryK(SpaceK):
    """Every k that the target was trained for."""

    name = "space_k"
    variants = tuple(Variant(f"k = {k}", {"k": k}, tuned=False) for k in range(1, 6))


OWN = {"fixed_k": PaperK, "space_k": EveryK}


def trained(folder: Path, recipe: str, config: Config) -> Document:
    """Train a drafter with its command; return its held-out agreement by tokens seen."""
    options = shlex.split(f"{recipe} {config['train']['shared']}")
    command = [sys.executable, "-m", "realrun", "train", *options, "--cache", str(folder.parent.parent / "text")]
    done = subprocess.run([*command, "--out", str(folder), "--json"], check=True, stdout=subprocess.PIPE)
    document = json.loads(done.stdout)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    tokens_per_step = document["tokens"] / rows[-1]["step"]
    held_out = {round(row["step"] * tokens_per_step): row["held_out"] for row in rows if "held_out" in row}
    name = next(name for name in AGREEMENT if name in rows[0]["held_out"])
    curve = [[tokens, figures[name]] for tokens, figures in held_out.items()]
    return {"tokens": document["tokens"], "seconds": document["seconds"], "curve": curve}


def acceptance(trace: Trace, policy: Policy) -> Document:
    """Return the share of positions whose first drafted token is accepted, and tau under the policy."""
    replayed = PricedTrace(trace, ConstantCost(1.0, 10.0)).replay(policy)  # of which only counts are read
    drafted = trace.draft_limit > 0
    return {
        "first_accepted": float(np.mean(trace.match_len[drafted] > 0)),
        "tau": float(tokens_per_round(replayed.output_tokens.sum(), replayed.num_rounds.sum())),
    }


def measured(out: Path, drafter: Mapping[str, Any], config: Config, progress: Progress) -> Document:
    """Train, record, forecast and decode with one drafter."""
    folder = out / drafter["name"]
    training, weights = None, str(drafter.get("drafter", folder / "weights"))
    if "train" in drafter:
        training = cached(folder / "training.json", lambda: trained(folder / "weights", drafter["train"], config))
    kinds: Sequence[type[Policy]] = [OWN.get(name, POLICIES[name]) for name in drafter["policies"]]
    trees = any(kind.name in TREE_POLICIES for kind in kinds)
    (run,) = config["runs"]
    document = validation(folder, weights, kinds, run, config, progress, trees=trees)
    trace = read_trace(folder / "trace")
    at_depth: Policy = SpaceK(config["depth"]) if "space_k" in drafter["policies"] else FixedK(config["depth"])
    names = dict.fromkeys(trace.domain.tolist())
    kinds_of_task = {name: acceptance(trace.select(np.flatnonzero(trace.domain == name)), at_depth) for name in names}
    rows = [{key: value for key, value in row.items() if key not in UNUSED} for row in document["rows"]]
    return {
        **document,
        "rows": rows,
        "training": training,
        "all": acceptance(trace, at_depth),
        "tasks": kinds_of_task,
    }


def main(out: Path, config: Config) -> None:
    """Run what is not there yet and write the report."""
    claim(out, config)
    documents = {}
    with progress_bar() as progress:
        for drafter in config["drafters"]:
            name = drafter["name"]
            make = lambda drafter=drafter: measured(out, drafter, config, progress)  # noqa: E731
            documents[name] = cached(out / name / FOUND, make)
    report(config, documents).write(out)
