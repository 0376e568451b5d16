"""Independent tasks in many processes, on this machine or on a cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from specsim.io.errors import InputError

Backend = Literal["loky", "dask"]
KILLED = (
    "a worker process was killed, most often because memory ran out; give fewer processes with --jobs. A sweep with "
    "--out goes on where it was"
)
WAIT_S = 30  # for the first worker of a cluster
Run = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterator[Any]]


@dataclass(frozen=True)
class Workers:
    """Processes that run tasks.

    backend : processes of this machine, or workers of a Dask cluster
    jobs : tasks at once; default: one per core, or as many as the cluster takes. 1 under loky: all in this process
    scheduler : address of a cluster; default: start a cluster on this machine, with a process per job

    Raises InputError for an unknown backend, or a scheduler without a cluster.

    References: joblib, https://joblib.readthedocs.io (backends).
    """

    backend: Backend = "loky"
    jobs: int | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise InputError(f"backend {self.backend!r} is unknown; known: {', '.join(get_args(Backend))}")
        if self.jobs is not None and self.jobs < 1:
            raise InputError(f"jobs={self.jobs}; give at least 1")
        if self.scheduler is not None and self.backend == "loky":
            raise InputError("backend loky has no scheduler; choose dask")

    @contextmanager
    def ready(self) -> Iterator[Run]:
        """Start workers; give a function that runs tasks and yields their results as they finish, in any order.

        Workers stop at the end of the block. Raises InputError if the backend is not installed or reachable, and if
        workers are killed.
        """
        with ExitStack() as stack:
            try:
                start = {"loky": _loky, "dask": _dask}[self.backend]
                run = stack.enter_context(start(self.jobs, self.scheduler))
            except ImportError:
                raise InputError(
                    f"backend {self.backend} is not installed; pip install -c constraints.txt '.[{self.backend}]'"
                ) from None
            except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: Dask's workers died at the start
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                failure = f"no {self.backend} cluster at {self.scheduler}"
                if self.scheduler is None:
                    failure = f"{self.backend} cannot start workers on this machine"
                raise InputError(f"{failure} ({reason:.200}); check it") from None
            yield run


@contextmanager
def _loky(jobs: int | None, scheduler: str | None) -> Iterator[Run]:
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import BrokenProcessPool

    def run(call: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        parallel = Parallel(n_jobs=jobs or -1, batch_size=1, return_as="generator_unordered")
        try:
            results: Iterable[Any] = parallel(delayed(call)(*task) for task in tasks)
            yield from results
        except BrokenProcessPool:
            raise InputError(KILLED) from None

    yield run


@contextmanager
def _dask(jobs: int | None, scheduler: str | None) -> Iterator[Run]:
    """Run tasks on a Dask cluster, which repeats the tasks of lost workers.

    joblib is not used, because it waits forever after a task failed.
    """
    from distributed import Client, KilledWorker, LocalCluster, as_completed
    from joblib import cpu_count

    def run(call: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        futures = [client.submit(call, *task, pure=False) for task in tasks]
        try:
            for _, result in as_completed(futures, with_results=True):
                yield result
        except KilledWorker:
            raise InputError(KILLED) from None

    with ExitStack() as stack:
        address: Any = scheduler
        if address is None:
            count = jobs or cpu_count()
            options = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.CRITICAL}
            address = stack.enter_context(LocalCluster(n_workers=count, **options))
        client = stack.enter_context(Client(address))
        client.wait_for_workers(1, timeout=WAIT_S)
        yield run
