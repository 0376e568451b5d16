"""Gumbel noise keyed by (seed, sequence, position): the same on every device, in replay and in real runs."""

from __future__ import annotations

from functools import lru_cache

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BLOCK = 64  # positions per generated block of noise


def _signed(x: int) -> int:
    """Reinterpret the bits of a uint64 as int64."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _mix(x: int) -> int:
    """Apply the finaliser of SplitMix64, as specsim.io.rng does."""
    x &= _MASK
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return x ^ _shift(x, 31)


@lru_cache(maxsize=64)
def _noise_block(
    seed: int, sequence: int, block: int, vocab: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Draw standard Gumbel noise [BLOCK, V] for positions block * BLOCK and on, computed in float64."""
    base = _mix(_mix(seed + _GOLDEN) + sequence + _GOLDEN)
    keys = [_signed(_mix(base + block * BLOCK + i + _GOLDEN)) for i in range(BLOCK)]
    key = torch.tensor(keys, device=device)[:, None]
    token = torch.arange(vocab, device=device)[None] * _signed(_GOLDEN)
    bits = _shift(_mix_tensor(key + token), 12)
    uniform = (bits.double() + 0.5) * 2.0**-52  # 53 bits, so the half is never rounded away
    return (-torch.log(-torch.log(uniform))).to(dtype)


def gumbel_noise(
    seed: int,
    sequence: int,
    start: int,
    count: int,
    vocab: int,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Draw noise [count, V] for output positions start .. start + count - 1."""
    parts, end = [], start + count
    for block in range(start // BLOCK, (end - 1) // BLOCK + 1):
        begin = block * BLOCK
        rows = _noise_block(seed, sequence, block, vocab, device, dtype)
        parts.append(rows[max(start - begin, 0) : end - begin])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
