"""A dense trace recorded inside an engine: what its drafter drafts after every output token but the last.

An engine that emits the first output token with the prompt does not draft ahead of it, so that the first row of every
sequence has no draft. As specsim's own rounds start there, a replay emits that token in a round without a draft.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from realrun.drafters.lookup import LookupKind
from realrun.engines.check import check_batch
from realrun.engines.engine import DenseRun, Engine, Job, Setting
from realrun.measure.record import Recorded, RecordSettings, trace_of
from realrun.pairs.drafter_files import weights_digest
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.proposals.recorder import Columns
from specsim.engines.formats.vllm_dense import dense_columns
from specsim.io.arrays import Array
from specsim.io.errors import InputError
from specsim.trace.trace import Trace


def engine_pair(pair: Pair) -> Pair:
    """Remove what an engine does not record: identity blocks, which change no output, and the acceptance predictor."""
    return dataclasses.replace(pair.core, predictor=None)


def record_with_engine(
    pair: Pair, prompts: Sequence[Prompt], settings: RecordSettings, engine: Engine, *, batch: int = 1
) -> Trace:
    """Record a dense trace inside an engine.

    Parameters
    ----------
    pair : Pair
        In float32, in which engines run here.
    prompts : sequence of Prompt
    settings : RecordSettings
        Greedy, or with greedy drafts, whose probabilities are those at temperature 1. Without trees.
    engine : Engine
    batch : int
        Sequences at once, at most.

    Returns
    -------
    Trace
        Without the columns true_rank and score, and without a draft at every sequence's first position. The columns of
        prompt lookup, which has no probabilities, are not informed.

    Raises
    ------
    InputError
        If the engine does not run this drafter or sampling mode, its version cannot be recorded, or it fails.
    """
    engine.check_dense(settings.sampler)
    check_batch(engine, batch)
    pair = engine_pair(pair)
    with tempfile.TemporaryDirectory() as name:
        job = job_of(pair, prompts, settings.max_new_tokens, Path(name))
        engine.convert(pair, job.folder)
        run = engine.run_dense(job, Setting(settings.max_draft_tokens, batch=batch), settings.sampler)
    return dense_trace(pair, prompts, settings, engine, run)


def job_of(pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int, folder: Path) -> Job:
    """Describe the decoding of these prompts; the engine drafts with the pair's drafter."""
    lookup = isinstance(pair.drafter, LookupKind)
    return Job(folder, [prompt.tokens for prompt in prompts], max_new_tokens, pair.eos_token_ids, lookup)


def dense_trace(
    pair: Pair, prompts: Sequence[Prompt], settings: RecordSettings, engine: Engine, run: DenseRun
) -> Trace:
    """Make the trace of an engine's recording; InputError if drafts are missing or belong to other texts."""
    depth, count = settings.max_draft_tokens, len(prompts)
    seconds = run.generate_s / count, run.draft_s / count
    sequences = [
        Recorded(np.asarray(output), own_columns(run.rows[run.rows["request"] == number], output, depth), *seconds)
        for number, output in enumerate(run.outputs)
    ]
    trace = trace_of(pair, prompts, settings, depth, range(count), sequences)
    meta = {key: value for key, value in trace.meta.items() if key != "kernels"} | {"engine": run.facts}
    if isinstance(pair.drafter, LookupKind):
        assert engine.lookup_rule is not None
        rule = dataclasses.asdict(engine.lookup_rule)
        # Another rule than this package's own drafter has, which therefore is not the trace's.
        weights = weights_digest(pair.target, str(rule))
        meta |= {"informed": False, "drafter_facts": rule, "weights": weights}
        return dataclasses.replace(trace, meta=meta, top10_confidence=None)
    return dataclasses.replace(trace, meta=meta)


def own_columns(rows: Array, output: Sequence[int], depth: int) -> Columns:
    """Make the columns of a sequence from the rows of its steps; InputError unless they are its text's."""
    needed = max(len(output) - 1, 1)
    if rows["token"][: len(output)].tolist() != output[: len(rows)] or len(rows) < needed:
        raise InputError(
            f"the engine recorded drafts after {len(rows)} of {len(output)} output tokens, or after other tokens; "
            "record again with fewer sequences at once"
        )
    return dense_columns(rows, np.asarray(output), depth)
