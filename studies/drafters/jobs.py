"""What the study computes, each into a folder of its own: validations, boards, typical acceptance.

What is there already is read, so that a second start goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

from realrun.drafters.self_sd import SelfSDKind
from realrun.experiment.typical_acceptance import TypicalSettings, compare_typical
from realrun.pairs.prompts import study_prompts
from specsim.cost.model import ConstantCost
from specsim.io.files import write_json
from specsim.io.progress import Progress
from specsim.policy.registry import POLICIES, make_policy
from studies.common import Config, Document, board, load, validation
from studies.comparisons import first_best

CHAINS_ONLY = ("model", SelfSDKind.name)  # as the papers have them


def main_jobs(out: Path, run: Config, config: Config, report: Progress) -> dict[str, Document]:
    """Validate every drafter in a way of decoding."""
    documents = {}
    for drafter in config["drafters"]:
        names = config["chains"] if drafter in CHAINS_ONLY else [*config["chains"], *config["trees"]]
        kinds = tuple(POLICIES[name] for name in names)
        trees = drafter not in CHAINS_ONLY
        documents[drafter] = validation(out / run["name"] / drafter, drafter, kinds, run, config, report, trees=trees)
    return documents


def cheap_jobs(out: Path, run: Config, config: Config, report: Progress) -> dict[str, Document]:
    """Leaderboards of the chain policies on the recorded traces, were a draft step as cheap as config.toml says."""
    documents = {}
    for drafter in config["drafters"]:
        folder = out / run["name"] / drafter
        cost = ConstantCost(config["cheap"]["step_ratio"], 1.0)
        kinds = [POLICIES[name] for name in config["chains"]]
        documents[drafter] = board(folder / "cheap.json", cost, kinds, config, report)
    return documents


def typical_job(out: Path, config: Config, medusa: Document, report: Progress) -> Document:
    """Typical acceptance of MEDUSA-1 with the sparse tree of its validation that is best on the tuning prompts."""
    done, asked = out / "typical.json", config["typical"]
    if not done.is_file():
        pair = load(config, "medusa-1")
        row = first_best(row for row in medusa["rows"] if row["policy"] == "sparse_tree")
        assert row is not None, "no sparse tree was run"
        settings = TypicalSettings(
            tuple(asked["epsilons"]), None, asked["temperature"], asked["max_new_tokens"], config["seed"]
        )
        prompts = study_prompts(pair.tokenizer, asked["prompts"])
        policy = make_policy(row["policy"], row["params"])
        document = compare_typical(pair, prompts, policy, settings, lambda n, total: report("typical", n, total))
        write_json(document, done)
    return dict(json.loads(done.read_text()))
