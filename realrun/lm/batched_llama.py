"""The fused pass over several sequences at once, each with a cache of its own length.

B sequences, n new tokens, H heads, D head size, L slots. A row with fewer tokens than the longest is padded; the
padding lies beyond its length in the cache, is never seen and is overwritten by its next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from realrun.lm.cached import grown
from realrun.lm.llama import FusedLlama, rms_norm, supported
from realrun.lm.skinny_linear import skinny_linear
from specsim.io.arrays import Ints
from specsim.io.errors import InputError


class BatchedLlama:
    """A Llama or Qwen3 model that decodes several sequences together.

    model : a LlamaForCausalLM or Qwen3ForCausalLM, whose weights are shared with every other pass over it

    Raises InputError for a model that the fused pass does not support.
    """

    def __init__(self, model: Any):
        if not supported(model):
            raise InputError(
                f"batches are decoded by plain Llama and Qwen3 models, this is a {type(model).__name__}; choose another"
            )
        self.single = FusedLlama(model)  # for its weights
        self.device, self.max_positions = model.device, self.single.max_positions
        self.reset(0)

    def reset(self, batch: int) -> None:
        """Start with no sequence, and room for this many."""
        lm = self.single
        self.lengths: Ints = np.zeros(0, dtype=np.int64)  # cached tokens of each sequence, [B]
        shape = (len(lm.layers), batch, lm.kv_heads, 0, lm.head_dim)
        self.keys = torch.zeros(shape, dtype=lm.model.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)

    @torch.inference_mode()
    def add(self, tokens: Sequence[int]) -> None:
        """Add a sequence and cache these tokens of it."""
        row = len(self.lengths)
        self.lengths = np.append(self.lengths, 0)
        if tokens:
            self._pass([tokens], slice(row, row + 1), head=False)
        self.lengths[row] = len(tokens)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append each row's tokens to its cache; logits [B, n, V], padded behind each row's tokens."""
        logits = self._pass(tokens, slice(0, len(self.lengths)))
        self.lengths = self.lengths + np.array([len(row) for row in tokens])
        return logits

    def truncate(self, lengths: Ints) -> None:
        """Keep at most this many tokens of each row."""
        self.lengths = np.minimum(self.lengths, lengths)

    def drop(self, row: int) -> None:
        """Remove a sequence; the last sequence takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            end = self.lengths[last]
            for cached in (self.keys, self.values):
                cached[:, row, :, :end] = cached[:, last, :, :end]
            self.lengths[row] = end
        self.lengths = self.lengths[:last]

    def _pass(self, tokens: Sequence[Sequence[int]], rows: slice, *, head: bool = True) -> torch.Tensor:
        """Compute logits [B, n, V] of these rows, or nothing without the head."""
        lm, lengths = self.single, torch.from_numpy(self.lengths[rows]).to(self.device)
        n = max(len(row) for row in tokens)
        ids = torch.tensor([[*row, *[0] * (n - len(row))] for row in tokens], device=self.device)
        slots = lengths[:, None] + torch.arange(n, device=self.device)  # [B, n]
        end = int(self.lengths[rows].max()) + n
        self.keys, self.values = (grown(cached, end, self.max_positions) for cached in (self.keys, self.values))
        positions = slots.clamp(max=self.max_positions - 1)  # padding may stand beyond the last position
        rotation = lm.cos[positions], lm.sin[positions]  # [B, n, 1, D]
        unseen = torch.arange(end, device=self.device) > slots[:, :, None]
        mask = torch.zeros(unseen.shape, dtype=lm.model.dtype, device=self.device).masked_fill_(unseen, -torch.inf)
        mask = mask[:, None].repeat(1, 1, lm.heads // lm.kv_heads, 1)  # [B, 1, groups * n, L]
        x, row = F.embedding(ids, lm.embedding), torch.arange(len(ids), device=self.device)[:, None]
        for layer, keys, values in zip(lm.layers, self.keys[:, rows], self.values[:, rows], strict=True):
            q, keys[row, :, slots], values[row, :, slots] = layer.project(layer.normed(x, rms_norm)[1], rotation)
            mixed = lm.attend(q, keys[:, :, :end], values[:, :, :end], mask)
            x = layer.add_mlp(x + skinny_linear(mixed, layer.out))
        return lm._of_known(lm.logits_of(rms_norm(x, lm.norm_out, lm.eps))) if head else x[:, :0]
