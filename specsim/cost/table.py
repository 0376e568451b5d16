"""The table of arrays that a cost model is compiled to, which replay and policies read, and its columns for a trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specsim.cost.model import MAX_TREE_TOKENS, CostModel, SpaceCost
from specsim.io.arrays import Floats, IntArray, Seconds
from specsim.trace.trace import Trace


@dataclass(frozen=True)
class TreeTable:
    """What trees cost; columns as in `CostTable`.

    wider_s : [n_max + 1, B], a draft pass over n nodes beyond a chain's step at its place (row 0 is unused)
    verify_s : [n_max + 1, B], a target pass over a tree of n tokens (row 0 is unused)
    """

    wider_s: Seconds
    verify_s: Seconds
    policy_step_s: float
    round_overhead_s: float


@dataclass(frozen=True)
class CostTable:
    """A cost model compiled to arrays. Column b covers contexts [b, b+1) x 2^bucket_bits tokens.

    draft_s : [k_max + 1, B], drafting k tokens in sequence (row 0 is 0)
    catch_up_s : [B], what the first of them takes more where it ingests two tokens
    verify_s : [n_max + 1, B], a target pass over n tokens (row 0 is unused)
    autoregressive_s : [B]
    tree : what trees cost, where the model can tell
    refeed_s : [k_max + 1, B], a second pass over n tokens after a rejection (row 0 is unused); all 0 unless the target
        has recurrent layers
    notes : what results must say of these costs
    masks : whether drafts ride in the target's pass, as SPACE's do
    """

    bucket_bits: int
    draft_s: Seconds
    catch_up_s: Seconds
    verify_s: Seconds
    refeed_s: Seconds
    autoregressive_s: Seconds
    policy_step_s: float
    round_overhead_s: float
    tree: TreeTable | None = None
    notes: tuple[str, ...] = ()
    masks: bool = False

    @property
    def step_ratio(self) -> float:
        """s_d / s_t, time of a mean draft step over that of a baseline decode step."""
        longest = len(self.draft_s) - 1
        return float(self.draft_s[longest].mean() / longest / self.autoregressive_s.mean())


def column_contexts(contexts: tuple[int, int], bucket_bits: int) -> Seconds:
    """The context [B] at which each column of a table over these contexts is priced."""
    columns = (contexts[1] >> bucket_bits) + 1
    return np.clip((np.arange(columns) + 0.5) * 2**bucket_bits, *contexts)


def compile_table(
    model: CostModel,
    *,
    max_draft_tokens: int,
    contexts: tuple[int, int],
    trees: bool = False,
    refeeds: bool = False,
    bucket_bits: int = 4,
) -> CostTable:
    """Evaluate a cost model once for everything a replay over these contexts can ask.

    Where speedups with such costs are known to come out lower or higher than predicted, rounds take longer or shorter
    in proportion, but no round takes less than a step without drafts; see `CostModel.speedup_error`.

    refeeds : whether a rejection costs a second pass, see `CostModel.refeed`
    """
    context = column_contexts(contexts, bucket_bits)
    factor = math.exp(-model.speedup_error[0])
    autoregressive_s = model.autoregressive_step(context)

    def rows(cost: Callable[[int, npt.ArrayLike], Seconds], largest: int) -> Seconds:
        return np.stack([np.full(len(context), np.nan), *(cost(n, context) * factor for n in range(1, largest + 1))])

    def passes(cost: Callable[[int, npt.ArrayLike], Seconds], largest: int, overhead_s: float) -> Seconds:
        seconds = rows(cost, largest)
        return seconds if factor >= 1 else np.maximum(seconds, autoregressive_s - overhead_s * factor)

    tree = None
    if trees and model.max_tree_tokens:
        largest = min(model.max_tree_tokens, MAX_TREE_TOKENS)
        tree = TreeTable(
            wider_s=rows(model.wider, largest),
            verify_s=passes(model.tree_verify, largest, model.tree_round_overhead()),
            policy_step_s=model.tree_policy_step(),
            round_overhead_s=model.tree_round_overhead() * factor,
        )
    draft_s = rows(model.draft, max_draft_tokens)
    draft_s[0] = 0.0
    return CostTable(
        bucket_bits=bucket_bits,
        draft_s=draft_s,
        catch_up_s=model.catch_up(context) * factor,
        verify_s=passes(model.verify, max_draft_tokens + 1, model.round_overhead()),
        refeed_s=rows(model.refeed, max_draft_tokens) if refeeds else np.zeros_like(draft_s),
        autoregressive_s=autoregressive_s,
        policy_step_s=model.policy_step(),
        round_overhead_s=model.round_overhead() * factor,
        tree=tree,
        notes=tuple(model.notes(max_draft_tokens, contexts)),
        masks=isinstance(model, SpaceCost),
    )


def refeeds(trace: Trace) -> bool:
    """Whether a rejection costs a second pass on this trace, because the target has recurrent layers."""
    return bool(trace.meta.get("second_pass"))


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
