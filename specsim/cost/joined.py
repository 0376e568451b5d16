"""Costs of several drafters of the same target, for joined traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.cost.model import CostModel, not_a_cost
from specsim.cost.table import CostTable, column_contexts, compile_table, context_range, refeeds
from specsim.io.arrays import Floats, Seconds
from specsim.io.errors import InputError
from specsim.trace.joined import JoinedTrace

JOINED_COST_KIND = "specsim-joined-cost"
UNEQUAL = 0.05  # share by which the parts' costs of a token without speculation may differ unremarked


@dataclass(frozen=True)
class JoinedCost(CostModel):
    """The costs of each drafter, in the order of the joined trace; the baseline is the first's.

    A round is priced by the costs of its drafter, verification included, because some drafters run a part of the
    target's pass themselves.

    Parameters
    ----------
    parts : tuple of CostModel
        Of the same target on the same machine.

    Raises
    ------
    TypeError
        For a part that is not a cost model; `read_cost` reads files.

    Examples
    --------
    >>> import specsim
    >>> lookup, eagle = specsim.ConstantCost(1e-6, 0.010), specsim.ConstantCost(0.001, 0.010)
    >>> specsim.JoinedCost((lookup, eagle)).parts[1].s_d
    0.001
    """

    parts: tuple[CostModel, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            if not isinstance(part, CostModel):
                raise not_a_cost(part)

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.parts[0].draft(n_tokens, context)

    def catch_up(self, context: npt.ArrayLike) -> Seconds:
        return self.parts[0].catch_up(context)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.parts[0].verify(n_tokens, context)

    def policy_step(self) -> float:
        return self.parts[0].policy_step()

    def round_overhead(self) -> float:
        return self.parts[0].round_overhead()

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self.parts[0].autoregressive_step(context)


@dataclass(frozen=True, kw_only=True)
class JoinedTable(CostTable):
    """A joined cost compiled to arrays: a `CostTable` of the first drafter, and of all D the following.

    each_draft_s, each_refeed_s : [D, k_max + 1, B]; each_verify_s : [D, n_max + 1, B]; as in `CostTable`
    each_catch_up_s : [D, L + 1, B], additional time of the first draft step by missing tokens of the draft cache
    each_policy_step_s, each_round_overhead_s : [D]
    """

    each_draft_s: Seconds
    each_catch_up_s: Seconds
    each_verify_s: Seconds
    each_refeed_s: Seconds
    each_policy_step_s: Floats
    each_round_overhead_s: Floats


def joined_table(trace: JoinedTrace, cost: CostModel) -> JoinedTable:
    """The table of these costs on a joined trace; InputError unless they are of as many drafters."""
    drafters = len(trace.parts)
    parts = cost.parts if isinstance(cost, JoinedCost) else (cost,)
    if len(parts) != drafters:
        raise InputError(
            f"costs of {len(parts)} drafters for a joined trace of {drafters}; join the cost files as well, "
            "each by `specsim join --cost`"
        )
    contexts, longest = context_range(trace), int(trace.output_tokens.max())
    how: dict[str, Any] = {"max_draft_tokens": trace.depth, "contexts": contexts, "refeeds": refeeds(trace)}
    tables = [compile_table(part, **how) for part in parts]
    at = column_contexts(contexts, tables[0].bucket_bits)
    catch_up_s = [
        np.stack([np.zeros(len(at)), *(part.catch_up_by(n, at) for n in range(1, longest + 1))]) for part in parts
    ]
    notes = [note for table in tables for note in table.notes]
    steps = [float(table.autoregressive_s.mean()) for table in tables]
    if max(steps) > (1 + UNEQUAL) * min(steps):
        notes.append(
            f"a token without speculation takes {1e3 * min(steps):.3g} to {1e3 * max(steps):.3g} ms by the drafters' "
            "costs, which should be of one target on one machine"
        )
    return JoinedTable(
        **{**vars(tables[0]), "notes": tuple(dict.fromkeys(notes))},
        each_draft_s=np.stack([table.draft_s for table in tables]),
        each_catch_up_s=np.stack(catch_up_s),
        each_verify_s=np.stack([table.verify_s for table in tables]),
        each_refeed_s=np.stack([table.refeed_s for table in tables]),
        each_policy_step_s=np.array([table.policy_step_s for table in tables]),
        each_round_overhead_s=np.array([table.round_overhead_s for table in tables]),
    )


def joined_document(documents: Sequence[Any]) -> dict[str, Any]:
    """The file of a joined cost, from the parsed cost files of its drafters."""
    return {"kind": JOINED_COST_KIND, "version": 1, "costs": list(documents)}
