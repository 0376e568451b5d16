"""How long work says how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import NamedTuple, Self

Progress = Callable[[str, int, int], None]  # (what, done, total), in units of the work's own
Counter = Callable[[int, int], None]  # (done, total) of work that whoever asks for it has a name for

LINE_EVERY_S = 30.0


def no_progress(done: int, total: int) -> None:
    """Say nothing."""


class Start(NamedTuple):
    """When a part of the work was first heard of, in seconds of a clock, and how much of it had been done by then."""

    at_s: float
    done: int


class ProgressLines:
    """A `Progress` that says every half a minute, also while nothing is reported, what is done, how far and how long.

    Parameters
    ----------
    say : callable
        Takes a line.
    interval_s : float
        Between two lines, in seconds.
    clock : callable
        The time in seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        interval_s: float = LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.say, self.interval_s, self.clock = say, interval_s, clock
        self.starts: dict[str, Start] = {}
        self.latest: tuple[str, int, int] | None = None
        self.ended = Event()

    def __call__(self, what: str, done: int, total: int) -> None:
        self.starts.setdefault(what, Start(self.clock(), done))
        self.latest = what, done, total

    def line(self) -> str | None:
        """What was reported last, with how long it will still take if it goes on so; None before all reports."""
        if self.latest is None:
            return None
        what, done, total = self.latest
        start = self.starts[what]
        spent_s, gained = self.clock() - start.at_s, done - start.done
        if done >= total:
            return f"{what}: {done} of {total}, done"
        left = f"about {duration(spent_s * (total - done) / gained)} left" if gained else f"{duration(spent_s)} so far"
        return f"{what}: {done} of {total}, {left}"

    def __enter__(self) -> Self:
        Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()

    def _run(self) -> None:
        while not self.ended.wait(self.interval_s):
            if line := self.line():
                self.say(line)


def duration(seconds: float) -> str:
    """A time to read: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
