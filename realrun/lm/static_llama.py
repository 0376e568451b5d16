"""The pass over a static cache: fixed addresses, kernels for attention, CUDA graphs.

The fused pass asks the host for every length; this one keeps the lengths on the device, so
that its launches depend on the shape [B, n] of the new tokens only. On a GPU they are
recorded once per n and replayed with one call. The autoregressive baseline is n = 1.

A draft tree is more data of the same launches: positions and mask bits, for which a chain is
one of many trees. Where a tree grows level by level, a node also sees nodes of earlier
passes. The attention kernel masks as many slots at the end of the cache as it has queries,
so such a pass adds empty queries for a whole number of mask words, WINDOW slots each. These
slots end with the newest node, and may begin among the cached tokens, all of which are seen.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

import speckernels
from realrun.lm.cuda_graphs import Graphs, Replay
from realrun.lm.fused_ops import PLAIN, compiled_pieces
from realrun.lm.kernels import planless_attention
from realrun.lm.llama import TREE_ROOM, LlamaLM
from specsim.arrays import Bools
from specsim.errors import InputError

MAX_STEP_TOKENS = 256  # new tokens of a step, or nodes of a tree; more go through the library's fused attention
WINDOW = 32  # slots at the end of the cache, a mask word's bits
PATH_STEP = 16  # nodes; a path's length is filled up to a multiple
FIRST_CAPACITY = 4096  # cached tokens per sequence, unless the model has fewer positions
PIECE_TOKENS = 256  # of a prompt that continues a cache; bounds the mask's memory

Attend = Callable[[int, torch.Tensor], torch.Tensor]  # (layer, query [B, Hq, n, D]) -> [B, n, Hq, D]


class _Mirrored:
    """Integers that the host writes and the device reads at a fixed address; on the CPU they are one."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=True) if on_gpu else self.tensor
        self._numbers = self._host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None

    def put(self, numbers: npt.ArrayLike) -> None:
        """Write numbers that broadcast to the shape; later launches see them."""
        if self._copied is None:
            self._numbers[:] = numbers
            return
        self._copied.synchronize()  # the last copy may still be reading
        self._numbers[:] = numbers
        self.tensor.copy_(self._host, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self.tensor.device))


@dataclass
class _Size:
    """What a step of n new tokens reads beside weights and cache. Its attention has r >= n queries."""

    packed: _Mirrored  # int64 [B, n + 1]: the tokens, then the slot of the first
    tree: _Mirrored  # int32: mask bits [B, r, ceil(r / 32)], then slots and positions [2, n]
    mask_bits: torch.Tensor  # views of `tree`
    offsets: torch.Tensor  # [2, 1, n], slots and positions less the first slot
    rows: torch.Tensor  # int64 [B * n], the sequence of every new token
    is_chain: bool = False  # `tree` holds a chain
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
        smaller of these and 4096 unless given. A longer sequence, tree nodes included, makes
        the buffers grow, which drops all graphs: call `warm` or `reserve` ahead of the clock
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
        self._sizes: dict[int, _Size] = {}  # by n; r = n
        self._levels: dict[tuple[int, int], _Size] = {}  # by n and r, behind nodes of earlier passes
        if compiled is None:
            compiled = on_gpu and importlib.util.find_spec("triton") is not None
        self._pieces = compiled_pieces() if compiled else PLAIN
        super().__init__(model)
        self._graphs = Graphs(self.device) if (on_gpu if graphs is None else graphs) else None
        self.keys = self.values = torch.empty(
            (len(self.layers), batch, self.kv_heads, 0, self.head_dim), dtype=model.dtype, device=self.device
        )
        capacity = min(self.max_positions, FIRST_CAPACITY) if capacity is None else capacity
        if not 1 <= capacity <= self.max_positions:
            raise InputError(
                f"a cache of {capacity} tokens is asked for, the model has {self.max_positions} positions; "
                "shorten prompt or output"
            )
        self._allocate(capacity)

    def reset(self) -> None:
        """Forget everything; buffers and graphs stay."""
        self.length = self.nodes = 0
        self.hidden = None

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room for `length` tokens and nodes a sequence; drops all graphs if the buffers must grow."""
        if length > self.capacity:
            self._allocate(max(length, min(2 * self.capacity, self.max_positions + TREE_ROOM)))

    @torch.inference_mode()
    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        """Forget everything, make room for `length` tokens and nodes, and record the graphs of these n.

        tree_nodes : of trees that grow by several passes of these sizes; 0 if none does so
        What is not recorded here is recorded when it is first used.
        """
        self.reset()
        windows = range(WINDOW, min(tree_nodes + WINDOW, MAX_STEP_TOKENS + 1, self.max_positions + 1), WINDOW)
        self.reserve(max(length, *windows, 0))
        if self._graphs is None:
            return
        # The largest first: the smaller ones then fit into its memory.
        for n in sorted((n for n in set(sizes) if n <= MAX_STEP_TOKENS), reverse=True):
            for queries in (*(window for window in reversed(windows) if window > n), n):
                size = self._size(n, queries)
                if size.replay is None:
                    size.packed.put([0] * n + [queries - n])  # the window's slots then begin with the first
                    self._run(size)
        if self.batch == 1:
            self._move_nodes([0])  # loads or compiles the kernel

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits [B, n, V] after each new token; their keys and values enter the cache.

        tokens : int64 [B, n], the sequences' next tokens. lengths : int32 [B], tokens cached
        before them; `length` of this object plays no part and does not change. Slots lengths
        to lengths + n - 1 are written and must lie inside the capacity: on a GPU the lengths
        stay on the device and are not checked. With graphs the result lies at a fixed address:
        the next step of the same n overwrites it.
        """
        if tokens.dim() != 2 or len(tokens) != self.batch or not 1 <= tokens.shape[1] <= MAX_STEP_TOKENS:
            raise InputError(
                f"tokens are {list(tokens.shape)}; give [{self.batch}, n] with 1 to {MAX_STEP_TOKENS} new tokens"
            )
        size = self._chain(tokens.shape[1])
        size.packed.tensor[:, :-1].copy_(tokens)
        size.packed.tensor[:, -1].copy_(lengths)
        return self._run(size)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        assert self.batch == 1, "the interface of CachedLM serves one sequence; call step"
        self.reserve(self.length + len(tokens))
        # A prompt's length seldom comes twice: recording it would not pay.
        if keep or len(tokens) > MAX_STEP_TOKENS:
            return self._prompt(tokens, keep)
        return self._step(self._chain(len(tokens)), tokens, self.length)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        assert self.batch == 1, "the interface of CachedLM serves one sequence"
        n, start = len(tokens), self.length + self.nodes
        nodes, end = self.nodes + n, start + n
        self.reserve(end)
        if nodes > MAX_STEP_TOKENS:
            ids, slots = torch.tensor([tokens], device=self.device), torch.arange(start, end, device=self.device)
            positions = torch.tensor([self.length + depth for depth in depths], device=self.device)
            attend = self._attend_up_to(end, self._tree_mask(visible, end))
            self.hidden = self._hidden(ids, slots, positions, torch.zeros_like(slots), attend)
            return F.linear(self.hidden, self.head)
        # A cache shorter than the window is a window of its own.
        size = self._size(n, min(-(-nodes // WINDOW) * WINDOW, end) if self.nodes else n)
        self._lay_out(size, np.asarray(depths) - self.nodes, visible.numpy())
        return self._step(size, tokens, start)

    def _move_nodes(self, path: Sequence[int]) -> None:
        # The layers as a batch of one tensor, padded to one variant of a compiled kernel.
        layers = len(self.layers)
        padded = [*path, *[-1] * (-len(path) % PATH_STEP)]
        numbers = torch.tensor(padded * layers + [self.length] * layers, dtype=torch.int32).to(self.device)
        speckernels.compact_kv(
            [self.keys[:, 0]], [self.values[:, 0]], numbers[:-layers].view(layers, -1), numbers[-layers:]
        )

    def _chain(self, n: int) -> _Size:
        """The size of a step of n tokens, each of which sees those before it."""
        size = self._size(n, n)
        if not size.is_chain:
            self._lay_out(size, np.arange(n), np.tri(n, dtype=np.bool_))
            size.is_chain = True
        return size

    def _lay_out(self, size: _Size, offsets: npt.NDArray[np.int_], visible: Bools) -> None:
        """Give a size's next steps the shape of a tree.

        offsets : [n], positions less the first slot
        visible : [n, k], which of the last k slots each token sees; all see those before
        """
        batch, queries, words = size.mask_bits.shape
        n, k = visible.shape
        seen = np.zeros((queries, words * WINDOW), np.bool_)
        seen[:n, : queries - k] = True
        seen[:n, queries - k : queries] = visible
        seen[n:, 0] = True  # an empty query, whose result is dropped, must see something
        bits = np.packbits(seen, axis=-1, bitorder="little").view(np.int32).ravel()
        size.tree.put(np.concatenate([*[bits] * batch, np.arange(n), offsets]))
        size.is_chain = False

    def _step(self, size: _Size, tokens: Sequence[int], first_slot: int) -> torch.Tensor:
        """Logits [n, V] of one sequence's step."""
        size.packed.put([*tokens, first_slot])
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
        tokens, first = size.packed.tensor[:, :-1], size.packed.tensor[:, -1]
        n, empty = tokens.shape[1], size.mask_bits.shape[1] - tokens.shape[1]
        slots, positions = (size.offsets + first[:, None]).flatten(1)
        context = (first - empty).int() if empty else first.int()

        def attend(number: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = self.keys[number], self.values[number]
            if not empty:
                return speckernels.tree_attention(query, keys, values, size.mask_bits, context, self.scaling)
            query = F.pad(query, (0, 0, 0, empty))
            return speckernels.tree_attention(query, keys, values, size.mask_bits, context, self.scaling)[:, :n]

        x = self._hidden(tokens, slots, positions, size.rows, attend)
        size.hidden = x
        return F.linear(x, self.head).view(*tokens.shape, -1)

    def _hidden(
        self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Normalised last hidden states [B * n, hidden] of tokens [B, n], for slots and at positions [B * n]."""
        piece, eps = self._pieces, self.eps
        cos, sin = self.cos[positions], self.sin[positions]  # [B * n, 1, D]
        x = F.embedding(tokens.flatten(), self.embedding)
        normed = piece.norm(x, self.layers[0].norm_in, eps)
        norms_after = [*(layer.norm_in for layer in self.layers[1:]), self.norm_out]
        for number, (layer, norm_after) in enumerate(zip(self.layers, norms_after, strict=True)):
            qkv, keys, values = F.linear(normed, layer.qkv), self.keys[number], self.values[number]
            query = piece.rotate_and_store(qkv, cos, sin, rows, slots, keys, values, layer.q_norm, layer.k_norm, eps)
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
        with planless_attention(self.device):
            for piece in pieces:
                end = start + piece.shape[1]
                positions = torch.arange(start, end, device=self.device)
                attend = self._attend_up_to(end, self._causal_mask(end - start, end) if start else None)
                x = self._hidden(piece, positions, positions, torch.zeros_like(positions), attend)
                if not keep or piece is pieces[-1]:
                    hidden.append(x[-keep:].clone() if keep else x)
                start = end
        self.hidden = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        return F.linear(self.hidden, self.head)

    def _attend_up_to(self, end: int, mask: torch.Tensor | None) -> Attend:
        """Attention to slots before `end` by a mask [groups * n, end], or a causal one where all tokens are new."""
        groups = self.heads // self.kv_heads

        def attend(number: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = self.keys[number, :, :, :end], self.values[number, :, :, :end]
            if mask is None:
                mixed = F.scaled_dot_product_attention(
                    query, keys, values, is_causal=True, scale=self.scaling, enable_gqa=groups > 1
                )
            else:  # the query heads of one key-value head as rows of one matrix: keys are not repeated
                mixed = F.scaled_dot_product_attention(
                    query.reshape(1, self.kv_heads, -1, self.head_dim),
                    keys,
                    values,
                    attn_mask=mask,
                    scale=self.scaling,
                ).reshape(query.shape)  # whose layout is the attention kernel's choice
            return mixed.transpose(1, 2)

        return attend

    def _allocate(self, capacity: int) -> None:
        shape = (len(self.layers), self.batch, self.kv_heads, capacity, self.head_dim)
        keys, values = (torch.empty(shape, dtype=self.model.dtype, device=self.device) for _ in range(2))
        if self.capacity:
            keys[:, :, :, : self.capacity] = self.keys
            values[:, :, :, : self.capacity] = self.values
        self.keys, self.values, self.capacity = keys, values, capacity
        for size in (*self._sizes.values(), *self._levels.values()):
            size.replay = None

    def _size(self, n: int, queries: int) -> _Size:
        """Of a step of n tokens whose attention has so many queries."""
        size = self._sizes.get(n) if queries == n else self._levels.get((n, queries))
        if size is not None:
            return size
        size = self._new_size(n, queries)
        if queries == n:
            self._sizes[n] = size
        else:
            self._levels[n, queries] = size
        return size

    @torch.inference_mode()
    def _new_size(self, n: int, queries: int) -> _Size:
        bits = (self.batch, queries, -(-queries // WINDOW))
        tree = _Mirrored([math.prod(bits) + 2 * n], torch.int32, self.device)
        size = _Size(
            packed=_Mirrored([self.batch, n + 1], torch.int64, self.device),
            tree=tree,
            mask_bits=tree.tensor[: -2 * n].view(bits),
            offsets=tree.tensor[-2 * n :].view(2, 1, n),
            rows=torch.arange(self.batch, device=self.device).repeat_interleave(n),
        )
        self._lay_out(size, np.arange(n), np.tri(n, dtype=np.bool_))
        size.is_chain = queries == n
        return size
