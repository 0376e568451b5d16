"""The sides of `realrun compare`: a checkout, an environment or both, and the processes that run them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from realrun.kept_files import log_end
from specsim.io.errors import InputError
from specsim.io.files import digest, file_digest

WORKER = Path(__file__).with_name("worker.py")
PYTHON = Path("bin", "python")
PACKAGES = ("realrun", "specsim", "speckernels", "kernels")  # folders of code that decides how fast a side is
CODE = (".py", ".cu", ".cuh", ".h")
HOW = "give a checkout (holds realrun/), an environment (holds bin/python), or both as CHECKOUT@ENVIRONMENT"
ANSWER_S = 600.0  # that a process may take for an answer: it loads models, and may compile kernels


@dataclass(frozen=True)
class Side:
    """A version to run.

    name : as it was given
    checkout : None for what the environment has installed
    python : the interpreter
    """

    name: str
    checkout: Path | None
    python: Path

    def environment(self, restart: int) -> dict[str, str]:
        """Return the environment variables of a process.

        All processes of a restart hash texts alike: collisions in dictionaries make a process faster or slower, and
        would look like a difference of versions.
        """
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["PYTHONHASHSEED"] = str(restart)
        if self.checkout is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(self.checkout), str(self.checkout / "kernels")])
        return variables


def find_side(name: str) -> Side:
    """Find the checkout and the interpreter of CHECKOUT, ENVIRONMENT or CHECKOUT@ENVIRONMENT, or raise InputError."""
    parts = [name] if Path(name).is_dir() else name.rsplit("@", 1)
    folders = [Path(part).absolute() for part in parts]
    for part, folder in zip(parts, folders, strict=True):
        if not folder.is_dir():
            raise InputError(f"{part} is not a folder; {HOW}")
    checkout = folders[0] if (folders[0] / "realrun" / "__init__.py").is_file() else None
    home = folders[-1] if len(folders) == 2 or checkout is None else None
    if len(folders) == 2 and checkout is None:
        raise InputError(f"{parts[0]} holds no realrun/; {HOW}")
    if home is not None and not (home / PYTHON).is_file():
        raise InputError(f"{parts[-1]} holds no {'realrun/ or ' if len(parts) == 1 else ''}{PYTHON}; {HOW}")
    return Side(name, checkout, Path(sys.executable) if home is None else home / PYTHON)


def code_digest(folder: Path) -> str:
    """Hash the code of the project's packages in a folder."""
    paths = (path for package in PACKAGES for path in sorted((folder / package).rglob("*")) if path.suffix in CODE)
    return digest(json.dumps([[str(path.relative_to(folder)), file_digest(path)] for path in paths]))


class Worker:
    """A process that decodes with a side's code when it is told to.

    Commands are those of `realrun.versions.worker.Worker`. Raises InputError, with the end of the process's log, where
    the side's code cannot serve them.
    """

    def __init__(self, side: Side, restart: int = 0):
        self.side = side
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [side.python, "-P", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=side.environment(restart),
            text=True,
            start_new_session=True,  # so that Ctrl-C ends the command, which ends its processes
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command; `answer` waits for its result."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Wait for the result of the last command."""
        assert self.process.stdout is not None
        answers = self.process.stdout
        ready, _, _ = select.select([answers], [], [], ANSWER_S)
        line = answers.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"did not answer within {ANSWER_S:g} s"
            self.log.seek(0)
            log = log_end(self.log.read())
            raise InputError(f"the process of {self.side.name} {what}: {log}; run its Python to see why")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            what = " ".join(str(answer["error"]).split())
            raise InputError(f"{self.side.name} does not decode: {what:.400}; compare a version that can run this job")
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Run a command and return its result."""
        self.send(do, **arguments)
        return self.answer()


def ask_all(workers: Sequence[Worker], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Run a command in all workers at once, where time does not matter."""
    for worker in workers:
        worker.send(do, **arguments)
    return [worker.answer() for worker in workers]


def identity_of(side: Side, started: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a side's times depend on. started : answer of its worker to "start" """
    folder = Path(started["folder"])
    if side.checkout is not None and folder != side.checkout.resolve():
        raise InputError(f"{side.name} runs the code in {folder}; start another Python, as CHECKOUT@ENVIRONMENT")
    facts = {name: value for name, value in started.items() if name != "folder"}
    return {"name": side.name, "code": code_digest(folder), **facts}
