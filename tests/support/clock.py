"""A clock that stands still but for what a test adds, in place of `time.perf_counter`."""

from __future__ import annotations

import time

import pytest

READING_S = 1e-6  # by which every reading moves it on, so that no span is empty


class SetClock:
    """Seconds since it was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", self)

    def __call__(self) -> float:
        self.now_s += READING_S
        return self.now_s

    def take(self, seconds: float) -> None:
        """Let so much time pass."""
        self.now_s += seconds
