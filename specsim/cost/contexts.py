"""The contexts of a trace's rounds, and its cost without speculation."""

from __future__ import annotations

import numpy as np

from specsim.cost.table import CostTable
from specsim.io.arrays import Floats, IntArray
from specsim.trace.trace import Trace


def autoregressive_seconds(trace: Trace, table: CostTable) -> Floats:
    """Seconds per sequence [S] to emit the same tokens without speculation."""
    return decode_seconds(trace, table, trace.prompt_tokens - 1, trace.output_tokens)


def decode_seconds(trace: Trace, table: CostTable, context: IntArray, tokens: IntArray) -> Floats:
    """Seconds to emit so many tokens without speculation, from so many cached tokens on; arrays of one shape."""
    contexts = np.arange(context_range(trace)[1] + 1)
    step_s = table.autoregressive_s[contexts >> table.bucket_bits]
    elapsed_s = np.concatenate([[0.0], np.cumsum(step_s)])
    result: Floats = elapsed_s[context + tokens] - elapsed_s[context]
    return result


def context_range(trace: Trace) -> tuple[int, int]:
    """Smallest and largest context, in cached tokens, that a replay looks up."""
    return int(trace.prompt_tokens.min()) - 1, int((trace.prompt_tokens + trace.output_tokens).max()) - 2


def context_share(trace: Trace, table: CostTable) -> Floats:
    """Share of the trace's positions in every column of the table [B], by which its costs are averaged."""
    context = np.repeat(trace.prompt_tokens - 1, trace.output_tokens) + trace.position
    columns = len(table.catch_up_s)
    counts = np.bincount(context >> table.bucket_bits, minlength=columns)[:columns]
    return np.asarray(counts / len(context), dtype=np.float64)
