"""What adapting the draft length to a prompt can gain over the best fixed K, and what drawing the length costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specsim.acceptance.models import Drafts, match_lengths, uninformed
from specsim.acceptance.sources import Source
from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.cali_ts_confidence import CaliTSConfidence
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.expected import draws_uniforms
from specsim.replaying.intervals import Estimate, ratio_interval
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from studies.common import Config, Document

FIXED, FIXED_EACH = "fixed K", "K of each prompt, in hindsight"
DRAWN, DRAWN_EACH = "geometric", "geometric of each prompt, in hindsight"
WEAK, TUNED, CALI = "Beta-TS, weak prior", "Beta-TS, tuned", "Cali-TS, tuned"
UNMOVED = 1e9  # tokens of a prior that no output moves


@dataclass(frozen=True)
class PerPrompt:
    """Every prompt has an acceptance probability of its own, with which its tokens are accepted independently.

    The probabilities are the quantiles of a Beta distribution at even steps, in random order, so that prompts of
    any spread accept alike in the mean.

    mean, spread : mean and standard deviation over prompts
    """

    mean: float
    spread: float

    name: ClassVar[str] = "per_prompt"
    source: ClassVar[str] = "own"
    informed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.mean < 1 or not 0 <= self.spread**2 < self.mean * (1 - self.mean):
            raise InputError(
                f"no Beta distribution has mean {self.mean:g} and spread {self.spread:g}; choose less spread"
            )

    @classmethod
    def fit(cls, source: Source) -> PerPrompt:
        """Mean and standard deviation of what the prompts of a trace accept."""
        assert isinstance(source, Trace)
        shares = accepted_shares(source)
        return cls(float(shares.mean()), float(shares.std()))

    def probabilities(self, prompts: int) -> Floats:
        """Compute the acceptance probabilities of this number of prompts, ascending."""
        from scipy.stats import beta

        if self.spread == 0:
            return np.full(prompts, self.mean)
        weight = self.mean * (1 - self.mean) / self.spread**2 - 1
        steps = (np.arange(prompts) + 0.5) / prompts
        return np.asarray(beta.ppf(steps, self.mean * weight, (1 - self.mean) * weight))

    def draw(self, lengths: Ints, depth: int, rng: np.random.Generator) -> Drafts:
        total = int(lengths.sum())
        probability = np.repeat(rng.permutation(self.probabilities(len(lengths))), lengths)
        accepted = rng.random(total) < probability
        return Drafts(match_lengths([accepted] * depth, lengths), **uninformed(np.full(depth, self.mean), total))


def accepted_shares(trace: Trace) -> Floats:
    """Compute for every prompt [S] the share of its tokens accepted as the first of a draft."""
    drafted = trace.draft_limit > 0
    sequence = np.repeat(np.arange(trace.sequences), trace.output_tokens)
    counts = [
        np.bincount(sequence[rows], minlength=trace.sequences) for rows in (drafted & (trace.match_len > 0), drafted)
    ]
    return np.asarray(counts[0] / counts[1])


def geometric(keep: float, depth: int) -> BetaTS:
    """Drafting goes on with this probability after every token: Thompson sampling that has nothing left to learn."""
    return BetaTS(alpha0=UNMOVED * keep, beta0=UNMOVED * (1 - keep), max_draft_tokens=depth)


def seconds(priced: PricedTrace, policy: Policy, config: Config) -> Floats:
    """Compute the seconds of each prompt [S], in the mean over what the policy draws."""
    assert isinstance(policy, ChainPolicy)
    seeds = range(config["replay_seeds"]) if draws_uniforms(type(policy)) else range(1)
    return np.asarray(np.mean([priced.replay(policy, seed=seed).speculative_s for seed in seeds], axis=0))


def times(train: PricedTrace, held: PricedTrace, config: Config) -> tuple[dict[str, Floats], int]:
    """Compute the seconds of each prompt [S] of `held` by way to choose draft lengths.

    Returned with the best fixed K. What is chosen for all prompts is chosen on `train`; in hindsight, each prompt has
    its own fastest policy.
    """
    depth = train.trace.depth
    families: dict[tuple[str, str], list[Policy]] = {
        (FIXED, FIXED_EACH): [FixedK(k) for k in range(1, depth + 1)],
        (DRAWN, DRAWN_EACH): [geometric(keep, depth) for keep in config["keeps"]],
    }
    taken, best = {}, {}
    for (once, each), policies in families.items():
        best[once] = int(np.argmin([seconds(train, policy, config).sum() for policy in policies]))
        played = np.stack([seconds(held, policy, config) for policy in policies])
        taken |= {once: played[best[once]], each: played.min(axis=0)}
    search = SearchSettings(trials=config["trials"], seed=config["seed"], jobs=config["threads"])
    taken[WEAK] = seconds(held, BetaTS(**BetaTS.PRIORS["weak"], max_draft_tokens=depth), config)
    taken[TUNED] = seconds(held, best_policy(BetaTS, train, search), config)
    if train.trace.informed:
        taken[CALI] = seconds(held, best_policy(CaliTSConfidence, train, search), config)
    return taken, best[FIXED] + 1


def comparison(train: PricedTrace, held: PricedTrace, config: Config) -> Document:
    """Compare all ways to choose draft lengths with the best fixed K, on prompts that nothing was chosen on."""
    taken, best_k = times(train, held, config)
    shares, played = accepted_shares(held.trace), held.replay(FixedK(best_k))
    return {
        "k": best_k,
        "tau": float(played.output_tokens.sum() / played.num_rounds.sum()),
        "speedup": ratio_interval(held.baseline_s, taken[FIXED]).as_dict(),
        "gains": {label: gain(taken[FIXED], own).as_dict() for label, own in taken.items() if label != FIXED},
        "acceptance": {"mean": float(shares.mean()), "spread": float(shares.std())},
        "prompts": {"tuning": train.trace.sequences, "holdout": held.trace.sequences},
    }


def gain(fixed_s: Floats, own_s: Floats) -> Estimate:
    """Compute the speed gain over the best fixed K, in percent. Both arguments: seconds of each prompt [S]."""
    ratio = ratio_interval(fixed_s, own_s)
    return Estimate(*(100 * (value - 1) for value in (ratio.estimate, ratio.low, ratio.high)))


def passes_from(gains: Sequence[tuple[float, Mapping[str, float]]]) -> float | None:
    """Find the least spread from which on every gain is significantly above 0; None if the largest spread's is not."""
    passed = None
    for spread, value in sorted(gains, key=lambda pair: pair[0], reverse=True):
        if value["low"] <= 0:
            break
        passed = spread
    return passed
