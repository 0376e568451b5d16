"""The compiled functions of a policy without memory, of chains and of trees."""

from __future__ import annotations

import numba as nb


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (0.0,)


@nb.njit
def update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    return state
