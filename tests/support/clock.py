"""A clock that stands still but for what a test adds, in place of `time.perf_counter` and `time.monotonic`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from realrun.lm.cached import CachedLM

READING_S = 1e-6  # by which every reading moves it on, so that no span is empty


class SetClock:
    """Seconds since it was made, and the passes of models on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.passes = 0.0, 0
        for clock in ("perf_counter", "monotonic"):
            monkeypatch.setattr(time, clock, self)

    def __call__(self) -> float:
        self.now_s += READING_S
        return self.now_s

    def take(self, seconds: float) -> None:
        """Let so much time pass."""
        self.now_s += seconds


def time_passes(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, int], float]) -> SetClock:
    """Let only passes of models take time: these seconds for a number of tokens after a number of passes."""
    clock = SetClock(monkeypatch)

    def let_take_time(name: str) -> None:
        forward = getattr(CachedLM, name)

        def timed(lm: CachedLM, tokens: Sequence[int], *more: Any, **options: Any) -> torch.Tensor:
            clock.passes += 1
            clock.take(seconds(len(tokens), clock.passes))
            result: torch.Tensor = forward(lm, tokens, *more, **options)
            return result

        monkeypatch.setattr(CachedLM, name, timed)

    let_take_time("forward")
    let_take_time("forward_nodes")  # of a tree
    return clock
