"""A Dask cluster of two workers, of which one is killed when the first results are there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from specsim.io.progress import Counter
from specsim.io.workers import Workers


def losing_a_worker(run: Callable[[Workers, Counter], Any]) -> Any:
    """Return what a run gives whose tasks are done again."""
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    killed: list[int] = []
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        victim = next(iter(client.run(os.getpid).values()))

        def kill(done: int, total: int) -> None:
            if 0 < done < total and not killed:
                os.kill(victim, signal.SIGKILL)
                killed.append(done)

        result = run(Workers("dask", scheduler=cluster.scheduler_address), kill)
        assert killed and victim not in client.run(os.getpid).values()
    return result
