"""How long work says how far it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import NamedTuple, Self

Progress = Callable[[str, int, int], None]  # (what, done, total), in units of the work's own
Counter = Callable[[int, int], None]  # (done, total) of work that whoever asks for it has a name for

LINE_EVERY_S = 30.0
REPORT_EVERY_S = 1.0  # at most, of what a program reads
NEXT_PART_S = 10.0  # after a part's end; from then on a line says that something else is under way


def no_progress(done: int, total: int) -> None:
    """Say nothing."""


class Start(NamedTuple):
    """When a part of the work was first heard of, in seconds of a clock, and how much of it had been done by then."""

    at_s: float
    done: int


def seconds_left(start: Start, now_s: float, done: int, total: int) -> float | None:
    """How long it will still take if it goes on so; None where nothing has been done since it was first heard of."""
    gained = done - start.done
    return (now_s - start.at_s) * (total - done) / gained if gained else None


class ProgressReports:
    """A `Progress` for programs: one JSON object a line, at most every second, and one at the end of each part.

    Of keys "progress" (what), "done", "total", "elapsed_s" and "left_s", which is null where nothing can be said yet.

    Parameters
    ----------
    say : callable
        Takes a line.
    clock : callable
        The time in seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self.say, self.clock = say, clock
        self.starts: dict[str, Start] = {}
        self.said_s: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = self.clock()
        start = self.starts.setdefault(what, Start(now_s, done))
        if done < total and now_s - self.said_s.get(what, -REPORT_EVERY_S) < REPORT_EVERY_S:
            return
        self.said_s[what] = now_s
        left_s = seconds_left(start, now_s, done, total)
        times = {"elapsed_s": round(now_s - start.at_s, 3), "left_s": None if left_s is None else round(left_s, 3)}
        self.say(json.dumps({"progress": what, "done": done, "total": total, **times}))


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
        self.latest_s = 0.0
        self.ended = Event()

    def __call__(self, what: str, done: int, total: int) -> None:
        self.starts.setdefault(what, Start(self.clock(), done))
        self.latest, self.latest_s = (what, done, total), self.clock()

    def line(self) -> str | None:
        """What was reported last, with how long it will still take if it goes on so; None before all reports."""
        if self.latest is None:
            return None
        what, done, total = self.latest
        start, now_s = self.starts[what], self.clock()
        if done >= total:
            since_s = now_s - self.latest_s  # of what comes next and has not reported yet
            then = f"; the next part, {duration(since_s)} so far" if since_s >= NEXT_PART_S else ""
            return f"{what}: {done} of {total}, done{then}"
        left_s = seconds_left(start, now_s, done, total)
        left = f"{duration(now_s - start.at_s)} so far" if left_s is None else f"about {duration(left_s)} left"
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
