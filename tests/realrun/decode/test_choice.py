"""Choosing tokens: noise that belongs to its place alone, and exact samples by it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from realrun.decode.sampling import Sampler, gumbel_noise
from specsim.io.errors import InputError

CPU = torch.device("cpu")
VOCAB = 97


def reference_gumbel(seed: int, sequence: int, position: int, token: int) -> float:
    """SplitMix64 in plain integers, chained over the key, as the module's docstring defines the noise."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x &= mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = 0
    for part in (seed, sequence, position):
        key = mix(key + part + golden)
    uniform = ((mix(key + token * golden) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def test_noise_equals_a_plain_splitmix64() -> None:
    for seed, sequence, position in [(0, 0, 0), (3, 1, 63), (2**63 + 5, 7, 64), (2**32 - 1, 2**31, 1000)]:
        noise = gumbel_noise(seed, sequence, position, 1, VOCAB, CPU)[0].tolist()
        expected = [reference_gumbel(seed, sequence, position, token) for token in range(VOCAB)]
        assert noise == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("start", "count"), [(0, 200), (63, 2), (64, 1), (60, 70), (127, 130)])
def test_noise_does_not_depend_on_how_it_is_asked_for(start: int, count: int) -> None:
    whole = gumbel_noise(5, 2, start, count, VOCAB, CPU)
    assert whole.shape == (count, VOCAB) and whole.dtype == torch.float64
    for position in reversed(range(start, start + count)):
        gumbel_noise(6, 1, position, 1, VOCAB, CPU)  # evicts cached blocks
        assert torch.equal(gumbel_noise(5, 2, position, 1, VOCAB, CPU)[0], whole[position - start])


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    assert torch.equal(gumbel_noise(1, 1, 1, 9, 50, CPU), gumbel_noise(1, 1, 1, 9, VOCAB, CPU)[:, :50])


def test_noise_is_distinct_over_seed_sequence_position_and_token() -> None:
    parts = [gumbel_noise(seed, sequence, 0, 100, VOCAB, CPU) for seed in range(4) for sequence in range(4)]
    values = torch.cat(parts).flatten()
    assert len(values.unique()) == len(values)


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(11, 0, 0, 2000, VOCAB, CPU).numpy()
    assert np.isfinite(noise).all()
    n, sd = noise.size, math.pi / math.sqrt(6)
    assert abs(noise.mean() - np.euler_gamma) < 4 * sd / math.sqrt(n)
    # A standard Gumbel has kurtosis 5.4, so its variance estimate has variance sd^4 x 4.4 / n.
    assert abs(noise.var() - sd**2) < 4 * sd**2 * math.sqrt(4.4 / n)
    assert stats.kstest(noise.ravel()[::7], "gumbel_r").pvalue > 1e-3
    neighbours = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(n)


def p_value(chosen: np.ndarray, probs: np.ndarray) -> float:
    return stats.chisquare(np.bincount(chosen, minlength=len(probs)), probs * len(chosen)).pvalue


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_choices_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.5], dtype=torch.float64)
    sampler = Sampler("gumbel", temperature, seed=3)
    rows = logits.expand(3000, -1)
    chosen = np.concatenate([sampler.tokens(rows, sequence, 0).numpy() for sequence in range(10)])
    assert p_value(chosen, (logits / temperature).softmax(-1).numpy()) > 1e-3
    assert p_value(chosen, (logits / (1.1 * temperature)).softmax(-1).numpy()) < 1e-6  # the test can fail


def test_many_positions_at_once_choose_as_one_by_one() -> None:
    logits = torch.randn(150, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sampler = Sampler("gumbel", 0.8, seed=9)
    one_by_one = [sampler.tokens(logits[i : i + 1], 4, 30 + i).item() for i in range(150)]
    assert sampler.tokens(logits, 4, 30).tolist() == one_by_one
    assert sampler.tokens(logits, 5, 30).tolist() != one_by_one


def test_greedy_is_the_argmax_and_ignores_temperature_and_seed() -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0))
    for sampler in (Sampler(), Sampler("greedy", 0.0, 7)):
        assert torch.equal(sampler.tokens(logits, 3, 5), logits.argmax(-1))
        confidence = sampler.statistics(logits, 3, 5)[:, 2]
        torch.testing.assert_close(confidence, logits.softmax(-1).amax(-1))


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(),
        Sampler("gumbel", 0.6, seed=2),
        Sampler("gumbel", 1.3, top_p=0.7),
        Sampler("rejection", 0.8, top_p=0.4),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [4, 10, 60])
def test_top10_confidence_is_the_largest_of_the_ten_largest_probabilities_over_their_sum(
    sampler: Sampler, vocabulary: int
) -> None:
    logits = 2 * torch.randn(50, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ranked = sampler.probs(logits).sort(dim=-1, descending=True).values[:, :10]
    confidence = sampler.top10_confidence(logits)
    torch.testing.assert_close(confidence, ranked[:, 0] / ranked.sum(-1), rtol=1e-12, atol=0)
    if vocabulary > 10 and sampler.top_p == 1:
        assert (confidence > ranked[:, 0]).all()
    one_by_one = torch.cat([sampler.top10_confidence(row[None]) for row in logits])
    assert torch.equal(confidence, one_by_one)


def test_half_precision_logits_are_compared_in_float32() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0]])
    sampler = Sampler("gumbel", 0.7)
    assert torch.equal(sampler.statistics(logits.bfloat16(), 0, 0), sampler.statistics(logits, 0, 0))


@pytest.mark.parametrize(
    ("mode", "temperature"),
    [("beam", 1.0), ("gumbel", 0.0), ("gumbel", -1.0), ("gumbel", 100.0), ("gumbel", math.nan)],
)
def test_a_bad_mode_or_temperature_is_refused(mode: str, temperature: float) -> None:
    with pytest.raises(InputError, match=r"mode|temperature") as caught:
        Sampler(mode, temperature)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
