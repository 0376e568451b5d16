"""Counter-based uniforms: the same draw for the same place, in replay and in the real run."""

from __future__ import annotations

import math

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


@nb.njit
def split(u, i):  # type: ignore[no-untyped-def]
    """The i-th further uniform in (0, 1) made from a draw u of `uniform`, i >= 1.

    SplitMix64 with u's bits as its state; independent of u and of those with another i for all purposes here.
    """
    x = mix(np.uint64(np.int64(u * 2.0**52)) + np.uint64(i) * GOLDEN)
    return (np.float64(x >> np.uint64(12)) + 0.5) * 2.0**-52


# Coefficients of AS 241, numerator and denominator from the highest power down.
# fmt: off
MIDDLE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)
TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940, 2.05319162663775882187, 1.0),
)
FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)
# fmt: on


@nb.njit(inline="always")
def polynomial(x, c):  # type: ignore[no-untyped-def]
    """Of degree 7, in pairs of powers (Estrin), whose parts a processor works out side by side."""
    x2 = x * x
    upper = (c[0] * x + c[1]) * x2 + (c[2] * x + c[3])
    return upper * (x2 * x2) + ((c[4] * x + c[5]) * x2 + (c[6] * x + c[7]))


@nb.njit(inline="always")
def rational(x, coefficients):  # type: ignore[no-untyped-def]
    """The quotient of two polynomials."""
    return polynomial(x, coefficients[0]) / polynomial(x, coefficients[1])


@nb.njit(error_model="numpy")
def normal_quantile(u):  # type: ignore[no-untyped-def]
    """The z below which a standard normal variable falls with probability u in (0, 1).

    Relative error about 1e-15: PPND16 of Wichura 1988, Algorithm AS 241, Applied Statistics 37.
    """
    q = u - 0.5
    if abs(q) <= 0.425:
        return q * rational(0.180625 - q * q, MIDDLE)
    r = math.sqrt(-math.log(min(u, 1.0 - u)))
    z = rational(r - 1.6, TAIL) if r <= 5.0 else rational(r - 5.0, FAR_TAIL)
    return z if q > 0.0 else -z
