"""What else a machine did while something was measured on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
IDLE, IOWAIT, STEAL = 3, 4, 7  # places among the counters of the line of all CPUs


class Load(NamedTuple):
    """Shares of all CPUs' time, in percent; None where the system does not tell.

    others_percent : that other processes used; stolen_percent : that the host gave to other guests
    """

    others_percent: float | None
    stolen_percent: float | None


class Ticks(NamedTuple):
    """Ticks of all CPUs over some time: in all, busy, of these by this process and its children, and stolen."""

    total: float
    busy: float
    own: float
    stolen: float


def watch() -> Callable[[], Ticks]:
    """Begin to watch the machine; what it returns gives the ticks since."""
    ticks, own_s, children_s = _ticks(), time.process_time(), _children_s()

    def since() -> Ticks:
        spent = [after - before for before, after in zip(ticks, _ticks(), strict=True)]
        busy = sum(spent) - spent[IDLE] - spent[IOWAIT] - spent[STEAL]
        own = ((time.process_time() - own_s) + (_children_s() - children_s)) * os.sysconf("SC_CLK_TCK")
        return Ticks(sum(spent), busy, own, spent[STEAL])

    return since


def load_from(parts: Iterable[Ticks]) -> Load:
    """The load over all of these times."""
    total, busy, own, stolen = map(sum, zip(*parts, strict=True))
    return Load(100 * max(busy - own, 0.0) / total, 100 * stolen / total) if total > 0 else Load(None, None)


def _children_s() -> float:
    """CPU seconds of the processes that this one started and that have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def _ticks() -> list[int]:
    """Ticks of all CPUs by use: user, nice, system, idle, iowait, irq, softirq, steal."""
    if not STAT.is_file():
        return [0] * 8
    return [int(number) for number in STAT.read_text().split("\n", 1)[0].split()[1:9]]
