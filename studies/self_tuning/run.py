"""Gap to an oracle of rules that choose draft lengths under load: `python -m studies load`.

Takes the acceptance of shipped traces to an H100, whose costs are those of its data sheet and of an engine's overheads,
and to a CPU, whose costs were measured, and keeps batches of each size full. Rules learn from half of the sequences and
are compared on the others.
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
from specsim.io.json import read_json
from specsim.io.progress import Progress
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.intervals import ratio_of_ratios
from specsim.serving.arrivals import shuffled
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import ScheduledK
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from specsim.serving.policies import fit_policies
from specsim.serving.speedup_map import speedup_map
from specsim.trace.files import read_plain_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from studies.common import Config, Document, cached, claim
from studies.load.report import ORACLE, report

FOUND, PROFILE = "found.json", "batches.json"
RECORDED = ("config.json", FOUND, PROFILE)


def costs_of(server: Config, out: Path) -> BatchCost:
    """Return the costs of a server: of a data sheet, or a batch profile in the folder of results."""
    if "profile" in server:
        return batch_cost(as_cost(out / server["profile"]))
    asked = (server["hardware"], server["target"], server["drafter"], None, 1, server["engine"])
    return batch_cost(as_cost(data_sheet_document(*asked)))


def tuned_schedule(train: Trace, cost: BatchCost, server: Config, config: Config) -> ScheduledK:
    """Return the best fixed K of each batch on the tuning sequences."""
    arms = [FixedK(k=k) for k in range(1, train.depth + 1)]
    speedups = speedup_map(train, cost, arms, server["batches"], contexts=[server["context"]], seed=config["seed"])
    return ScheduledK(speedups.schedule(server["context"]))


def rows_of(
    trace: Trace, name: str, cost: BatchCost, server: Config, config: Config, progress: Progress
) -> list[dict[str, Any]]:
    """Compare the rules on a trace, batch by batch."""
    share, seed = config["tuning_share"], config["seed"]
    tuning, _ = split_sequences(trace, tuning_share=share, seed=seed)
    schedules = {
        "no speculation": ScheduledK({1: 0}),
        f"K = {config['fixed_k']}": ScheduledK({1: config["fixed_k"]}),
        "tuned schedule": tuned_schedule(trace.select(tuning), cost, server, config),
    }
    asked = [*schedules.values(), *config["rules"], ORACLE]
    part, arms, _ = fit_policies(trace, cost, [(arm, {}) for arm in asked], tuning_share=share, seed=seed)
    labels, rows = [*schedules, *config["rules"], ORACLE], []
    drafts = [drafts_of(part, arm, seed=seed) for arm in arms]
    for number, batch in enumerate(server["batches"]):
        progress(f"{server['name']}: {name}", number, len(server["batches"]))
        count = max(part.sequences, config["turns"] * batch)
        count = part.sequences * -(-count // part.sequences)  # each sequence equally often
        order = shuffled(part.sequences, count, np.random.default_rng(seed))
        runs = [lockstep(each, cost, batch, order=order, refill=True, context=server["context"]) for each in drafts]
        columns = [run.per_sequence(full_only=True) for run in runs]
        for label, run, (tokens, seconds) in zip(labels, runs, columns, strict=True):
            rows.append(
                {
                    "server": server["name"],
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


def facts_of(cost: BatchCost, server: Config, config: Config) -> list[dict[str, Any]]:
    """Price passes by batch, in units of a pass of a token.

    five_tokens : a pass of five tokens of every sequence. catching_up : by which the first draft pass is longer after
    steps without speculation
    """
    context, facts = server["context"], []
    for batch in server["batches"]:
        late, up = (
            float(cost.batch_draft(0, BatchTokens.alike(batch, new, context))) for new in (1 + config["steps_off"], 1)
        )
        one_s, five_s = (float(cost.batch_verify(BatchTokens.alike(batch, n, context))) for n in (1, 5))
        shares = {"five_tokens": five_s / one_s, "catching_up": (late - up) / (one_s + cost.step_s)}
        facts.append({"server": server["name"], "batch": batch, **shares})
    return facts


def compared(out: Path, config: Config, progress: Progress) -> Document:
    """Compare all rules on all servers and traces."""
    traces: Mapping[str, Trace] = {name: read_plain_trace(f"example:{name}") for name in config["traces"]}
    found: Document = {"rows": [], "passes": [], "sequences": {name: t.sequences for name, t in traces.items()}}
    for server in config["servers"]:
        cost = costs_of(server, out)
        for name, trace in traces.items():
            shallow = trace.shallower(server["max_draft_tokens"])
            found["rows"] += rows_of(shallow, name, cost, server, config, progress)
        found["passes"] += facts_of(cost, server, config)
    return found


def main(out: Path, config: Config) -> None:
    """Compare what is not there, and write the report."""
    again = "measure it with `realrun batch-profile`, or copy the recorded one"
    profile = read_json(out / PROFILE, str(out / PROFILE), dict, missing=again, invalid=again)
    claim(out, config)
    with progress_bar() as progress:
        found = cached(out / FOUND, partial(compared, out, config, progress))
    report(config, found, profile).write(out)
