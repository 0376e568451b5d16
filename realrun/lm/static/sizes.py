"""Inputs that the host writes for a pass of n rows: tokens, slots, positions and masks, at fixed addresses.

Trees and chains use the same launches with other positions and mask bits. In a tree that grows level by level, a node
also sees nodes of earlier passes: the mask then covers a window of slots at the end of the cache, a whole number of
mask words. The window ends with the newest node, and may begin among the cached tokens, all of which are seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import speckernels
from specsim.io.arrays import Bools

WINDOW = 32  # slots, a mask word's bits

# (query [B, Hq, n, D], keys and values [B, Hkv, capacity, D], scaling) -> [B, n, Hq, D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class Mirrored:
    """Integers that the host writes and the device reads at a fixed address; on the CPU there is a single copy."""

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


class Rows(NamedTuple):
    """The N = B * n rows of a pass, on the device.

    slots, positions, sources : int64 [N], slots of their keys and values, positions in the text, slots to read from
    sequences : int64 [N]; tokens : int64 [B, n]
    size : of a chain's rows, so that the last of them can be taken alone
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    sequences: torch.Tensor
    attend: Attend
    size: Size | None = None

    def tail(self, n: int) -> Rows:
        """Take the last n rows of a chain."""
        assert self.size is not None
        return self.size.rows(n)


class Size:
    """Inputs of passes of n new rows. The mask covers the last `window` slots, n or more.

    packed : int64 [B, n + 1], the tokens, then the slot of the first
    tree : int32, mask bits [B, n, ceil(window / 32)], then slots, positions and sources [3, n] less the first slot
    """

    def __init__(self, batch: int, n: int, window: int, device: torch.device):
        self.n, self.window = n, window
        bits = (batch, n, -(-window // WINDOW))
        self.packed = Mirrored([batch, n + 1], torch.int64, device)
        self.tree = Mirrored([math.prod(bits) + 3 * n], torch.int32, device)
        self.mask_bits = self.tree.tensor[: -3 * n].view(bits)
        self.offsets = self.tree.tensor[-3 * n :].view(3, 1, n)
        self.sequences = torch.arange(batch, device=device).repeat_interleave(n)
        self._tails = torch.full((batch,), window, dtype=torch.int32, device=device) if window > n else None
        self.is_chain = False
        self.be_chain()

    def be_chain(self) -> None:
        """Let each row see the rows before it; sources are the slots before their own."""
        if not self.is_chain:
            self.lay_out(np.arange(self.n), np.tri(self.n, dtype=np.bool_), np.arange(self.n) - 1)
            self.is_chain = True

    def lay_out(self, offsets: npt.ArrayLike, visible: Bools, sources: npt.ArrayLike | None = None) -> None:
        """Give the next passes the shape of a tree.

        offsets, sources : [n], positions, and slots to read from, less the first slot
        visible : [n, k], which of the last k slots each row sees; all see those before
        """
        batch, n, words = self.mask_bits.shape
        k = visible.shape[1]
        seen = np.zeros((n, words * WINDOW), np.bool_)
        seen[:, : self.window - k] = True
        seen[:, self.window - k : self.window] = visible
        bits = np.packbits(seen, axis=-1, bitorder="little").view(np.int32).ravel()
        sources = np.zeros(n, np.int64) if sources is None else sources
        self.tree.put(np.concatenate([*[bits] * batch, np.arange(n), offsets, sources]))
        self.is_chain = False

    def rows(self, tail: int | None = None) -> Rows:
        """Make the rows of a pass, or the last `tail` rows of a chain."""
        n = self.n if tail is None else tail
        tokens, first = self.packed.tensor[:, :-1], self.packed.tensor[:, -1]
        slots, positions, sources = (part[:, -n:].flatten() for part in self.offsets + first[:, None])
        bits, tails = self.mask_bits, self._tails
        if n < self.n:  # a chain of n is the beginning of a longer chain
            bits, first = bits[:, :n, : -(-n // WINDOW)], first + (self.n - n)
        context = first.int() if tails is None else (first - (self.window - n)).int()

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
            return speckernels.tree_attention(query, keys, values, bits, context, scaling, tail_lens=tails)

        sequences = self.sequences.view(-1, self.n)[:, -n:].flatten()
        return Rows(tokens[:, -n:], slots, positions, sources, sequences, attend, self)


def window(nodes: int, end: int) -> int:
    """Count the slots masked in a pass behind `nodes` of a tree, its own included, whose cache ends at slot `end`.

    If the cache is shorter than that, the mask covers all of it.
    """
    return min(-(-nodes // WINDOW) * WINDOW, end)
