"""Decode a leaderboard's held-out prompts for real, with every drafter's policies and without, in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.pairs.open import open_drafter
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.validation.validate import output_identical, rounds_identical
from specsim.files import write_json
from specsim.policy.base import Policy
from specsim.replaying.replay import Replay
from specsim.trace.trace import Trace

WARM_TOKENS = 24
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """One policy of one drafter, with its replay and the trace that this is of; of the baseline neither."""

    label: str
    drafter: str
    policy: Policy | None = None
    replayed: Replay | None = None
    trace: Trace | None = None


@dataclass(frozen=True)
class Measured:
    """What one arm took: seconds and output tokens [repeats, S]; shares of the last repeat, None for the baseline."""

    seconds: Floats
    tokens: npt.NDArray[np.int64]
    rounds_identical: float | None
    output_identical: float | None

    def seconds_for(self, wanted: npt.NDArray[np.int64]) -> Floats:
        """Seconds per sequence [S], the median of the repeats, for as many tokens as wanted [S]."""
        return np.asarray(np.median(self.seconds / self.tokens, axis=0) * wanted)


def measure(
    pairs: Mapping[str, Pair],
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    held: Trace,
    folder: Path,
    *,
    repeats: int,
    seed: int,
    after: Callable[[int], None],
    progress: Callable[[int, int], None],
) -> list[Measured]:
    """What every arm took, in their order; a repeat that is in the folder is read.

    pairs : by the name that arms give, the baseline's among them
    prompts : of the held-out sequences, in the order of `held`, whose numbers and budgets they take
    after : called with the number of repeats so far after each that is measured
    """
    done = [folder / f"{repeat}.json" for repeat in range(repeats)]
    if not all(path.is_file() for path in done):
        loops = {}
        for arm in arms:
            pair = pairs[arm.drafter]
            if arm.drafter not in loops:
                loops[arm.drafter] = Decoder(*open_drafter(pair), pair.eos_token_ids, Sampler(**held.meta["decoding"]))
            budget = min(WARM_TOKENS, int(held.budget_tokens[0]))
            loops[arm.drafter].decode(prompts[0].tokens, budget, arm.policy)
        for repeat, path in enumerate(done):
            if not path.is_file():
                write_json(_repeat(loops, arms, prompts, held, repeat, repeats, seed, progress), path)
                after(repeat + 1)
    documents = [json.loads(path.read_text()) for path in done]
    return [
        Measured(
            seconds=np.array([document[arm.label]["seconds"] for document in documents]),
            tokens=np.array([document[arm.label]["tokens"] for document in documents]),
            rounds_identical=documents[-1][arm.label]["rounds_identical"],
            output_identical=documents[-1][arm.label]["output_identical"],
        )
        for arm in arms
    ]


def _repeat(
    loops: Mapping[str, Decoder],
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    held: Trace,
    repeat: int,
    repeats: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Every prompt by every arm, in an order shuffled for each prompt; seconds, tokens and shares by label."""
    order = np.random.default_rng((seed, repeat))
    states: dict[int, Any] = {}  # of policies that carry theirs from sequence to sequence
    runs: dict[int, list[Decoded]] = {number: [] for number in range(len(arms))}
    for index, prompt in enumerate(prompts):
        for number in order.permutation(len(arms)).tolist():
            arm = arms[number]
            decoded = loops[arm.drafter].decode(
                prompt.tokens,
                int(held.budget_tokens[index]),
                arm.policy,
                sequence=int(held.sequence_id[index]),
                seed=seed,
                state=states.get(number),
            )
            states[number] = decoded.state
            runs[number].append(decoded)
        progress(repeat * len(prompts) + index + 1, repeats * len(prompts))

    def entry(arm: Arm, own: list[Decoded]) -> dict[str, Any]:
        return {
            "seconds": [run.seconds for run in own],
            "tokens": [len(run.tokens) for run in own],
            "rounds_identical": None if arm.replayed is None else rounds_identical(arm.replayed, own),
            "output_identical": None if arm.trace is None else output_identical(arm.trace, own),
        }

    return {arm.label: entry(arm, runs[number]) for number, arm in enumerate(arms)}
