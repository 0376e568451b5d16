"""SGLang's adaptive speculative steps: K from a few candidates per batch size, by a moving accepted length."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from specsim.cost.batches import SEQUENCES, BatchCost, captured_size
from specsim.io.errors import InputError
from specsim.io.json import read_json
from specsim.policy.base import Settings, parse_settings, setting
from specsim.serving.draft_length import DraftLengthRule, DraftRounds, Running
from specsim.trace.trace import Trace

EXAMPLE = 'give such as {"1": {"candidate_steps": [1, 3, 7]}, "32": {"candidate_steps": [0, 1]}}'


class Constants(NamedTuple):
    """Candidates and constants at a batch size, as SGLang's file names them; defaults are SGLang 0.5.23's."""

    candidate_steps: Sequence[int]
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25
    ceiling_coeff: float = 0.0


class StepsConfig(NamedTuple):
    """SGLang's --speculative-adaptive-config.

    by_size : by the smallest batch that they apply to; constants : of all batches, by SGLang's names
    """

    by_size: dict[int, Constants]
    constants: dict[str, float]

    @classmethod
    def from_json(cls, document: Mapping[str, Any], name: str, least: int) -> StepsConfig:
        """Read the parsed file; InputError unless it lists values of K by batch size. least : smallest valid K"""
        sizes = sorted(int(key) for key in document if key.isdigit())
        lists = [document[str(size)].get("candidate_steps") for size in sizes]
        if not lists or not all(
            isinstance(each, list) and each and all(type(k) is int and k >= least for k in each) for each in lists
        ):
            raise InputError(f"{name}: config has no candidate_steps, a list of K, by batch size; {EXAMPLE}")
        by_size = {}
        for size in sizes:
            given = {**document, **document[str(size)]}
            by_size[size] = Constants(**{key: given[key] for key in Constants._fields if key in given})
        return cls(by_size, {key: value for key, value in document.items() if not key.isdigit()})

    @classmethod
    def of_settings(cls, name: str, settings: Settings, default: StepsConfig, depth: int, least: int) -> StepsConfig:
        """The configuration that a rule's settings give, maybe as a file; the default is limited to K <= depth."""
        config = settings.get("config")
        if config is None:
            steps = {size: [k for k in own.candidate_steps if k <= depth] for size, own in default.by_size.items()}
            by_size = {size: own._replace(candidate_steps=steps[size]) for size, own in default.by_size.items()}
            return cls(by_size, default.constants)
        if not isinstance(config, Mapping):
            config = read_json(Path(config), f"{name}: config {config}", dict, missing=EXAMPLE, invalid=EXAMPLE)
        return cls.from_json(config, name, least)

    @property
    def candidates(self) -> dict[int, list[int]]:
        """The values of K to choose from, by the smallest batch that they apply to."""
        return {size: sorted(set(own.candidate_steps)) for size, own in self.by_size.items()}

    @property
    def max_draft_tokens(self) -> int:
        return max(max(own.candidate_steps) for own in self.by_size.values())


# SGLang 0.5.23's own.
DEFAULT = StepsConfig(
    {
        1: Constants([1, 3, 5, 7]),
        8: Constants([0, 1, 3], down_hysteresis=0.0),
        32: Constants([0, 1], down_hysteresis=0.0),
        64: Constants([0], down_hysteresis=0.0),
    },
    {},
)


class Slot(NamedTuple):
    """State at a batch size. steps : K; accepted : moving average of accepted tokens; batches : steps seen so far"""

    steps: int
    accepted: float
    batches: int


@dataclass(frozen=True)
class SGLangAdaptive(DraftLengthRule):
    """K from the candidates of the batch size, moved by the average of accepted tokens in steps of such a batch.

    Every `update_interval` steps, K falls while the average is at most the next lower candidate less 0.5 plus
    `down_hysteresis`, or else rises while it exceeds K less 0.5 plus `up_hysteresis`. A slot at K = 0 tries its next
    candidate at the next such moment.

    config : candidates and constants by the least batch size
    """

    config: StepsConfig = DEFAULT
    initial_steps: int = setting(3, 0, 255, doc="K at first, if it is a candidate: --speculative-num-steps")

    name = "sglang_adaptive"
    source = "SGLang 0.5.23, --speculative-adaptive: srt/speculative/adaptive_spec_params.py"

    @classmethod
    def fit(cls, settings: Settings, train: Trace, cost: BatchCost) -> Self:
        config = StepsConfig.of_settings(cls.name, settings, DEFAULT, train.depth, 0)
        return cls(config, **parse_settings(cls, {key: settings[key] for key in settings if key != "config"}))

    @property
    def max_draft_tokens(self) -> int:
        return self.config.max_draft_tokens

    def initial_state(self) -> dict[int, Slot]:
        slots = {}
        for size, steps in self.config.candidates.items():
            first = self.initial_steps if self.initial_steps in steps else steps[len(steps) // 2]
            slots[size] = Slot(first, first - 1.0, 0)
        return slots

    def choose(self, state: dict[int, Slot], running: Running) -> int:
        return state[padded_batch(state, running.sequences)].steps

    def update(self, state: dict[int, Slot], running: Running, rounds: DraftRounds) -> dict[int, Slot]:
        size = padded_batch(state, running.sequences)
        slot, constants = state[size], self.config.by_size[size]
        accepted, batches = slot.accepted, slot.batches + 1
        if slot.steps > 0:
            alpha = constants.ema_alpha
            accepted = (1 - alpha) * accepted + alpha * float(rounds.accepted.mean())
        later = batches - constants.warmup_batches
        if later <= 0 or later % constants.update_interval:
            return {**state, size: Slot(slot.steps, accepted, batches)}
        return {**state, size: Slot(*moved(slot.steps, accepted, constants), batches)}


def moved(steps: int, accepted: float, constants: Constants) -> tuple[int, float]:
    """K after a moment of change, and the moving average."""
    among = sorted(set(constants.candidate_steps))
    place = start = among.index(steps)
    if steps == 0:
        target = among[min(place + 1, len(among) - 1)]
        return target, target - 1.0 if target > 0 and accepted < 0 else accepted
    while place > 0:
        lower = among[place - 1]
        if accepted > (0.5 if lower == 0 else lower - 0.5) + constants.down_hysteresis:
            break
        place -= 1
    if place == start:
        while place < len(among) - 1 and accepted > among[place] - 0.5 + constants.up_hysteresis:
            place += 1
    if constants.ceiling_coeff > 0:
        ceiling = max(1, math.ceil(accepted * constants.ceiling_coeff))
        while place > 0 and among[place] > ceiling and among[place] <= steps:
            place -= 1
    return among[place], accepted


def padded_batch(sizes: Collection[int], sequences: int) -> int:
    """The largest of these sizes up to the batch padded to its CUDA graph; the smallest if all are larger."""
    batch = float(captured_size(sequences, SEQUENCES))
    return max((size for size in sizes if size <= batch), default=min(sizes))
