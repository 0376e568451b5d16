"""What inference engines add to the passes of their models: a preset, fitted to published measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from specsim.cost.keys import from_keys
from specsim.cost.roofline.cost import Overheads, RooflineCost
from specsim.cost.roofline.hardware import Derating
from specsim.io.errors import InputError

PRESET = Path(__file__).parent / "engines.json"
INVALID = "write it anew with `python -m studies published`"


@dataclass(frozen=True)
class Preset:
    """What the known engines, which run a step as a CUDA graph, have in common.

    engines : full names by the names of `specsim advise --engine`
    derating : shares of the hardware's ceilings that are reached, times of a launch and of an all-reduce
    overheads : of steps, sequences, rounds and draft steps
    source, date : what the numbers were fitted to
    """

    engines: dict[str, str]
    derating: Derating
    overheads: Overheads
    source: str
    date: str


@cache
def engine_preset() -> Preset:
    """Read the preset.

    Examples
    --------
    >>> from specsim.cost.roofline.engine import engine_preset
    >>> engine_preset().engines["vllm"]
    'vLLM'
    """
    return from_keys(json.loads(PRESET.read_text()), Preset, PRESET.name, INVALID)


def in_engine(cost: RooflineCost, engine: str) -> RooflineCost:
    """Return the costs of the same models on the same hardware in an inference engine; InputError if it is unknown."""
    preset = engine_preset()
    if engine not in preset.engines:
        known = ", ".join(preset.engines)
        raise InputError(f"unknown engine {engine!r} for costs on a GPU; known: {known}")
    overheads = preset.overheads
    if cost.draft_passes is None or cost.drafter.at_once:  # a step is not launched for every token
        once_s = overheads.round_s + overheads.draft_step_s
        overheads = replace(overheads, round_s=once_s, draft_step_s=0.0)
    drafting = cost.draft_passes and replace(cost.draft_passes, derating=preset.derating)
    target = replace(cost.target, derating=preset.derating)
    return replace(cost, target=target, draft_passes=drafting, overheads=overheads, engine=engine)
