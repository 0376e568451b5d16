"""Measure how busy other processes and guests kept the machine during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
IDLE, IOWAIT, STEAL = 3, 4, 7  # places among the counters of the line of all CPUs


class Load(NamedTuple):
    """Shares of the CPU time of all cores, in percent; None if the system does not report them.

    others_percent : used by other processes; stolen_percent : given by the host to other guests (steal)
    """

    others_percent: float | None
    stolen_percent: float | None


class Ticks(NamedTuple):
    """Ticks of all CPUs: total, busy, busy with this process and its children, and stolen."""

    total: float
    busy: float
    own: float
    stolen: float


def watch() -> Callable[[], Ticks]:
    """Start counting CPU ticks; call the returned function for the ticks since then."""
    ticks, own_s, children_s = _ticks(), time.process_time(), _children_s()

    def since() -> Ticks:
        spent = [after - before for before, after in zip(ticks, _ticks(), strict=True)]
        busy = sum(spent) - spent[IDLE] - spent[IOWAIT] - spent[STEAL]
        own = ((time.process_time() - own_s) + (_children_s() - children_s)) * os.sysconf("SC_CLK_TCK")
        return Ticks(sum(spent), busy, own, spent[STEAL])

    return since


def load_from(parts: Iterable[Ticks]) -> Load:
    """Compute the load over all these periods."""
    total, busy, own, stolen = map(sum, zip(*parts, strict=True))
    return Load(100 * max(busy - own, 0.0) / total, 100 * stolen / total) if total > 0 else Load(None, None)


def _children_s() -> float:
    """Return the CPU seconds of finished child processes."""
    spent = os.times()
    return spent.children_user + spent.children_system


def _ticks() -> list[int]:
    """Read the ticks of all CPUs by use: user, nice, system, idle, iowait, irq, softirq, steal."""
    if not STAT.is_file():
        return [0] * 8
    return [int(number) for number in STAT.read_text().split("\n", 1)[0].split()[1:9]]
