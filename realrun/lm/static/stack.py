"""Consecutive layers over preallocated keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

import speckernels
from realrun.lm.fused_ops import ElementwiseOps
from realrun.lm.kernels import planless_attention
from realrun.lm.llama import TREE_ROOM, Layer, LlamaLM
from realrun.lm.static.graphs import Recorded
from realrun.lm.static.sizes import Attend, Rows
from realrun.lm.variants.skipped_layers import NOTHING, SkippedSublayers

PATH_STEP = 16  # nodes; a path's length is filled up to a multiple
PIECE_TOKENS = 256  # of a prompt that continues a cache; bounds the mask's memory


class StaticStack:
    """Layers and their keys and values [layers, B, Hkv, capacity, D].

    readers : passes recorded over these buffers; they are dropped when the buffers move
    """

    def __init__(self, lm: LlamaLM, ops: ElementwiseOps, layers: Sequence[Layer], batch: int):
        self.lm, self.ops, self.layers, self.batch = lm, ops, layers, batch
        self.readers: list[Recorded] = []
        self.capacity = 0
        shape = (len(layers), batch, lm.kv_heads, 0, lm.head_dim)
        self.keys = self.values = torch.empty(shape, dtype=lm.model.dtype, device=lm.device)

    def reserve(self, length: int) -> None:
        """Make room for `length` slots per sequence, at least doubling the buffers, so that copies stay rare."""
        if length > self.capacity:
            self.allocate(max(length, min(2 * self.capacity, self.lm.max_positions + TREE_ROOM)))

    def allocate(self, capacity: int) -> None:
        """Move the caches to buffers of this capacity."""
        shape = (*self.keys.shape[:3], capacity, self.keys.shape[4])
        keys, values = (torch.empty(shape, dtype=self.keys.dtype, device=self.keys.device) for _ in range(2))
        keys[:, :, :, : self.capacity] = self.keys
        values[:, :, :, : self.capacity] = self.values
        self.keys, self.values, self.capacity = keys, values, capacity
        for recorded in self.readers:
            recorded.drop()

    def run(
        self,
        x: torch.Tensor,
        rows: Rows,
        norm_after: torch.Tensor | None = None,
        layers: range | None = None,
        skip: SkippedSublayers = NOTHING,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run these layers, all unless given, over x [N, d]; with the result after a norm of this weight, if any.

        Keys and values enter the rows' slots. skip : sublayers to skip
        """
        ops, eps, layers = self.ops, self.lm.eps, range(len(self.layers)) if layers is None else layers
        turns = self.lm.cos[rows.positions], self.lm.sin[rows.positions]  # [N, 1, D]
        parts = [
            (number, attends)
            for number in layers
            for attends in (True, False)
            if number not in (skip.attention if attends else skip.mlp)
        ]
        norms = [self.layers[number].norm_in if attends else self.layers[number].norm_mlp for number, attends in parts]
        after = [*norms[1:], norm_after]
        if parts and parts[0][1]:
            x, normed = self.layers[parts[0][0]].normed(x, ops.norm)
        else:
            first = norms[0] if parts else norm_after
            normed = x if first is None else ops.norm(x, first, eps)
        for (number, attends), weight in zip(parts, after, strict=False):
            layer = self.layers[number]
            if attends:
                change = self._attention(number, normed, rows, turns)
            else:
                change = F.linear(ops.gate(F.linear(normed, layer.gate_up)), layer.down)
            if weight is None:
                x = normed = x + change
            else:
                x, normed = ops.add_norm(x, change, weight, eps)
        return x, normed

    def fill(self, x: torch.Tensor, rows: Rows) -> None:
        """Write only the keys and values of rows x [N, d], in a stack of a single layer."""
        (layer,) = self.layers
        turns = self.lm.cos[rows.positions], self.lm.sin[rows.positions]
        _, normed = layer.normed(x, self.ops.norm)
        self._project(0, normed, rows, turns)

    def prompt(
        self, x: torch.Tensor, start: int, norm_after: torch.Tensor | None = None, layers: range | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the same as `run` for a prompt: x [n, d] of a sequence for slots `start` and on, without a graph."""
        outputs = []
        end = start
        with planless_attention(self.lm.device):
            # From an empty cache all at once, as causal attention then needs no mask.
            for piece in x.split(PIECE_TOKENS) if start else [x]:
                first, end = end, end + len(piece)
                mask = self.lm._causal_mask(end - first, end) if start else None
                rows = self.rows_at(torch.arange(first, end, device=x.device), self.attend_up_to(end, mask))
                outputs.append(self.run(piece, rows, norm_after, layers))
        if len(outputs) == 1:
            return outputs[0]
        out, normed = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        return out, normed

    def rows_at(self, slots: torch.Tensor, attend: Attend) -> Rows:
        """Make rows of the first sequence at these slots, which are also their positions."""
        return Rows(slots[None], slots, slots, slots - 1, torch.zeros_like(slots), attend)

    def attend_up_to(self, end: int, mask: torch.Tensor | None) -> Attend:
        """Make attention to slots before `end` by a mask [groups * n, end]; without a mask it is causal."""
        groups = self.lm.heads // self.lm.kv_heads

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
            keys, values = keys[:, :, :end], values[:, :, :end]
            if mask is None:
                mixed = F.scaled_dot_product_attention(
                    query, keys, values, is_causal=True, scale=scaling, enable_gqa=groups > 1
                )
            else:  # query heads of a key-value head are rows of the same matrix, so that keys are not repeated
                mixed = F.scaled_dot_product_attention(
                    query.reshape(1, self.lm.kv_heads, -1, self.lm.head_dim),
                    keys,
                    values,
                    attn_mask=mask,
                    scale=scaling,
                ).reshape(query.shape)  # the attention kernel chooses its layout
            return mixed.transpose(1, 2)

        return attend

    def move(self, paths: Sequence[Sequence[int]], length: int) -> None:
        """Move each layer's slots length + path[j] to length + j, in place; a path for each layer, ascending."""
        # The layers are the batch of a single call, padded so that compiled kernels need few variants.
        size = -(-max(map(len, paths)) // PATH_STEP) * PATH_STEP
        padded = [node for path in paths for node in (*path, *[-1] * (size - len(path)))]
        layers = len(self.layers)
        numbers = torch.tensor([*padded, *[length] * layers], dtype=torch.int32).to(self.keys.device)
        speckernels.compact_kv(
            [self.keys[:, 0]], [self.values[:, 0]], numbers[:-layers].view(layers, -1), numbers[-layers:]
        )

    def _attention(
        self, number: int, normed: torch.Tensor, rows: Rows, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Compute what a layer's attention adds to the rows, [N, d]."""
        query = self._project(number, normed, rows, turns)
        query = query.view(*rows.tokens.shape, self.lm.heads, self.lm.head_dim).transpose(1, 2)  # [B, Hq, n, D]
        mixed = rows.attend(query, self.keys[number], self.values[number], self.lm.scaling)
        return F.linear(mixed.reshape(len(normed), -1), self.layers[number].out)

    def _project(
        self, number: int, normed: torch.Tensor, rows: Rows, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Compute queries [N, Hq, D]; keys and values enter the rows' slots."""
        layer, (cos, sin) = self.layers[number], turns
        qkv, places = F.linear(normed, layer.qkv), (rows.sequences, rows.slots)
        return self.ops.rotate_and_store(
            qkv, cos, sin, *places, self.keys[number], self.values[number], layer.q_norm, layer.k_norm, self.lm.eps
        )
