"""SGLang's adaptive speculative steps: K from a few candidates per batch size, by a moving accepted length."""

from __future__ import annotations

import dataclasses
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

# SGLang 0.5.23's own, in the form of its --speculative-adaptive-config.
DEFAULT: dict[str, Any] = {
    "1": {"candidate_steps": [1, 3, 5, 7]},
    "8": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
    "32": {"candidate_steps": [0, 1], "down_hysteresis": 0.0},
    "64": {"candidate_steps": [0], "down_hysteresis": 0.0},
}
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

    config : candidates and constants by the least batch size, as SGLang's file has them
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=lambda: DEFAULT)
    initial_steps: int = setting(3, 0, 255, doc="K at first, if it is a candidate: --speculative-num-steps")

    name = "sglang_adaptive"
    source = "SGLang 0.5.23, --speculative-adaptive: srt/speculative/adaptive_spec_params.py"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_config(self.name, self.config, 0)

    @classmethod
    def fit(cls, settings: Settings, train: Trace, cost: BatchCost) -> Self:
        config, values = read_config(cls.name, settings, DEFAULT, train.depth)
        return cls(config, **parse_settings(cls, values))

    @property
    def max_draft_tokens(self) -> int:
        return max(max(steps) for steps in candidates(self.config).values())

    def constants(self, size: int) -> Constants:
        """Candidates and constants at a batch size."""
        given = {**self.config, **self.config[str(size)]}
        return Constants(**{key: given[key] for key in Constants._fields if key in given})

    def initial_state(self) -> dict[int, Slot]:
        slots = {}
        for size, steps in candidates(self.config).items():
            first = self.initial_steps if self.initial_steps in steps else steps[len(steps) // 2]
            slots[size] = Slot(first, first - 1.0, 0)
        return slots

    def choose(self, state: dict[int, Slot], running: Running) -> int:
        return state[padded_batch(state, running.sequences)].steps

    def update(self, state: dict[int, Slot], running: Running, rounds: DraftRounds) -> dict[int, Slot]:
        size = padded_batch(state, running.sequences)
        slot, constants = state[size], self.constants(size)
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


def candidates(config: Mapping[str, Any]) -> dict[int, list[int]]:
    """The values of K to choose from, by the smallest batch that they apply to."""
    sizes = sorted(int(key) for key in config if key.isdigit())
    return {size: sorted(set(config[str(size)]["candidate_steps"])) for size in sizes}


def check_config(name: str, config: Mapping[str, Any], least: int) -> None:
    """Raise InputError unless the configuration lists values of K by batch size. least : smallest valid K"""
    lists = [config[key].get("candidate_steps") for key in config if key.isdigit()]
    if not lists or not all(
        isinstance(each, list) and each and all(type(k) is int and k >= least for k in each) for each in lists
    ):
        raise InputError(f"{name}: config has no candidate_steps, a list of K, by batch size; {EXAMPLE}")


def read_config(
    name: str, settings: Settings, default: Mapping[str, Any], depth: int
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the configuration and the other settings. It may be a file; the default is limited to K <= depth."""
    values = dict(settings)
    config = values.pop("config", default)
    if not isinstance(config, Mapping):
        config = read_json(Path(config), f"{name}: config {config}", dict, missing=EXAMPLE, invalid=EXAMPLE)
    shallow = {key: _within(entry, depth) for key, entry in config.items()} if config is default else config
    return shallow, values


def padded_batch(sizes: Collection[int], sequences: int) -> int:
    """The largest of these sizes up to the batch padded to its CUDA graph; the smallest if all are larger."""
    batch = float(captured_size(sequences, SEQUENCES))
    return max((size for size in sizes if size <= batch), default=min(sizes))


def _within(entry: Mapping[str, Any], depth: int) -> dict[str, Any]:
    return {**entry, "candidate_steps": [k for k in entry["candidate_steps"] if k <= depth]}
