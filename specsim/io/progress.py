"""Report the progress of long work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import NamedTuple, Self

Progress = Callable[[str, int, int], None]  # (part, done, total), in the work's own units
Counter = Callable[[int, int], None]  # (done, total) of work that the caller names

LINE_EVERY_S = 30.0
REPORT_EVERY_S = 1.0  # at most, for programs
NEXT_PART_S = 10.0  # after a part's end; then a line says that the next part is running


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


class Start(NamedTuple):
    """Time of the first report of a part, in seconds of a clock, and how much of it was done by then."""

    at_s: float
    done: int


def seconds_left(start: Start, now_s: float, done: int, total: int) -> float | None:
    """Estimate the seconds left at the rate so far; None if nothing was done since the first report."""
    gained = done - start.done
    return (now_s - start.at_s) * (total - done) / gained if gained else None


def started(starts: dict[str, Start], latest: dict[str, int], part: str, now_s: float, done: int) -> Start:
    """Record a progress report, and return when its part began; a part whose progress fell has begun anew."""
    if part not in starts or done < latest[part]:
        starts[part] = Start(now_s, done)
    latest[part] = done
    return starts[part]


class ProgressReports:
    """A `Progress` for programs: a JSON object per line, at most every second, and at the end of each part.

    Keys are "progress" (the part), "done", "total", "elapsed_s" and "left_s", which is null while unknown.

    say : takes a line
    clock : the time in seconds
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self.say, self.clock = say, clock
        self.starts: dict[str, Start] = {}
        self.done: dict[str, int] = {}
        self.reported_s: dict[str, float] = {}

    def __call__(self, part: str, done: int, total: int) -> None:
        now_s = self.clock()
        start = started(self.starts, self.done, part, now_s, done)
        if done < total and now_s - self.reported_s.get(part, -REPORT_EVERY_S) < REPORT_EVERY_S:
            return
        self.reported_s[part] = now_s
        left_s = seconds_left(start, now_s, done, total)
        times = {"elapsed_s": round(now_s - start.at_s, 3), "left_s": None if left_s is None else round(left_s, 3)}
        self.say(json.dumps({"progress": part, "done": done, "total": total, **times}))


class ProgressLines:
    """A `Progress` that prints a line every half minute: the part, how much is done, and how long it will take.

    say : takes a line
    interval_s : between two lines, in seconds
    clock : the time in seconds
    """

    def __init__(
        self,
        say: Callable[[str], None],
        interval_s: float = LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.say, self.interval_s, self.clock = say, interval_s, clock
        self.starts: dict[str, Start] = {}
        self.done: dict[str, int] = {}
        self.latest: tuple[str, int, int] | None = None
        self.latest_s = 0.0
        self.ended = Event()

    def __call__(self, part: str, done: int, total: int) -> None:
        started(self.starts, self.done, part, self.clock(), done)
        self.latest, self.latest_s = (part, done, total), self.clock()

    def line(self) -> str | None:
        """Return the latest report with the estimated time left; None before the first report."""
        if self.latest is None:
            return None
        part, done, total = self.latest
        start, now_s = self.starts[part], self.clock()
        if done >= total:
            since_s = now_s - self.latest_s  # of the next part, which has not reported yet
            then = f"; the next part, {duration(since_s)} so far" if since_s >= NEXT_PART_S else ""
            return f"{part}: {done} of {total}, done{then}"
        left_s = seconds_left(start, now_s, done, total)
        left = f"{duration(now_s - start.at_s)} so far" if left_s is None else f"about {duration(left_s)} left"
        return f"{part}: {done} of {total}, {left}"

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
    """Format a time: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
