"""The parts of a model: its embedding, stacks of its layers with their own caches, its norm and its head.

Drafters inside the target run some of its layers and share their keys and values with verification. There are two
forms: any Llama-like model through its own modules, here, and the fused form of `realrun.lm.llama`. A layer runs as a
whole, so that its norms, its MLP and its scaling may be of any kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from realrun.lm.cached import (
    FULL,
    MASKED_ATTENTION,
    SLIDING,
    CachedLM,
    grown,
    layer_types,
    refuse_recurrent_layers,
    window_of,
    within_window,
)
from realrun.lm.llama import FusedParts, supported
from realrun.lm.variants import NOTHING, SkippedSublayers, shallow_copy
from specsim.io.errors import InputError

TRIED_TOKENS = 8


class LayerStack(Protocol):
    """Consecutive layers and a buffer slot per cached row; the caller knows which slots are taken."""

    def run(
        self,
        x: torch.Tensor,
        start: int,
        positions: slice | torch.Tensor,
        mask: torch.Tensor | None,
        skip: SkippedSublayers = NOTHING,
        layers: range | None = None,
    ) -> torch.Tensor:
        """Compute hidden states [n, d] from x [n, d]; keys and values enter slots `start` and on.

        positions : of the rows in the text; mask : from `ModelParts`, None if all rows see all slots
            before `start` and their own; skip : sublayers to skip, numbered within the stack; layers : of the
            stack, those to run, all unless given
        """

    def fill(self, x: torch.Tensor, start: int, positions: slice) -> None:
        """Write only the keys and values of rows x [n, d]. Stacks of `LibraryParts` must have a single layer."""

    def move(self, slots: Sequence[int], start: int) -> None:
        """Copy the keys and values of these slots, in place, to slots `start` and on."""


class ModelParts(Protocol):
    """The parts of a pass over a model. `layers`, `norm` and `head` are the library's modules."""

    def stack(self, layers: Sequence[Any]) -> LayerStack:
        """Make a stack of these layers with empty caches."""

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Look up embeddings [n, d]."""

    def normed(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        """Apply a final norm to [n, d]."""

    def logits(self, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        """Compute logits [n, V]."""

    def causal_mask(self, n: int, end: int) -> torch.Tensor | None:
        """Make the mask of n rows that enter slots end - n .. end - 1: each sees all slots up to its own."""

    def tree_mask(self, visible: torch.Tensor, end: int) -> torch.Tensor | None:
        """Make the mask of n rows that enter slots end - n .. end - 1.

        visible : bool [n, k] on the CPU, which of the last k slots each row sees; all see the slots before those
        """


class PartsLM(CachedLM):
    """A pass made of a model's parts, which ends with a norm and a head.

    parts, norm, head : set before `CachedLM.__init__`
    """

    parts: ModelParts
    norm: Any
    head: Any

    def reset(self) -> None:
        self.length = self.nodes = 0
        self.hidden = None

    def finish(self, x: torch.Tensor, keep: int) -> torch.Tensor:
        """Compute logits after the last `keep` rows of the last layer's output, or all if 0."""
        hidden = self.parts.normed(x[-keep:] if keep else x, self.norm)
        if self.keep_hidden:
            self.hidden = hidden
        return self.parts.logits(hidden, self.head)

    def node_positions(self, depths: Sequence[int]) -> torch.Tensor:
        """Give the positions [n] of tree nodes of these depths."""
        return torch.tensor([self.length + depth for depth in depths], device=self.device)

    def check_trees(self) -> None:
        """Do nothing: every model that comes in parts reads tree masks."""

    def _crop(self, end: int) -> None:
        """Do nothing: slots behind the tokens are never read."""


def model_parts(model: PreTrainedModel) -> ModelParts:
    """Choose the fastest form for this model; InputError if its parts do not make the whole."""
    if supported(model):
        return FusedParts(model)
    refuse_recurrent_layers(model, "whose states a drafter inside the target cannot share")
    parts = LibraryParts(model)
    _check_sum_of_parts(parts, model)
    return parts


@torch.inference_mode()
def _check_sum_of_parts(parts: LibraryParts, model: Any) -> None:
    """Raise InputError unless the parts, run in turn, give the whole model's logits for a few tokens.

    Many models name their parts as Llama does and use them differently: they scale the embeddings or the logits.
    """
    tokens = _tried_tokens(model)
    whole = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].double()
    reason = "they do not fit together"
    try:
        stack, half = parts.stack(model.model.layers), TRIED_TOKENS // 2
        for start in (0, half):
            end = start + half
            x = stack.run(parts.embed(tokens[start:end]), start, slice(start, end), parts.causal_mask(half, end))
        joined = parts.logits(parts.normed(x, model.model.norm), model.get_output_embeddings()).double()
        none = whole[half:].isneginf() & joined.isneginf()  # of tokens that the head leaves out
        joined, whole = joined.masked_fill(none, 0), whole[half:].masked_fill(none, 0)
        error = float((joined - whole).norm() / whole.norm())
        if error <= _rounding(model):
            return
        reason = "their logits are not those of the whole"
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        pass
    raise InputError(
        f"{type(model).__name__} has parts like a Llama's and joins them otherwise ({reason}), so no drafter can live "
        "inside it; choose a Llama-like target, or an independent draft model"
    )


@torch.inference_mode()
def check_head(model: Any) -> None:
    """Raise InputError unless the model's logits are its head's output, `capped`, for the states that it is fed."""
    lm = CachedLM(model)
    lm.keep_hidden = True
    whole = lm.forward(_tried_tokens(model)).double()
    parts = capped(model.config, model.get_output_embeddings()(lm.hidden)).double()
    if not float((parts - whole).norm()) <= _rounding(model) * float(whole.norm()):
        raise InputError(
            f"{type(model).__name__} changes what its head gives, so that nothing else can draft with this head; "
            "choose another target, or another drafter"
        )


def _tried_tokens(model: Any) -> list[int]:
    return [(7 * i + 1) % int(model.config.vocab_size) for i in range(TRIED_TOKENS)]


def _rounding(model: Any) -> float:
    """Give the relative difference allowed between two ways of computing the same logits.

    The library's eager attention takes its softmax in float32 whatever the model's type.
    """
    return float(max(torch.finfo(dtype).eps for dtype in (model.dtype, torch.float32)) ** 0.5)


class LibraryParts:
    """The model's own modules."""

    def __init__(self, model: Any):
        self.model = model
        required = ("embed_tokens", "layers", "norm", "rotary_emb")
        lacks = [part for part in required if not hasattr(getattr(model, "model", None), part)]
        lacks = lacks or [part for part in ("self_attn", "mlp") if not hasattr(model.model.layers[0], part)]
        if lacks:
            raise InputError(
                f"{type(model).__name__} has no {lacks[0]} where Llama-like models have it, so no drafter can live "
                "inside it; choose a Llama-like target, or an independent draft model"
            )
        attention = model.config._attn_implementation
        if attention not in MASKED_ATTENTION:
            raise InputError(
                f"{attention} attention takes no mask; load {type(model).__name__} with attn_implementation "
                f"{' or '.join(MASKED_ATTENTION)}"
            )
        # `type_of` looks at the layer alone because drafters have layers of their own; it must agree with the model.
        self.types, self.window = layer_types(model.config), window_of(model.config)
        if [self.type_of(layer) for layer in model.model.layers] != self.types:
            raise InputError(
                f"{type(model).__name__} does not say which of its layers have a sliding window, so no drafter can "
                "live inside it; choose a model whose every layer has full attention, or an independent draft model"
            )

    def type_of(self, layer: Any) -> str:
        """Decide whether a layer of this kind of model has a window."""
        if self.window is None or FULL not in self.types:
            return self.types[0]
        return SLIDING if getattr(layer.self_attn, "sliding_window", None) else FULL

    def places(
        self, x: torch.Tensor, positions: torch.Tensor, types: Iterable[str]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Compute rotary embeddings of rows [1, n, d] at these positions, for each type of layer."""
        rotary = self.model.model.rotary_emb
        if hasattr(rotary, "layer_types"):  # Gemma 3 has other angles for layers with windows
            return {kind: rotary(x, positions[None], kind) for kind in types}
        return dict.fromkeys(types, rotary(x, position_ids=positions[None]))

    def stack(self, layers: Sequence[Any]) -> LibraryStack:
        return LibraryStack(self, layers)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.model.model.embed_tokens(torch.tensor(tokens, device=self.model.device))

    def normed(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        return norm(x)

    def logits(self, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        return capped(self.model.config, head(hidden))

    def causal_mask(self, n: int, end: int) -> torch.Tensor | None:
        return None if n == 1 else self.tree_mask(torch.ones(n, n, dtype=torch.bool).tril_(), end)

    def tree_mask(self, visible: torch.Tensor, end: int) -> torch.Tensor | None:
        if len(visible) == 1 and bool(visible.all()):
            return None
        dtype = self.model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
        return F.pad(mask, (end - visible.shape[1], 0)).to(self.model.device)[None, None]


def capped(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Apply the soft cap on logits of models that have a cap (Gemma 2)."""
    cap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def layer_pass(model: Any, layer: Any, x: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Run a layer of this model's kind over rows x [B, n, d], without a cache: [B, n, d].

    positions : [n]; seen : bool [n, n], which rows each sees, windows aside
    """
    parts = LibraryParts(model)
    kind = parts.type_of(layer)
    if kind == SLIDING:
        assert parts.window is not None
        seen = within_window(seen, positions, positions, parts.window)
    mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(~seen, torch.finfo(x.dtype).min)
    places = parts.places(x, positions, [kind])[kind]
    output = layer(x, attention_mask=mask[None, None], position_ids=positions[None], position_embeddings=places)
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


class LibraryStack:
    """The modules of consecutive layers. The stack is itself the cache that their attention writes and reads.

    slot_positions : [room], position of each slot's token
    """

    def __init__(self, parts: LibraryParts, layers: Sequence[Any]):
        self.parts, self.layers = parts, layers
        self.types = [parts.type_of(layer) for layer in layers]
        self.buffers: dict[int, list[torch.Tensor]] = {}  # keys and values [1, Hkv, room, D] by the attention's number
        self.start = 0
        self.slot_positions = torch.empty(0, dtype=torch.long, device=parts.model.device)
        self._silenced: dict[tuple[int, bool, bool], Any] = {}

    def run(
        self,
        x: torch.Tensor,
        start: int,
        positions: slice | torch.Tensor,
        mask: torch.Tensor | None,
        skip: SkippedSublayers = NOTHING,
        layers: range | None = None,
    ) -> torch.Tensor:
        self.start = start
        x = x[None]
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=x.device)
        self.slot_positions = torch.cat([self.slot_positions[:start], positions])
        places = self.parts.places(x, positions, {*self.types})
        masks = {FULL: mask, SLIDING: self._windowed(mask, positions) if SLIDING in self.types else mask}
        for number in range(len(self.layers)) if layers is None else layers:
            layer, kind = self.layers[number], self.types[number]
            silent = number in skip.attention, number in skip.mlp
            if all(silent):
                continue
            output = (self._without(number, *silent) if any(silent) else layer)(
                x,
                attention_mask=masks[kind],
                position_ids=positions[None],
                past_key_values=self,
                use_cache=True,
                position_embeddings=places[kind],
            )
            x = output[0] if isinstance(output, tuple) else output
        return x[0]

    def _windowed(self, mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """Make the additive mask [1, 1, n, end] of layers with a window."""
        window, dtype = self.parts.window, self.parts.model.dtype
        assert window is not None
        if mask is None:
            shape = 1, 1, len(positions), len(self.slot_positions)
            mask = torch.zeros(shape, dtype=dtype, device=positions.device)
        return within_window(mask, positions, self.slot_positions, window)

    def _without(self, number: int, attention: bool, mlp: bool) -> Any:
        """Copy a layer, on the same parameters, so that its attention or MLP adds nothing."""
        key = number, attention, mlp
        if key not in self._silenced:
            own, whole = shallow_copy(self.layers[number]), self.layers[number]
            if attention:
                own.self_attn = Silent(pairs=True)
            if mlp:  # mixtures of experts may return the router's choice as well
                x = torch.zeros(1, 1, int(self.parts.model.config.hidden_size), dtype=self.parts.model.dtype)
                own.mlp = Silent(pairs=isinstance(whole.mlp.forward(x.to(self.parts.model.device)), tuple))
            self._silenced[key] = own
        return self._silenced[key]

    def fill(self, x: torch.Tensor, start: int, positions: slice) -> None:
        assert len(self.layers) == 1
        self.run(x, start, positions, None)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any) -> tuple[torch.Tensor, ...]:
        """Cache keys and values [1, Hkv, n, D] and return all up to their end; the library's attention calls it."""
        end = self.start + keys.shape[2]
        parts = self.buffers.setdefault(layer, [part[:, :, :0] for part in (keys, values)])
        parts[:] = [grown(part, end) for part in parts]
        for part, new in zip(parts, (keys, values), strict=True):
            part[:, :, self.start : end] = new
        return tuple(part[:, :, :end] for part in parts)

    def move(self, slots: Sequence[int], start: int) -> None:
        source = torch.tensor(slots, device=self.slot_positions.device)
        self.slot_positions[start : start + len(slots)] = self.slot_positions[source]
        for parts in self.buffers.values():
            for part in parts:
                part[:, :, start : start + len(slots)] = part[:, :, source]


class Silent(torch.nn.Module):
    """A sublayer that returns zeros.

    pairs : whether it returns a pair, as attention does
    """

    def __init__(self, *, pairs: bool):
        super().__init__()
        self.pairs = pairs

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.pairs else zeros
