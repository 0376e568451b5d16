"""The task of a stage, and the format of its result file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from realrun.own_files import read_kept
from specsim.io.progress import Progress

KIND = "specsim-campaign"
VERSION = 1


class Result(TypedDict):
    """A stage's result file, whatever else the stage puts into it."""

    kind: Literal["specsim-campaign"]
    complete: bool


class OutOfTime(BaseException):
    """The stage's minutes are over; no `except Exception` of what it runs keeps it from ending.

    Results saved until then are kept for a second call.
    """


@dataclass(frozen=True)
class Job:
    """One stage's task.

    out : folder of result files; work : folder for checkpoints and other scratch
    deadline : time.monotonic() at which the stage should be done; grace_s : after which, behind it, it is ended
    """

    name: str
    out: Path
    work: Path
    deadline: float
    device: torch.device
    seed: int
    progress: Progress
    save: Callable[[dict[str, Any]], None]  # writes a part of the result, which an abrupt end then leaves
    grace_s: float = 0.0

    @property
    def full(self) -> bool:
        """Whether sizes are true, as on a GPU, and not reduced."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.full else torch.float32

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def minutes(self, share: float = 1.0) -> float:
        """Compute a share of the minutes left."""
        return self.left_s() * share / 60

    def report(self, done: int, total: int) -> None:
        self.progress(self.name, done, total)

    def on_time(self, what: str, done: int, total: int) -> None:
        """Report progress of work without a time limit of its own; raises OutOfTime after the deadline."""
        if time.monotonic() > self.deadline + self.grace_s:
            raise OutOfTime(f"{what}: {done} of {total} done")
        self.progress(what, done, total)

    def previous(self) -> dict[str, Any]:
        """Read the result that an earlier run of this stage left; empty if there is no result."""
        return read_result(self.out / f"{self.name}.json") or {}


def read_result(path: Path) -> dict[str, Any] | None:
    """Read a stage's result file; None if it is missing or damaged."""
    return read_kept(path, Result)
