"""The papers' drafters, trained for SmolLM2 on this machine and compared: `python -m studies drafters`.

Trains each drafter of config.toml by its command, then ranks all of them as `realrun board` does. SPACE tunes its
target, so it is validated against a baseline of its own. A second start goes on with what is there.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np

from realrun.leaderboard.job import BoardSettings, run_leaderboard
from realrun.pairs.pair import LOOKUP, load_pair
from realrun.pairs.training_tasks import training_questions
from specsim.acceptance.formulas import tokens_per_round
from specsim.cli.console import progress_bar
from specsim.cost.model import ConstantCost
from specsim.io.files import write_text
from specsim.io.progress import Progress
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.registry import POLICIES
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.common import Config, Document, cached, claim, prompts_of, record_settings, validation
from studies.drafters.report import SPACE, report

TRAINING, BOARD, TASKS, SPACES = "training.json", "board.json", "tasks.json", "space.json"
RECORDED = ("config.json", BOARD, SPACES, f"*/{TRAINING}", f"*/{TASKS}")
AGREEMENT = ("agreement", "head_1_agreement", "mask_1_agreement")  # of the first drafted token, in the log
UNUSED = ("error_parts", "sequence_tokens")  # long values of a validation's rows, which the report does not read


class EveryK(SpaceK):
    """Every k that the target was tuned for."""

    name = "space_k"
    variants = tuple(Variant(f"k = {k}", {"k": k}, tuned=False) for k in range(1, 6))


def trained(folder: Path, recipe: str, config: Config) -> Document:
    """Train a drafter by its command; return its agreement on held-out text by tokens seen."""
    home = folder.parent.parent
    questions = [json.dumps({"prompt": question}) for question in training_questions(config["train"]["questions"])]
    write_text(home / "questions.jsonl", "\n".join(questions))
    options = [*shlex.split(f"{recipe} {config['train']['shared']}"), "--prompts", str(home / "questions.jsonl")]
    command = [sys.executable, "-m", "realrun", "train", *options, "--cache", str(home / "text")]
    done = subprocess.run([*command, "--out", str(folder), "--json"], check=True, stdout=subprocess.PIPE)
    document = json.loads(done.stdout)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    tokens_per_step = document["tokens"] / rows[-1]["step"]
    name = next(name for name in AGREEMENT if name in rows[0]["held_out"])
    curve = [[row["step"] * tokens_per_step, row["held_out"][name]] for row in rows if "held_out" in row]
    return {"tokens": document["tokens"], "seconds": document["seconds"], "curve": curve}


def acceptance(trace: Trace, policy: Policy) -> Document:
    """Return the share of positions whose first drafted token is accepted, and tau under the policy."""
    replayed = PricedTrace(trace, ConstantCost(1.0, 10.0)).replay(policy)  # of which only counts are read
    return {
        "first_accepted": float(np.mean(trace.match_len[trace.draft_limit > 0] > 0)),
        "tau": float(tokens_per_round(replayed.output_tokens.sum(), replayed.num_rounds.sum())),
    }


def by_task(folder: Path, policy: Policy) -> Document:
    """Return the acceptance on the recorded prompts of each kind, and on all."""
    trace = read_trace(folder)
    kinds = dict.fromkeys(trace.domain.tolist())
    parts = {kind: trace.select(np.flatnonzero(trace.domain == kind)) for kind in kinds}
    return {kind: acceptance(part, policy) for kind, part in {"all": trace, **parts}.items()}


def board(out: Path, weights: dict[str, str], config: Config, progress: Progress) -> Document:
    """Return the leaderboard of these drafters."""
    settings = BoardSettings(
        record=record_settings(config["run"], config, trees=True),
        kinds=tuple(POLICIES[name] for name in config["policies"]),
        trials=config["trials"],
        repeats=config["repeats"],
        tuning_share=config["tuning_share"],
        seed=config["seed"],
    )
    load = partial(load_pair, config["target"], dtype=config["dtype"], threads=config["threads"])
    plain = load(drafter=LOOKUP)
    pairs = {name: load(drafter=drafter, beside=plain) for name, drafter in weights.items()}
    return run_leaderboard(pairs, plain, prompts_of(plain, config), settings, out, progress).as_dict()


def space(folder: Path, weights: str, config: Config, progress: Progress) -> Document:
    """Return the validation of SPACE with every k."""
    document = validation(folder, weights, [EveryK], config["run"], config, progress)
    rows = [{key: value for key, value in row.items() if key not in UNUSED} for row in document["rows"]]
    return {**document, "rows": rows}


def main(out: Path, config: Config) -> None:
    """Run what is not there yet and write the report."""
    claim(out, config)
    weights, trainings, tasks = {}, {}, {}
    for name, drafter in config["drafters"].items():
        weights[name] = drafter.get("drafter", str(out / name / "weights"))
        if "train" in drafter:
            train = partial(trained, out / name / "weights", drafter["train"], config)
            trainings[name] = cached(out / name / TRAINING, train)
    spaces = weights.pop(SPACE)
    with progress_bar() as progress:
        ranked = cached(out / BOARD, lambda: board(out / "board", weights, config, progress))
        own = cached(out / SPACES, lambda: space(out / SPACE / "validation", spaces, config, progress))
    for name in config["drafters"]:
        if name == SPACE:
            make = partial(by_task, out / SPACE / "validation" / "trace", SpaceK(config["depth"]))
        else:
            make = partial(by_task, out / "board" / name / "trace", FixedK(config["depth"]))
        tasks[name] = cached(out / name / TASKS, make)
    report(config, ranked, own, trainings, tasks).write(out)
