"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # (what, done, total), in units of the work's own
Counter = Callable[[int, int], None]  # (done, total) of work that whoever asks for it has a name for


def no_progress(done: int, total: int) -> None:
    """Say nothing."""
