"""Console commands to be killed, in processes forked from this process, which has imported and compiled all.

Units of work are noted in a file as they begin; a kill may cost a unit. Costs are given, so that what policies
are tuned under is the same each time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import realrun.experiment.forecast as forecast_costs_module
import realrun.experiment.measuring as measuring_module
import realrun.experiment.pipeline as pipeline_module
import realrun.leaderboard.job as costs_module
import realrun.measure.probe as probe_module
import specsim.report.drafters as drafters_page
import specsim.report.validation as validation_page
from realrun.decode.decoder import Decoder
from realrun.train.common.loop import LoopSettings, _Run
from specsim.cost.profile import Profile
from tests.support.commands import COMMANDS, on_any_machine

DEPTH = 3
GIVEN_COSTS = {
    "contexts": [0, 200],
    **{
        name: {
            "draft_step": [[1e-3] * 2] * DEPTH,
            "catch_up": [0.0] * 2,
            "verify": [[1e-2] * 2] * (DEPTH + 1),
            "autoregressive": [1e-2] * 2,
            "policy_step": 0.0,
            "round_overhead": 0.0,
            "score_step": 0.0,
        }
        for name in ("mean_s", "median_s", "p25_s", "p75_s")
    },
}


class Ended(NamedTuple):
    """How a process ended, what it said on standard error, and how often it began each unit of work."""

    code: int
    err: str
    began: Counter[str]


def noted(log: Path, unit: str, function: Callable[..., Any], when: Callable[..., bool] = lambda *_, **__: True) -> Any:
    """The function, which notes that a unit of work begins."""

    def begin(*args: Any, **options: Any) -> Any:
        if when(*args, **options):
            with log.open("a") as file:
                file.write(f"{unit}\n")
        return function(*args, **options)

    return begin


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Given costs, no figures, which take as long as all else, and a checkpoint after every step."""
    patch.setattr(forecast_costs_module, "profile", lambda *_, **__: GIVEN_COSTS)
    patch.setattr(costs_module, "profile_slice", lambda *_, **__: Profile.from_json(GIVEN_COSTS, "given"))
    patch.setattr(probe_module, "LIMIT_S", 0.0)
    for page, renderer in ((validation_page, "render_validation"), (drafters_page, "render_drafters")):
        patch.setattr(page, renderer, lambda document: "")
    patch.setattr(LoopSettings, "checkpoint_s", property(lambda self: 0.0, lambda self, value: None))


def run_command(arguments: list[str], err: Path, log: Path) -> None:
    """What the forked process does."""
    for number, path in ((1, "/dev/null"), (2, str(err))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(number, "w") for number in (1, 2))  # not pytest's  # noqa: SIM115
    patched: list[tuple[Any, str, str, Callable[..., bool]]] = [
        (Decoder, "decode", "recorded sequence", lambda *_, **options: "sequence" in options),
        (measuring_module, "decode_sequence", "decoded sequence", lambda *_, **__: True),
        (pipeline_module, "_tuned", "tuned policy", lambda *_, **__: True),
        (costs_module.SlicedCosts, "_slice", "slice of costs", lambda *_, **__: True),
        (_Run, "_train_step", "training step", lambda *_, **__: True),
    ]
    for owner, name, unit, when in patched:
        setattr(owner, name, noted(log, unit, getattr(owner, name), when))
    quicken(pytest.MonkeyPatch())
    sys.argv = ["realrun", *arguments]
    code: Any = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        with on_any_machine():
            COMMANDS["realrun"]()
    except SystemExit as stop:
        code = stop.code or 0
    except KeyboardInterrupt:  # before the command, or after it, where Python itself says so
        code = 130
        print("interrupted outside the command", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


class Commands:
    """Runs them; keeps what they say in a folder."""

    def __init__(self, folder: Path):
        self.folder, self.context = folder, multiprocessing.get_context("fork")

    def run(self, arguments: list[str], number: int | None = None, after_s: float = 0.0) -> Ended:
        """A command to its end, or until this signal is sent after so many seconds."""
        err, log = self.folder / "err", self.folder / "log"
        log.write_text("")
        process: BaseProcess = self.context.Process(target=run_command, args=(arguments, err, log))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the process is there
        process.start()
        signal.signal(signal.SIGINT, before)
        if number is not None:
            process.join(after_s)
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, number)
        process.join()
        assert process.exitcode is not None
        return Ended(process.exitcode, err.read_text(), Counter(log.read_text().split("\n")[:-1]))


SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGINT": signal.SIGINT}
