"""Numba, made ready: loaded without what takes longest, and saying once that it compiles."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

from numba.core import event

COMPILING = "specsim: compiling policies, a few seconds each; those that ship with it are kept for the next process"
OURS = ("specsim", "realrun")  # first letters of modules whose functions are announced; a user's own are not

log = logging.getLogger("specsim")  # where nobody configures logging, a warning is a line on standard error


class Announcement(event.Listener):
    """Says, when the first function of ours is compiled, what takes so long."""

    said = False

    def on_start(self, event: Any) -> None:
        if not self.said and event.data["dispatcher"].py_func.__module__.startswith(OURS):
            self.said = True
            log.warning(COMPILING)

    def on_end(self, event: Any) -> None: ...


@cache
def prepare_compiler() -> None:
    """Have numba announce compiling, and load its registries without SciPy's linear algebra.

    That takes longer than all that a replay does. Numba looks there whether np.cov has what it needs; it has, when it
    is asked for.
    """
    event.register("numba:compile", Announcement())
    if "scipy.linalg" in sys.modules:
        return
    from numba.core.registry import cpu_target

    sys.modules["scipy.linalg"] = None  # type: ignore[assignment]  # not to be imported
    try:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
    finally:
        del sys.modules["scipy.linalg"]
    from numba.np import arraymath

    arraymath._HAVE_BLAS = True
