"""What the two commands share: costs of batches, and what decodes, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.errors import InputError

if TYPE_CHECKING:
    from specsim.cost.batches import BatchCost
    from specsim.cost.model import CostModel
    from specsim.policy.base import Policy
    from specsim.serving.draft_length import DraftLengthRule, GoodputK
    from specsim.trace.trace import Trace

BatchCostOption = Annotated[
    Path,
    typer.Option(
        help="Costs that know batches: a linear, roofline or silicon cost file, a batch profile, or a name of "
        "`specsim cost list`.",
        metavar="COST",
    ),
]
GOODPUT = "goodput"
GOODPUT_SETTINGS = {"max_draft_tokens": int, "accept_prob": float, "prior_tokens": float, "memory": float}


def goodput_rule(trace: Trace, cost: BatchCost, settings: Mapping[str, str]) -> GoodputK:
    """The rule of this name with settings as text."""
    from specsim.serving.draft_length import GoodputK

    values: dict[str, Any] = {"max_draft_tokens": trace.depth}
    for key, text in settings.items():
        if key not in GOODPUT_SETTINGS:
            raise InputError(f"{GOODPUT} has no setting {key!r}; known: {', '.join(GOODPUT_SETTINGS)}")
        try:
            values[key] = GOODPUT_SETTINGS[key](text)
        except ValueError:
            raise InputError(f"{GOODPUT}: {key}={text!r} is no number; give one") from None
    return GoodputK(cost, **values)


def cost_notes(model: CostModel, trace: Trace, longest: int, batch: int, contexts: Sequence[int] = ()) -> list[str]:
    """What costs say of drafts up to `longest` and batches up to `batch`, at these contexts or those of the trace."""
    from specsim.cost.contexts import context_range
    from specsim.cost.files import with_batch

    met = contexts or context_range(trace)
    return with_batch(model, batch).notes(longest, (min(met), max(met)))


def parse_schedule(text: str, option: str = "--schedule") -> dict[int, int]:
    """K by batch, of "1:5,4:3,16:0"."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        found = {int(batch): int(k) for batch, k in pairs}
    except ValueError:
        raise InputError(f"{option} {text!r} is no list of BATCH:K; write for example 1:5,4:3,16:0") from None
    if len(found) < len(pairs):
        raise InputError(f"{option} {text!r} names a batch twice; give each once")
    return found


def choose_arms(
    trace: Trace, cost: CostModel, named: Sequence[tuple[str, Mapping[str, str]]], *, tuning_share: float, seed: int
) -> tuple[Trace, list[Policy | DraftLengthRule], int]:
    """The sequences to report on, policies or rules by name and settings, and how many sequences they learned from.

    Where one learns, it does on one part of the sequences, at the costs of a batch of one, and all are reported on the
    other part; otherwise, 0 sequences are learned from.
    """
    from specsim.fitting.fit import fit, needs_fitting
    from specsim.policy.base import build_policy
    from specsim.policy.registry import find_policy
    from specsim.replaying.table import cost_table
    from specsim.serving.costs import batch_cost
    from specsim.trace.split import split_sequences
    from specsim.tuning.space import cap_depth

    kinds = {name: find_policy(name) for name, _ in named if name != GOODPUT}
    rest, train = trace, None
    if any(needs_fitting(kind) for kind in kinds.values()):
        tuning, others = split_sequences(trace, tuning_share=tuning_share, seed=seed)
        rest, train = trace.select(others), trace.select(tuning)
    arms: list[Policy | DraftLengthRule] = []
    for name, settings in named:
        if name == GOODPUT:
            arms.append(goodput_rule(trace, batch_cost(cost), settings))
            continue
        kind = kinds[name]
        given = {**cap_depth(kind, trace.depth), **settings}
        if train is not None and needs_fitting(kind):
            arms.append(fit(kind, given, train, cost_table(train, cost)))
        else:
            arms.append(build_policy(kind, given))
    return rest, arms, 0 if train is None else train.sequences
