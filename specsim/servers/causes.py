"""Causes of a loss by speculation: for each, how much faster the server would be without it.

Parts of a round and acceptance are compared with those of servers on which speculation pays. A cause is named if rounds
would be at least `LEAST_GAIN` faster with the usual value in its place. A wrong K is a cause of its own, so the others
are compared at the best K of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specsim.engines.flags import draft_length_flags
from specsim.io.arrays import Floats
from specsim.replaying.intervals import Estimate
from specsim.report.doctor import Cause
from specsim.servers.round_costs import RoundCosts, tokens_per_round

LEAST_GAIN = 1.10
SURE = 0.95  # of draws that must agree that there is a gain, so that its 90 % interval shows one
# Up to what a part is usual: acceptance of the first drafted token and, in decode steps, a draft step, a round's fixed
# part and all its further verified tokens. Chosen with room, so that ordinary servers have no cause.
USUAL_ACCEPTANCE, USUAL_DRAFT_STEP, USUAL_ROUND, USUAL_VERIFICATION = 0.5, 0.25, 0.25, 0.5
REMEDIES = {  # by what is slow, and engine
    "acceptance": {
        "vllm": 'a drafter of this very target: "model" in --speculative-config; n-grams need text that repeats',
        "sglang": "a drafter of this very target: --speculative-draft-model-path",
        "llamacpp": "a draft model of this very target: --spec-draft-model",
    },
    "drafting": {
        "vllm": 'a drafter inside the target: "method": "eagle3", "mtp" or "ngram" in --speculative-config',
        "sglang": "a drafter inside the target: --speculative-algorithm EAGLE3, NEXTN or NGRAM",
        "llamacpp": "a smaller --spec-draft-model, or --spec-type draft-eagle3, draft-mtp or ngram-mod",
    },
    "host": {
        "vllm": "CUDA graphs: leave out --enforce-eager",
        "sglang": "CUDA graphs: leave out --disable-cuda-graph",
        "llamacpp": "more room for a draft to pay: a larger target; no flag shortens this part",
    },
    "verification": {
        "vllm": 'fewer drafts under load: "num_speculative_tokens_per_batch_size" in --speculative-config',
        "sglang": "fewer drafts under load: --speculative-adaptive",
        "llamacpp": "fewer drafts: --spec-draft-n-max, or --spec-draft-p-min 0.5 to end unsure ones",
    },
}


@dataclass(frozen=True)
class Rounds:
    """A server's rounds at one concurrency.

    costs : draws [R]; rates [R, D], of the i-th token, if all before it were accepted
    prompts : of other requests that the server reads, per output token of a request
    """

    costs: RoundCosts
    rates: Floats
    concurrency: float
    prompts: float = 0.0

    def step_s(self, lengths: npt.ArrayLike) -> Floats:
        """Seconds of rounds with so many drafts [R, ...], with the prompts of others."""
        seconds = self.costs.step(self.concurrency, lengths)
        tokens = tokens_per_round(self.rates)[:, np.asarray(lengths)]
        return seconds + (tokens.T * self.costs.prompt_s * self.prompts).T

    @property
    def speeds(self) -> Floats:
        """Tokens per second of a sequence [R, D + 1], for K = 0, 1, ..., D."""
        lengths = np.arange(self.rates.shape[1] + 1)
        return tokens_per_round(self.rates) / self.step_s(lengths)

    @property
    def decode_s(self) -> Floats:
        """Seconds of a baseline decode step [R]."""
        return self.step_s(0)

    @property
    def best_draft(self) -> int:
        """The K with the largest expected speedup among those that speculate."""
        return 1 + int((self.speeds[:, 1:] / self.speeds[:, :1]).mean(axis=0).argmax())

    def repaired(self, name: str, k: int) -> Rounds:
        """The same rounds with the usual value of a part, where K tokens are drafted."""
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


def find_causes(rounds: Rounds, k: int, engine: str, drafter: str | None = None) -> list[Cause]:
    """Find causes for a server that drafts K tokens, the one that costs most first.

    engine, drafter : whose flags are recommended, as `draft_length_flags` takes them
    """
    c, base_s = rounds.concurrency, rounds.decode_s
    speeds, best = rounds.speeds, rounds.best_draft
    top = speeds[:, best]
    rates, step = rounds.rates, rounds.costs.draft(c, 1) / base_s
    first = f"{100 * rates[:, 0].mean():.0f} %"
    extra = 100 * (rounds.costs.verify(c, k) / rounds.costs.step(c, 0) - 1).mean()
    found = {
        "acceptance": (
            "the drafter does not fit the target",
            f"{first} of the first drafted tokens are accepted, where a drafter that fits has "
            f"{100 * USUAL_ACCEPTANCE:.0f} % or more",
        ),
        "drafting": (
            "the drafter is slow",
            f"a draft step takes {step.mean():.2f} of a decode step, {k} of them {k * step.mean():.2f}; a small "
            f"drafter's takes less than {USUAL_DRAFT_STEP:g}",
        ),
        "host": (
            "a round has a large fixed part",
            f"{(rounds.costs.round_s / base_s).mean():.2f} decode steps of a round do not depend on K",
        ),
        "verification": (
            "verification is not free at this load",
            f"a pass over {k + 1} tokens of each of {c:.0f} sequences takes {extra:.0f} % longer than over one each",
        ),
    }
    causes = []
    length = top / speeds[:, k]
    if best != k and _is_named(length):
        better = tokens_per_round(rates)[:, [best, k]].mean(axis=0)
        times = (rounds.step_s([best, k]) / base_s[:, None]).mean(axis=0)
        text = (
            f"a round of {k} drafts yields {better[1]:.2f} tokens in {times[1]:.2f} decode steps, one of {best} yields "
            f"{better[0]:.2f} in {times[0]:.2f}"
        )
        name = f"K = {k} is too {'long' if k > best else 'short'}"
        causes.append(Cause(name, _gain(length), text, draft_length_flags(engine, best, drafter)))
    for part, (name, text) in found.items():
        repaired = rounds.repaired(part, best)
        draws = repaired.speeds[:, repaired.best_draft] / top
        if _is_named(draws):
            causes.append(Cause(name, _gain(draws), text, REMEDIES[part][engine]))
    return sorted(causes, key=lambda cause: -cause.gain)


def _gain(draws: Floats) -> Estimate:
    return Estimate(float(draws.mean()), *map(float, np.quantile(draws, (0.05, 0.95))))


def _is_named(draws: Floats) -> bool:
    return bool(draws.mean() >= LEAST_GAIN and (draws > 1).mean() >= SURE)
