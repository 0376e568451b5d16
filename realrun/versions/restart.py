"""A restart of `realrun compare`: fresh processes of both versions decode the same prompts in turns."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypedDict

import numpy as np

from realrun.measure.interleaving import TURN_ROUNDS, take_turns
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
    """A restart: runs [arm][process][prompt], arm 0 is the baseline.

    prompts : numbers of those that were decoded, the same in every restart
    """

    prompts: list[int]
    spent_s: float
    ticks: list[float]
    runs: list[list[list[Run]]]


@contextmanager
def started(
    sides: Sequence[Side], job: Mapping[str, Any], number: int
) -> Iterator[tuple[list[Worker], dict[str, Any]]]:
    """Start the processes of a restart; gives them, and by version what its times depend on."""
    base, head = sides
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(side, number)) for side in (base, head, base)]
        answers = ask_all(workers, "start", job=job)
        yield workers, {"base": identity_of(base, answers[BASE]), "head": identity_of(head, answers[HEAD])}


def decode_all(
    workers: Sequence[Worker],
    arms: int,
    prompts: Sequence[int],
    limit_s: float,
    order: np.random.Generator,
    progress: Counter,
) -> tuple[list[int], list[list[list[Run]]]]:
    """Decode prompts with every arm in every layout, all processes in turns.

    limit_s : prompts that would take longer, by those before them, are left out

    Returns the prompts that were decoded, and runs [arm][process][prompt].
    """
    layouts: dict[tuple[int, int, int], list[Any]] = defaultdict(list)
    begun_s, done = time.monotonic(), 0
    for layout in range(LAYOUTS):
        if layout:
            ask_all(workers, "load")
        for number, prompt in enumerate(prompts, start=1):
            for arm in order.permutation(arms).tolist():
                decodings = [RemoteDecoding(worker, arm, prompt, layout) for worker in workers]
                take_turns(decodings, order, turn_rounds=1)
                for process, decoding in enumerate(decodings):
                    layouts[arm, process, prompt].append(decoding.run)
                done += 1
                progress(done, LAYOUTS * len(prompts) * arms)
            if not layout and LAYOUTS * (time.monotonic() - begun_s) * (1 + 1 / number) > limit_s:
                prompts = prompts[:number]
                break
    return list(prompts), [
        [[typical_run(layouts[arm, process, prompt]) for prompt in prompts] for process in range(len(workers))]
        for arm in range(arms)
    ]


class RemoteDecoding:
    """A sequence that a worker decodes; `advance` runs a whole turn of rounds.

    Turns end elsewhere in every layout, because the first round of a turn takes longer.
    """

    def __init__(self, worker: Worker, arm: int, prompt: int, layout: int):
        self.worker = worker
        self.rounds = TURN_ROUNDS - layout % TURN_ROUNDS  # of the next turn
        self.position, self.run = 0, None
        worker.ask("begin", arm=arm, prompt=prompt)

    @property
    def done(self) -> bool:
        return self.run is not None

    def advance(self) -> None:
        state = self.worker.ask("advance", rounds=self.rounds)
        self.position, self.run, self.rounds = state["position"], state["run"], TURN_ROUNDS


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
