"""Engines that choose draft lengths themselves, against schedules and bounds: `python -m studies self_tuning`.

Simulates full batches of each size on an H100, with costs of its data sheet and of an engine's overheads, and on a CPU,
with measured costs. Acceptance is that of shipped traces. Rules that learn offline do so on half of the sequences; the
other half is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specsim.cli.console import progress_bar
from specsim.cost.batches import BatchCost, DoesNotFit
from specsim.cost.files import as_cost
from specsim.io.arrays import Ints, Seconds
from specsim.io.json import read_json
from specsim.io.progress import Progress
from specsim.serving.arrivals import shuffled
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import DraftLengthRule, Running, ScheduledK
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import Lockstep, lockstep
from specsim.serving.rules.adaptive_verification import AdaptiveVerification, Learned
from specsim.serving.rules.oracle import Oracle
from specsim.serving.rules.registry import RULES, make_rule
from specsim.trace.files import read_plain_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from studies.common import Config, Document, cached, claim, gpu_costs
from studies.self_tuning.report import ADAPTIVE, BOTH, BOUND, BOUNDED, FIXED, INFORMED, OFF, OWN, SCHEDULE, STEP, report

FOUND, PROFILE = "found.json", "batches.json"
RECORDED = ("config.json", FOUND, PROFILE)
CHAT = "conversation"  # a domain of the first trace
MOST, FAR = 1.0, 4.0  # change of a coefficient in a fit, and distance from 0


@dataclass(frozen=True)
class WholeSteps(AdaptiveVerification):
    """A proposal: the budget follows from the seconds of whole steps at the served contexts, not of profiled passes."""

    def profiled_s(self, running: Running, count: Ints) -> Seconds:
        drafted_s = self.round_s(len(running.request), running)[-1] - self.verify_s(
            running, len(running.request) * self.max_draft_tokens
        )
        return np.asarray(drafted_s + self.verify_s(running, count))


@dataclass(frozen=True)
class Bounded(AdaptiveVerification):
    """A proposal: a fit changes no coefficient by more than `MOST`, or beyond `FAR`, so that it cannot overshoot."""

    def refit(self, state: Learned) -> Learned:
        after = super().refit(state)
        slope = np.clip(after.slope, max(state.slope - MOST, 0.0), min(state.slope + MOST, FAR))
        low, high = np.maximum(state.intercepts - MOST, -FAR), np.minimum(state.intercepts + MOST, FAR)
        return after._replace(slope=float(slope), intercepts=np.clip(after.intercepts, low, high))


@dataclass(frozen=True)
class Both(WholeSteps, Bounded):
    """Both proposals."""


def costs_of(server: Config, out: Path) -> BatchCost:
    """Return the costs of a server, from a data sheet or from a batch profile in the folder of results."""
    if "profile" in server:
        return batch_cost(as_cost(out / server["profile"]))
    return batch_cost(gpu_costs({"gpu": server["hardware"], "engine": None, **server}), "graphs")


def served(
    trace: Trace, rule: DraftLengthRule, cost: BatchCost, server: Config, batch: int, config: Config
) -> Lockstep:
    """Decode sequences under a rule in a batch that stays full until the last ones."""
    count = trace.sequences * -(-max(trace.sequences, config["turns"] * batch) // trace.sequences)
    order = shuffled(trace.sequences, count, np.random.default_rng(config["seed"]))
    return lockstep(drafts_of(trace, rule), cost, batch, order=order, refill=True, context=server["context"])


def rate(run: Lockstep) -> float:
    """Return the tokens per second while the batch is full."""
    tokens, seconds = run.per_sequence(full_only=True)
    return float(tokens.sum() / seconds.sum())


def rows_of(trace: Trace, name: str, cost: BatchCost, server: Config, config: Config, progress: Progress) -> list[Any]:
    """Compare the rules on a trace, batch by batch."""
    tuning, others = split_sequences(trace, tuning_share=config["tuning_share"], seed=config["seed"])
    train, part = trace.select(tuning), trace.select(others)
    lengths = [k for k in config["lengths"] if k <= server["max_draft_tokens"]]
    tuned = np.array(
        [
            [rate(served(train, ScheduledK({1: k}), cost, server, batch, config)) for k in (0, *lengths)]
            for batch in server["batches"]
        ]
    )
    one_k = lengths[int(np.log(tuned[:, 1:]).mean(axis=0).argmax())]  # of the best mean over batches
    rows: list[dict[str, Any]] = []
    adaptive = {ADAPTIVE: {}, OWN: {"profile_context": server["context"]}}
    for number, batch in enumerate(server["batches"]):
        progress(f"{server['name']}: {name}", number, len(server["batches"]))
        best = (0, *lengths)[int(tuned[number].argmax())]
        options = {"max_num_seqs": max(server["batches"])}
        if "profile" in server:  # whose measured contexts do not reach vLLM's default
            options["profile_context"] = server["context"]
        arms: list[tuple[str, int | None, DraftLengthRule]] = [
            (label, k, ScheduledK({1: k})) for label, k in ((OFF, 0), (FIXED, one_k), (SCHEDULE, best))
        ]
        for k in lengths:
            arms += [
                (label, k, AdaptiveVerification(cost, max_draft_tokens=k, **{**options, **settings}))
                for label, settings in adaptive.items()
            ]
            arms += [(STEP, k, WholeSteps(cost, max_draft_tokens=k))]
        arms += [(rule, None, make_rule(RULES[rule], {}, train, cost)) for rule in config["rules"]]
        arms += [
            (INFORMED, None, make_rule(RULES["budget"], {}, part, cost)),
            (BOUND, None, Oracle(cost, max_draft_tokens=trace.depth)),
        ]
        for label, k, rule in arms:
            reached = rate(served(part, rule, cost, server, batch, config))
            place = {"server": server["name"], "trace": name, "batch": batch, "rule": label, "k": k}
            rows.append({**place, "tokens_per_s": reached})
    return rows


def contexts_of(trace: Trace, cost: BatchCost, server: Config, config: Config) -> list[dict[str, Any]]:
    """Compare a start-up profile at 8,192 cached tokens with one at the served context, for several contexts."""
    rows = []
    for context in config["profile_contexts"]:
        for batch in (1, 4, 16):
            here = {**server, "context": context}
            arms = [AdaptiveVerification(cost, profile_context=at) for at in (8192, context)]
            try:
                rates = [rate(served(trace, arm, cost, here, batch, config)) for arm in arms]
            except DoesNotFit:
                continue
            rows.append({"context": context, "batch": batch, "own_over_8192": rates[1] / rates[0]})
    return rows


def traffic(trace: Trace, cost: BatchCost, server: Config, config: Config, other: str | float) -> list[dict[str, Any]]:
    """Serve chat, then other text, then chat for twice as long; return rates, verified tokens and steps to settle.

    other : a domain of the trace, or the share of chat's accepted tokens that stay accepted in the other text
    """
    asked = config["traffic"]
    chat = np.flatnonzero(trace.domain == CHAT)
    both = trace.select(chat if isinstance(other, float) else np.flatnonzero(np.isin(trace.domain, [CHAT, other])))
    is_away = both.domain == other
    if isinstance(other, float):
        known = np.random.default_rng(config["seed"]).random((len(both.token), trace.depth)) < other
        match = np.minimum(both.match_len, known.cumprod(axis=1).sum(axis=1)).astype(both.match_len.dtype)
        is_away = np.arange(2 * len(chat)) >= len(chat)
        both = replace(both.select([*range(len(chat))] * 2), match_len=np.concatenate([both.match_len, match]))
    here, there = (np.resize(np.flatnonzero(mask), asked["requests"]) for mask in (~is_away, is_away))
    rows = []
    for label, kind in ((ADAPTIVE, AdaptiveVerification), (STEP, WholeSteps), (BOUNDED, Bounded), (BOTH, Both)):
        run = lockstep(
            drafts_of(both, kind(cost, max_draft_tokens=asked["ceiling"])),
            cost,
            asked["batch"],
            order=np.concatenate([here, there, here, here]),
            refill=True,
            context=server["context"],
        )
        step, seconds = run.rounds.batch_round, run.seconds.total_s
        others = np.flatnonzero(np.bincount(step, is_away[run.rounds.sequence]) > 0)
        full = np.flatnonzero(run.seconds.sequences == asked["batch"])
        bounds = [0, others[0], others[-1] + 1, full[-1] + 1]
        emitted, verified = (np.bincount(step, getattr(run.rounds, name)) for name in ("emitted", "verified"))
        parts = [slice(*bounds[at : at + 2]) for at in range(3)]
        rates = [emitted[part].sum() / seconds[part].sum() for part in parts]
        half = slice(others[0] // 2, others[0])
        settled = float(emitted[half].sum() / seconds[half].sum())
        ends = [slice(max(part.start, part.stop - asked["window"]), part.stop) for part in parts]
        learned = [steps_until(emitted[part], seconds[part], settled, asked) for part in (parts[0], parts[2])]
        rows.append(
            {
                "rule": label,
                "other": other,
                "settled": settled,
                **{f"rate_{at}": float(each) for at, each in enumerate(rates)},
                **{f"verified_{at}": float(verified[end].mean() / asked["batch"]) for at, end in enumerate(ends)},
                **{f"steps_{at}": int(each) for at, each in enumerate(np.diff(bounds))},
                "learned": learned[0],
                "learned_again": learned[1],
            }
        )
    return rows


def steps_until(emitted: Ints, seconds: Seconds, settled: float, asked: Config) -> int | None:
    """Steps after which the rate over a window stays near the settled one; None if it never does."""
    window = np.ones(asked["window"])
    rates = np.convolve(emitted, window, "valid") / np.convolve(seconds, window, "valid")
    below = np.flatnonzero(rates < (1 - asked["near"]) * settled)
    last = int(below[-1]) + 1 if len(below) else 0
    return last if last < len(rates) else None


def compared(out: Path, config: Config, progress: Progress) -> Document:
    """Compare all rules on all servers and traces."""
    traces: Mapping[str, Trace] = {name: read_plain_trace(f"example:{name}") for name in config["traces"]}
    found: Document = {"rows": [], "sequences": {name: t.sequences for name, t in traces.items()}}
    for server in config["servers"]:
        cost = costs_of(server, out)
        for name, trace in traces.items():
            shallow = trace.shallower(server["max_draft_tokens"])
            found["rows"] += rows_of(shallow, name, cost, server, config, progress)
    server, trace = config["servers"][0], traces[config["traces"][0]]
    cost = costs_of(server, out)
    found["contexts"] = contexts_of(trace, cost, server, config)
    others = (*config["traffic"]["known"], "code")
    found["traffic"] = [row for other in others for row in traffic(trace, cost, server, config, other)]
    return found


def main(out: Path, config: Config) -> None:
    """Simulate what is not there yet, and write the report."""
    again = "measure it with `realrun batch-profile`, or copy the recorded one"
    profile = read_json(out / PROFILE, str(out / PROFILE), dict, missing=again, invalid=again)
    claim(out, config)
    with progress_bar() as progress:
        found = cached(out / FOUND, partial(compared, out, config, progress))
    report(config, found, profile).write(out)
