"""`realrun engine drafter-check`: whether an engine's drafter proposes the same tokens however the engine runs.

A drafter sees the text alone, so its draft at a position must not depend on which drafts were accepted before, on the
chunks in which the prompt was read, or on what else is in the batch. Where it does, the text stays right, and only
drafts and acceptance change, which no engine's own metrics show.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.engines.check import best_two, compared, recorded_tokens, without_ends
from realrun.engines.compare import Models
from realrun.engines.dense import dense_trace, engine_pair, job_of
from realrun.engines.engine import Engine, Setting
from realrun.measure.record import RecordSettings
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from specsim.io.progress import Progress
from specsim.trace.trace import Trace

LEAST_CHUNK = 8  # tokens
ROUNDING = 1e-5  # of probabilities, by float32 sums in another order


def drafter_check(
    pair: Pair,
    prompts: Sequence[Prompt],
    engine: Engine,
    ks: Sequence[int],
    max_new_tokens: int,
    *,
    depth: int,
    batch: int,
    source: str = "",
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Compare what an engine's drafter proposes in several ways of running the engine, greedily.

    A recording at every position, one sequence at a time and with whole prompts, is the reference. Its replay is
    compared with the rounds of normal runs, and its drafts with those of a recording with chunked prompts and of one
    with several sequences at once.

    ks : draft lengths of the normal runs, at most `depth`
    max_new_tokens : of the normal runs; recordings go on for `depth` tokens, and behind an end of text
    depth : longest draft recorded
    batch : sequences at once in the last recording
    source : where the prompts are from

    Returns what `realrun engine drafter-check --json` prints.

    Raises InputError if the engine does not run this drafter, cannot be recorded, or fails.
    """
    pair = engine_pair(pair)
    endless = dataclasses.replace(pair, eos_token_ids=())
    settings = RecordSettings(depth, recorded_tokens(engine, depth, max_new_tokens), Sampler("greedy"))
    drafts_alone = isinstance(pair.drafter, IndependentKind)
    models = Models(best_two(pair.target), best_two(pair.drafter.weights(pair.target)[0]) if drafts_alone else None)
    chunk = max(LEAST_CHUNK, 3 * min(len(prompt.tokens) for prompt in prompts) // 4)
    total = 3 + len(ks)
    with tempfile.TemporaryDirectory() as name:
        job = job_of(pair, prompts, max_new_tokens, Path(name))
        engine.convert(pair, job.folder)

        def recorded(done: int, setting: Setting, step_tokens: int | None = None) -> Trace:
            progress("run", done, total)
            longer = job._replace(max_new_tokens=settings.max_new_tokens, eos_token_ids=())
            run = engine.run_dense(longer, setting, settings.sampler, step_tokens)
            trace = dense_trace(endless, prompts, settings, engine, run)
            return dataclasses.replace(trace, meta={**trace.meta, "eos_token_id": list(pair.eos_token_ids)})

        reference = recorded(0, Setting(depth))
        chunked = recorded(1, Setting(depth), chunk)
        together = recorded(2, Setting(depth, batch=batch))
        checks = []
        for done, k in enumerate(ks, start=3):
            progress("run", done, total)
            run = without_ends(engine.run(job, Setting(k)), set(pair.eos_token_ids))
            checks.append(_rounds_row(compared(reference, engine, Setting(k), run, max_new_tokens, models)))
        progress("run", total, total)
    checks.append(_drafts_row(f"prompts in chunks of {chunk} tokens against whole prompts", chunked, reference))
    checks.append(_drafts_row(f"{batch} sequences at once against one at a time", together, reference))
    return {
        "engine": engine.name,
        "version": engine.version(),
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "prompts": prompt_facts(prompts, source),
        "max_new_tokens": max_new_tokens,
        "depth": depth,
        "checks": checks,
        "passed": all(row["passed"] for row in checks),
    }


def _rounds_row(row: dict[str, Any]) -> dict[str, Any]:
    """Describe the comparison of a normal run with the replay, from a row of `realrun engine check`."""
    difference = None
    if not row["accounted"]:
        reasons = [*row["differences"], "counters differ" if row["rounds"] else "no round had a draft"]
        difference = reasons[0]
    return {
        "check": f"rounds at {row['setting']} against the replay of the recording",
        "unit": "rounds",
        "total": row["rounds"],
        "equal": row["rounds_identical"],
        "near_ties": [tie["text"] for tie in row["near_ties"]],
        "first_difference": difference,
        "passed": row["accounted"],
    }


def _drafts_row(check: str, trace: Trace, reference: Trace) -> dict[str, Any]:
    """Describe the comparison of two recordings."""
    rows = np.flatnonzero(reference.position > 0)
    differing = [row for row in rows.tolist() if differs(trace, reference, row)]
    first = described(trace, reference, differing[0]) if differing else None
    others = (trace.draft_token[rows] != reference.draft_token[rows]).any(axis=1)
    return {
        "check": check,
        "unit": "positions",
        "total": len(rows),
        "equal": len(rows) - len(differing),
        "other_tokens": int(others.sum()),
        "largest_prob_difference": float(np.abs(trace.prob - reference.prob)[rows][~others].max(initial=0.0)),
        "near_ties": [],
        "first_difference": first if len(rows) else "no position was recorded",
        "passed": not differing and len(rows) > 0,
    }


def differs(trace: Trace, reference: Trace, row: int) -> bool:
    """Tell whether two recordings have other tokens at a row, or probabilities further apart than `ROUNDING`."""
    return bool(
        trace.token[row] != reference.token[row]
        or (trace.draft_token[row] != reference.draft_token[row]).any()
        or (np.abs(trace.prob[row] - reference.prob[row]) > ROUNDING).any()
    )


def described(trace: Trace, reference: Trace, row: int) -> str:
    """Describe how two recordings differ at a row."""
    sequence = int(np.searchsorted(reference.offsets, row, side="right")) - 1
    where = f"sequence {sequence}, position {int(reference.position[row])}"
    ours, theirs = trace.draft_token[row], reference.draft_token[row]
    other = (ours != theirs) | (np.abs(trace.prob[row] - reference.prob[row]) > ROUNDING)
    if not other.any():
        return f"{where}: the target emits token {trace.token[row]} instead of {reference.token[row]}"
    at = int(other.argmax())
    probs = f"probability {trace.prob[row, at]:.4f} instead of {reference.prob[row, at]:.4f}"
    tokens = f"{ours[at]}" if ours[at] == theirs[at] else f"{ours[at]} instead of {theirs[at]}"
    return f"{where}: token {at + 1} of the draft is {tokens}, with {probs}"
