"""Costs of a target and a drafter from measured operators, and their form in a cost file.

``target``, ``drafter`` : as of a roofline, see `specsim.cost.roofline.document`
``hardware`` : a100, h100, h200, b200 or l40s
``framework`` (default vllm), ``dtype``, ``tensor_parallel``, ``routing``, ``attention``, see `SiliconPasses`
``batch``; ``step_s``, ``round_s``, as of linear costs: the tables do not include an engine's overhead
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specsim.cost.batches import BatchTokens
from specsim.cost.keys import from_keys
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import Drafter, Overheads, PassCost, find_drafter
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.cost.roofline.points import LARGEST_FACTOR, LEAST_FACTOR
from specsim.cost.silicon.passes import Attention, SiliconPasses
from specsim.io.arrays import Seconds

FALL = 0.05  # share by which a larger batch may take less
PASSES = ("hardware", "framework", "dtype", "tensor_parallel", "routing", "attention")


@dataclass(frozen=True, repr=False)
class SiliconCost(PassCost):
    """Costs of a target and a drafter by NVIDIA's measured operators.

    target : the target's passes
    drafter : how drafts are made
    draft_passes : the passes of `drafter.model`; default: on the target's hardware, as its own
    batch : sequences in lockstep; times are the batch's
    overheads : overhead of rounds

    Raises InputError for a batch below 1.
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
        """The tables' version, the difference between the two ways of counting attention, and what is not credible."""
        tokens, context = max_draft_tokens + 1, contexts[1]
        ways: dict[Attention, str] = {"once": "one query's", "separate": "that of so many sequences"}
        (other,) = ways.keys() - {self.target.attention}
        both = self, replace(self, target=replace(self.target, attention=other))
        own_ms, other_ms = (1e3 * float(cost.verify(tokens, context)) for cost in both)
        passes = f"a pass of {tokens} tokens at context {context} takes {own_ms:.2f} ms, counted as {ways[other]}"
        return [
            f"NVIDIA's tables, {self.target.tables.name} on {self.target.hardware}; attention of several queries "
            f"counted as {ways[self.target.attention]}: {passes} {other_ms:.2f}",
            *self._not_credible(context),
        ]

    def _not_credible(self, context: int) -> Iterator[str]:
        """Decoding steps that are far from the data sheet's, or shorter in a batch of twice the size."""
        of = self.target
        sheet = Roofline(of.model, find_hardware(of.hardware), tensor_parallel=of.tensor_parallel,
                         weights=None if of.dtype == "bfloat16" else of.dtype)  # fmt: skip
        step_s, twice_s = (float(of.seconds(1, context, size)) for size in (self.batch, 2 * self.batch))
        times = step_s / float(sheet.seconds(1, context, self.batch))
        if not LEAST_FACTOR <= times <= LARGEST_FACTOR:
            yield (
                f"a decoding step takes {times:.2f} times the roofline of the data sheet; {LEAST_FACTOR:g} to "
                f"{LARGEST_FACTOR:g} are credible"
            )
        if twice_s < (1 - FALL) * step_s:
            yield f"a step of batch {2 * self.batch} takes {twice_s / step_s:.2f} of one of batch {self.batch}"


@dataclass(frozen=True)
class SiliconForm:
    """A target, a drafter and hardware whose operators were measured, as in a cost file."""

    target: str | dict[str, Any]
    drafter: str | dict[str, Any]
    hardware: str
    framework: str = "vllm"
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    routing: str = "balanced"
    attention: str = "once"
    batch: int = 1
    step_s: float = 0.0
    round_s: float = 0.0

    def cost(self, name: str) -> SiliconCost:
        """The cost model; InputError for unknown names."""
        model = find_architecture(self.target)
        target = SiliconPasses(model, **{key: getattr(self, key) for key in PASSES})
        overheads = Overheads(step_s=self.step_s, round_s=self.round_s)
        return SiliconCost(target, find_drafter(self.drafter, model), batch=self.batch, overheads=overheads)


def silicon_from_document(document: Mapping[str, Any]) -> SiliconCost:
    """The costs of these keys."""
    return from_keys(dict(document), SiliconForm, "silicon", "see specsim.cost.silicon.cost").cost("silicon")
