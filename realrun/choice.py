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

import speckernels
from realrun import kernels
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


@lru_cache(maxsize=64)
def _noise_block(
    seed: int, sequence: int, block: int, vocab: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Standard Gumbel noise [_BLOCK, V] for positions block * _BLOCK and on, computed in float64."""
    base = _mix(_mix(seed + _GOLDEN) + sequence + _GOLDEN)
    keys = [_signed(_mix(base + block * _BLOCK + i + _GOLDEN)) for i in range(_BLOCK)]
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
    """Noise for output positions start .. start + count - 1, [count, V]."""
    parts, end = [], start + count
    for block in range(start // _BLOCK, (end - 1) // _BLOCK + 1):
        begin = block * _BLOCK
        rows = _noise_block(seed, sequence, block, vocab, device, dtype)
        parts.append(rows[max(start - begin, 0) : end - begin])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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

    def prepare(self, sequence: int, positions: int, vocab: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make a sequence's noise ahead of the clock, for logits [n, vocab] of this device and type."""
        if self.mode == "gumbel":
            for start in range(0, positions, _BLOCK):
                gumbel_noise(self.seed, sequence, start, 1, vocab, device, _compared_in(dtype))

    def statistics(self, logits: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
        """The token chosen after each row of logits [n, V], and how sure the row is of it: [n, 4].

        Rows belong to output positions position, position + 1, ... Columns: token, its
        probability, the largest probability, entropy in nats; all of the distribution that is
        sampled from, in at least float32. One tensor, so that one copy brings everything to
        the host.
        """
        noise, temperature = self._noise(logits, sequence, position), self._temperature
        if _lean(logits):
            return lean_statistics(logits, noise, temperature)
        return speckernels.draft_statistics(logits, noise=noise, temperature=temperature).values[:, :4]

    def tokens(self, logits: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
        """The tokens of `statistics`, int64 [n]."""
        if _lean(logits):
            return _argmax(_scaled(logits, self._temperature), self._noise(logits, sequence, position))
        return self.statistics(logits, sequence, position)[:, 0].long()

    @property
    def _temperature(self) -> float:
        return self.temperature if self.mode == "gumbel" else 1.0

    def _noise(self, logits: torch.Tensor, sequence: int, position: int) -> torch.Tensor | None:
        if self.mode == "greedy":
            return None
        count, vocab = logits.shape
        dtype = _compared_in(logits.dtype)
        return gumbel_noise(self.seed, sequence, position, count, vocab, logits.device, dtype)

    def as_dict(self) -> dict[str, Any]:
        return {"mode": self.mode, "temperature": self.temperature, "seed": self.seed}


def lean_statistics(logits: torch.Tensor, noise: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """speckernels.draft_statistics of finite logits in fewer calls: the first four columns.

    At a small model on a CPU the operation would take as long as a good part of a draft step.
    """
    scaled = _scaled(logits, temperature)
    tokens = _argmax(scaled, noise)
    probs = scaled.softmax(-1)
    entropy = torch.special.entr(probs).sum(-1)
    prob = probs.gather(-1, tokens[:, None])[:, 0]
    return torch.stack([tokens.to(probs.dtype), prob, probs.amax(-1), entropy], dim=-1)


def _lean(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu" and not kernels.named()


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.to(_compared_in(logits.dtype))
    return logits if temperature == 1.0 else logits / temperature


def _argmax(scaled: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    return (scaled if noise is None else scaled + noise).argmax(-1)


def _compared_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which logits of this type are compared."""
    return torch.float64 if dtype == torch.float64 else torch.float32
