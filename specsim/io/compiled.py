"""Compile functions, and keep the machine code on disk where that can be written."""

from __future__ import annotations

from functools import partial
from typing import Any

import numba as nb

UNKEPT: list[str] = []  # functions whose code cannot be kept


def njit(function: Any = None, **options: Any) -> Any:
    """Decorate a function as `numba.njit(cache=True, **options)`, without the cache where nothing can be written.

    That is the case if neither the package's folder nor the user's cache is writable, as in a container with a
    read-only file system, and NUMBA_CACHE_DIR names no folder that is.
    """
    if function is None:
        return partial(njit, **options)
    try:
        return nb.njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        UNKEPT.append(function.__name__)
        return nb.njit(**options)(function)
