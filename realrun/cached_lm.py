"""A Hugging Face causal language model and its key-value cache, as one sequence at batch 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from specsim.errors import InputError


class CachedLM:
    """Feeds tokens to a model and keeps its cache; `length` tokens are in the cache.

    hidden : where `keep_hidden` is set, what the last pass fed to the model's head, [n, d]: the
        last layer's states after the final norm, one row for every row of logits. A prefill
        leaves one row, that of its last token; None before the first token. Like logits,
        it may lie at an address that the next pass of the same size overwrites
    """

    keep_hidden = False
    hidden: torch.Tensor | None = None

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.device = model.device
        self.max_positions = int(model.config.max_position_embeddings)
        window = getattr(model.config, "sliding_window", None)
        if window:  # a cache whose window has begun to slide cannot be rolled back
            self.max_positions = min(self.max_positions, int(window))
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.cache = DynamicCache(config=self.model.config)
        self.length = 0
        self.hidden = None

    def warm(self, sizes: Iterable[int], length: int = 0) -> None:
        """Get ready, ahead of the clock, for `forward` of these sizes and for `length` tokens; forgets everything."""
        self.reset()

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens to the cache; logits [n, V] after each of them."""
        return self._append(tokens, keep=0)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens to the cache and drop their logits; no tokens is no work."""
        if tokens:
            self._append(tokens, keep=1)

    def _append(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        end = self.length + len(tokens)
        if end > self.max_positions:
            raise InputError(
                f"{end} tokens exceed the {self.max_positions} positions of the model; shorten prompt or output"
            )
        logits = self._forward(tokens, keep)
        self.length = end
        return logits

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """Logits after the last `keep` tokens, or after all of them if keep is 0."""
        positions = torch.arange(self.length, self.length + len(tokens), device=self.device)
        return self.run_model(
            input_ids=torch.tensor([tokens], device=self.device), position_ids=positions[None], logits_to_keep=keep
        )

    def run_model(self, **inputs: Any) -> torch.Tensor:
        """The library's own pass over the cache with these inputs: logits [n, V]; keeps hidden rows if asked."""
        inputs |= {"past_key_values": self.cache, "use_cache": True}
        if not self.keep_hidden:
            return self.model(**inputs).logits[0]
        head = self.model.get_output_embeddings()
        if head is None:
            raise InputError(f"{type(self.model).__name__} has no output embedding to take hidden states at")
        fed: list[torch.Tensor] = []
        hook = head.register_forward_pre_hook(lambda module, arguments: fed.append(arguments[0]))
        try:
            logits: torch.Tensor = self.model(**inputs).logits[0]
        finally:
            hook.remove()
        self.hidden = fed[0][0]
        return logits

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the cache."""
        if length < self.length:
            self.cache.crop(length - self.length)
            self.length = length
