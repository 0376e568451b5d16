"""A model with recurrent layers: linear attention or Mamba, among or beside layers of attention.

A recurrent layer holds no keys and values but a state that stands for all tokens so far, so that no token can be
dropped from it. The library's layers give the state behind the last token of a pass alone. States are therefore kept
before a pass (a copy of them, and nothing of the attention layers, whose caches are cropped). Dropping tokens goes back
to the nearest states that were kept and feeds the tokens since then again:

- a target keeps the states before each pass that verifies drafts. If some are rejected, a second pass feeds the pending
  token and the accepted ones again; `refed` counts them. If all are accepted, nothing is fed again.
- a draft model, which drafts token by token, keeps the states before each of its passes, so that those behind every
  token are at hand, and nothing is fed again.

What is exact: after `truncate`, logits are, bit for bit, those of a text that never held the dropped tokens and was fed
in the same passes. How a text is cut into passes moves logits, in float64 too, because the library computes recurrences
in float32, by one rule for a single token and by another, in chunks, for several: by about 1e-6 of their size. In
Nemotron-H and Zamba2 it is up to 1e-3, because the library's rule for chunks alone raises short time steps to
`time_step_min`. Texts are therefore those of plain greedy decoding except where two tokens are as close as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from realrun.lm.cached import CachedLM, has_recurrent_layers, make_cache
from specsim.io.errors import InputError

NO_TREES = "a recurrent layer has one state, not one for each branch of a tree"
TRIED = 8  # tokens, in two passes
States = list[dict[int, torch.Tensor]]  # of a layer: of its convolutions and of its recurrence


class Kept(NamedTuple):
    """The states behind the first `length` tokens, of each recurrent layer."""

    length: int
    states: list[States]


class RecurrentLM(CachedLM):
    """Feeds tokens to a model with recurrent layers, and brings their states back when tokens are dropped.

    text : the cached tokens
    every_pass : whether states are kept before every pass, as a draft model's are, or only before those of several
        tokens, as a target's are
    """

    recurrent = True

    def __init__(self, model: PreTrainedModel, every_pass: bool = False):
        self.every_pass = every_pass
        super().__init__(model)

    def reset(self) -> None:
        super().reset()
        self.text: list[int] = []
        self.kept: list[Kept] = []  # of increasing length
        self.refed = 0

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        if self.every_pass or len(tokens) > 1:
            self._keep()
        return super().forward(tokens)

    def prefill(self, tokens: Sequence[int]) -> None:
        if tokens:
            super().prefill(tokens)
            self.kept = []
            self._keep()

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; `refed` of them are fed again."""
        self.refed, length = 0, min(length, self.length)
        before = [kept for kept in self.kept if kept.length <= length]
        self.kept = [*before[:1], *before[1:][-1:]]  # the oldest too, for rounds that are made several times
        if length == self.length:
            return
        missing = self._back_to(before[-1] if before else None, length)
        if missing:
            self.refed = len(missing)
            self._append(missing, keep=1)

    def fork(self, text: Sequence[int]) -> None:
        """Bring the cache to this text, as far as possible without feeding again what is cached."""
        pairs = zip(text, self.text, strict=False)
        self.truncate(next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(self.text))))
        if len(text) > self.length:
            self.forward(text[self.length :])

    def check_trees(self) -> None:
        raise InputError(
            f"{self.model.config.get_text_config().model_type} models have recurrent layers, and {NO_TREES}; choose a "
            "policy of chains"
        )

    def append_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, keep: int = 0
    ) -> torch.Tensor:
        self.check_trees()
        raise AssertionError

    def drop_rows(self, count: int) -> None:
        """Do nothing: `fork` does."""

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        logits = super()._forward(tokens, keep)
        self.text += tokens
        return logits

    @property
    def _layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionLayer)]

    def _keep(self) -> None:
        """Copy the states, in place of those that were kept at this length."""
        layers = self._layers if self.length else []
        copied = [[_copies(layer.conv_states), _copies(layer.recurrent_states)] for layer in layers]
        kept = [kept for kept in self.kept if kept.length < self.length]
        self.kept = [*(kept if self.every_pass else kept[:1]), Kept(self.length, copied)]

    def _back_to(self, kept: Kept | None, length: int) -> list[int]:
        """Go back to these states, or to none; return the tokens that are missing from there to `length`."""
        start = 0 if kept is None else kept.length
        if kept is None or not kept.length:
            self.cache = make_cache(self.model.config)
        else:
            for layer in self.cache.layers:
                if isinstance(layer, DynamicLayer):
                    DynamicLayer.crop(layer, start - self.length)  # a hybrid layer's own would crop its states, too
            for layer, (convolutions, recurrences) in zip(self._layers, kept.states, strict=True):
                for states, copies in ((layer.conv_states, convolutions), (layer.recurrent_states, recurrences)):
                    for number, copy in copies.items():
                        states[number].copy_(copy)
        missing = self.text[start:length]
        self.text, self.length = self.text[:start], start
        return missing


def _copies(states: dict[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    return {number: state.clone() for number, state in states.items() if state is not None}


@torch.inference_mode()
def check_continues(model: Any) -> None:
    """Raise InputError unless passes of several tokens go on from the states of the pass before.

    Some of the library's recurrent layers begin anew in such a pass (Jamba's), so that they cannot verify drafts.
    """
    if not has_recurrent_layers(model.config):
        return
    size = int(model.config.get_text_config().vocab_size)
    tokens = [1 + number % (size - 1) for number in range(TRIED)]
    whole, cut = CachedLM(model), CachedLM(model)
    expected = whole.forward(tokens)[TRIED // 2 :].double()
    cut.forward(tokens[: TRIED // 2])
    continued = cut.forward(tokens[TRIED // 2 :]).double()
    rounding = float(max(torch.finfo(dtype).eps for dtype in (model.dtype, torch.float32)) ** 0.5)
    if not float((continued - expected).norm()) <= rounding * float(expected.norm()):
        raise InputError(
            f"the recurrent layers of {type(model).__name__} begin anew in a pass of several tokens, so it cannot "
            "verify drafts; choose another model"
        )
