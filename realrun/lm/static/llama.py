"""A whole model over a static cache; also the base of drafters' passes over static caches."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

import speckernels
from realrun.lm.cached import Describe
from realrun.lm.fused_ops import PLAIN, ElementwiseOps, compiled_ops
from realrun.lm.kernels import planless_attention
from realrun.lm.llama import TREE_ROOM, Layer, LlamaLM
from realrun.lm.static.graphs import Graphs, Recorded
from realrun.lm.static.sizes import WINDOW, Attend, Rows, Size, window
from realrun.lm.variants import NOTHING, SkippedSublayers
from specsim.io.arrays import Bools, Ints
from specsim.io.errors import InputError

PATH_STEP = 16  # nodes; a path's length is filled up to a multiple
PIECE_TOKENS = 256  # of a prompt that continues a cache; bounds the mask's memory
MAX_STEP_TOKENS = 256  # new tokens of a step, or nodes of a tree; more go through the library's fused attention
STATES = "states"  # variant of a pass that leaves out the head
FIRST_CAPACITY = 4096  # cached tokens per sequence, unless the model has fewer positions


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


class StaticLlama(LlamaLM):
    """Llama or Qwen3 over preallocated buffers: keys and values [layers, B, Hkv, capacity, D].

    `step` serves B sequences of any lengths. The interface of CachedLM (forward, prefill, truncate, reset, length)
    serves a single sequence, B = 1. Slots beyond a sequence's length hold garbage; nothing reads them.

    A drafter's pass is a subclass that overrides the input of its rows (`_input`) and what else a pass does (`_open`).
    Passes of the same shape may come in variants, each of which is a graph.

    capacity : tokens that each sequence has room for, at most the model's positions; by default 4096 or the model's
        positions. A longer sequence, tree nodes included, makes the buffers grow, which drops all graphs: call `warm`
        or `reserve` before timing starts
    batch : B
    graphs, compiled : record graphs; join elementwise operations by torch.compile, which needs Triton. Unless given,
        both where the model is on a GPU
    """

    describes = True
    skips: SkippedSublayers = NOTHING
    own_layers: range | None = None  # the layers that end a pass; all unless given

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
        self._warmed: list[tuple[int, int, Hashable]] = []
        self._described: WeakKeyDictionary[Describe, list[tuple[int, Hashable]]] = WeakKeyDictionary()
        self._sizes: dict[tuple[int, int], Size] = {}  # by rows and masked slots
        if compiled is None:
            compiled = on_gpu and importlib.util.find_spec("triton") is not None
        self._ops = compiled_ops() if compiled else PLAIN
        super().__init__(model)
        self.recorded = Recorded(Graphs(self.device) if (on_gpu if graphs is None else graphs) else None)
        self._make_stack(capacity)
        self.stack.readers.append(self.recorded)

    def _make_stack(self, capacity: int | None) -> None:
        self.stack = StaticStack(self, self._ops, self.layers, self.batch)
        capacity = min(self.max_positions, FIRST_CAPACITY) if capacity is None else capacity
        if not 1 <= capacity <= self.max_positions:
            raise InputError(
                f"a cache of {capacity} tokens exceeds the {self.max_positions} positions of the model; "
                "shorten prompt or output"
            )
        self.stack.allocate(capacity)

    @property
    def keys(self) -> torch.Tensor:
        """Cached keys [layers, B, Hkv, capacity, D]; `values` has the same shape."""
        return self.stack.keys

    @property
    def values(self) -> torch.Tensor:
        return self.stack.values

    @property
    def capacity(self) -> int:
        return self.stack.capacity

    def reset(self) -> None:
        """Forget everything; buffers and graphs stay."""
        self.length = self.nodes = 0
        self.hidden = None

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room for `length` tokens and nodes per sequence; drops all graphs if the buffers must grow."""
        self.stack.reserve(length)

    @torch.inference_mode()
    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        """Forget everything, make room for `length` tokens and nodes, and record the graphs of these n.

        tree_nodes : of trees that grow by several passes of these sizes; 0 if there are none
        Other passes are recorded when they first run.
        """
        self.reset()
        windows = range(WINDOW, min(tree_nodes + WINDOW, MAX_STEP_TOKENS + 1, self.max_positions + 1), WINDOW)
        self.reserve(max(length, *windows, 0))
        # The largest first: smaller passes then fit into its memory.
        self._warmed = [
            (n, masked, variant)
            for n in sorted((n for n in set(sizes) if n <= MAX_STEP_TOKENS), reverse=True)
            for masked in (*(size for size in reversed(windows) if size > n), n)
            for variant in self._variants(n)[: None if masked == n else 1]
        ]
        if self.recorded.graphs is None:
            return
        self.warm_again()
        if self.batch == 1:
            self.stack.move([[0]] * len(self.stack.layers), 0)  # loads or compiles the kernel

    @torch.inference_mode()
    def warm_again(self) -> None:
        """Record the warmed passes that are not recorded, for example because buffers grew since."""
        if self.recorded.graphs is None:
            return
        for key in self._warmed:
            self._warm(*key)
        for describe, passes in self._described.items():
            for n, variant in passes:
                if (n, variant, describe) not in self.recorded:
                    size = self._chain(n)
                    size.packed.put([0] * (n + 1))
                    self._run_description(size, variant, describe)

    def _warm(self, n: int, masked: int, variant: Hashable) -> None:
        if (n, masked, variant) not in self.recorded:
            size = self._size(n, masked)
            size.packed.put([0] * n + [masked - n])  # the window's slots then begin with the first
            self._run(size, variant)

    @torch.inference_mode()
    def warm_description(self, sizes: Iterable[int], describe: Describe) -> None:
        self._described[describe] = [
            (n, variant) for n in sorted(set(sizes), reverse=True) for variant in self._variants(n)
        ]
        self.warm_again()

    def forget_description(self, describe: Describe) -> None:
        self._described.pop(describe, None)
        self.recorded.forget(describe)

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Compute logits [B, n, V] after each new token; their keys and values enter the cache.

        tokens : int64 [B, n], the sequences' next tokens. lengths : int32 [B], tokens cached
        before them; `length` of this object is neither read nor changed. Slots lengths
        to lengths + n - 1 are written and must lie inside the capacity: on a GPU the lengths
        stay on the device and are not checked. With graphs the result lies at a fixed address:
        the next step of the same n overwrites it.
        """
        return self._fed(tokens, lengths, None)[0]

    @torch.inference_mode()
    def step_states(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Do the same as `step` without the head: states [B, n, d] after the final norm, for `logits_of`."""
        return self._fed(tokens, lengths, STATES)[1].view(*tokens.shape, -1)

    def _fed(self, tokens: torch.Tensor, lengths: torch.Tensor, variant: Hashable) -> tuple[torch.Tensor, ...]:
        if tokens.dim() != 2 or len(tokens) != self.batch or not 1 <= tokens.shape[1] <= MAX_STEP_TOKENS:
            raise InputError(
                f"tokens are {list(tokens.shape)}; give [{self.batch}, n] with 1 to {MAX_STEP_TOKENS} new tokens"
            )
        size = self._chain(tokens.shape[1])
        size.packed.tensor[:, :-1].copy_(tokens)
        size.packed.tensor[:, -1].copy_(lengths)
        return self._run(size, variant)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        assert self.batch == 1, "the interface of CachedLM serves a single sequence; call step"
        self.reserve(self.length + len(tokens))
        # A prompt's length seldom comes twice: recording it would not pay.
        if keep or len(tokens) > MAX_STEP_TOKENS:
            return self._prompt(tokens, keep)
        tokens, first, variant = self._open(tokens)
        return self._step(self._chain(len(tokens)), tokens, first, variant)

    def _describe(self, tokens: Sequence[int], describe: Describe, follows: bool) -> torch.Tensor:
        self.reserve(self.length + len(tokens))
        if len(tokens) > MAX_STEP_TOKENS:
            self._prompt(tokens[:-1], keep=1)
            self.length += len(tokens) - 1
            return self._describe(tokens[-1:], describe, follows)
        tokens, first, variant = self._open(tokens)
        size = self._chain(len(tokens))
        if not follows:
            size.packed.put([*tokens, first])
        statistics, self.hidden = self._run_description(size, variant, describe)
        return statistics

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        assert self.batch == 1, "the interface of CachedLM serves a single sequence"
        seen, start = visible.numpy(), self.length + self.nodes
        self.reserve(start + len(tokens))
        return self._nodes_step(
            tokens, start, np.asarray(depths) - self.nodes, seen, self._sources(seen), self._variants(len(tokens))[0]
        )

    def _nodes_step(
        self,
        tokens: Sequence[int],
        first: int,
        offsets: npt.ArrayLike,
        visible: Bools,
        sources: npt.ArrayLike,
        variant: Hashable,
    ) -> torch.Tensor:
        """Compute logits [n, V] of tree nodes from slot `first` on.

        offsets, sources : [n], positions, and slots to read from, less the first slot
        visible : [n, k], which of the last k slots each sees; all see those before
        """
        (n, nodes), end = visible.shape, first + len(tokens)
        if nodes <= MAX_STEP_TOKENS:
            size = self._size(n, window(nodes, end) if nodes > n else n)
            size.lay_out(offsets, visible, sources)
            return self._step(size, tokens, first, variant)
        ids, places, above = (torch.tensor(part, device=self.device) for part in (tokens, offsets, sources))
        attend = self.stack.attend_up_to(end, self._tree_mask(torch.from_numpy(visible), end))
        rows = self.stack.rows_at(torch.arange(first, end, device=self.device), attend)
        rows = rows._replace(tokens=ids[None], positions=places + first, sources=above + first)
        logits, self.hidden = self._through(rows, variant)
        return logits[0]

    def _sources(self, visible: Bools) -> Ints:
        """Find the slots that nodes bool [n, nodes + n] read from, less the first slot, [n]; unused here."""
        return np.zeros(len(visible), np.int64)

    def _move_nodes(self, path: Sequence[int]) -> None:
        self.stack.move([path] * len(self.stack.layers), self.length)

    def _chain(self, n: int) -> Size:
        size = self._size(n, n)
        size.be_chain()
        return size

    def _step(self, size: Size, tokens: Sequence[int], first_slot: int, variant: Hashable) -> torch.Tensor:
        """Compute logits [n, V] of a single sequence's step."""
        size.packed.put([*tokens, first_slot])
        logits, self.hidden = self._run(size, variant)  # computed anyway, whatever `keep_hidden` is
        return logits[0]

    def _run(self, size: Size, variant: Hashable) -> tuple[torch.Tensor, ...]:
        """Compute logits [B, n, V] and states [B * n, d] of a step on the size's inputs."""
        key = size.n, size.window, variant
        return self.recorded.run(key, lambda: self._through(size.rows(), variant))

    def _run_description(self, size: Size, variant: Hashable, describe: Describe) -> tuple[torch.Tensor, ...]:
        """Run a chain's step: statistics [c] of its last row, and the states [n, d].

        The chosen token and its slot become the inputs of the next step of a single row, so that nothing need be
        copied to the device for it.
        """
        following = self._chain(1).packed.tensor

        def run() -> tuple[torch.Tensor, ...]:
            rows = size.rows()
            logits, hidden = self._through(rows, variant)
            statistics = describe(self._of_known(logits[0, -1:]), self._places(rows, variant)[-1:], hidden[-1:])
            following.copy_(torch.stack([statistics[0].long(), rows.slots[-1] + 1])[None])
            return statistics, hidden

        return self.recorded.run((size.n, variant, describe), run, [following])

    def _places(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        return rows.positions

    def _open(self, tokens: Sequence[int]) -> tuple[Sequence[int], int, Hashable]:
        """Give the tokens that are fed now, the slot of the first of them, and the variant of the pass."""
        return tokens, self.length, None

    def _variants(self, n: int) -> Sequence[Hashable]:
        """List the variants of passes of n rows; the first is that of trees' nodes."""
        return (None,)

    def _through(self, rows: Rows, variant: Hashable) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits [B, n, V] and states [B * n, d]. Nothing is copied to the host, so it can be recorded."""
        x = self._input(rows, variant)
        _, hidden = self.stack.run(x, rows, self.norm_out, self.own_layers, self.skips)
        return hidden if variant == STATES else self._of_states(hidden, rows), hidden

    def _of_states(self, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        return self.logits_of(hidden).view(*rows.tokens.shape, -1)

    def _input(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        """Compute the input of the first layer, [B * n, d]."""
        return F.embedding(rows.tokens.flatten(), self.embedding)

    def _prompt(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """Run a prompt of any length without a graph. Logits after the last `keep` tokens, or all if 0."""
        x = F.embedding(torch.tensor(tokens, device=self.device), self.embedding)
        _, hidden = self.stack.prompt(x, self.length, self.norm_out)
        self.hidden = hidden[-keep:].clone() if keep else hidden
        return self.logits_of(self.hidden)

    @torch.inference_mode()
    def _size(self, n: int, masked: int) -> Size:
        """Get the size of a step of n tokens in which this many slots at the end are masked."""
        if (n, masked) not in self._sizes:
            self._sizes[n, masked] = Size(self.batch, n, masked, self.device)
        return self._sizes[n, masked]
