"""How a token is chosen from logits: greedy, or by Gumbel noise keyed to its position.

argmax(log p + g) with Gumbel noise g is an exact sample of p. As g depends only on (seed,
sequence, output position, token), the target's choice at a position does not depend on
who drafted, which makes replay exact at temperature > 0. The drafter uses the same noise,
so that it often agrees with the target; rejection sampling accepts somewhat more often, and
acceptance measured here does not carry over to engines that use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from specsim.errors import InputError

Mode = Literal["greedy", "gumbel"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK = 64  # positions per generated block of noise


def _signed(x: int) -> int:
    """The int64 with the bits of this uint64."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _mix(x: int) -> int:
    """The finaliser of SplitMix64, as in specsim.randomness."""
    x &= _MASK
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return x ^ _shift(x, 31)


@lru_cache(maxsize=32)
def _noise_block(seed: int, sequence: int, block: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, float64 [_BLOCK, V], for positions block * _BLOCK and on."""
    base = _mix(_mix(seed + _GOLDEN) + sequence + _GOLDEN)
    keys = [_signed(_mix(base + block * _BLOCK + i + _GOLDEN)) for i in range(_BLOCK)]
    key = torch.tensor(keys, device=device)[:, None]
    token = torch.arange(vocab, device=device)[None] * _signed(_GOLDEN)
    bits = _shift(_mix_tensor(key + token), 12)
    uniform = (bits.double() + 0.5) * 2.0**-52  # 53 bits, so the half is never rounded away
    return -torch.log(-torch.log(uniform))


def gumbel_noise(seed: int, sequence: int, start: int, count: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Noise for output positions start .. start + count - 1, float64 [count, V]."""
    first, last = start // _BLOCK, (start + count - 1) // _BLOCK
    blocks = [_noise_block(seed, sequence, b, vocab, device) for b in range(first, last + 1)]
    rows = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return rows[start - first * _BLOCK :][:count]


@dataclass(frozen=True)
class Choice:
    """Greedy decoding, or sampling at a temperature by Gumbel noise."""

    mode: Mode = "greedy"
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("greedy", "gumbel"):
            raise InputError(f"decoding mode {self.mode!r} is unknown; known: greedy, gumbel")
        if self.mode == "gumbel" and not 0 < self.temperature < 100:
            raise InputError(f"temperature={self.temperature} is outside (0, 100); use greedy for 0")

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the distribution that is sampled from, in at least float32."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits / self.temperature if self.mode == "gumbel" else logits

    def prepare(self, sequence: int, positions: int, vocab: int, device: torch.device) -> None:
        """Make a sequence's noise ahead of the clock."""
        if self.mode == "gumbel":
            for start in range(0, positions, _BLOCK):
                gumbel_noise(self.seed, sequence, start, 1, vocab, device)

    def tokens(self, scaled: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
        """Chosen tokens [n] for scaled logits [n, V] of output positions position, position + 1, ..."""
        if self.mode == "gumbel":
            noise = gumbel_noise(self.seed, sequence, position, len(scaled), scaled.shape[-1], scaled.device)
            scaled = scaled + noise.to(scaled.dtype)
        return scaled.argmax(-1)

    def as_dict(self) -> dict[str, Any]:
        return {"mode": self.mode, "temperature": self.temperature, "seed": self.seed}
