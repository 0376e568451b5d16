"""A model taken apart: its embedding, stacks of its layers with their own caches, its norm and its head.

Drafters that live inside the target run some of its layers and share their keys and values
with verification. Two forms: of any Llama-like model through its own modules, here, and the lean
one of `realrun.lm.llama`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from realrun.lm.cached import MASKED_ATTENTION
from realrun.lm.llama import FusedParts, supported
from realrun.lm.variants.skipped_layers import NOTHING, SkippedSublayers
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

    Many models name their parts as Llama does and use them otherwise: scaled embeddings or
    residuals, norms behind sublayers, capped logits.
    """
    tokens = [(7 * i + 1) % int(model.config.vocab_size) for i in range(TRIED_TOKENS)]
    whole = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].double()
    found = "they do not fit together"
    try:
        stack, half = pieces.stack(model.model.layers), TRIED_TOKENS // 2
        for start in (0, half):
            end = start + half
            x = stack.run(pieces.embed(tokens[start:end]), start, slice(start, end), pieces.causal_mask(half, end))
        parts = pieces.logits(pieces.normed(x, model.model.norm), model.get_output_embeddings()).double()
        error = float((parts - whole[half:]).norm() / whole[half:].norm())
        # The library's eager attention takes its softmax in float32 whatever the model's type.
        if error <= max(torch.finfo(dtype).eps for dtype in (model.dtype, torch.float32)) ** 0.5:
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


class LibraryPieces:
    """The model's own modules."""

    def __init__(self, model: Any):
        self.model = model
        parts = ("embed_tokens", "layers", "norm", "rotary_emb")
        lacks = [part for part in parts if not hasattr(getattr(model, "model", None), part)]
        sublayers = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        lacks = lacks or [part for part in sublayers if not hasattr(model.model.layers[0], part)]
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
        window = getattr(model.config, "sliding_window", None)
        if set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"} and window:
            raise InputError(
                f"{type(model).__name__} has layers with a sliding window, whose caches cannot be shared; choose a "
                "model whose every layer has full attention"
            )

    def stack(self, layers: Sequence[Any]) -> LibraryStack:
        return LibraryStack(self.model, layers)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.model.model.embed_tokens(torch.tensor(tokens, device=self.model.device))

    def normed(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        return norm(x)

    def logits(self, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        return head(hidden)

    def causal_mask(self, n: int, end: int) -> torch.Tensor | None:
        return None if n == 1 else self.tree_mask(torch.ones(n, n, dtype=torch.bool).tril_(), end)

    def tree_mask(self, visible: torch.Tensor, end: int) -> torch.Tensor | None:
        if len(visible) == 1 and bool(visible.all()):
            return None
        dtype = self.model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
        return F.pad(mask, (end - visible.shape[1], 0)).to(self.model.device)[None, None]


class LibraryStack:
    """The modules of consecutive layers. It is itself the cache that their attention writes to and reads."""

    def __init__(self, model: Any, layers: Sequence[Any]):
        self.model, self.layers = model, layers
        self.buffers: dict[int, list[torch.Tensor]] = {}  # keys and values [1, Hkv, room, D] by the attention's number
        self.start = 0

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
        places = self.model.model.rotary_emb(x, position_ids=positions[None])
        for number, layer in enumerate(self.layers):
            if number not in skip.attention:
                x = (
                    x
                    + layer.self_attn(
                        hidden_states=layer.input_layernorm(x),
                        attention_mask=mask,
                        position_ids=positions[None],
                        past_key_values=self,
                        use_cache=True,
                        position_embeddings=places,
                    )[0]
                )
            if number not in skip.mlp:
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x[0]

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
        for parts in self.buffers.values():
            source = torch.tensor(slots, device=parts[0].device)
            for part in parts:
                part[:, :, start : start + len(slots)] = part[:, :, source]
