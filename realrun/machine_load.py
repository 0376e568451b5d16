"""What else a machine did while something was measured on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

STAT = Path("/proc/stat")
IDLE, IOWAIT, STEAL = 3, 4, 7  # places among the counters of the line of all CPUs


class Load(NamedTuple):
    """Shares of all CPUs' time, in percent; None where the system does not tell.

    others_percent : that other processes used; stolen_percent : that the host gave to other guests
    """

    others_percent: float | None
    stolen_percent: float | None


def watch() -> Callable[[], Load]:
    """Begin to watch the machine; what it returns says how busy others were since."""
    ticks, own_s = _ticks(), time.process_time()

    def load() -> Load:
        now = _ticks()
        total = sum(now) - sum(ticks)
        if total <= 0:
            return Load(None, None)
        spent = [after - before for before, after in zip(ticks, now, strict=True)]
        busy = total - spent[IDLE] - spent[IOWAIT] - spent[STEAL]
        own = (time.process_time() - own_s) * os.sysconf("SC_CLK_TCK")
        return Load(100 * max(busy - own, 0.0) / total, 100 * spent[STEAL] / total)

    return load


def mean_load(loads: Sequence[Load]) -> Load:
    """The mean of several; None where one of them is not known."""
    return Load(*(None if None in values else fmean(values) for values in zip(*loads, strict=True)))


def _ticks() -> list[int]:
    """Ticks of all CPUs by use: user, nice, system, idle, iowait, irq, softirq, steal."""
    if not STAT.is_file():
        return [0] * 8
    return [int(number) for number in STAT.read_text().split("\n", 1)[0].split()[1:9]]
