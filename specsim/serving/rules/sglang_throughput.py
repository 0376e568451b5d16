"""SGLang's throughput-aware speculative steps: the K of most tokens per second, by acceptance rates and a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from specsim.cost.batches import SEQUENCES, BatchCost, captured_size
from specsim.policy.base import Settings, parse_settings, setting
from specsim.serving.draft_length import DraftRounds, PricedRule, Running
from specsim.serving.rules.sglang_adaptive import Constants, StepsConfig, padded_batch
from specsim.trace.trace import Trace

DEFAULT = StepsConfig({1: Constants([1, 3, 5, 7])}, {})
CONSTANTS = {"window_size": 20, "update_interval": 5, "switch_hysteresis": 0.1, "profile_run_seq_len": 128}


class Seen(NamedTuple):
    """K, steps since it was last reconsidered, and, by place in the draft, acceptance rates of the last steps."""

    steps: int
    since: int
    windows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ThroughputAware(PricedRule):
    """Choose the K with the most expected tokens per second among the candidates of the batch size.

    Expected tokens follow from the share of requests that accepted the first, second, ... token of their drafts in the
    last `window_size` steps, at any batch size; shares of tokens that were not drafted are extrapolated. Seconds come
    from a profile at start-up, at `profile_run_seq_len` cached tokens. Every `update_interval` steps, if all windows
    are full, K changes if another one is expected to be faster by more than `switch_hysteresis`. K is never 0.

    config : candidates by the smallest batch that they apply to, and constants
    """

    config: StepsConfig = DEFAULT
    initial_steps: int = setting(3, 1, 255, doc="K at first, if it is a candidate: --speculative-num-steps")

    name = "sglang_throughput"
    source = (
        'SGLang, "strategy": "throughput_aware": srt/speculative/throughput_aware_spec_params.py (pull request 28045)'
    )

    @classmethod
    def fit(cls, settings: Settings, train: Trace, cost: BatchCost) -> Self:
        config = StepsConfig.of_settings(cls.name, settings, DEFAULT, train.depth, 1)
        return cls(cost, config, **parse_settings(cls, {key: settings[key] for key in settings if key != "config"}))

    @property
    def max_draft_tokens(self) -> int:
        return self.config.max_draft_tokens

    def constant(self, name: str) -> Any:
        return self.config.constants.get(name, CONSTANTS[name])

    def at(self, sequences: int) -> list[int]:
        """Candidate values of K at a batch size."""
        by_size = self.config.candidates
        return by_size[padded_batch(by_size, sequences)]

    def initial_state(self) -> Seen:
        everywhere = {k for steps in self.config.candidates.values() for k in steps}
        first = self.at(1)
        steps = self.initial_steps if self.initial_steps in everywhere else first[len(first) // 2]
        return Seen(steps, 0, ((),) * self.max_draft_tokens)

    def choose(self, state: Seen, running: Running) -> int:
        return self.decided(state, running.sequences).steps

    def update(self, state: Seen, running: Running, rounds: DraftRounds) -> Seen:
        state = self.decided(state, running.sequences)
        longest = self.constant("window_size")
        shares = [float((rounds.accepted > place).mean()) for place in range(state.steps)]
        seen = [(*window, share)[-longest:] for window, share in zip(state.windows, shares, strict=False)]
        return Seen(state.steps, state.since + 1, (*seen, *state.windows[state.steps :]))

    def decided(self, state: Seen, sequences: int) -> Seen:
        """The state after K is chosen for a step of so many requests."""
        steps = self.at(sequences)
        if state.steps not in steps:
            scores = self.scores(state, steps, sequences)
            state = _moved(state, steps[int(np.argmax(scores))] if any(scores) else steps[len(steps) // 2])
        if state.since < self.constant("update_interval"):
            return state
        full = all(len(window) == self.constant("window_size") for window in state.windows[: state.steps])
        if full:
            scores = self.scores(state, steps, sequences)
            best, own = int(np.argmax(scores)), scores[steps.index(state.steps)]
            if scores[best] > own * (1 + self.constant("switch_hysteresis")):
                state = _moved(state, steps[best])
        return state._replace(since=0)

    def scores(self, state: Seen, steps: Sequence[int], sequences: int) -> list[float]:
        """Expected tokens of a request per second of a step, by K; 0 as long as nothing was accepted or rejected."""
        rates = expected_rates(state.windows)
        if not rates:
            return [0.0] * len(steps)
        batch = int(captured_size(min(sequences, int(SEQUENCES[-1])), SEQUENCES))
        took_s = np.asarray(self.tables.round(batch, self.constant("profile_run_seq_len")))
        return [(1 + sum(rates[:k])) / float(took_s[k]) for k in steps]


def expected_rates(windows: Sequence[Sequence[float]]) -> list[float]:
    """Share of requests that accept each token, extrapolated to tokens that were not drafted; empty without data."""
    rates: list[float] = []
    for window in windows:
        if window:
            rates.append(sum(window) / len(window))
        elif not rates:
            return []
        elif len(rates) == 1 or rates[0] <= 0:
            rates.append(rates[0] if len(rates) == 1 else 0.0)
        else:
            fall = (rates[-1] / rates[0]) ** (1 / (len(rates) - 1))
            rates.append(rates[-1] * min(fall, 1.0))
    return rates


def _moved(state: Seen, steps: int) -> Seen:
    """The state at another K; a shorter one drops the acceptance rates of the tokens that it does not draft."""
    windows = state.windows
    if steps < state.steps:
        windows = (*windows[:steps], *((),) * (len(windows) - steps))
    return state._replace(steps=steps, windows=windows)
