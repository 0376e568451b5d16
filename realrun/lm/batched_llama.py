"""The fused pass over several sequences at once, each with a cache of its own length.

B sequences, n new tokens, H heads, D head size, L slots. A row with fewer tokens than the longest is filled up; what
that leaves in its cache lies beyond its length, is never seen and is overwritten by its next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from realrun.lm.llama import FIRST_ROOM, FusedLlama, Layer, rms_norm, supported
from specsim.arrays import Ints
from specsim.errors import InputError


class BatchedLlama:
    """A Llama or Qwen3 model that decodes several sequences together.

    Parameters
    ----------
    model : LlamaForCausalLM or Qwen3ForCausalLM
        Its weights are shared with every other pass over it.

    Raises
    ------
    InputError
        For a model whose pass is another one.
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
        """Begin anew with room for so many sequences, none of which is there yet."""
        lm = self.single
        self.lengths: Ints = np.zeros(0, dtype=np.int64)  # cached tokens of the sequences that are there, [B]
        shape = (len(lm.layers), batch, lm.kv_heads, 0, lm.head_dim)
        self.keys = torch.zeros(shape, dtype=lm.model.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)

    @torch.inference_mode()
    def add(self, tokens: Sequence[int]) -> None:
        """One more sequence, of which these tokens are cached."""
        row = len(self.lengths)
        self.lengths = np.append(self.lengths, 0)
        if tokens:
            self._pass([tokens], slice(row, row + 1), head=False)
        self.lengths[row] = len(tokens)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append each row's tokens to its cache; logits [B, n, V], of which a row's first ones are its own."""
        logits = self._pass(tokens, slice(0, len(self.lengths)))
        self.lengths = self.lengths + np.array([len(row) for row in tokens])
        return logits

    def truncate(self, lengths: Ints) -> None:
        """Keep so many tokens of each row at most."""
        self.lengths = np.minimum(self.lengths, lengths)

    def drop(self, row: int) -> None:
        """A sequence is over; the last one takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            end = self.lengths[last]
            for cached in (self.keys, self.values):
                cached[:, row, :, :end] = cached[:, last, :, :end]
            self.lengths[row] = end
        self.lengths = self.lengths[:last]

    def _pass(self, tokens: Sequence[Sequence[int]], rows: slice, *, head: bool = True) -> torch.Tensor:
        """Logits [B, n, V] of these rows, or nothing where no head is asked for."""
        lm, lengths = self.single, torch.from_numpy(self.lengths[rows]).to(self.device)
        n = max(len(row) for row in tokens)
        ids = torch.tensor([[*row, *[0] * (n - len(row))] for row in tokens], device=self.device)
        slots = lengths[:, None] + torch.arange(n, device=self.device)  # [B, n]
        end = int(self.lengths[rows].max()) + n
        self._reserve(end)
        positions = slots.clamp(max=self.max_positions - 1)  # where a row is filled up, it may be at its end
        turns = lm.cos[positions], lm.sin[positions]  # [B, n, 1, D]
        unseen = torch.arange(end, device=self.device) > slots[:, :, None]
        mask = torch.zeros(unseen.shape, dtype=lm.model.dtype, device=self.device).masked_fill_(unseen, -torch.inf)
        groups = lm.heads // lm.kv_heads
        mask = mask[:, None].repeat(1, 1, groups, 1)  # [B, 1, groups * n, L]
        x = F.embedding(ids, lm.embedding)
        for layer, keys, values in zip(lm.layers, self.keys[:, rows], self.values[:, rows], strict=True):
            q = self._project(layer, x, keys, values, slots, turns)
            # The query heads of one key-value head are rows of one matrix: [B, Hkv, groups * n, D].
            q = q.view(len(ids), n, lm.kv_heads, groups, lm.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
            scores = torch.matmul(q, keys[:, :, :end].transpose(2, 3)).mul_(lm.scaling).add_(mask)
            mixed = torch.matmul(scores.softmax(-1), values[:, :, :end]).unflatten(2, (groups, n))
            x = x + F.linear(mixed.permute(0, 3, 1, 2, 4).flatten(2), layer.out)
            gate, up = F.linear(rms_norm(x, layer.norm_mlp, lm.eps), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down)
        return lm._of_known(lm.logits_of(rms_norm(x, lm.norm_out, lm.eps))) if head else x[:, :0]

    def _project(
        self,
        layer: Layer,
        x: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Queries [B, n, H, D] of x [B, n, d]; their keys and values enter the slots [B, n] of [B, Hkv, room, D]."""
        lm, (cos, sin) = self.single, turns
        qkv = F.linear(rms_norm(x, layer.norm_in, lm.eps), layer.qkv)
        qkv = qkv.unflatten(2, (lm.heads + 2 * lm.kv_heads, lm.head_dim))
        qk, v = qkv.split([lm.heads + lm.kv_heads, lm.kv_heads], dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([lm.heads, lm.kv_heads], dim=2)
            qk = torch.cat([rms_norm(q, layer.q_norm, lm.eps), rms_norm(k, layer.k_norm, lm.eps)], dim=2)
        qk = torch.addcmul(qk * cos, qk.roll(lm.head_dim // 2, dims=-1), sin)
        q, k = qk.split([lm.heads, lm.kv_heads], dim=2)
        row = torch.arange(len(x), device=self.device)[:, None]
        keys[row, :, slots] = k
        values[row, :, slots] = v
        return q

    def _reserve(self, slots: int) -> None:
        """Make room, at least doubling, so that copies stay rare."""
        have = self.keys.shape[3]
        if slots > have:
            room = max(slots, min(self.max_positions, max(2 * have, FIRST_ROOM))) - have
            self.keys, self.values = (F.pad(part, (0, 0, 0, room)) for part in (self.keys, self.values))
