"""Independent tasks in many processes, on this machine or on a cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

from specsim.errors import InputError

Backend = Literal["loky", "dask", "ray"]
Run = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterator[Any]]


@dataclass(frozen=True)
class Workers:
    """Who does the work.

    Parameters
    ----------
    backend : {"loky", "dask", "ray"}
        Processes of this machine, or workers of a Dask or Ray cluster.
    jobs : int, optional
        Tasks at once; default: one per core, or as many as the cluster takes. 1 under loky: all in this process.
    scheduler : str, optional
        Address of a cluster; default: one on this machine, with a process per job.

    Raises
    ------
    InputError
        For a backend that is not known, and a scheduler where there is none.

    References
    ----------
    joblib, https://joblib.readthedocs.io (backends).
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
            raise InputError("backend loky has no scheduler; choose dask or ray for one")

    @contextmanager
    def ready(self) -> Iterator[Run]:
        """A function of a call and its tasks that gives their results as they are done, in any order.

        Workers live as long as the block. InputError where the backend is not installed or not to be reached.
        """
        from joblib import Parallel, delayed

        # Ray's backend gives its results at the end alone.
        as_done = "list" if self.backend == "ray" else "generator_unordered"

        def run(call: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
            parallel = Parallel(n_jobs=self.jobs or -1, batch_size=1, return_as=as_done)
            results: Iterable[Any] = parallel(delayed(call)(*task) for task in tasks)
            yield from results

        with ExitStack() as stack:
            try:
                stack.enter_context(self._cluster())
            except ImportError:
                raise InputError(
                    f"backend {self.backend} is not installed; pip install -c constraints.txt '.[{self.backend}]'"
                ) from None
            except (OSError, ValueError) as error:  # as both libraries say that nobody answers
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise InputError(f"no {self.backend} cluster at {self.scheduler} ({reason:.200}); check it") from None
            yield run

    def _cluster(self) -> AbstractContextManager[None]:
        """In here, joblib works on this backend."""
        start = {"dask": _dask, "ray": _ray}.get(self.backend)
        return nullcontext() if start is None else start(self.jobs, self.scheduler)


@contextmanager
def _dask(jobs: int | None, scheduler: str | None) -> Iterator[None]:
    """A lost worker's tasks are done again by others."""
    from distributed import Client, LocalCluster
    from joblib import cpu_count, parallel_config

    with ExitStack() as stack:
        where: Any = scheduler
        if where is None:
            local = LocalCluster(
                n_workers=jobs or cpu_count(), threads_per_worker=1, dashboard_address=None, silence_logs=logging.ERROR
            )
            where = stack.enter_context(local)
        client = stack.enter_context(Client(where))
        stack.enter_context(parallel_config(backend="dask", client=client))
        yield


@contextmanager
def _ray(jobs: int | None, scheduler: str | None) -> Iterator[None]:
    import ray
    from joblib import cpu_count, parallel_config
    from ray.util.joblib import register_ray

    logging.getLogger("ray.util.multiprocessing").setLevel(logging.ERROR)  # it warns of what joblib hands it
    where: dict[str, Any] = {"address": scheduler}
    if scheduler is None:
        where = {"num_cpus": jobs or cpu_count(), "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
    try:
        register_ray()
        with parallel_config(backend="ray"):
            yield
    finally:
        ray.shutdown()
