"""Whether an engine's drafter proposes the same tokens however the engine runs: a part of `realrun engine check`.

A drafter sees the text alone, so its draft at a position must not depend on which drafts were accepted before, on the
chunks in which the prompt was read, or on what else is in the batch. Where it does, the text stays right, and only
drafts and acceptance change, which no engine's own metrics show.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.engines.check import DraftsRow, EngineCheck, check, recorded_tokens
from realrun.engines.dense import dense_trace, engine_pair, job_of
from realrun.engines.engine import Engine, Setting
from realrun.measure.record import RecordSettings
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.io.progress import Progress
from specsim.trace.trace import Trace

LEAST_CHUNK = 8  # tokens
BATCH = 4  # sequences at once in the batched recording, where the runs are of one at a time
ROUNDING = 1e-5  # of probabilities, by float32 sums in another order


def check_drafts(
    pair: Pair,
    prompts: Sequence[Prompt],
    engine: Engine,
    settings: Sequence[Setting],
    max_new_tokens: int,
    *,
    depth: int = RecordSettings.max_draft_tokens,
    progress: Progress = lambda what, done, total: None,
) -> EngineCheck:
    """Compare what an engine's drafter proposes in several ways of running the engine, greedily.

    A recording at every position, one sequence at a time and with whole prompts, is the reference. Its replay is
    compared with the rounds of normal runs, and its drafts with those of a recording with chunked prompts and of one
    with several sequences at once.

    settings : of the normal runs, with draft lengths up to `depth`
    max_new_tokens : of the normal runs; recordings go on for `depth` tokens, and behind an end of text
    depth : longest draft recorded

    Raises InputError if the engine does not run this drafter, cannot be recorded, or fails.
    """
    pair = engine_pair(pair)
    endless = dataclasses.replace(pair, eos_token_ids=())
    greedy = RecordSettings(depth, recorded_tokens(engine, depth, max_new_tokens), Sampler("greedy"))
    chunk = max(LEAST_CHUNK, 3 * min(len(prompt.tokens) for prompt in prompts) // 4)
    batch = max(setting.batch for setting in settings)
    batch = batch if batch > 1 else BATCH
    with tempfile.TemporaryDirectory() as name:
        job = job_of(endless, prompts, greedy.max_new_tokens, Path(name))
        engine.convert(pair, job.folder)

        def recorded(done: int, batch: int = 1, step_tokens: int | None = None) -> Trace:
            progress("record", done, 3)
            run = engine.run_dense(job, Setting(depth, batch=batch), greedy.sampler, step_tokens)
            trace = dense_trace(endless, prompts, greedy, engine, run)
            return dataclasses.replace(trace, meta={**trace.meta, "eos_token_id": list(pair.eos_token_ids)})

        reference, chunked, together = recorded(0), recorded(1, step_tokens=chunk), recorded(2, batch)
    lookup = isinstance(pair.drafter, LookupKind)
    compared = check(pair, reference, engine, settings, max_new_tokens, lookup=lookup, progress=progress)
    checks = [
        _drafts_row(f"prompts in chunks of {chunk} tokens against whole prompts", chunked, reference),
        _drafts_row(f"{batch} sequences at once against one at a time", together, reference),
    ]
    return dataclasses.replace(compared, depth=depth, checks=checks)


def _drafts_row(check: str, trace: Trace, reference: Trace) -> DraftsRow:
    """Describe the comparison of two recordings."""
    rows = np.flatnonzero(reference.position > 0)
    others = (trace.draft_token[rows] != reference.draft_token[rows]).any(axis=1)
    apart = (np.abs(trace.prob - reference.prob)[rows] > ROUNDING).any(axis=1)
    differing = rows[others | apart | (trace.token[rows] != reference.token[rows])]
    first = described(trace, reference, int(differing[0])) if len(differing) else None
    return DraftsRow(
        check,
        unit="positions",
        total=len(rows),
        equal=len(rows) - len(differing),
        other_tokens=int(others.sum()),
        largest_prob_difference=float(np.abs(trace.prob - reference.prob)[rows][~others].max(initial=0.0)),
        first_difference=first if len(rows) else "no position was recorded",
        passed=len(rows) > 0 and not len(differing),
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
