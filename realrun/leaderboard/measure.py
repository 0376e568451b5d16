"""Decode a leaderboard's held-out prompts for real, with every drafter's policies and without, in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.validation.timing import Arm, Timings, decoding, take_turns
from realrun.validation.validate import output_identical, rounds_identical
from specsim.arrays import Floats, Ints
from specsim.files import write_json
from specsim.policy.base import Policy
from specsim.progress import Counter
from specsim.replaying.replay import Replay
from specsim.trace.trace import Trace


@dataclass(frozen=True)
class Contender:
    """One policy of one drafter, with its replay and the trace that this is of; of the baseline neither."""

    label: str
    drafter: str
    policy: Policy | None = None
    replayed: Replay | None = None
    trace: Trace | None = None


@dataclass(frozen=True)
class Measured:
    """Of one contender: seconds and output tokens [repeats, S]; shares of the last repeat, None for the baseline."""

    seconds: Floats
    tokens: Ints
    rounds_identical: float | None
    output_identical: float | None

    def seconds_for(self, wanted: Ints) -> Floats:
        """Seconds per sequence [S], the median of the repeats, for as many tokens as wanted [S]."""
        return np.asarray(np.median(self.seconds / self.tokens, axis=0) * wanted)


def measure(
    pairs: Mapping[str, Pair],
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    held: Trace,
    folder: Path,
    *,
    repeats: int,
    seed: int,
    after: Callable[[int], None],
    progress: Counter,
) -> list[Measured]:
    """What every contender took, in their order; a repeat that is in the folder is read.

    pairs : by the name that contenders give, the baseline's among them
    prompts : of the held-out sequences, in the order of `held`, whose numbers and budgets they take
    after : called with the number of repeats so far after each that is measured
    """
    done = [folder / f"{repeat}.json" for repeat in range(repeats)]
    if not all(path.is_file() for path in done):
        sampler = Sampler(**held.meta["decoding"])
        decoders = {
            name: Decoder(*pairs[name].make_drafter(), pairs[name].eos_token_ids, sampler)
            for name in dict.fromkeys(one.drafter for one in contenders)
        }
        arms = [Arm(one.label, one.policy, decoders[one.drafter]) for one in contenders]
        step, turns = decoding(arms, prompts, held, seed), len(prompts) * len(arms)
        for repeat, path in enumerate(done):
            if path.is_file():
                continue
            timings, order = Timings(len(arms)), np.random.default_rng((seed, repeat))

            def report(done: int, before: int = repeat * turns) -> None:
                progress(before + done, repeats * turns)

            take_turns(len(arms), range(len(prompts)), step, order, timings, report)
            runs = [timings.last_runs(arm, range(len(prompts))) for arm in range(len(arms))]
            write_json({one.label: _entry(one, own) for one, own in zip(contenders, runs, strict=True)}, path)
            after(repeat + 1)
    documents = [json.loads(path.read_text()) for path in done]
    return [
        Measured(
            seconds=np.array([document[one.label]["seconds"] for document in documents]),
            tokens=np.array([document[one.label]["tokens"] for document in documents]),
            rounds_identical=documents[-1][one.label]["rounds_identical"],
            output_identical=documents[-1][one.label]["output_identical"],
        )
        for one in contenders
    ]


def _entry(contender: Contender, runs: list[Decoded]) -> dict[str, Any]:
    """Seconds and tokens of a repeat's runs, and the shares of what was done as replayed and recorded."""
    replayed, trace = contender.replayed, contender.trace
    return {
        "seconds": [run.seconds for run in runs],
        "tokens": [len(run.tokens) for run in runs],
        "rounds_identical": None if replayed is None else rounds_identical(replayed, runs),
        "output_identical": None if trace is None else output_identical(trace, runs),
    }
