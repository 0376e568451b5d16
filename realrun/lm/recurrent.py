"""Models with recurrent layers (linear attention or Mamba) besides attention layers.

A recurrent layer has no keys and values but one state that summarises all tokens so far, so no token can be dropped
from it. transformers returns only the state after the last token of a pass. Recurrent states are therefore copied
before a pass; the caches of attention layers are cropped instead. To drop tokens, the nearest earlier copy is put back
and the tokens since then are fed again:

- A target copies the states before each pass that verifies drafts. If a draft is rejected, a second pass feeds the
  pending token and the accepted ones again; `refed` counts them. If all are accepted, nothing is fed again.
- A draft model, which drafts token by token, copies the states before each of its passes. It has them after every
  token, so nothing is fed again.

After `truncate`, logits are bit for bit those of a text that never held the dropped tokens and was fed in the same
passes. Logits depend on how a text is cut into passes, in float64 too, because transformers computes recurrences in
float32 and by different algorithms for one token and for several: they differ by about 1e-6 of their size. In
Nemotron-H and Zamba2 they differ by up to 1e-3, because only the algorithm for several tokens raises short time steps
to `time_step_min`. The output is therefore that of plain greedy decoding except where two tokens are that close.

Models with short convolutions among the attention layers (LFM2), whose cache can drop the last tokens.

A convolution reads its last few inputs. transformers can keep all inputs since the cache was last cropped, so that
tokens are dropped exactly and without a second pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from realrun.lm.cached import CachedLM, grown, has_recurrent_layers, make_cache
from specsim.io.errors import InputError

NO_TREES = "a recurrent layer has one state, not one for each branch of a tree"
TRIED = 8  # tokens that `check_continues` feeds
States = list[dict[int, torch.Tensor]]  # of a layer: its convolutions' states and its recurrences' states


class Kept(NamedTuple):
    """Copies of every recurrent layer's states after the first `length` tokens."""

    length: int
    states: list[States]


class RecurrentLM(CachedLM):
    """CachedLM of a model with recurrent layers; it restores their states when tokens are dropped.

    text : the cached tokens
    every_pass : whether states are copied before every pass, for a draft model, or only before passes of several
        tokens, for a target
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
        self.kept = [*before[:1], *before[1:][-1:]]  # the oldest too, for callers that repeat a round
        if length == self.length:
            return
        missing = self._back_to(before[-1] if before else None, length)
        if missing:
            self.refed = len(missing)
            self._append(missing, keep=1)

    def fork(self, text: Sequence[int]) -> None:
        """Drop and feed tokens until the cache holds this text."""
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
        """Do nothing: `fork` drops the rows."""

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        logits = super()._forward(tokens, keep)
        self.text += tokens
        return logits

    @property
    def _layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionLayer)]

    def _keep(self) -> None:
        """Copy the states; the copy replaces one of the same length."""
        layers = self._layers if self.length else []
        copied = [[_copies(layer.conv_states), _copies(layer.recurrent_states)] for layer in layers]
        kept = [kept for kept in self.kept if kept.length < self.length]
        self.kept = [*(kept if self.every_pass else kept[:1]), Kept(self.length, copied)]

    def _back_to(self, kept: Kept | None, length: int) -> list[int]:
        """Put these states back, or start empty without any; return the tokens to feed to reach `length`."""
        start = 0 if kept is None else kept.length
        if kept is None or not kept.length:
            self.cache = make_cache(self.model.config)
        else:
            for layer in self.cache.layers:
                if isinstance(layer, DynamicLayer):
                    DynamicLayer.crop(
                        layer, start - self.length
                    )  # a hybrid layer's own method would crop its states too
            for layer, (convolutions, recurrences) in zip(self._layers, kept.states, strict=True):
                for states, copies in ((layer.conv_states, convolutions), (layer.recurrent_states, recurrences)):
                    for number, copy in copies.items():
                        states[number].copy_(copy)
        missing = self.text[start:length]
        self.text, self.length = self.text[:start], start
        return missing


class RecurrentStates(RecurrentLM):
    """RecurrentLM that keeps the output of its last layer for drafters that read it.

    Models with attention layers only keep it in `realrun.lm.split_target.SplitTarget`, which runs layers in parts.
    states : [room, d], by position, before the final norm; norm : the final norm
    """

    def __init__(self, model: Any):
        self.norm = model.model.norm
        super().__init__(model)

    def reset(self) -> None:
        super().reset()
        size = int(self.model.config.get_text_config().hidden_size)
        self.states = torch.empty(0, size, dtype=self.model.dtype, device=self.device)

    def run_model(self, **inputs: Any) -> torch.Tensor:
        fed: list[torch.Tensor] = []
        hook = self.norm.register_forward_pre_hook(lambda module, arguments: fed.append(arguments[0]))
        try:
            logits = super().run_model(**inputs)
        finally:
            hook.remove()
        end = self.length + fed[0].shape[1]
        self.states = grown(self.states, end)
        self.states[self.length : end] = fed[0][0]
        return logits


def _copies(states: dict[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    return {number: state.clone() for number, state in states.items() if state is not None}


@torch.inference_mode()
def check_continues(model: Any) -> None:
    """Raise InputError unless a pass of several tokens continues from the states of the pass before.

    Some recurrent layers in transformers (Jamba's) reset their state in such a pass, so they cannot verify drafts.
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


class ConvolutionLM(RecurrentLM):
    """CachedLM of such a model: no trees, because a convolution reads all rows before its own.

    earliest : the shortest length to which tokens can be dropped without feeding the text again
    """

    def reset(self) -> None:
        super().reset()
        self.cache.activate_past_recording()
        self.earliest = 0

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        return CachedLM.forward(self, tokens)

    def prefill(self, tokens: Sequence[int]) -> None:
        CachedLM.prefill(self, tokens)

    def truncate(self, length: int) -> None:
        length = min(length, self.length)
        text, self.refed = self.text[:length], 0
        if length < self.earliest:
            self.reset()
            self.prefill(text)
            self.refed = length
        elif self.length:
            self.cache.crop(length - self.length)
            self.text, self.length, self.earliest = text, length, length

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        logits = super()._forward(tokens, keep)
        if not self.cache.is_croppable:
            raise InputError(
                f"{self.model.config.model_type} models have layers of type conv, whose cache cannot drop the last "
                "tokens in this version of transformers; install a newer one"
            )
        return logits
