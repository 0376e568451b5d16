"""A model taken apart: its embedding, stacks of its layers with their own caches, its norm and its head.

Drafters that live inside the target run some of its layers and share their keys and values
with verification. Two forms: of any Llama-like model through its own modules, here, and the lean
one of `realrun.lm.llama`. A layer runs as a whole, so that where it norms, what its MLP is and how it
scales what it adds is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from realrun.lm.cached import MASKED_ATTENTION, CachedLM
from realrun.lm.llama import FusedParts, supported
from realrun.lm.variants.block_expansion import shallow
from realrun.lm.variants.skipped_layers import NOTHING, SkippedSublayers
from realrun.lm.windows import FULL, SLIDING, layer_types, window_of, within_window
from specsim.errors import InputError

FIRST_ROOM = 256  # slots that the buffers hold at first
TRIED_TOKENS = 8


class LayerStack(Protocol):
    """Consecutive layers and one buffer slot per cached row; the caller knows which slots are taken."""

    def run(
        self,
        x: torch.Tensor,
        start: int,
        positions: slice | torch.Tensor,
        mask: torch.Tensor | None,
        skip: SkippedSublayers = NOTHING,
    ) -> torch.Tensor:
        """Hidden states [n, d] for input x [n, d]; keys and values enter slots `start` and on.

        positions : of the rows in the text; mask : from `ModelParts`, None if all rows see all slots
            before `start` and their own; skip : sublayers passed over, numbered within the stack
        """

    def fill(self, x: torch.Tensor, start: int, positions: slice) -> None:
        """Of a stack of one layer, the keys and values of rows x [n, d], whose output is not needed."""

    def move(self, slots: Sequence[int], start: int) -> None:
        """Copy the keys and values of these slots, in place, to slots `start` and on."""


class ModelParts(Protocol):
    """What a pass over a model is made of. `layers`, `norm` and `head` are the library's modules."""

    def stack(self, layers: Sequence[Any]) -> LayerStack:
        """A stack of these layers with empty caches."""

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """[n, d]"""

    def normed(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        """[n, d] after a final norm."""

    def logits(self, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        """[n, V]"""

    def causal_mask(self, n: int, end: int) -> torch.Tensor | None:
        """For n rows that enter slots end - n .. end - 1: each sees all slots up to its own."""

    def tree_mask(self, visible: torch.Tensor, end: int) -> torch.Tensor | None:
        """For n rows that enter slots end - n .. end - 1: which of the last k slots each sees, bool [n, k] on the CPU.

        All see the slots before those.
        """


def model_parts(model: PreTrainedModel) -> ModelParts:
    """The leanest form for this model; InputError where it cannot be taken apart."""
    if supported(model):
        return FusedParts(model)
    pieces = LibraryPieces(model)
    _check_sum_of_parts(pieces, model)
    return pieces


@torch.inference_mode()
def _check_sum_of_parts(pieces: LibraryPieces, model: Any) -> None:
    """InputError unless the pieces, one after another, say about a few tokens what the whole model says.

    Many models name their parts as Llama does and use them otherwise: what is fed to the first layer is scaled,
    or logits are.
    """
    tokens = _tried_tokens(model)
    whole = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].double()
    found = "they do not fit together"
    try:
        stack, half = pieces.stack(model.model.layers), TRIED_TOKENS // 2
        for start in (0, half):
            end = start + half
            x = stack.run(pieces.embed(tokens[start:end]), start, slice(start, end), pieces.causal_mask(half, end))
        parts = pieces.logits(pieces.normed(x, model.model.norm), model.get_output_embeddings()).double()
        error = float((parts - whole[half:]).norm() / whole[half:].norm())
        if error <= _rounding(model):
            return
        found = f"their logits differ by {100 * error:.2g} % from those of the whole"
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        pass
    raise InputError(
        f"{type(model).__name__} has parts like a Llama's and joins them otherwise ({found}), so no drafter can live "
        "inside it; choose a Llama-like target, or an independent draft model"
    )


@torch.inference_mode()
def check_head(model: Any) -> None:
    """InputError unless the model's logits are what its head makes of the states that it is fed, as `capped`."""
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
    """By what share two ways of computing the same logits may differ.

    The library's eager attention takes its softmax in float32 whatever the model's type.
    """
    return float(max(torch.finfo(dtype).eps for dtype in (model.dtype, torch.float32)) ** 0.5)


class LibraryPieces:
    """The model's own modules."""

    def __init__(self, model: Any):
        self.model = model
        parts = ("embed_tokens", "layers", "norm", "rotary_emb")
        lacks = [part for part in parts if not hasattr(getattr(model, "model", None), part)]
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
        # What `type_of` finds out of the layers alone, as a drafter may have layers of its own, is what the model says.
        self.types, self.window = layer_types(model.config), window_of(model.config)
        if [self.type_of(layer) for layer in model.model.layers] != self.types:
            raise InputError(
                f"{type(model).__name__} does not say which of its layers have a sliding window, so no drafter can "
                "live inside it; choose a model whose every layer has full attention, or an independent draft model"
            )

    def type_of(self, layer: Any) -> str:
        """Whether a layer of this kind of model has a window."""
        if self.window is None or FULL not in self.types:
            return self.types[0]
        return SLIDING if getattr(layer.self_attn, "sliding_window", None) else FULL

    def places(self, x: torch.Tensor, positions: torch.Tensor, types: Iterable[str]) -> dict[str, Any]:
        """Rotary embeddings of rows [1, n, d] at these positions, for each type of layer."""
        rotary = self.model.model.rotary_emb
        if hasattr(rotary, "layer_types"):  # as Gemma 3's, which turns by its own angles in windows
            return {one: rotary(x, positions[None], one) for one in types}
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
    """What a head gives, within the cap of models that have one (Gemma 2)."""
    cap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def layer_pass(model: Any, layer: Any, x: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """What a layer of this model's kind makes of rows x [B, n, d], without a cache: [B, n, d].

    positions : [n]; seen : bool [n, n], which rows each sees, windows aside
    """
    pieces = LibraryPieces(model)
    kind = pieces.type_of(layer)
    if kind == SLIDING:
        assert pieces.window is not None
        seen = within_window(seen, positions, positions, pieces.window)
    mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(~seen, torch.finfo(x.dtype).min)
    places = pieces.places(x, positions, [kind])[kind]
    made = layer(x, attention_mask=mask[None, None], position_ids=positions[None], position_embeddings=places)
    out: torch.Tensor = made[0] if isinstance(made, tuple) else made
    return out


class LibraryStack:
    """The modules of consecutive layers. It is itself the cache that their attention writes to and reads.

    slot_positions : [room], of what lies in each slot
    """

    def __init__(self, pieces: LibraryPieces, layers: Sequence[Any]):
        self.pieces, self.layers = pieces, layers
        self.types = [pieces.type_of(layer) for layer in layers]
        self.buffers: dict[int, list[torch.Tensor]] = {}  # keys and values [1, Hkv, room, D] by the attention's number
        self.start = 0
        self.slot_positions = torch.empty(0, dtype=torch.long, device=pieces.model.device)
        self._silenced: dict[tuple[int, bool, bool], Any] = {}

    def run(
        self,
        x: torch.Tensor,
        start: int,
        positions: slice | torch.Tensor,
        mask: torch.Tensor | None,
        skip: SkippedSublayers = NOTHING,
    ) -> torch.Tensor:
        self.start = start
        x = x[None]
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=x.device)
        self.slot_positions = torch.cat([self.slot_positions[:start], positions])
        places = self.pieces.places(x, positions, {*self.types})
        masks = {FULL: mask, SLIDING: self._windowed(mask, positions) if SLIDING in self.types else mask}
        for number, (layer, kind) in enumerate(zip(self.layers, self.types, strict=True)):
            silent = number in skip.attention, number in skip.mlp
            if all(silent):
                continue
            made = (self._without(number, *silent) if any(silent) else layer)(
                x,
                attention_mask=masks[kind],
                position_ids=positions[None],
                past_key_values=self,
                use_cache=True,
                position_embeddings=places[kind],
            )
            x = made[0] if isinstance(made, tuple) else made
        return x[0]

    def _windowed(self, mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """The additive mask [1, 1, n, end] of layers with a window."""
        window, dtype = self.pieces.window, self.pieces.model.dtype
        assert window is not None
        if mask is None:
            shape = 1, 1, len(positions), len(self.slot_positions)
            mask = torch.zeros(shape, dtype=dtype, device=positions.device)
        return within_window(mask, positions, self.slot_positions, window)

    def _without(self, number: int, attention: bool, mlp: bool) -> Any:
        """A layer, on the same parameters, whose attention or MLP adds nothing."""
        key = number, attention, mlp
        if key not in self._silenced:
            own, whole = shallow(self.layers[number]), self.layers[number]
            if attention:
                own.self_attn = Silent(pairs=True)
            if mlp:  # mixtures of experts may give their router's choice as well
                x = torch.zeros(1, 1, int(self.pieces.model.config.hidden_size), dtype=self.pieces.model.dtype)
                own.mlp = Silent(pairs=isinstance(whole.mlp.forward(x.to(self.pieces.model.device)), tuple))
            self._silenced[key] = own
        return self._silenced[key]

    def fill(self, x: torch.Tensor, start: int, positions: slice) -> None:
        assert len(self.layers) == 1
        self.run(x, start, positions, None)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any) -> tuple[torch.Tensor, ...]:
        """What the library's attention calls: keep [1, Hkv, n, D], and return all up to their end."""
        end = self.start + keys.shape[2]
        parts = self.buffers.setdefault(layer, [part[:, :, :0] for part in (keys, values)])
        have = parts[0].shape[2]
        if end > have:
            room = max(end, 2 * have, FIRST_ROOM) - have
            parts[:] = [F.pad(part, (0, 0, 0, room)) for part in parts]
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
    """A sublayer that gives zeros.

    pairs : whether it gives something beside them, as attention does
    """

    def __init__(self, *, pairs: bool):
        super().__init__()
        self.pairs = pairs

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.pairs else zeros
