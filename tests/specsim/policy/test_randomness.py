"""Keyed uniforms: the value that SplitMix64 defines, inside (0, 1), independent between keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import special, stats

from specsim.io.rng import normal_quantile, split, uniform

WORD = 2**64
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def finalise(x: int) -> int:
    """SplitMix64's finaliser in whole numbers."""
    x = (x ^ (x >> 30)) * MIX_1 % WORD
    x = (x ^ (x >> 27)) * MIX_2 % WORD
    return x ^ (x >> 31)


def unshift(x: int, bits: int) -> int:
    """The y with y ^ (y >> bits) == x."""
    y = x
    for _ in range(64 // bits + 1):
        y = x ^ (y >> bits)
    return y


def unfinalise(x: int) -> int:
    x = unshift(x, 31) * pow(MIX_2, -1, WORD) % WORD
    x = unshift(x, 27) * pow(MIX_1, -1, WORD) % WORD
    return unshift(x, 30)


def chain(*key: int) -> int:
    x = 0
    for part in key:
        x = finalise((x + part + GOLDEN) % WORD)
    return x


def signed(x: int) -> int:
    """The int64 of the same 64 bits, since compiled code takes Python's whole numbers as int64."""
    return x - WORD if x >= WORD // 2 else x


words = st.integers(0, WORD - 1)
int64s = st.integers(-(2**63), 2**63 - 1)


@given(words)
def test_the_inverse_used_below_is_one(x: int) -> None:
    assert unfinalise(finalise(x)) == x


@given(int64s, int64s, int64s, int64s)
def test_uniform_is_splitmix64_chained_over_its_key(seed: int, sequence: int, position: int, depth: int) -> None:
    value = uniform(seed, sequence, position, depth)
    assert value == ((chain(seed, sequence, position, depth) >> 12) + 0.5) / 2**52
    assert 0 < value < 1


def test_splitmix64_itself() -> None:
    """The generator seeded with 0 starts with this word (Vigna's splitmix64.c)."""
    assert chain(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("bits", [0, WORD - 1, 2**12 - 1, WORD - 2**12, 2**63, 2**63 - 1])
def test_neither_0_nor_1_comes_out_of_any_bits(bits: int) -> None:
    """The key that ends in exactly these 64 bits, found by running the finaliser backwards."""
    depth = (unfinalise(bits) - GOLDEN - chain(5, 6, 7)) % WORD
    assert chain(5, 6, 7, depth) == bits
    assert 0 < uniform(5, 6, 7, signed(depth)) < 1


def line(axis: int, count: int = 10_000) -> np.ndarray:
    """Uniforms along a part of the key, the others fixed."""
    key = [3, 1, 4, 1]
    values = []
    for step in range(count):
        key[axis] = step
        values.append(uniform(*key))
    return np.array(values)


@pytest.mark.parametrize("axis", range(4), ids=["seed", "sequence", "position", "depth"])
def test_neighbouring_keys_are_uniform_and_independent(axis: int) -> None:
    """Fixed keys. Kolmogorov-Smirnov for a draw, chi-square on 8 x 8 cells for a pair of neighbours."""
    values = line(axis)
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    pairs = (8 * values[0::2]).astype(int) * 8 + (8 * values[1::2]).astype(int)
    assert stats.chisquare(np.bincount(pairs, minlength=64)).pvalue > 1e-3
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(len(values))


@given(st.floats(0, 1, exclude_min=True, exclude_max=True), st.integers(1, 1000))
def test_split_is_splitmix64_with_the_bits_of_u_as_its_state(u: float, i: int) -> None:
    word = finalise((int(u * 2**52) + i * GOLDEN) % WORD)
    assert split(u, i) == ((word >> 12) + 0.5) / 2**52
    assert 0 < split(u, i) < 1


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 2), (1, 2), (1, 7)])
def test_splits_are_uniform_and_independent(first: int, second: int) -> None:
    """Of each other and of u, the 0-th. Chi-square on 16 x 16 cells."""
    draws = line(axis=3, count=20_000)

    def cells(i: int) -> np.ndarray:
        return (16 * (draws if i == 0 else np.array([split(u, i) for u in draws]))).astype(int)

    assert stats.chisquare(np.bincount(16 * cells(first) + cells(second), minlength=256)).pvalue > 1e-3


ONE_BELOW_1 = 1 - 2.0**-53
QUANTILE_ERROR = 2e-15  # relative, of ours and scipy's together; AS 241 states 1e-16 in exact arithmetic


@given(st.floats(2**-53, ONE_BELOW_1))
@example(2.0**-53)
@example(ONE_BELOW_1)
@example(0.075)  # where the formulas meet
@example(0.5 + 2**-53)
@example(np.exp(-25.0))
def test_normal_quantile_is_scipys(u: float) -> None:
    np.testing.assert_allclose(normal_quantile(u), special.ndtri(u), rtol=QUANTILE_ERROR)


def test_normal_quantile_at_the_middle_and_far_out() -> None:
    assert normal_quantile(0.5) == 0.0
    assert normal_quantile(0.25) == -normal_quantile(0.75)
    tails = 10.0 ** -np.arange(1, 300, 7)
    np.testing.assert_allclose([normal_quantile(u) for u in tails], special.ndtri(tails), rtol=QUANTILE_ERROR)
    inside = np.linspace(1e-4, 1 - 1e-4, 5000)
    np.testing.assert_allclose([normal_quantile(u) for u in inside], special.ndtri(inside), rtol=QUANTILE_ERROR)
