"""A target and a drafter at measured operators, as a cost model and as a person writes it down.

``target``, ``drafter`` : as of a roofline, see `specsim.cost.roofline.document`
``hardware`` : a100, h100, h200, b200 or l40s
``framework`` (default vllm), ``dtype``, ``tensor_parallel``, ``routing``, ``attention``, see `SiliconPasses`
``batch``; ``step_s``, ``round_s``, as of linear costs: what an engine takes beside passes is not in the tables
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict

from specsim.arrays import Seconds
from specsim.cost.batches import BatchTokens
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import Drafter, Overheads, PassCost, find_drafter
from specsim.cost.silicon.passes import Attention, SiliconPasses


class SiliconDocument(TypedDict):
    """A target, a drafter and hardware whose operators were measured."""

    target: str | dict[str, Any]
    drafter: str | dict[str, Any]
    hardware: str
    framework: NotRequired[str]
    dtype: NotRequired[str]
    tensor_parallel: NotRequired[int]
    routing: NotRequired[str]
    attention: NotRequired[str]
    batch: NotRequired[int]
    step_s: NotRequired[float]
    round_s: NotRequired[float]


PASSES = ("hardware", "framework", "dtype", "tensor_parallel", "routing", "attention")


def silicon_from_document(document: Mapping[str, Any]) -> SiliconCost:
    """The cost model of a checked document; InputError names what there is not."""
    model = find_architecture(document["target"])
    target = SiliconPasses(model, **{key: document[key] for key in PASSES if key in document})
    overheads = Overheads(step_s=document.get("step_s", 0.0), round_s=document.get("round_s", 0.0))
    drafter = find_drafter(document["drafter"], model)
    return SiliconCost(target, drafter, batch=document.get("batch", 1), overheads=overheads)


@dataclass(frozen=True, repr=False)
class SiliconCost(PassCost):
    """Costs of a target and a drafter by NVIDIA's measured operators.

    Parameters
    ----------
    target : SiliconPasses
        The target's passes.
    drafter : Drafter
        How drafts are made.
    draft_passes : SiliconPasses, optional
        The passes of `drafter.model`; default: on the target's hardware, as its own.
    batch : int
        Sequences in lockstep; times are the batch's.
    overheads : Overheads
        What a round takes beside passes.

    Raises
    ------
    InputError
        For a batch below 1.
    """

    target: SiliconPasses
    drafter: Drafter
    draft_passes: SiliconPasses | None = None
    batch: int = 1
    overheads: Overheads = field(default_factory=Overheads)

    form = "silicon"

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        shared, model = self.drafter.shared_layers, self.target.model
        if not shared:
            return self.target.batch_seconds(tokens)
        above = replace(self.target, model=model.first(model.num_layers - shared))
        below = replace(self.target, model=model.first(shared))  # which drafting has run for all but the last token
        last = BatchTokens.alike(tokens.sequences, 1, tokens.cached / tokens.sequences)
        return above.batch_seconds(tokens) + below.batch_seconds(last, ends=False)

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        """Whose tables these are, and how far apart the two ways of counting attention are at the most."""
        tokens, context = max_draft_tokens + 1, contexts[1]
        ways: dict[Attention, str] = {"once": "one query's", "separate": "that of so many sequences"}
        (other,) = ways.keys() - {self.target.attention}
        both = self, replace(self, target=replace(self.target, attention=other))
        own_ms, other_ms = (1e3 * float(one.verify(tokens, context)) for one in both)
        passes = f"a pass of {tokens} tokens at context {context} takes {own_ms:.2f} ms, counted as {ways[other]}"
        return [
            f"NVIDIA's tables, {self.target.tables.name} on {self.target.hardware}; attention of several queries "
            f"counted as {ways[self.target.attention]}: {passes} {other_ms:.2f}"
        ]
