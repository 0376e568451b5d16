"""Sensitivity to a roofline's constants: the same costs with a constant changed by a share of itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import NamedTuple

from specsim.cost.roofline.cost import Overheads, RooflineCost
from specsim.cost.roofline.passes import Roofline

MEMORY, THROUGHPUT, LAUNCH, OVERLAP, LINK, ALL_REDUCE = (
    "memory bandwidth", "matrix throughput", "time of a launch", "overlap", "bandwidth between devices",
    "time of an all-reduce",
)  # fmt: skip
CONSTANTS = (MEMORY, THROUGHPUT, LAUNCH, OVERLAP, LINK, ALL_REDUCE)  # of passes
OVERHEADS = {
    "step_s": "overhead of a step",
    "sequence_s": "overhead of a sequence",
    "verified_sequence_s": "overhead of a verified sequence",
    "round_s": "overhead of a round",
    "policy_step_s": "a decision",
    "draft_step_s": "overhead of a draft step",
    "cold_start_s": "cold start of drafting",
}


class Change(NamedTuple):
    """Costs with a constant smaller and larger by a share."""

    constant: str
    less: RooflineCost
    more: RooflineCost


def scaled_passes(passes: Roofline, constant: str, factor: float) -> Roofline:
    """The same passes where a constant is so many times as large; an overlap stays within 1."""
    hardware, derating = passes.hardware, passes.derating
    if constant == MEMORY:
        return replace(passes, hardware=replace(hardware, memory_bytes_s=factor * hardware.memory_bytes_s))
    if constant == THROUGHPUT:
        flops = {dtype: factor * value for dtype, value in hardware.flops.items()}
        return replace(passes, hardware=replace(hardware, flops=flops))
    if constant == LINK:
        return replace(passes, hardware=replace(hardware, link_bytes_s=factor * hardware.link_bytes_s))
    if constant == LAUNCH:
        return replace(passes, derating=replace(derating, launch_s=factor * derating.launch_s))
    if constant == ALL_REDUCE:
        return replace(passes, derating=replace(derating, all_reduce_s=factor * derating.all_reduce_s))
    assert constant == OVERLAP
    return replace(passes, derating=replace(derating, overlap=min(factor * derating.overlap, 1.0)))


def changes(cost: RooflineCost, share: float) -> Iterator[Change]:
    """Every constant that is not 0, changed by this share of itself.

    Of passes for target and drafter together, as other hardware would, and for each alone, as other kernels would. A
    share that is reached of a ceiling acts as the ceiling does, and is not listed.
    """
    for constant in CONSTANTS:
        if _absent(cost.target, constant):
            continue
        whose = [("target: ", True, False)]
        if cost.draft_passes:
            whose += [("both: ", True, True), ("drafter: ", False, True)]
        for of, target, drafter in whose:
            yield Change(
                f"{of}{constant}",
                *(_scaled(cost, constant, factor, target, drafter) for factor in (1 - share, 1 + share)),
            )
    for field in fields(Overheads):
        value = getattr(cost.overheads, field.name)
        if value and field.name in OVERHEADS:
            less, more = (replace(cost.overheads, **{field.name: f * value}) for f in (1 - share, 1 + share))
            yield Change(OVERHEADS[field.name], replace(cost, overheads=less), replace(cost, overheads=more))


def _absent(passes: Roofline, constant: str) -> bool:
    if constant in (LINK, ALL_REDUCE):
        return passes.tensor_parallel == 1
    return (constant == LAUNCH and not passes.derating.launch_s) or (
        constant == OVERLAP and not passes.derating.overlap
    )


def _scaled(cost: RooflineCost, constant: str, factor: float, target: bool, drafter: bool) -> RooflineCost:
    if target:
        cost = replace(cost, target=scaled_passes(cost.target, constant, factor))
    if drafter and cost.draft_passes:
        cost = replace(cost, draft_passes=scaled_passes(cost.draft_passes, constant, factor))
    return cost
