"""A restart of `realrun compare`: fresh processes of both versions decode all prompts in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypedDict

import numpy as np

from realrun.machine_load import watch
from realrun.measure.turns import TURN_ROUNDS, take_turns
from realrun.versions.sides import Side, Worker, ask_all, identity_of
from specsim.io.files import digest
from specsim.io.progress import Counter

BASE, HEAD, NULL = range(3)  # processes of a restart; the third runs the base version once more
# Times that a process loads its models, so that weights and caches lie elsewhere in memory. Few, because another
# restart tells more than another layout in each.
LAYOUTS = 2


class Run(TypedDict):
    """A process's decoding of a prompt, its rounds as `typical_run` takes them."""

    tokens: int
    rounds: int
    text: str
    log: str
    seconds: float


class RestartFile(TypedDict):
    """A restart: runs [arm][process][prompt], arm 0 is the baseline."""

    spent_s: float
    ticks: list[float]
    runs: list[list[list[Run]]]


class Restart:
    """The processes of a restart."""

    def __init__(self, sides: Sequence[Side], job: Mapping[str, Any], number: int):
        self.sides, self.job, self.number = sides, job, number
        self.stack = ExitStack()

    def __enter__(self) -> Restart:
        self.start_s = time.monotonic()
        self.load = watch()
        base, head = self.sides
        with ExitStack() as stack:
            self.workers = [stack.enter_context(Worker(side, self.number)) for side in (base, head, base)]
            self.started = ask_all(self.workers, "start", job=self.job)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    @property
    def identity(self) -> dict[str, Any]:
        """Return what the times of both sides depend on."""
        sides = (identity_of(side, started) for side, started in zip(self.sides, self.started, strict=False))
        return dict(zip(("base", "head"), sides, strict=True))

    def run(self, order: np.random.Generator, progress: Counter) -> RestartFile:
        """Decode every prompt with every arm in every layout, all processes in turns."""
        arms, prompts = len(self.job["policies"]), len(self.job["prompts"])
        runs: list[list[list[list[Any]]]] = [[[[] for _ in range(prompts)] for _ in self.workers] for _ in range(arms)]
        steps = LAYOUTS * prompts * arms
        for layout in range(LAYOUTS):
            if layout:
                ask_all(self.workers, "load")
            for prompt in range(prompts):
                for place, arm in enumerate(order.permutation(arms).tolist()):
                    decodings = [RemoteDecoding(worker, arm, prompt, layout) for worker in self.workers]
                    take_turns(decodings, order, turn_rounds=1)
                    for process, decoding in enumerate(decodings):
                        runs[arm][process][prompt].append(decoding.run)
                    progress((layout * prompts + prompt) * arms + place + 1, steps)
        self.stack.close()
        ticks = list(self.load())
        typical = [[[typical_run(layouts) for layouts in process] for process in arm] for arm in runs]
        return {"spent_s": time.monotonic() - self.start_s, "ticks": ticks, "runs": typical}


class RemoteDecoding:
    """A sequence that a worker decodes; `advance` runs a whole turn of rounds.

    Turns end elsewhere in every layout, because the first round of a turn takes longer.
    """

    def __init__(self, worker: Worker, arm: int, prompt: int, layout: int):
        self.worker = worker
        self.rounds = TURN_ROUNDS - layout % TURN_ROUNDS  # of the next turn
        self.state = worker.ask("begin", arm=arm, prompt=prompt)

    @property
    def position(self) -> int:
        return int(self.state["position"])

    @property
    def run(self) -> Any:
        return self.state["run"]

    @property
    def done(self) -> bool:
        return self.run is not None

    def advance(self) -> None:
        self.state = self.worker.ask("advance", rounds=self.rounds)
        self.rounds = TURN_ROUNDS


def typical_run(layouts: Sequence[Mapping[str, Any]]) -> Run:
    """Summarise the runs of a process on a prompt: each round takes the mean of the faster half of its repeats.

    Interruptions and busy neighbours only ever add time. Where runs do other rounds, the median run counts.
    """
    logs = [[round_[:2] for round_ in run["rounds"]] for run in layouts]
    seconds = [[round_[2] for round_ in run["rounds"]] for run in layouts]
    half = len(layouts) // 2
    middle = int(np.argsort([sum(own) for own in seconds])[half])
    same = all(log == logs[0] for log in logs)
    return {
        "tokens": len(layouts[middle]["tokens"]),
        "rounds": len(logs[middle]),
        "text": digest(json.dumps(layouts[middle]["tokens"])),
        "log": digest(json.dumps(logs[middle])),
        "seconds": float(np.sort(seconds, axis=0)[:half].mean(axis=0).sum()) if same else sum(seconds[middle]),
    }
