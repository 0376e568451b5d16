"""Roofline costs as a person writes them down, and their calibration as it is kept.

``target`` : a name of `public_shapes`, a config.json or its folder, or its content
``drafter`` : the same for a draft model, or a drafter as of `find_drafter`
``hardware`` : a name of `known_hardware`, or ``{"memory_bytes_s": ..., "flops": {dtype: ...}, ...}``
``dtype`` (default bfloat16), ``weights``, ``batch``, ``tensor_parallel``
``calibration`` : ``target`` and ``drafter``, each with ``memory``, ``compute``, ``launch_s``, ``overlap``;
    ``overheads``; ``covered``, as `calibration_document` gives them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NotRequired, TypedDict

from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import Covered, Overheads, RooflineCost, find_drafter
from specsim.cost.roofline.hardware import Derating, find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.errors import InputError


class DeratingDocument(TypedDict):
    """See `Derating`; what is left out is ideal."""

    memory: NotRequired[float]
    compute: NotRequired[float]
    launch_s: NotRequired[float]
    overlap: NotRequired[float]


class OverheadsDocument(TypedDict):
    """See `Overheads`; what is left out is 0."""

    step_s: NotRequired[float]
    round_s: NotRequired[float]
    policy_step_s: NotRequired[float]
    draft_step_s: NotRequired[float]
    cold_start_s: NotRequired[float]
    cold_start_ratio: NotRequired[float]


class CoveredDocument(TypedDict):
    """See `Covered`."""

    subject: str
    draft_tokens: list[int]
    verify_tokens: list[int]
    contexts: list[int]
    batches: list[int]


class CalibrationDocument(TypedDict):
    """What a calibration found."""

    target: NotRequired[DeratingDocument]
    drafter: NotRequired[DeratingDocument | None]
    overheads: NotRequired[OverheadsDocument]
    covered: NotRequired[CoveredDocument | None]


class RooflineDocument(TypedDict):
    """A target, a drafter and hardware."""

    target: str | dict[str, Any]
    drafter: str | dict[str, Any]
    hardware: str | dict[str, Any]
    dtype: NotRequired[str]
    weights: NotRequired[str | None]
    batch: NotRequired[int]
    tensor_parallel: NotRequired[int]
    calibration: NotRequired[CalibrationDocument]


NESTED: dict[str, Any] = {"target": DeratingDocument, "drafter": DeratingDocument, "overheads": OverheadsDocument,
                          "covered": CoveredDocument}  # fmt: skip


def roofline_from_document(document: Mapping[str, Any]) -> RooflineCost:
    """The cost model of a checked document; InputError names what there is not."""
    target = Roofline(
        find_architecture(document["target"]),
        find_hardware(document["hardware"]),
        dtype=document.get("dtype", "bfloat16"),
        weights=document.get("weights"),
        tensor_parallel=document.get("tensor_parallel", 1),
    )
    cost = RooflineCost(target, find_drafter(document["drafter"], target.model), batch=document.get("batch", 1))
    return with_calibration(cost, document.get("calibration", {}))


def with_calibration(cost: RooflineCost, calibration: Mapping[str, Any]) -> RooflineCost:
    """The same shapes and hardware under a calibration, as of `calibration_document`."""
    passes, found = cost.draft_passes, calibration.get("covered")
    covered = _covered(found) if found else None
    if calibration.get("target"):
        cost = replace(cost, target=replace(cost.target, derating=Derating(**calibration["target"])))
    if calibration.get("drafter") and passes is not None:
        cost = replace(cost, draft_passes=replace(passes, derating=Derating(**calibration["drafter"])))
    return replace(cost, overheads=Overheads(**calibration.get("overheads", {})), covered=covered)


def _covered(found: Mapping[str, Any]) -> Covered:
    for key in ("draft_tokens", "verify_tokens", "contexts", "batches"):
        if not found[key]:
            raise InputError(f"calibration: {key} is empty; give the smallest and the largest that were measured")
    ends = {key: (found[key][0], found[key][-1]) for key in ("draft_tokens", "verify_tokens", "contexts")}
    return Covered(subject=found["subject"], batches=tuple(found["batches"]), **ends)


def calibration_document(cost: RooflineCost) -> dict[str, Any]:
    """What a cost file holds under ``calibration``."""
    return {
        "target": asdict(cost.target.derating),
        "drafter": asdict(cost.draft_passes.derating) if cost.draft_passes else None,
        "overheads": asdict(cost.overheads),
        "covered": asdict(cost.covered) if cost.covered else None,
    }
