"""Gap to an oracle of rules that choose draft lengths under load: `python -m studies load`.

Takes the acceptance of shipped traces to an H100, whose costs are those of its data sheet and of an engine's overheads,
and keeps batches of each size full. Rules learn from half of the sequences and are compared on the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specsim.cli.console import progress_bar
from specsim.cost.batches import BatchCost, BatchTokens
from specsim.cost.calibrate import data_sheet_document
from specsim.cost.files import as_cost
from specsim.io.progress import Progress
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.intervals import ratio_of_ratios
from specsim.serving.arms import choose_arms
from specsim.serving.arrivals import shuffled
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import ScheduledK
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from specsim.serving.speedup_map import speedup_map
from specsim.trace.files import read_plain_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from studies.common import Config, Document, cached, claim
from studies.load.report import ORACLE, report

FOUND = "found.json"
RECORDED = ("config.json", FOUND)


def server(config: Config) -> BatchCost:
    """Return the costs of the server."""
    asked = config["server"]
    document = data_sheet_document(asked["hardware"], asked["target"], asked["drafter"], None, 1, asked["engine"])
    return batch_cost(as_cost(document))


def tuned_schedule(train: Trace, cost: BatchCost, config: Config) -> ScheduledK:
    """Return the best fixed K of each batch on the tuning sequences."""
    arms = [FixedK(k=k) for k in range(1, train.depth + 1)]
    speedups = speedup_map(train, cost, arms, config["batches"], contexts=[config["context"]], seed=config["seed"])
    return ScheduledK(speedups.schedule(config["context"]))


def rows_of(trace: Trace, name: str, cost: BatchCost, config: Config, progress: Progress) -> list[dict[str, Any]]:
    """Compare the rules on a trace, batch by batch."""
    share, seed = config["tuning_share"], config["seed"]
    tuning, _ = split_sequences(trace, tuning_share=share, seed=seed)
    schedules = {
        "no speculation": ScheduledK({1: 0}),
        f"K = {config['fixed_k']}": ScheduledK({1: config["fixed_k"]}),
        "tuned schedule": tuned_schedule(trace.select(tuning), cost, config),
    }
    asked = [*schedules.values(), *config["rules"], ORACLE]
    part, arms, _ = choose_arms(trace, cost, [(arm, {}) for arm in asked], tuning_share=share, seed=seed)
    labels, rows = [*schedules, *config["rules"], ORACLE], []
    drafts = [drafts_of(part, arm, seed=seed) for arm in arms]
    for number, batch in enumerate(config["batches"]):
        progress(name, number, len(config["batches"]))
        count = max(part.sequences, config["turns"] * batch)
        count = part.sequences * -(-count // part.sequences)  # each sequence equally often
        order = shuffled(part.sequences, count, np.random.default_rng(seed))
        runs = [lockstep(each, cost, batch, order=order, refill=True, context=config["context"]) for each in drafts]
        columns = [run.per_sequence(full_only=True) for run in runs]
        for label, run, (tokens, seconds) in zip(labels, runs, columns, strict=True):
            rows.append(
                {
                    "trace": name,
                    "batch": batch,
                    "rule": label,
                    "tokens_per_s": float(tokens.sum() / seconds.sum()),
                    "oracle_over_rule": ratio_of_ratios(*columns[-1], tokens, seconds).as_dict(),
                    "speedup": ratio_of_ratios(tokens, seconds, *columns[0]).as_dict(),
                    "drafted_per_round": float(run.rounds.drafted.mean()),
                    "verified_per_round": float(run.rounds.verified.mean()),
                    "accepted_per_round": float(run.rounds.accepted.mean()),
                    "steps_with_drafts": float(
                        np.bincount(run.rounds.batch_round, run.rounds.speculates).astype(bool).mean()
                    ),
                }
            )
    return rows


def catching_up(cost: BatchCost, config: Config) -> list[dict[str, float]]:
    """Price the first draft pass after steps without speculation, in steps without speculation, by batch."""
    context, off = config["context"], config["steps_off"]
    shares = []
    for batch in config["batches"]:
        late, up = (float(cost.batch_draft(0, BatchTokens.alike(batch, new, context))) for new in (1 + off, 1))
        step_s = float(cost.batch_verify(BatchTokens.alike(batch, 1, context))) + cost.step_s
        shares.append({"batch": batch, "steps": (late - up) / step_s})
    return shares


def compared(config: Config, progress: Progress) -> Document:
    """Compare all rules on all traces."""
    cost = server(config)
    traces: Mapping[str, Trace] = {name: read_plain_trace(f"example:{name}") for name in config["traces"]}
    rows = [row for name, trace in traces.items() for row in rows_of(trace, name, cost, config, progress)]
    sequences = {name: trace.sequences for name, trace in traces.items()}
    return {"rows": rows, "catching_up": catching_up(cost, config), "sequences": sequences}


def main(out: Path, config: Config) -> None:
    """Compare what is not there, and write the report."""
    claim(out, config)
    with progress_bar() as progress:
        found = cached(out / FOUND, partial(compared, config, progress))
    report(config, found).write(out)
