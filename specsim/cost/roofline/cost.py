"""The cost model of a target and a drafter on a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchCost, BatchTokens, DoesNotFit
from specsim.cost.model import MAX_SECONDS, MAX_TREE_TOKENS
from specsim.cost.roofline.architecture import (
    OTHER_MODEL,
    config_path,
    find_architecture,
    find_model,
    model_config,
    public_shapes,
    published_head,
)
from specsim.cost.roofline.config import ModelConfig
from specsim.cost.roofline.drafters import CLASSES, ONE_PASS, drafter_config
from specsim.cost.roofline.families import architecture_from_config
from specsim.cost.roofline.hardware import GGUF_BITS
from specsim.cost.roofline.passes import Operation, Roofline
from specsim.cost.roofline.published import (
    Error,
    batch_class,
    calibrated_error,
    correction_notes,
    error_note,
    published_error,
    unknown_error,
)
from specsim.cost.roofline.shape import MAX_SIZE, Architecture, Attention, LinearAttention, Mlp
from specsim.io.arrays import Floats, Seconds
from specsim.io.errors import InputError
from specsim.io.names import find_name, known_name, plain

PLAIN = ("eagle", "eagle3", "mtp", "edd", "vdm", "space", "prompt-lookup")  # without a number
NUMBERED = {"eesd": "layers", "self-sd": "layers", "medusa": "heads", "block": "layers"}  # with this number
KINDS = ("model", *PLAIN, *NUMBERED)
SIZES = ("vocabulary", "hidden_size", "intermediate_size")
SIZED = {"eagle": SIZES[:1], "eagle3": SIZES, "block": SIZES}  # may have sizes of their own
EAGLE3_VOCABULARY = 32000  # tokens that released EAGLE-3 drafters can draft
BLOCK_LAYERS = 5  # of published DFlash, DSpark and Domino drafters
OWN_NAMES = ("dflash", "dspark", "p-eagle", "pard", "suffix")  # names of methods that share a kind with others
LOOKUPS = ("suffix", "ngram-gpu", "ngram-simple", "ngram-mod", "ngram-map-k", "ngram-map-k4v", "ngram-cache")
DRAFT_MODELS = (
    "model",
    "draftmodel",
    "draft",
    "draftsimple",
    "standalone",
)  # names that do not tell which model drafts
CONSUMER = re.compile("GeForce|Radeon|Ryzen|Apple|Arc")  # titles of consumer GPUs
PROCESSOR = re.compile("EPYC|Xeon|CPU")
LARGEST_NUMBER = 64  # of MEDUSA's heads, and of a block drafter's layers


@dataclass(frozen=True)
class Drafter:
    """How a drafter drafts.

    kind : "model", or a kind of `find_drafter`
    model : whose passes draft; None where no pass does
    shared_layers : first layers of the target that drafting has run already where the target verifies, EESD's
    method : the drafter's own name in engines, where several are of its kind, such as "dflash" or "suffix"; else empty
    block : longest draft that it was trained for; 0: not known
    """

    kind: str
    model: Architecture | None = None
    shared_layers: int = 0
    method: str = ""
    block: int = 0

    @property
    def at_once(self) -> bool:
        """Whether a single pass drafts all tokens, as MEDUSA's heads do."""
        return self.kind in ("medusa", "block")

    @property
    def reads_verified(self) -> bool:
        """Whether a round's first pass reads all tokens that the last one verified, as engines run EAGLE-3 and MTP."""
        return self.kind in ("eagle3", "mtp") and not self.borrows_cache

    @property
    def borrows_cache(self) -> bool:
        """Whether it attends to the target's KV cache and has no cache of its own, as Gemma-4's assistant."""
        attention = self.model.of(Attention) if self.model else []
        return bool(attention) and all(block.values == "shared" for block in attention)


def find_drafter(drafter: str | Mapping[str, Any], target: Architecture) -> Drafter:
    """A drafter of this target.

    drafter : a draft model as of `find_architecture`, or a kind, or an object with a kind and its numbers:

        "eagle", "edd", "vdm" : a dense layer of the target's shape and its head; EAGLE may draft of a part of the
            vocabulary, ``{"kind": "eagle", "vocabulary": 8192}``
        "eagle3" : three states of the target are projected to one, a dense layer attends to it and an embedding, and a
            head of its own drafts 32,000 tokens; ``{"kind": "eagle3", "vocabulary": 32000, "hidden_size": ...,
            "intermediate_size": ...}``; default: those of the head that is published for the target, else the
            target's
        "mtp" : multi-token prediction, a state and an embedding are projected to one, then a layer of the target's own
            kind, with its experts, and its head; for Gemma-4 the small model that is published for it, which attends
            to the target's cache
        ``{"kind": "block", "layers": N}`` : N dense layers that draft all tokens in one pass, as DFlash, P-EAGLE and
            PARD do; sizes as of "eagle3", default: the target's
        ``{"kind": "medusa", "heads": K}``
        ``{"kind": "eesd", "layers": N}`` : an exit layer after the target's first N
        ``{"kind": "self-sd", "layers": N}`` : N of the target's layers
        "space", "prompt-lookup" : no pass makes the drafts

        In short "block:N", "medusa:K", "eesd:N", "self-sd:N". Engines' names stand for these kinds: "ngram", "suffix",
        "deepseek_mtp", "NEXTN", "dflash:N"; "dflash" alone has the 5 layers of the published ones. A drafter's own
        config.json, or its folder, gives its kind and sizes.

    Raises InputError for a kind that is not known, or a number that does not fit the target.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> from specsim.cost.roofline.cost import find_drafter
    >>> find_drafter("eagle", find_architecture("llama-2-7b")).model.parameters
    498085888
    """
    method = ""
    if isinstance(drafter, str):
        if find_model(drafter) is None and config_path(drafter).is_file():
            drafter = model_config(drafter)
        else:
            drafter, method = _named_drafter(drafter)
            method = method if method in OWN_NAMES else ""
    keys = ModelConfig(drafter, getattr(drafter, "name", "inline"))
    if "model_type" in keys or "architectures" in keys:
        return _drafter_of_config(keys, target)
    if set(keys) == {"model"}:
        return Drafter("model", find_architecture(str(keys["model"])))
    kind = str(keys.get("kind"))
    number, sized = NUMBERED.get(kind, ""), SIZED.get(kind, ())
    if kind not in KINDS[1:] or set(keys) - {"kind", number, *sized}:
        raise InputError(
            f"roofline: drafter {dict(keys)!r:.80} is unknown; give a model, {', '.join(PLAIN)}, or an object with "
            "kind eesd, self-sd, medusa or block and its layers or heads"
        )
    layers = target.num_layers - 1 if kind in ("eesd", "self-sd") else LARGEST_NUMBER
    most = {number: layers, **dict.fromkeys(sized, MAX_SIZE - 1), "vocabulary": target.vocab_size}
    for key in sorted({number, *keys} - {"", "kind"}):
        value, short = keys.get(key, 0), f", such as {kind}:4" if key == number else ""
        if type(value) is not int or not 1 <= value <= most[key]:
            raise InputError(f"roofline: drafter {kind} has {key}={value!r}; give 1 to {most[key]}{short}")
    value, name = keys.get(number, 0), f"{kind} of {target.name}"
    drafted = min(EAGLE3_VOCABULARY, target.vocab_size) if kind == "eagle3" else target.vocab_size
    layer = replace(target.first(0, name), vocab_size=keys.get("vocabulary", drafted), tables=0, projected_width=0,
                    streams=1)  # fmt: skip
    hidden = target.hidden_size

    def dense(layers: int = 1) -> Architecture:
        """A dense model of the target's heads, or of sizes of its own."""
        sizes = {key: keys[key] for key in SIZES[1:] if key in keys}
        blocks = target.plain_attention, Mlp(sizes.get("intermediate_size", target.intermediate_size))
        return replace(layer, layers=(blocks,) * layers, tied=False, **sizes)

    match kind:
        case "eagle":
            return Drafter(kind, replace(layer, layers=(target.dense_layer,), projected_width=2 * hidden))
        case "edd" | "vdm":
            return Drafter(kind, replace(layer, layers=(target.dense_layer,)))
        case "eagle3":
            if (sizes := published_head("eagle3", target)) and not {*SIZES[1:]} & set(keys):
                one_layer = {"num_hidden_layers": 1, "vocab_size": layer.vocab_size, "model_type": "llama", **sizes}
                return _eagle3(architecture_from_config(ModelConfig(one_layer, name)), target)
            return _eagle3(dense(), target)
        case "mtp":
            if assistant := published_head("mtp", target):
                return _assistant(ModelConfig(assistant, name))
            return Drafter(kind, replace(layer, layers=(target.predicting_layer,), projected_width=2 * hidden))
        case "block":
            return Drafter(kind, dense(layers=value), method=method)
        case "eesd":
            return Drafter(kind, target.first(value + 1, name), shared_layers=value)
        case "self-sd":
            return Drafter(kind, target.first(value, name))
        case "medusa":
            return Drafter(kind, replace(layer, medusa_heads=value))
    return Drafter(kind, method=method)


def _eagle3(head: Architecture, target: Architecture) -> Drafter:
    """EAGLE-3 with this layer, which attends to a projected state and an embedding."""
    return Drafter("eagle3", replace(head.attending(states=2), projected_width=3 * target.hidden_size))


def _assistant(config: ModelConfig) -> Drafter:
    """Gemma-4's assistant: a small model that attends to the target's cache and projects from and to its states."""
    text = ModelConfig({"model_type": "gemma4_text"}, config.name) | config.inner("text_config")
    model = architecture_from_config(text | {"num_kv_shared_layers": text.get("num_hidden_layers")})
    if config.get("use_ordered_embeddings"):  # scores clusters of tokens, then the tokens of the best clusters
        clusters = config.get("num_centroids", 2048)
        drafted = clusters + model.vocab_size // clusters * config.get("centroid_intermediate_top_k", 32)
        model = replace(model, vocab_size=drafted)
    return Drafter("mtp", replace(model, projected_width=3 * int(config["backbone_hidden_size"])))


def _named_drafter(name: str) -> tuple[dict[str, int | str], str]:
    """The object that a drafter's name stands for (a kind, or {"model": name}) and its name in engines."""
    short, colon, number = name.partition(":")
    written = plain(short)
    if written in DRAFT_MODELS:
        raise InputError(f"drafter {name!r}: which model drafts? Give its name or config.json, such as qwen3-0.6b")
    method = next((each for each in (*ONE_PASS, *LOOKUPS) if plain(each) == written), "")
    if method in LOOKUPS:
        return {"kind": "prompt-lookup"}, method
    if method:
        return {"kind": "block", "layers": _whole(number) if colon else BLOCK_LAYERS}, method
    kind = find_name("drafter", short, KINDS[1:])
    if kind is None and not find_model(name) and ("/" in name or written.endswith("mtp")):
        # A hub id such as z-lab/Qwen3-8B-DFlash-b16 names its kind, as deepseek_mtp does.
        kind = next((method for word, method in CLASSES.items() if word in plain(name)), None)
        if kind in ONE_PASS:
            return {"kind": "block", "layers": BLOCK_LAYERS}, kind
    if kind in NUMBERED:
        return {"kind": kind, **({NUMBERED[kind]: _whole(number)} if colon else {})}, ""
    if kind is not None and not colon:
        return {"kind": kind}, ""
    if not find_model(name):
        known_name("drafter", name, [*KINDS[1:], *public_shapes()], other=OTHER_MODEL)
    return {"model": name}, ""


def _whole(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _drafter_of_config(config: ModelConfig, target: Architecture) -> Drafter:
    """The drafter of a config.json: a published drafter, or a model that drafts."""
    own = drafter_config(config)
    if own is None:
        model = architecture_from_config(config)
        if model.num_layers == 1 and model.hidden_size == target.hidden_size:
            # EAGLE's published heads call themselves LlamaForCausalLM, and no model has one layer of a target's width.
            return Drafter("eagle", replace(model, projected_width=2 * target.hidden_size))
        return Drafter("model", model)
    if own.method == "mtp":
        return _assistant(config) if "backbone_hidden_size" in config else find_drafter("mtp", target)
    if own.method == "medusa":
        return find_drafter({"kind": "medusa", "heads": own.heads}, target)
    head = architecture_from_config(own.sizes)
    head = replace(head, vocab_size=own.vocabulary or target.vocab_size, tied=False)
    if own.method == "eagle3":
        return _eagle3(head, target)
    if own.method == "eagle":
        return Drafter("eagle", replace(head, projected_width=2 * target.hidden_size))
    return Drafter("block", head, method=own.method if own.method in OWN_NAMES else "", block=own.block)


@dataclass(frozen=True)
class Overheads:
    """Overheads in seconds, without the passes of target and drafter.

    step_s : per decode step and per round
    sequence_s : per sequence of a target pass
    verified_sequence_s : further seconds per sequence of a target pass that verifies drafts
    round_s : per round
    tree_round_s : further seconds per round with a tree
    policy_step_s : per decision whether to continue drafting
    draft_step_s : per draft step; below 0 if measured draft steps are faster than the roofline predicts
    cold_start_s : further seconds of the first draft step, if the target's pass evicts the drafter's weights from cache
    cold_start_ratio : factor by which `cold_start_s` shrinks at each further step
    """

    step_s: float = 0.0
    round_s: float = 0.0
    policy_step_s: float = 0.0
    draft_step_s: float = 0.0
    cold_start_s: float = 0.0
    cold_start_ratio: float = 0.0
    sequence_s: float = 0.0
    verified_sequence_s: float = 0.0
    tree_round_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = 1.0 if name == "cold_start_ratio" else MAX_SECONDS
            least = -MAX_SECONDS if name == "draft_step_s" else 0
            if not least <= value <= most:
                raise InputError(f"roofline: {name}={value}; give {least:g} to {most:g}")

    def draft_step(self, place: npt.ArrayLike) -> Seconds:
        """Overhead of the draft step at this place of a round, from 0."""
        return np.asarray(self.draft_step_s + self.cold_start_s * self.cold_start_ratio ** np.asarray(place))


@dataclass(frozen=True)
class Covered:
    """The measured ranges of a calibration, ends included, and their subject."""

    subject: str
    draft_tokens: tuple[int, int]
    verify_tokens: tuple[int, int]
    contexts: tuple[int, int]
    batches: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class RooflineCost(BatchCost):
    """Costs of a target and a drafter, from their shapes and the hardware's ceilings.

    target : the target's passes
    drafter : how drafts are made
    draft_passes : the passes of `drafter.model`; default: on the target's hardware, as its own
    batch : sequences in lockstep; times are the batch's
    overheads : overhead of a round besides its passes
    prompt_share : share of the prefill time of other requests that an output token waits for
    covered : ranges of the calibration; `notes` names requests beyond them
    engine : name of the inference engine whose overheads these are
    remarks : further lines of `notes`

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
    prompt_share: float = 1.0
    covered: Covered | None = None
    engine: str = ""
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InputError(f"roofline: batch={self.batch}; give at least 1")
        if self.draft_passes is None and self.drafter.model is not None:
            object.__setattr__(self, "draft_passes", replace(self.target, model=self.drafter.model))

    def with_passes(self, **changes: Any) -> RooflineCost:
        """A copy whose passes of target and drafter have these fields of `Roofline` changed."""
        draft_passes = self.draft_passes and replace(self.draft_passes, **changes)
        return replace(self, target=replace(self.target, **changes), draft_passes=draft_passes)

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

    def tree_round_overhead(self) -> float:
        return self.round_overhead() + self.overheads.tree_round_s

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        overhead_s = self.overheads.draft_step(place) + np.zeros(np.shape(tokens.cached))
        if self.draft_passes is None:
            return overhead_s
        place = np.asarray(place)
        first, count = place == 0, place + 1
        passes, context = self.draft_passes, tokens.cached / tokens.sequences - place

        def rows_s(rows: npt.ArrayLike, ends: bool = True) -> Seconds:
            return passes.batch_seconds(BatchTokens.alike(tokens.sequences, rows, context), ends=ends)

        if self.drafter.kind == "medusa":  # its pass counts in the first step, over the last state of every sequence
            return np.where(first, rows_s(1), 0.0) + overhead_s
        if self.drafter.kind == "block":  # each step counts the time that its token adds to the single pass
            later_s = rows_s(count) - rows_s(np.maximum(count - 1, 1))
            return np.where(first, rows_s(1) + overhead_s, later_s)
        pass_s = passes.batch_seconds(tokens)
        if self.drafter.kind == "eagle3":  # the first step projects the target's states
            later = replace(passes, model=replace(passes.model, projected_width=0))
            pass_s = np.where(first, pass_s, later.batch_seconds(tokens))
        if self.drafter.reads_verified:  # each step counts the time that its token adds to the next round's first pass
            pass_s = pass_s + rows_s(count + 1, ends=False) - rows_s(count, ends=False)
        return np.maximum(pass_s + overhead_s, 0.0)

    def catch_up(self, context: npt.ArrayLike) -> Seconds:
        read = self.drafter.reads_verified or self.drafter.borrows_cache
        return np.zeros(np.shape(context)) if read else super().catch_up(context)

    @property
    def subject(self) -> str:
        """Models and hardware, in words."""
        of = self.target
        devices = f"{of.tensor_parallel} x {of.hardware.name}" if of.tensor_parallel > 1 else of.hardware.name
        drafter = self.drafter.model.name if self.drafter.model else self.drafter.kind
        return f"{of.model.name} with {drafter} on {devices} in {of.dtype}{of.formats}"

    def missing_bytes(self, tokens: BatchTokens) -> Floats:
        """Bytes by which weights and caches before these passes exceed a device's memory; 0 if they fit."""
        memory_bytes = self.target.hardware.memory_bytes
        contexts = tokens.cached / tokens.sequences
        need_bytes = self.target.device_bytes(tokens.sequences, contexts)
        if self.drafter.kind == "model" and self.draft_passes is not None:  # others are small, or share weights
            need_bytes = need_bytes + self.draft_passes.device_bytes(tokens.sequences, contexts)
        return np.maximum(need_bytes - (memory_bytes or np.inf), 0.0)

    def check_memory(self, tokens: BatchTokens) -> None:
        """Raise DoesNotFit where weights and caches of such passes need more memory than there is."""
        missing_bytes = self.missing_bytes(tokens)
        if missing_bytes.any():
            raise DoesNotFit(
                f"roofline: weights and caches of {self.target.model.name} at batch {np.max(tokens.sequences):g} and "
                f"up to {np.max(tokens.cached / tokens.sequences):,.0f} cached tokens need "
                f"{missing_bytes.max() / 1e9:.1f} GB more than {self.target.hardware.name} has; choose a smaller batch "
                "or context, fewer bits, or more devices"
            )

    def verify_operations(self, tokens: BatchTokens) -> list[Operation]:
        """Operations of verification; drafting may have run the first layers for all but each draft's last token."""
        shared, model = self.drafter.shared_layers, self.target.model
        if not shared:
            return self.target.batch_operations(tokens)
        above = replace(self.target, model=model.after(shared))
        last = BatchTokens.alike(tokens.sequences, 1, tokens.cached / tokens.sequences)
        return [*above.batch_operations(tokens), *self.target.layers(model.first(shared), last)]

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        self.check_memory(tokens)
        passes_s = self.target.total(self.verify_operations(tokens))
        verifies = np.asarray(tokens.new - tokens.prompts > tokens.sequences)
        of_sequence_s = self.overheads.sequence_s + verifies * self.overheads.verified_sequence_s
        return passes_s + tokens.sequences * of_sequence_s

    def batch_tree_verify(self, tokens: BatchTokens) -> Seconds:
        """A pass, and a launch to compact the cache where tokens can be rejected."""
        return self.batch_verify(tokens) + (tokens.new > tokens.sequences) * self.target.derating.launch_s

    def kind(self, *, drafts: bool = True) -> tuple[str, ...]:
        """Features of the deployment that decide its error, see `Runs`. drafts : include the drafter"""
        model, weights = self.target.model, self.target.weights
        formats = weights.values() if isinstance(weights, Mapping) else [weights]
        words = {
            "dense": model.experts is None,
            "experts": model.experts is not None,
            "hybrid": model.count(LinearAttention) > 0,
            "integer weights": any(str(name).startswith("int") or name in GGUF_BITS for name in formats),
            "consumer GPU": bool(CONSUMER.search(self.target.hardware.title)),
            "CPU": bool(PROCESSOR.search(self.target.hardware.title)),
        }
        drafter = "eagle" if self.drafter.kind == "eagle3" else self.drafter.kind
        own = [word for word, holds in words.items() if holds]
        return (*own, *([drafter] if drafts else []), batch_class(self.batch))

    @property
    def _published(self) -> Error | None:
        return published_error("speedup", self.kind()) if self.engine else None

    @property
    def error_band(self) -> tuple[float, float] | None:
        return None if self.covered is not None or self._published is None else self._published.band

    @property
    def error_known(self) -> bool:
        return self.covered is not None or self._published is not None

    @property
    def speedup_error(self) -> tuple[float, float]:
        error = self._published
        bias, sd = (0.0, unknown_error("speedup")) if error is None else (error.mean, error.sd)
        if self.covered is None:
            return bias, sd
        between = min(self.covered.batches) <= self.batch <= max(self.covered.batches)
        experts = self.target.model.experts is not None
        return 0.0, calibrated_error(experts=experts, batch=self.batch) if between else sd

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        covered, joined = self.covered, self.target.hardware.link_devices
        slow = [
            f"{self.target.tensor_parallel} GPUs share a layer, but fast links join {joined}: all-reduces take longer"
        ]
        slow = slow if self.target.tensor_parallel > joined else []
        slow += [*self.target.notes, *self.remarks]
        if 0 < self.drafter.block < max_draft_tokens:
            slow.append(
                f"this drafter was trained for blocks of {self.drafter.block} drafted tokens: it accepts fewer beyond"
            )
        if covered is None:
            if not self.engine:
                return ["roofline, not calibrated", *slow]
            return [error_note("speedup", self.kind()), *correction_notes(self.speedup_error[0]), *slow]
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
        return [*(f"extrapolated: {note}" for note in beyond), *slow]
