"""Ctrl-C during a training: finish the current step, so that there is a checkpoint to continue from."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specsim.io.errors import Interrupted


def interrupted(step: int, steps: int, folder: Path) -> Interrupted:
    """Make the exception to raise after that checkpoint."""
    return Interrupted(f"step {step} of {steps} is kept in {folder}; the same command goes on")


@contextmanager
def stop_asked() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether the user has pressed Ctrl-C; a second Ctrl-C interrupts at once.

    It never tells so outside the main thread, which receives the signals, or if they are ignored, as under nohup.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield lambda: False
        return
    asked = False

    def note(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
