"""Counter-based uniforms: the same draw for the same place, in replay and in the real run."""

from __future__ import annotations

import numba as nb
import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


@nb.njit(inline="always")
def mix(x):  # type: ignore[no-untyped-def]
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), uint64 to uint64."""
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))


@nb.njit
def uniform(seed, sequence, position, depth):  # type: ignore[no-untyped-def]
    """A float64 in (0, 1), keyed by (seed, sequence id, position t, depth i).

    Zero is never returned: `u <= p` must not accept an event of probability zero.
    """
    x = mix(np.uint64(seed) + GOLDEN)
    x = mix(x + np.uint64(sequence) + GOLDEN)
    x = mix(x + np.uint64(position) + GOLDEN)
    x = mix(x + np.uint64(depth) + GOLDEN)
    return (np.float64(x >> np.uint64(12)) + 0.5) * 2.0**-52  # 53 bits, so the half is never rounded away
