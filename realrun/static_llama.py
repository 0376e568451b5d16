"""The pass over a static cache: fixed addresses, kernels for attention, CUDA graphs.

The lean pass asks the host for every length; this one keeps the lengths on the device, so
that its launches depend on the shape [B, n] of the new tokens only. On a GPU they are
recorded once per n and replayed with one call. The autoregressive baseline is n = 1.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

import speckernels
from realrun.graphs import Graphs, Replay
from realrun.lean_llama import LlamaLM, rms_norm
from specsim.errors import InputError

MAX_STEP_TOKENS = 256  # new tokens of a step; more of them go through the library's fused attention
FIRST_CAPACITY = 4096  # cached tokens per sequence, unless the model has fewer positions
PIECE_TOKENS = 256  # of a prompt that continues a cache; bounds the mask's memory

Attend = Callable[[int, torch.Tensor], torch.Tensor]  # (layer, query [B, Hq, n, D]) -> [B, n, Hq, D]


@dataclass
class _Size:
    """What a step of n new tokens reads beside weights and cache."""

    packed: torch.Tensor  # int64 [B, n + 1] on the device: the tokens, then the cached length
    host: torch.Tensor  # the same on the host, pinned; on the CPU `packed` itself
    numbers: npt.NDArray[np.int64]  # a view of `host`
    copied: Any  # event after the last copy from `host`, or None on the CPU
    offsets: torch.Tensor  # int64 [n], 0, 1, ...
    rows: torch.Tensor  # int64 [B * n], the sequence of every new token
    mask_bits: torch.Tensor  # int32 [B, n, ceil(n / 32)], a chain's
    replay: Replay | None = None
    hidden: torch.Tensor | None = None  # [B * n, hidden] of the last pass; held, so that no other graph takes its place


class StaticLlama(LlamaLM):
    """Llama or Qwen3 over preallocated buffers: keys and values [layers, B, Hkv, capacity, D].

    `step` serves B sequences of any lengths. The interface of CachedLM (forward, prefill,
    truncate, reset, length) serves one sequence, B = 1. Slots beyond a sequence's length hold
    garbage; nothing reads them.

    Parameters
    ----------
    capacity : tokens that each sequence has room for, at most the model's positions; the
        smaller of these and 4096 unless given. A longer sequence makes the buffers grow,
        which drops all graphs: call `warm` or `reserve` ahead of the clock
    batch : B
    graphs, compiled : record graphs; join elementwise operations by torch.compile, which needs
        Triton. Unless given, both where the model is on a GPU
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,  # a LlamaForCausalLM or Qwen3ForCausalLM
        *,
        capacity: int | None = None,
        batch: int = 1,
        graphs: bool | None = None,
        compiled: bool | None = None,
    ):
        on_gpu = model.device.type == "cuda"
        self.batch = batch
        self.capacity = 0
        self._sizes: dict[int, _Size] = {}
        if compiled is None:
            compiled = on_gpu and importlib.util.find_spec("triton") is not None
        self._pieces = _compiled_pieces() if compiled else PLAIN
        super().__init__(model)
        self._graphs = Graphs(self.device) if (on_gpu if graphs is None else graphs) else None
        self.keys = self.values = torch.empty(
            (len(self.layers), batch, self.kv_heads, 0, self.head_dim), dtype=model.dtype, device=self.device
        )
        self._allocate(min(self.max_positions, FIRST_CAPACITY) if capacity is None else capacity)

    def reset(self) -> None:
        """Forget everything; buffers and graphs stay."""
        self.length = 0
        self.hidden = None

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens; drops all graphs if the buffers must grow."""
        if length > self.capacity:
            self._allocate(max(length, min(2 * self.capacity, self.max_positions)))

    def warm(self, sizes: Iterable[int], length: int = 0) -> None:
        """Forget everything, make room for `length` tokens, and record the graphs of these n.

        What is not recorded here is recorded when it is first used.
        """
        self.reset()
        self.reserve(length)
        if self._graphs is not None:
            # The largest first: the smaller ones then fit into its memory.
            for n in sorted(set(sizes), reverse=True):
                if self._size(n).replay is None:
                    self.step(torch.zeros(self.batch, n, dtype=torch.int64), torch.zeros(self.batch, dtype=torch.int32))

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits [B, n, V] after each new token; their keys and values enter the cache.

        tokens : int64 [B, n], the sequences' next tokens. lengths : int32 [B], tokens cached
        before them; `length` of this object plays no part and does not change. Slots lengths
        to lengths + n - 1 are written and must lie inside the capacity: on a GPU the lengths
        stay on the device and nobody checks. With graphs the result lies at a fixed address:
        the next step of the same n overwrites it.
        """
        if tokens.dim() != 2 or len(tokens) != self.batch or not 1 <= tokens.shape[1] <= MAX_STEP_TOKENS:
            raise InputError(
                f"tokens are {list(tokens.shape)}; give [{self.batch}, n] with 1 to {MAX_STEP_TOKENS} new tokens"
            )
        size = self._size(tokens.shape[1])
        size.packed[:, :-1].copy_(tokens)
        size.packed[:, -1].copy_(lengths)
        return self._run(size)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        assert self.batch == 1, "the interface of CachedLM serves one sequence; call step"
        self.reserve(self.length + len(tokens))
        # A prompt's length seldom comes twice: recording it would not pay.
        if keep or len(tokens) > MAX_STEP_TOKENS:
            return self._prompt(tokens, keep)
        size = self._size(len(tokens))
        if size.copied is None:
            size.numbers[0] = [*tokens, self.length]
        else:
            size.copied.synchronize()  # the last copy may still be reading
            size.numbers[0] = [*tokens, self.length]
            size.packed.copy_(size.host, non_blocking=True)
            size.copied.record(torch.cuda.current_stream(self.device))
        logits = self._run(size)[0]
        self.hidden = size.hidden  # it exists anyway, so `keep_hidden` plays no part here
        return logits

    def _run(self, size: _Size) -> torch.Tensor:
        if self._graphs is None:
            return self._pass(size)
        if size.replay is None:
            size.replay = self._graphs.capture(lambda: self._pass(size))
        return size.replay()

    def _pass(self, size: _Size) -> torch.Tensor:
        """A step on what `packed` holds. No value of it comes to the host, so it can be recorded."""
        tokens, lengths = size.packed[:, :-1], size.packed[:, -1]
        context = lengths.int()

        def attend(number: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = self.keys[number], self.values[number]
            return speckernels.tree_attention(query, keys, values, size.mask_bits, context, self.scaling)

        x = self._hidden(tokens, (lengths[:, None] + size.offsets).flatten(), size.rows, attend)
        size.hidden = x
        return F.linear(x, self.head).view(*tokens.shape, -1)

    def _hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Normalised last hidden states [B * n, hidden] of tokens [B, n] at positions [B * n]."""
        piece, eps = self._pieces, self.eps
        cos, sin = self.cos[positions], self.sin[positions]  # [B * n, 1, D]
        x = F.embedding(tokens.flatten(), self.embedding)
        normed = piece.norm(x, self.layers[0].norm_in, eps)
        norms_after = [*(layer.norm_in for layer in self.layers[1:]), self.norm_out]
        for number, (layer, norm_after) in enumerate(zip(self.layers, norms_after, strict=True)):
            qkv, keys, values = F.linear(normed, layer.qkv), self.keys[number], self.values[number]
            query = piece.rotate_and_store(
                qkv, cos, sin, rows, positions, keys, values, layer.q_norm, layer.k_norm, eps
            )
            mixed = attend(number, query.view(*tokens.shape, self.heads, self.head_dim).transpose(1, 2))
            x, normed = piece.add_norm(x, F.linear(mixed.reshape(len(x), -1), layer.out), layer.norm_mlp, eps)
            gated = piece.gate(F.linear(normed, layer.gate_up))
            x, normed = piece.add_norm(x, F.linear(gated, layer.down), norm_after, eps)
        return normed

    def _prompt(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """The pass for prompts: any length, no graph. Logits after the last `keep` tokens, or all if 0."""
        ids = torch.tensor([tokens], device=self.device)
        hidden = []
        # From an empty cache all at once, as causal attention then needs no mask.
        pieces = ids.split(PIECE_TOKENS if self.length else len(tokens), dim=1)
        start = self.length
        for piece in pieces:
            end = start + piece.shape[1]
            positions = torch.arange(start, end, device=self.device)
            x = self._hidden(piece, positions, torch.zeros_like(positions), self._attend_from(start, end))
            if not keep or piece is pieces[-1]:
                hidden.append(x[-keep:].clone() if keep else x)
            start = end
        self.hidden = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        return F.linear(self.hidden, self.head)

    def _attend_from(self, start: int, end: int) -> Attend:
        """Causal attention of the tokens from `start` to `end` over the cache before and themselves."""
        n, groups = end - start, self.heads // self.kv_heads
        mask = self._causal_mask(n, end) if start else None

        def attend(number: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = self.keys[number, :, :, :end], self.values[number, :, :, :end]
            if mask is None:
                mixed = F.scaled_dot_product_attention(
                    query, keys, values, is_causal=True, scale=self.scaling, enable_gqa=groups > 1
                )
            else:  # the query heads of one key-value head as rows of one matrix: keys are not repeated
                mixed = F.scaled_dot_product_attention(
                    query.reshape(1, self.kv_heads, groups * n, self.head_dim),
                    keys,
                    values,
                    attn_mask=mask,
                    scale=self.scaling,
                ).view(1, self.heads, n, self.head_dim)
            return mixed.transpose(1, 2)

        return attend

    def _allocate(self, capacity: int) -> None:
        if not 1 <= capacity <= self.max_positions:
            raise InputError(
                f"a cache of {capacity} tokens is asked for, the model has {self.max_positions} positions; "
                "shorten prompt or output"
            )
        shape = (len(self.layers), self.batch, self.kv_heads, capacity, self.head_dim)
        keys, values = (torch.empty(shape, dtype=self.model.dtype, device=self.device) for _ in range(2))
        if self.capacity:
            keys[:, :, :, : self.capacity] = self.keys
            values[:, :, :, : self.capacity] = self.values
        self.keys, self.values, self.capacity = keys, values, capacity
        for size in self._sizes.values():
            size.replay = None

    def _size(self, n: int) -> _Size:
        size = self._sizes.get(n)
        if size is None:
            size = self._sizes[n] = self._new_size(n)
        return size

    @torch.inference_mode()
    def _new_size(self, n: int) -> _Size:
        on_gpu = self.device.type == "cuda"
        packed = torch.zeros(self.batch, n + 1, dtype=torch.int64, device=self.device)
        host = torch.zeros(self.batch, n + 1, dtype=torch.int64, pin_memory=True) if on_gpu else packed
        offsets = torch.arange(n, device=self.device)
        parents = (offsets - 1).int().expand(self.batch, n)
        context = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
        return _Size(
            packed=packed,
            host=host,
            numbers=host.numpy(),
            copied=torch.cuda.Event() if on_gpu else None,
            offsets=offsets,
            rows=torch.arange(self.batch, device=self.device).repeat_interleave(n),
            mask_bits=speckernels.tree_metadata(parents, context).mask_bits,
        )


def add_norm(
    x: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + change, and its norm. All [rows, hidden]."""
    x = x + change
    return x, rms_norm(x, weight, eps)


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """The rotated query [rows, Hq, D]; keys and values go to their slots in [B, Hkv, capacity, D].

    qkv : [rows, (Hq + 2 Hkv) * D]; cos, sin : [rows, 1, D], the sine signed as for `roll`
    rows, positions : [rows], each new token's sequence and slot
    """
    head_dim, kv_heads = keys.shape[-1], keys.shape[1]
    q, k, v = qkv.view(len(qkv), -1, head_dim).split(
        [qkv.shape[-1] // head_dim - 2 * kv_heads, kv_heads, kv_heads], dim=1
    )
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    keys[rows, :, positions] = torch.addcmul(k * cos, k.roll(head_dim // 2, dims=-1), sin)
    values[rows, :, positions] = v
    return torch.addcmul(q * cos, q.roll(head_dim // 2, dims=-1), sin)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half times the second: [rows, 2 * intermediate] -> [rows, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class _Pieces:
    """The elementwise parts of a pass, as they are or compiled."""

    norm: Callable[..., torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotate_and_store: Callable[..., torch.Tensor]
    gate: Callable[..., torch.Tensor]


PLAIN = _Pieces(rms_norm, add_norm, rotate_and_store, gate)


@cache
def _compiled_pieces() -> _Pieces:
    # A variant per model shape; the default of 8 is soon used up by a grid of models.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    rows, buffer = (0,), (0, 2)
    return _Pieces(
        _compiled(rms_norm, rows),
        _compiled(add_norm, rows, rows),
        _compiled(rotate_and_store, rows, rows, rows, rows, rows, buffer, buffer),
        _compiled(gate, rows),
    )


def _compiled(function: Callable[..., Any], *free: tuple[int, ...]) -> Callable[..., Any]:
    """Compiled for fixed shapes but for these dimensions of the first arguments: rows, batch, capacity.

    A variant for every number of rows and every batch would take minutes to compile.
    """
    fast = torch.compile(function, dynamic=False, fullgraph=True)

    def call(*args: Any) -> Any:
        for tensor, dimensions in zip(args, free, strict=False):
            for dimension in dimensions:
                if tensor.shape[dimension] > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler warns of itself, and of matrix products not made here
            return fast(*args)

    return call
