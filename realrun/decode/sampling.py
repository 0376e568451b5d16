"""How a token is chosen from logits: greedily, by Gumbel noise, or by rejection sampling.

argmax(log p + g) with Gumbel noise g is an exact sample of p. Because g depends only on (seed, sequence, output
position, token), the target's choice at a position does not depend on the draft, which makes replay exact at
temperature > 0. Two modes choose the target's tokens in this way, and differ in what the drafter proposes:

- "greedy-draft": its likeliest token x, which is kept with probability p(x). Engines do so by default (vLLM, SGLang,
  TensorRT-LLM, llama.cpp): accepting x with p(x), else drawing from p without x, is drawing from p and comparing.
- "gumbel": the token that it chooses by the same noise (Daliri et al. 2024), which agrees with the target more often.

Rejection sampling (Leviathan et al. 2023; Chen et al. 2023) accepts most often: the drafter samples its own tokens,
and `realrun.decode.verify` accepts them with probability p/q. Each draw is a uniform keyed by its purpose, sequence,
round and depth. Noise and uniforms are the same on every device, in replay and in real runs.

Temperature, then top-k, then top-p turn the logits of both target and drafter into the distribution that is sampled
from, in the order of Hugging Face and vLLM. Features (probability, confidence, entropy) are those of that distribution,
in greedy-draft mode as well; none of the three changes which token is likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, get_args

import numpy as np
import torch

import speckernels
from realrun.lm import kernels
from speckernels.ops.draft_statistics import MAX_TOP_K
from specsim.io.errors import InputError
from specsim.io.rng import uniform

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BLOCK = 64  # positions per generated block of noise
Mode = Literal["greedy", "greedy-draft", "gumbel", "rejection"]
Stream = Literal["draft", "judge", "last", "couple"]  # purpose of a uniform in rejection sampling
_STREAMS: tuple[Stream, ...] = ("draft", "judge", "last", "couple")


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _mix(x: int) -> int:
    """Apply the finaliser of SplitMix64, as specsim.io.rng does."""
    x &= _MASK
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
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


@lru_cache(maxsize=64)
def _stream_seed(seed: int, stream: Stream) -> int:
    words = np.random.SeedSequence((seed, _STREAMS.index(stream))).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


@dataclass(frozen=True)
class Sampler:
    """Greedy decoding, or sampling at a temperature with greedy drafts, shared Gumbel noise or rejection sampling.

    Attributes
    ----------
    mode : "greedy"; or the target samples, and the drafter proposes its likeliest token ("greedy-draft"), the token
        that it chooses by the target's noise ("gumbel"), or a sample of its own ("rejection")
    temperature : divisor of the logits, in (0, 100)
    seed : of the noise
    top_p : sample from the nucleus, the smallest set of most probable tokens whose mass
        reaches it (Holtzman et al. 2020); 1 keeps all. Greedy ignores it and the temperature.
    top_k : sample from this many most probable tokens (Fan et al. 2018), before top_p; 0 keeps all.

    Examples
    --------
    >>> import realrun
    >>> realrun.Sampler("rejection", temperature=0.8, top_p=0.95).mode
    'rejection'
    """

    mode: Mode = "greedy"
    temperature: float = 1.0
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise InputError(f"decoding mode {self.mode!r} is unknown; known: {', '.join(get_args(Mode))}")
        if self.mode != "greedy" and not 0 < self.temperature < 100:
            raise InputError(f"temperature={self.temperature} is outside (0, 100); for 0 give mode 'greedy'")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} is outside (0, 1]; 1 keeps every token")
        if self.top_k < 0:
            raise InputError(f"top_k={self.top_k} is below 0; 0 keeps every token")

    @property
    def noisy_target(self) -> bool:
        """Whether the target samples by Gumbel noise."""
        return self.mode in ("greedy-draft", "gumbel")

    @property
    def noisy_drafter(self) -> bool:
        """Whether the drafter chooses by the target's noise."""
        return self.mode == "gumbel"

    def prepare(self, sequence: int, positions: int, vocab: int, device: torch.device, dtype: torch.dtype) -> None:
        """Draw a sequence's noise before timing starts, for logits [n, vocab] of this device and type."""
        if self.noisy_target:
            for start in range(0, positions, BLOCK):
                gumbel_noise(self.seed, sequence, start, 1, vocab, device, compared_in(dtype))
        elif self.mode == "rejection":
            self.uniform("last", sequence, 0, 0)  # the first call in a process compiles it

    def statistics(self, logits: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
        """Choose the token that is drafted after each row of logits [n, V]; with its statistics, [n, 4].

        Rows belong to output positions position, position + 1, ... Columns: token, its probability, the largest
        probability, entropy in nats; all of the distribution that is sampled from, in at least float32. They are in a
        single tensor so that a single copy brings them to the host. Not in rejection mode, which draws in `draft`.
        """
        assert self.mode != "rejection", "rejection sampling needs the depth in the draft as well"
        return self.statistics_with(logits, self.draft_noise(logits, sequence, range(position, position + len(logits))))

    def statistics_with(self, logits: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Compute `statistics` with the rows' noise [n, V], or without noise."""
        logits, temperature = self._truncated(logits), self._temperature
        if plain_calls(logits):
            return plain_statistics(logits, noise, temperature)
        return speckernels.draft_statistics(logits, noise=noise, temperature=temperature).values[:, :4]

    def top10_confidence(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the largest probability of each row's ten likeliest tokens, renormalised: [n] from logits [n, V]."""
        best = self.warped(logits).topk(min(10, logits.shape[1]), dim=-1).values
        return best.softmax(-1)[:, 0]

    def tokens(self, logits: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
        """Choose the target's tokens from its logits [n, V] at output positions position and on, int64 [n]."""
        return self.tokens_at(logits, sequence, range(position, position + len(logits)))

    def tokens_at(self, logits: torch.Tensor, sequence: int, positions: Sequence[int]) -> torch.Tensor:
        """Choose the target's token after each row of logits [n, V], int64 [n]; row i is for positions[i]."""
        assert self.mode != "rejection", "rejection sampling needs the draft as well"
        noise = self._noise(logits, sequence, positions) if self.noisy_target else None
        if plain_calls(logits):
            return _argmax(self.warped(logits), noise)
        logits, temperature = self._truncated(logits), self._temperature
        return speckernels.draft_statistics(logits, noise=noise, temperature=temperature).values[:, 0].long()

    def candidates(
        self, logits: torch.Tensor, sequence: int, positions: Sequence[int], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Order the first `width` siblings below each row of logits [n, V]: tokens int64 [n, w] and probs [n, w].

        Row i is for output position positions[i]; w is `width`, or V if that is less. With q the distribution that is
        sampled from and g the noise of the position (0 except in Gumbel mode), siblings are ordered by log q + g,
        lowest index first at ties, so that the first sibling is the token that a chain drafts. A sibling's prob is
        softmax(log q + g): because the target chooses by the same noise, this estimates how likely it chooses the
        sibling, which q does not.
        """
        scores = self.warped(logits)
        noise = self.draft_noise(logits, sequence, positions)
        return top_tokens(scores if noise is None else scores + noise, width)

    def draft(
        self, logits: torch.Tensor, sequence: int, position: int, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft the depth-th token (from 1) of the round at `position`, from logits [1, V]: statistics [1, 4].

        In rejection mode, the second result is the distribution [1, V] that the token was drawn from.
        """
        if self.mode != "rejection":
            return self.statistics(logits, sequence, position + depth - 1), None
        probs = self.probs(logits)
        return describe(probs, draw(probs, [self.uniform("draft", sequence, position, depth)])), probs

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the distribution [n, V] that is sampled from, in at least float32."""
        return self.warped(logits).softmax(-1)

    def warped(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the logits [n, V] of `probs`: at the temperature, -inf where top-k or top-p cuts."""
        return _scaled(self._truncated(logits), self._temperature)

    def uniform(self, stream: Stream, sequence: int, position: int, depth: int) -> float:
        """Draw the uniform in (0, 1) of this stream for token `depth` of the round at `position`."""
        return float(uniform(_stream_seed(self.seed, stream), sequence, position, depth))

    def _truncated(self, logits: torch.Tensor) -> torch.Tensor:
        """Set logits to -inf where top-k, then top-p, cuts."""
        if self.mode == "greedy":
            return logits
        if 0 < self.top_k < logits.shape[1]:
            logits = logits.masked_fill(~most_likely(logits, self.top_k), -torch.inf)
        if self.top_p < 1.0:
            logits = logits.masked_fill(~nucleus(_scaled(logits, self.temperature).softmax(-1), self.top_p), -torch.inf)
        return logits

    @property
    def _temperature(self) -> float:
        return 1.0 if self.mode == "greedy" else self.temperature

    def draft_noise(self, logits: torch.Tensor, sequence: int, positions: Sequence[int]) -> torch.Tensor | None:
        """Draw the noise [n, V] by which the drafter chooses at the rows' positions; None if it uses none."""
        return self._noise(logits, sequence, positions) if self.noisy_drafter else None

    def _noise(self, logits: torch.Tensor, sequence: int, positions: Sequence[int]) -> torch.Tensor:
        """Draw the noise [n, V] of the rows' positions."""
        vocab, dtype = logits.shape[1], compared_in(logits.dtype)

        def noise(start: int, count: int) -> torch.Tensor:
            return gumbel_noise(self.seed, sequence, start, count, vocab, logits.device, dtype)

        if isinstance(positions, range):
            return noise(positions.start, len(positions))
        # Nodes of a level share their position.
        parts = [noise(at, 1).expand(len([*rows]), -1) for at, rows in groupby(positions)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def as_dict(self) -> dict[str, Any]:
        """Make the JSON form, without top_p and top_k where they cut nothing, as in old traces."""
        values = {"mode": self.mode, "temperature": self.temperature, "seed": self.seed}
        if self.top_p < 1.0:
            values["top_p"] = self.top_p
        return {**values, "top_k": self.top_k} if self.top_k else values


def top_tokens(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the tokens of each row's largest scores [n, V], descending, and their softmax(scores); both [n, w].

    At ties the lowest index comes first; w is `width`, or V if that is less. Scores are finite or -inf.
    """
    vocabulary = scores.shape[1]
    width = min(width, vocabulary)
    if not plain_calls(scores) and width <= MAX_TOP_K:
        # Kernels give no token for -inf; this far down, the probability is 0 all the same.
        statistics = speckernels.draft_statistics(scores.clamp(min=-1e30), top_k=width)
        return statistics.top_ids, statistics.top_probs.clamp(max=1)  # may exceed 1 by rounding
    best, tokens = scores.topk(min(width + 1, vocabulary), dim=-1)
    tokens = tokens[:, :width]
    if bool((best[:, 1:] == best[:, :-1]).any()):  # topk does not define which of equal scores it takes
        tokens = torch.stack(
            [_top_of_row(row, least, width) for row, least in zip(scores, best[:, width - 1], strict=True)]
        )
    return tokens, scores.softmax(-1).gather(-1, tokens)


def _top_of_row(scores: torch.Tensor, least: torch.Tensor, width: int) -> torch.Tensor:
    """Find the tokens of `top_tokens` for a row [V] whose width-th largest score is `least`."""
    tokens = torch.cat([(scores > least).nonzero()[:, 0], (scores == least).nonzero()[:width, 0]])
    return tokens[scores[tokens].argsort(descending=True, stable=True)][:width]


def most_likely(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Mark the `top_k` largest logits of each row, bool [n, V]; lowest index first at ties."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order[:, :top_k], value=True)


def nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mark the fewest most probable tokens of each row with mass >= top_p, bool [n, V]; lowest index first at ties."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.double()
    inside = ranked.cumsum(-1) - ranked < top_p
    return torch.zeros_like(inside).scatter(-1, order, inside)


def draw(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """Draw a token for each row of weights [n, V], which need not sum to 1, by inversion of its uniform: int64 [n]."""
    cumulative = weights.double().cumsum(-1)
    at = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True).clamp(max=weights.shape[-1] - 1)[:, 0]


def describe(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the columns of `Sampler.statistics` [n, 4] for tokens [n] drawn from probs [n, V]."""
    entropy = torch.special.entr(probs).sum(-1)
    prob = probs.gather(-1, tokens[:, None])[:, 0]
    return torch.stack([tokens.to(probs.dtype), prob, probs.amax(-1), entropy], dim=-1)


def plain_statistics(logits: torch.Tensor, noise: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """Compute the first four columns of speckernels.draft_statistics of logits, finite or -inf, in fewer calls.

    With a small model on a CPU the operation would take a good part of a draft step.
    """
    scaled = _scaled(logits, temperature)
    return describe(scaled.softmax(-1), _argmax(scaled, noise))


def plain_calls(logits: torch.Tensor) -> bool:
    """Decide whether plain torch calls do the work: on a CPU, unless kernels were named."""
    return logits.device.type == "cpu" and not kernels.named()


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.to(compared_in(logits.dtype))
    if temperature == 1.0:
        return logits
    # Divided as speckernels.draft_statistics does: on a GPU, torch would multiply by the reciprocal of a number.
    on_cpu = logits.device.type == "cpu"
    return logits / (temperature if on_cpu else torch.full((), temperature, dtype=logits.dtype, device=logits.device))


def _argmax(scaled: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    return (scaled if noise is None else scaled + noise).argmax(-1)


def compared_in(dtype: torch.dtype) -> torch.dtype:
    """Choose the type in which logits of this type are compared."""
    return torch.float64 if dtype == torch.float64 else torch.float32
