"""Roofline costs as a person writes them down, with their calibration, and the preset of inference engines.

``target`` : a name of `public_shapes`, a config.json or its folder, or its content
``drafter`` : the same for a draft model, or a drafter as of `find_drafter`
``hardware`` : a name of `known_hardware`, or ``{"memory_bytes_s": ..., "flops": {dtype: ...}, ...}``
``dtype`` (default bfloat16) : dtype of hidden states, and of weights and cache unless given
``weights`` : a format of the layers' matrices, or of some parts: ``{"attention": ..., "mlp": ..., "experts": ...,
    "head": ...}``; int4, int4-g32, int8, float8, mxfp4, nvfp4, a type of llama.cpp such as q4_k_m, or a dtype; default:
    the format in which the target is stored, by its name or config.json or as it was released; else dtype
``stored`` : why the weights have their format, if it was not chosen by the user
``activations`` : float8 or float4, for products in that type; default: weights are unpacked as they are read
``cache`` : format of keys and values: float8, q8_0, ...
``batch``, ``tensor_parallel``
``engine`` : inference engine whose overhead is added, a name of `engine_preset` or "llamacpp"; optionally with the
    month of its release, such as "sglang@2025-03"; default: none
``states`` : how the engine restores recurrent states after a rejection, a key of `STATE_BYTES`
``calibration`` : ``target`` and ``drafter``, each with ``memory``, ``compute``, ``launch_s``, ``overlap``,
    ``all_reduce_s``;
    ``overheads``; ``covered``, as `calibration_document` gives them
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from specsim.cost.roofline.architecture import find_architecture, model_config
from specsim.cost.roofline.config import ModelConfig
from specsim.cost.roofline.cost import Covered, Overheads, RooflineCost, find_drafter
from specsim.cost.roofline.drafters import lacks_mtp
from specsim.cost.roofline.formats import find_format, stored_weights
from specsim.cost.roofline.hardware import Derating, Hardware, find_hardware, on_links
from specsim.cost.roofline.passes import Roofline
from specsim.io.errors import InputError
from specsim.io.json import from_keys
from specsim.io.names import known_name

PRESET, LLAMACPP = (Path(__file__).parent / name for name in ("engines.json", "llamacpp.json"))
WITHOUT_PRESET = ("transformers",)  # engines of unknown overhead
CHANGED = "2025-07"  # first month of releases that start a draft step several times as fast
INVALID, REMAKE = "correct it, or calibrate again", "write it anew with `python -m studies published`"


@dataclass(frozen=True)
class RooflineForm:
    """A target, a drafter and hardware."""

    target: str | dict[str, Any]
    drafter: str | dict[str, Any]
    hardware: str | dict[str, Any]
    dtype: str = "bfloat16"
    weights: str | dict[str, str] | None = None
    batch: int = 1
    tensor_parallel: int = 1
    activations: str | None = None
    cache: str | None = None
    states: str = "float32"
    engine: str | None = None
    calibration: dict[str, Any] = field(default_factory=dict)
    stored: str = ""

    def cost(self, name: str) -> RooflineCost:
        """The cost model; InputError for unknown names."""
        weights, stored = self.weights, self.stored
        model = ModelConfig(self.target) if isinstance(self.target, dict) else self.target
        if weights is None and (found := stored_weights(model)):
            weights, stored = found
        elif isinstance(weights, str):
            weights = find_format(weights)
        target = Roofline(
            find_architecture(model),
            find_hardware(self.hardware) if isinstance(self.hardware, str) else Hardware.from_json(self.hardware),
            dtype=find_format(self.dtype),
            weights=weights,
            tensor_parallel=self.tensor_parallel,
            activations=self.activations,
            cache=None if self.cache is None else find_format(self.cache),
            states=self.states,
        )
        cost = RooflineCost(target, find_drafter(self.drafter, target.model), batch=self.batch)
        if stored:
            text = f"{target.formats.removeprefix(', ')} ({stored}; --weights changes it)"
            cost = replace(cost, remarks=(text,))
        # A checkpoint of its own may hold layers that were trained afterwards.
        by_kind = isinstance(self.drafter, str) and not re.search(r"[/\\]|\.json$", self.drafter)
        if cost.drafter.kind == "mtp" and by_kind and lacks_mtp(model_config(model)):
            text = f"{target.model.name} has no layers for multi-token prediction: mtp needs a checkpoint that has them"
            cost = replace(cost, remarks=(*cost.remarks, text))
        if self.engine is not None:
            cost = in_engine(cost, self.engine)
        return from_keys(self.calibration, Calibration, f"{name}: calibration", INVALID).applied(cost)


@dataclass(frozen=True)
class CoveredRanges:
    """See `Covered`: ranges as lists, whose ends count."""

    subject: str
    draft_tokens: list[int]
    verify_tokens: list[int]
    contexts: list[int]
    batches: list[int]

    def covered(self) -> Covered:
        for key, values in vars(self).items():
            if not values:
                raise InputError(f"calibration: {key} is empty; give the smallest and the largest that were measured")
        ends = {
            key: (getattr(self, key)[0], getattr(self, key)[-1])
            for key in ("draft_tokens", "verify_tokens", "contexts")
        }
        return Covered(subject=self.subject, batches=tuple(self.batches), **ends)


@dataclass(frozen=True)
class Calibration:
    """A calibration in a cost file."""

    target: dict[str, Any] | None = None
    drafter: dict[str, Any] | None = None
    overheads: dict[str, Any] = field(default_factory=dict)
    covered: dict[str, Any] | None = None

    def applied(self, cost: RooflineCost) -> RooflineCost:
        """The same shapes and hardware under this calibration."""

        def part(key: str, kind: Any) -> Any:
            return from_keys(getattr(self, key), kind, f"calibration: {key}", INVALID)

        if self.target:
            cost = replace(cost, target=replace(cost.target, derating=part("target", Derating)))
        if self.drafter and cost.draft_passes is not None:
            cost = replace(cost, draft_passes=replace(cost.draft_passes, derating=part("drafter", Derating)))
        covered = part("covered", CoveredRanges).covered() if self.covered else None
        overheads = part("overheads", Overheads) if self.overheads else cost.overheads
        return replace(cost, overheads=overheads, covered=covered)


def roofline_from_document(document: Mapping[str, Any]) -> RooflineCost:
    """The roofline costs of these keys."""
    return from_keys(dict(document), RooflineForm, "roofline", INVALID).cost("roofline")


def calibration_document(cost: RooflineCost) -> dict[str, Any]:
    """A calibration as cost files hold it under ``calibration``."""
    return {
        "target": asdict(cost.target.derating),
        "drafter": asdict(cost.draft_passes.derating) if cost.draft_passes else None,
        "overheads": asdict(cost.overheads),
        "covered": asdict(cost.covered) if cost.covered else None,
    }


@dataclass(frozen=True)
class Preset:
    """Fitted overheads of inference engines.

    engines : full names by the names of `specsim advise --engine`
    derating : reached shares of the hardware's ceilings, seconds of a launch and of an all-reduce
    overheads : fields of `Overheads` in seconds, by engine; "vllm@2025-03" is for releases before `CHANGED`
    source, date : data that the numbers were fitted to, and month of the fit
    prompt_shares : `RooflineCost.prompt_share` by engine; default: 1
    vector : see `Roofline`
    remark : a further line of `RooflineCost.notes`
    """

    engines: dict[str, str]
    derating: Derating
    overheads: dict[str, dict[str, float]]
    source: str
    date: str
    prompt_shares: dict[str, float] = field(default_factory=dict)
    vector: float = 0.0
    remark: str = ""

    def overheads_of(self, engine: str, month: str) -> Overheads:
        """The overheads of an engine. month : of its release, such as "2025-03"; empty: the current release"""
        early = [name for name in self.overheads if month and month < CHANGED and name.startswith(f"{engine}@")]
        return Overheads(**self.overheads[early[0] if early else engine])


@cache
def engine_preset() -> Preset:
    """Read the preset of vLLM, SGLang and TensorRT-LLM.

    Examples
    --------
    >>> from specsim.cost.roofline.document import engine_preset
    >>> engine_preset().engines["vllm"]
    'vLLM'
    """
    return _read_preset(PRESET)


@cache
def llamacpp_preset() -> Preset:
    """Read the preset of llama.cpp, which has its own kernels and host overhead."""
    return _read_preset(LLAMACPP)


def _read_preset(path: Path) -> Preset:
    return from_keys(json.loads(path.read_text()), Preset, path.name, REMAKE)


def in_engine(cost: RooflineCost, engine: str) -> RooflineCost:
    """Return the costs of the same models on the same hardware in an inference engine; InputError if it is unknown.

    engine : a name, optionally with the month of its release, such as "sglang@2025-03"

    An engine of unknown overhead adds none; a remark says so.
    """
    preset, llamacpp = engine_preset(), llamacpp_preset()
    known = [*preset.engines, *llamacpp.engines, *WITHOUT_PRESET]
    engine, _, month = engine.partition("@")
    engine = known_name("engine", engine, known, where="for costs on a GPU")
    if engine in llamacpp.engines:
        preset = llamacpp
    if engine in WITHOUT_PRESET:
        return replace(cost, remarks=(*cost.remarks, f"without the overhead of {engine}, which is not known"))
    overheads = preset.overheads_of(engine, month)
    if cost.draft_passes is None or cost.drafter.at_once:  # no pass is launched per drafted token
        once_s = overheads.round_s + overheads.draft_step_s
        overheads = replace(overheads, round_s=once_s, draft_step_s=0.0)
    derating = on_links(preset.derating, cost.target.hardware)
    return replace(
        cost.with_passes(derating=derating, vector=preset.vector),
        overheads=overheads,
        prompt_share=preset.prompt_shares.get(engine, 1.0),
        engine=engine,
        remarks=(*cost.remarks, *([preset.remark] if preset.remark else [])),
    )
