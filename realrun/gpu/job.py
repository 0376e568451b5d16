"""The task of a stage: where it works, until when, and commands that end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realrun.kept_files import log_end
from specsim.io.progress import Progress

REPOSITORY = Path(__file__).resolve().parents[2]
MARGIN = 0.1  # of a stage's time, kept free at its end
# Whatever plugins and versions are on the machine, its own warnings fail no test.
PYTEST = ("-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider")


class OutOfTime(BaseException):
    """The stage's time is over; no `except Exception` of what it runs keeps it from ending."""


@dataclass(frozen=True)
class Job:
    """One stage's task.

    home : folder in which every stage has a folder of its name, from which a second run goes on
    work : this stage's folder there
    deadline : time.monotonic() at which the stage is ended
    target : the model whose drafters are trained and decoded
    """

    home: Path
    work: Path
    deadline: float
    device: torch.device
    target: str
    seed: int
    progress: Progress

    @property
    def full(self) -> bool:
        """Whether sizes are true, as on a GPU, and not reduced."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """Name the number type of models."""
        return "bfloat16" if self.full else "float32"

    @property
    def machine(self) -> dict[str, Any]:
        """Device and number type, as functions take them."""
        return {"device": str(self.device), "dtype": self.dtype}

    @property
    def seconds(self) -> float:
        """Compute the seconds until the deadline, without the margin."""
        return max(0.1, (self.deadline - time.monotonic()) * (1 - MARGIN))

    def report(self, what: str, done: int, total: int) -> None:
        """Report progress; raises OutOfTime after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTime(f"{what}: {done} of {total} done")
        self.progress(what, done, total)

    def run(self, *command: str, **variables: str) -> str:
        """Run a command in the source tree with these environment variables, and return what it printed.

        Raises OutOfTime if it takes longer than the stage may, RuntimeError with its last lines if it fails.
        """
        with subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=self.seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # its children too, or they would disturb the next stage
                if isinstance(error, subprocess.TimeoutExpired):
                    raise OutOfTime(f"{Path(command[0]).name} {' '.join(command[1:4])} was not done") from None
                raise
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {log_end(output)}")
        return output

    def pytest(self, *options: str, **variables: str) -> str:
        """Run tests with these environment variables, and return pytest's closing line."""
        return self.run(sys.executable, *PYTEST, *options, **variables).strip().splitlines()[-1]


def environment(**variables: str) -> dict[str, str]:
    """Give the environment in which a process finds this source tree, installed or not."""
    paths = [str(REPOSITORY), str(REPOSITORY / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), **variables}
