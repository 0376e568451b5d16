"""Causes of a loss by speculation: for each, how much faster the server would be without it.

Parts of a round and acceptance are compared with those of servers on which speculation pays. A cause is named if output
would be at least `LEAST_GAIN` faster with the usual value in its place, at the K that is best then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from specsim.io.arrays import Floats
from specsim.replaying.intervals import Estimate
from specsim.servers.round_costs import RoundCosts, tokens_per_round

LEAST_GAIN = 1.10
LEAST_SPEEDUP = 0.95  # at another K, for the K to be the cause; below, the rounds are slow at any K
SURE = 0.9  # of draws that must agree that there is a gain
# Usual values: acceptance of the first drafted token of a drafter that fits; a draft step, a round's fixed part, and
# further verified tokens of a round, in decode steps. Half as good is usual enough, so that small lacks name no cause.
USUAL_ACCEPTANCE, USUAL_DRAFT_STEP, USUAL_ROUND, USUAL_VERIFICATION = 0.5, 0.25, 0.25, 0.5


@dataclass(frozen=True)
class Cause:
    """Why the server is slower than it could be.

    gain : speed without it over the speed now, with a 90 % credible interval
    evidence, remedy : numbers that show it, and what to try
    """

    name: str
    gain: Estimate
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Rounds:
    """A server's rounds at one concurrency.

    costs : draws [R]; rates [R, D], of the i-th token, if all before it were accepted
    """

    costs: RoundCosts
    rates: Floats
    concurrency: float

    @property
    def speeds(self) -> Floats:
        """Tokens per second of a sequence [R, D + 1], for K = 0, 1, ..., D."""
        lengths = np.arange(self.rates.shape[1] + 1)
        return tokens_per_round(self.rates) / self.costs.step(self.concurrency, lengths)

    @property
    def decode_s(self) -> Floats:
        """Seconds of a baseline decode step [R]."""
        return self.costs.step(self.concurrency, 0)

    @property
    def best(self) -> int:
        """The K with the largest expected speedup, 0 for none."""
        return int((self.speeds / self.speeds[:, :1]).mean(axis=0).argmax())

    def repaired(self, name: str, k: int) -> Rounds:
        """The same rounds with the usual value of a part, of rounds of K drafts."""
        costs, c, base_s = self.costs, self.concurrency, self.decode_s
        if name == "acceptance":
            return replace(self, rates=np.maximum(self.rates, USUAL_ACCEPTANCE))
        if name == "drafting":
            step_s = costs.draft(c, 1)
            factor = np.minimum(1.0, USUAL_DRAFT_STEP * base_s / np.maximum(step_s, 1e-12))
            costs = replace(costs, draft_s=costs.draft_s * factor, draft_token_s=costs.draft_token_s * factor)
        elif name == "host":
            costs = replace(costs, round_s=np.minimum(costs.round_s, USUAL_ROUND * base_s))
        else:
            token_s = np.minimum(costs.token_s, USUAL_VERIFICATION * base_s / (c * k))
            costs = replace(costs, token_s=token_s, pass_s=costs.pass_s + c * (costs.token_s - token_s))
        return replace(self, costs=costs)


def find_causes(rounds: Rounds, k: int) -> list[Cause]:
    """Find causes for a server that drafts K tokens, the one that costs most first."""
    c, base_s = rounds.concurrency, rounds.decode_s
    speeds = rounds.speeds
    now, top = speeds[:, k], speeds[:, rounds.best]
    best = 1 + int((speeds[:, 1:] / speeds[:, :1]).mean(axis=0).argmax())  # with speculation
    rates, step = rounds.rates, rounds.costs.draft(c, 1) / base_s
    first = f"{100 * rates[:, 0].mean():.0f} %"
    extra = 100 * (rounds.costs.verify(c, k) / base_s - 1).mean()
    evidence = {
        "acceptance": (
            "the drafter does not fit the target",
            f"{first} of the first drafted tokens are accepted, where a drafter that fits has "
            f"{100 * USUAL_ACCEPTANCE:.0f} % or more",
            "use a drafter trained for this very target, with its chat template and quantisation",
        ),
        "drafting": (
            "the drafter is slow",
            f"a draft step takes {step.mean():.2f} of a decode step, {k} of them {k * step.mean():.2f}; a small "
            f"drafter's takes less than {USUAL_DRAFT_STEP:g}",
            "use a smaller drafter (EAGLE-3, MTP, n-gram), or fewer draft tokens",
        ),
        "host": (
            "a round has a large fixed part",
            f"{(rounds.costs.round_s / base_s).mean():.2f} decode steps of a round are neither drafts nor verification",
            "turn CUDA graphs on (vLLM: leave out --enforce-eager) and update the engine",
        ),
        "verification": (
            "verification is not free at this load",
            f"a pass over {k + 1} tokens of each of {c:.0f} sequences takes {extra:.0f} % longer than over a single one",
            "fewer draft tokens at this concurrency, or a schedule of K by batch",
        ),
    }
    causes = []
    length = speeds[:, best] / now
    if best != k and (speeds[:, best] / speeds[:, 0]).mean() > LEAST_SPEEDUP and _is_named(length):
        better = tokens_per_round(rates)[:, [best, k]].mean(axis=0)
        times = (rounds.costs.step(c, [best, k]) / base_s[:, None]).mean(axis=0)
        text = (
            f"a round of {k} drafts yields {better[1]:.2f} tokens in {times[1]:.2f} decode steps, one of {best} yields "
            f"{better[0]:.2f} in {times[0]:.2f}"
        )
        name = f"K = {k} is too {'long' if k > best else 'short'}"
        causes.append(Cause(name, _gain(length), text, f"draft {best} tokens"))
    for part, (name, text, remedy) in evidence.items():
        repaired = rounds.repaired(part, k)
        draws = repaired.speeds[:, repaired.best] / top
        if _is_named(draws):
            causes.append(Cause(name, _gain(draws), text, remedy))
    return sorted(causes, key=lambda cause: -cause.gain)


def _gain(draws: Floats) -> Estimate:
    return Estimate(float(draws.mean()), *map(float, np.quantile(draws, (0.05, 0.95))))


def _is_named(draws: Floats) -> bool:
    return bool(draws.mean() >= LEAST_GAIN and (draws > 1).mean() >= SURE)
