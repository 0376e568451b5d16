"""Shared memory of a GPU, and number of parts of the cache, from shapes and the device alone."""

from __future__ import annotations

from functools import cache

import torch

MIN_TILES = 2  # a part below this many tiles of slots costs more to merge than it saves
GOOD_ENOUGH = 0.9  # of the best use of the multiprocessors: fewer parts mean less to merge
FULL_SHARED_BYTES = 163 * 1024  # of a block: the largest tiles; A100, H100 and later data-center GPUs have them
SMALL_SHARED_BYTES = 99 * 1024  # of a block on RTX 30, 40 and 50, A40, L40S


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory, in bytes, that a thread block may use."""
    if device.type != "cuda":
        return FULL_SHARED_BYTES
    # Missing from torch's type stubs.
    limit: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return limit


@cache
def split_count(blocks: int, capacity_tiles: int, slots: int) -> int:
    """Number of parts per sequence and head.

    blocks : thread blocks if the cache is not cut; capacity_tiles : tiles in a full cache;
    slots : blocks the GPU runs at once. The last wave of blocks leaves part of the GPU idle:
    the fewest parts that come within GOOD_ENOUGH of the best use are taken.
    """
    max_splits = max(1, min(slots, capacity_tiles // MIN_TILES))
    waves = {splits: -(-blocks * splits // slots) for splits in range(1, max_splits + 1)}
    used = {splits: blocks * splits / (count * slots) for splits, count in waves.items()}
    best = max(used.values())
    return next(splits for splits, share in used.items() if share >= GOOD_ENOUGH * best)
