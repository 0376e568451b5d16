"""The cost model of a target and a drafter on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchCost, BatchTokens
from specsim.cost.model import MAX_SECONDS, MAX_TREE_TOKENS
from specsim.cost.roofline.architecture import Architecture, find_architecture
from specsim.cost.roofline.passes import Operation, Roofline
from specsim.io.arrays import Seconds
from specsim.io.errors import InputError

KINDS = ("model", "eagle", "edd", "vdm", "eesd", "self-sd", "medusa", "space", "prompt-lookup")
PLAIN = ("eagle", "edd", "vdm", "space", "prompt-lookup")  # without a number
NUMBERED = {"eesd": "layers", "self-sd": "layers", "medusa": "heads"}  # with this number


@dataclass(frozen=True)
class Drafter:
    """How a drafter drafts.

    kind : "model", "eagle", "edd", "vdm", "eesd", "self-sd", "medusa", "space" or "prompt-lookup"
    model : whose passes draft; None where no pass does
    shared_layers : first layers of the target that drafting has run already where the target verifies, EESD's
    """

    kind: str
    model: Architecture | None = None
    shared_layers: int = 0

    @property
    def at_once(self) -> bool:
        """Whether a single pass drafts all tokens, as MEDUSA's heads do."""
        return self.kind == "medusa"


def find_drafter(drafter: str | Mapping[str, Any], target: Architecture) -> Drafter:
    """A drafter of this target.

    drafter : a draft model as of `find_architecture`; "eagle", "edd" or "vdm", a layer of the target's shape and its
        head; "space" or "prompt-lookup", whose drafts no pass makes; or ``{"kind": "eesd", "layers": N}`` for an exit
        layer after the target's first N, ``{"kind": "self-sd", "layers": N}`` for N of the target's layers, ``{"kind":
        "medusa", "heads": K}``; or these in short, "eesd:N", "self-sd:N", "medusa:K"

    Raises InputError for a kind that is not known, or a number that does not fit the target.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> from specsim.cost.roofline.cost import find_drafter
    >>> find_drafter("eagle", find_architecture("llama-2-7b")).model.parameters
    498085888
    """
    keys: Mapping[str, Any] = {"kind": drafter} if isinstance(drafter, str) else drafter
    if isinstance(drafter, str):
        short, colon, text = drafter.partition(":")
        if colon and short in NUMBERED:
            keys = {"kind": short, NUMBERED[short]: int(text) if text.isdecimal() else text}
        elif drafter not in KINDS:
            return Drafter("model", find_architecture(drafter))
    if "model_type" in keys:
        return Drafter("model", find_architecture(keys))
    kind = keys.get("kind")
    number = NUMBERED.get(str(kind))
    if kind not in KINDS[1:] or set(keys) - {"kind", number}:
        raise InputError(
            f"roofline: drafter {dict(keys)!r:.80} is unknown; give a model, {', '.join(PLAIN)}, or an object "
            "with kind eesd, self-sd or medusa and its layers or heads"
        )
    most = {"layers": target.num_layers - 1, "heads": 64}.get(number or "", 0)
    value = keys.get(number, 0) if number else 0
    if number and (type(value) is not int or not 1 <= value <= most):
        raise InputError(f"roofline: drafter {kind} has {number}={value!r}; give 1 to {most}")
    name = f"{kind} of {target.name}"
    match kind:
        case "eagle" | "edd" | "vdm":
            layer = replace(target, name=name, num_layers=1, experts=None, dense_layers=0, window_layers=0)
            return Drafter(kind, replace(layer, projected_inputs=2 if kind == "eagle" else 0))
        case "eesd":
            return Drafter(kind, target.first(value + 1, name), shared_layers=value)
        case "self-sd":
            return Drafter(kind, target.first(value, name))
        case "medusa":
            return Drafter(kind, replace(target.first(0, name), medusa_heads=value))
    return Drafter(str(kind))


@dataclass(frozen=True)
class Overheads:
    """Overhead of a round besides its passes, in seconds.

    step_s : a round, and a token without speculation
    round_s : a round
    policy_step_s : a decision whether to continue
    draft_step_s : a draft step
    cold_start_s : the first draft step, where the target's pass has thrown the drafter's weights out of a cache
    cold_start_ratio : what of it is left at each further step
    """

    step_s: float = 0.0
    round_s: float = 0.0
    policy_step_s: float = 0.0
    draft_step_s: float = 0.0
    cold_start_s: float = 0.0
    cold_start_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = 1.0 if name == "cold_start_ratio" else MAX_SECONDS
            if not 0 <= value <= most:
                raise InputError(f"roofline: {name}={value}; give 0 to {most:g}")

    def draft_step(self, place: npt.ArrayLike) -> Seconds:
        """Of the draft step at this place of a round, from 0."""
        return np.asarray(self.draft_step_s + self.cold_start_s * self.cold_start_ratio ** np.asarray(place))


@dataclass(frozen=True)
class Covered:
    """The measured ranges of a calibration, ends included, and their subject."""

    subject: str
    draft_tokens: tuple[int, int]
    verify_tokens: tuple[int, int]
    contexts: tuple[int, int]
    batches: tuple[int, ...]


class PassCost(BatchCost):
    """Costs of a target and a drafter that follow from their passes; subclasses add verification."""

    form: ClassVar[str]  # as errors call it
    target: Any  # a model's passes
    drafter: Drafter
    draft_passes: Any  # a model's passes, or None where no pass drafts
    batch: int
    overheads: Overheads

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InputError(f"{self.form}: batch={self.batch}; give at least 1")
        if self.draft_passes is None and self.drafter.model is not None:
            object.__setattr__(self, "draft_passes", replace(self.target, model=self.drafter.model))

    @property
    def max_tree_tokens(self) -> int:
        return MAX_TREE_TOKENS

    @property
    def step_s(self) -> float:
        return self.overheads.step_s

    @property
    def round_s(self) -> float:
        return self.overheads.round_s

    def policy_step(self) -> float:
        return self.overheads.policy_step_s

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        overhead_s = self.overheads.draft_step(place) + np.zeros(np.shape(tokens.cached))
        if self.draft_passes is None:
            return overhead_s
        if self.drafter.at_once:  # by the first step, on every sequence's last state
            last = BatchTokens.alike(tokens.sequences, 1, tokens.cached / tokens.sequences)
            return np.where(np.asarray(place) == 0, self.draft_passes.batch_seconds(last), 0.0) + overhead_s
        pass_s: Seconds = self.draft_passes.batch_seconds(tokens)
        return pass_s + overhead_s


@dataclass(frozen=True, repr=False)
class RooflineCost(PassCost):
    """Costs of a target and a drafter, from their shapes and the hardware's ceilings.

    target : the target's passes
    drafter : how drafts are made
    draft_passes : the passes of `drafter.model`; default: on the target's hardware, as its own
    batch : sequences in lockstep; times are the batch's
    overheads : overhead of a round besides its passes
    covered : ranges of the calibration; `notes` names requests beyond them

    Raises InputError for a batch below 1.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> from specsim.cost.roofline.cost import RooflineCost, find_drafter
    >>> from specsim.cost.roofline.hardware import find_hardware
    >>> from specsim.cost.roofline.passes import Roofline
    >>> target = Roofline(find_architecture("llama-3.1-8b"), find_hardware("h100"))
    >>> cost = RooflineCost(target, find_drafter("llama-3.2-1b", target.model))
    >>> bool(cost.verify(5, 1000) < 1.1 * cost.autoregressive_step(1000))
    True
    """

    target: Roofline
    drafter: Drafter
    draft_passes: Roofline | None = None
    batch: int = 1
    overheads: Overheads = field(default_factory=Overheads)
    covered: Covered | None = None

    form = "roofline"

    @property
    def subject(self) -> str:
        """Models and hardware, in words."""
        of = self.target
        devices = f"{of.tensor_parallel} x {of.hardware.name}" if of.tensor_parallel > 1 else of.hardware.name
        drafter = self.drafter.model.name if self.drafter.model else self.drafter.kind
        weights = f", weights {of.weights}" if of.weights else ""
        return f"{of.model.name} with {drafter} on {devices} in {of.dtype}{weights}"

    def verify_operations(self, tokens: BatchTokens) -> list[Operation]:
        """Operations of verification; drafting may have run the first layers for all but each draft's last token."""
        shared, model = self.drafter.shared_layers, self.target.model
        if not shared:
            return self.target.batch_operations(tokens)
        above = replace(self.target, model=model.first(model.num_layers - shared))
        last = BatchTokens.alike(tokens.sequences, 1, tokens.cached / tokens.sequences)
        return [*above.batch_operations(tokens), *self.target.layers(model.first(shared), last)]

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        return self.target.total(self.verify_operations(tokens))

    def batch_tree_verify(self, tokens: BatchTokens) -> Seconds:
        """A pass, and a launch to compact the cache where tokens can be rejected."""
        return self.batch_verify(tokens) + (tokens.new > tokens.sequences) * self.target.derating.launch_s

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        covered = self.covered
        if covered is None:
            return ["roofline, not calibrated"]
        beyond = []
        if covered.subject != self.subject:
            beyond.append(f"{self.subject}, calibrated on {covered.subject}")
        if max_draft_tokens > covered.draft_tokens[1]:
            beyond.append(f"drafts of up to {max_draft_tokens} tokens, calibrated to {covered.draft_tokens[1]}")
        if max_draft_tokens + 1 > covered.verify_tokens[1]:
            beyond.append(f"passes of up to {max_draft_tokens + 1} tokens, calibrated to {covered.verify_tokens[1]}")
        low, high = covered.contexts
        if contexts[0] < low or contexts[1] > high:
            beyond.append(f"contexts {contexts[0]} to {contexts[1]}, calibrated on {low} to {high}")
        if self.batch not in covered.batches:
            beyond.append(f"batch {self.batch}, calibrated on {', '.join(map(str, covered.batches))}")
        return [f"extrapolated: {note}" for note in beyond]
