"""What adapting the draft length to a prompt can gain over the best fixed K, and what drawing the length costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from specsim.acceptance.sources import Source
from specsim.acceptance.synthetic import Drafts, match_lengths, uninformed
from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.cali_ts import CaliTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.expected import draws_uniforms
from specsim.replaying.intervals import Estimate, ratio_interval
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from studies.common import Config, Document

FIXED, FIXED_EACH = "fixed K", "K of each prompt, in hindsight"
DRAWN, DRAWN_EACH = "geometric", "geometric of each prompt, in hindsight"
WEAK, STRONG, TUNED, CALI = "Beta-TS, weak prior", "Beta-TS, strong prior", "Beta-TS, tuned", "Cali-TS, tuned"
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


def extremes(trace: Trace, share: float) -> Ints:
    """The least and the most accepting prompts, this share of all each."""
    order = np.argsort(accepted_shares(trace), kind="stable")
    count = round(share * trace.sequences)
    return np.sort(np.concatenate([order[:count], order[-count:]]))


def geometric(keep: float, depth: int) -> BetaTS:
    """Drafting goes on with this probability after every token: Thompson sampling that has nothing left to learn."""
    return BetaTS(alpha0=UNMOVED * keep, beta0=UNMOVED * (1 - keep), max_draft_tokens=depth)


def replays(priced: PricedTrace, policy: Policy, config: Config) -> tuple[Floats, Floats]:
    """Seconds per prompt [S], and drafted tokens and rounds [2, S], in the mean over what the policy draws."""
    assert isinstance(policy, ChainPolicy)
    seeds = range(config["replay_seeds"]) if draws_uniforms(type(policy)) else range(1)
    runs = [priced.replay(policy, seed=seed) for seed in seeds]
    seconds = np.mean([run.speculative_s for run in runs], axis=0)
    return seconds, np.mean([(run.drafted, run.num_rounds) for run in runs], axis=0)


def row(label: str, settings: str, seconds: Floats, counts: Floats) -> Document:
    """Return a way to choose draft lengths: seconds per prompt, and drafted tokens per round."""
    drafted, rounds = counts.sum(axis=1)
    return {"label": label, "settings": settings, "seconds": seconds.tolist(), "mean_draft": float(drafted / rounds)}


def family(train: PricedTrace, held: PricedTrace, policies: Sequence[Policy], config: Config) -> tuple[int, list[Any]]:
    """Which of the policies is best on the tuning prompts, and of each prompt reported on the best in hindsight."""
    best = int(np.argmin([replays(train, policy, config)[0].sum() for policy in policies]))
    played = [replays(held, policy, config) for policy in policies]
    seconds, counts = (np.stack(values) for values in zip(*played, strict=True))
    own = seconds.argmin(axis=0)
    prompts = np.arange(seconds.shape[1])
    each = (seconds[own, prompts], counts[own, :, prompts].T)
    return best, [(seconds[best], counts[best]), each]


def comparison(train: PricedTrace, held: PricedTrace, config: Config) -> Document:
    """Fixed, geometric and learned draft lengths; what is chosen once for all prompts is chosen on `train`."""
    depth = train.trace.depth
    lengths = range(1, depth + 1)
    best_k, (fixed, fixed_each) = family(train, held, [FixedK(k) for k in lengths], config)
    best_keep, (drawn, drawn_each) = family(train, held, [geometric(keep, depth) for keep in config["keeps"]], config)
    rows = [
        row(FIXED, f"K = {lengths[best_k]}", *fixed),
        row(FIXED_EACH, "", *fixed_each),
        row(DRAWN, f"{config['keeps'][best_keep]:g}", *drawn),
        row(DRAWN_EACH, "", *drawn_each),
    ]
    search = SearchSettings(trials=config["trials"], seed=config["seed"], jobs=config["threads"])
    learned: dict[str, Policy] = {
        WEAK: BetaTS(**BetaTS.PRIORS["weak"], max_draft_tokens=depth),
        STRONG: BetaTS(**BetaTS.PRIORS["strong"], max_draft_tokens=depth),
        TUNED: best_policy(BetaTS, train, search),
    }
    if train.trace.score is not None:
        learned[CALI] = best_policy(CaliTS, train, search)
    rows += [row(label, str(policy), *replays(held, policy, config)) for label, policy in learned.items()]
    shares = accepted_shares(held.trace)
    return {
        "rows": rows,
        "baseline_s": held.baseline_s.tolist(),
        "acceptance": {"mean": float(shares.mean()), "spread": float(shares.std())},
        "prompts": {"tuning": train.trace.sequences, "holdout": held.trace.sequences},
    }


def rows_of(document: Config) -> dict[str, Mapping[str, Any]]:
    """The rows of a comparison by label."""
    return {row["label"]: row for row in document["rows"]}


def gain(document: Config, label: str, over: str = FIXED) -> Estimate | None:
    """Return the speed gain of a way to choose lengths over another, in percent; None if it was not compared."""
    rows = rows_of(document)
    if label not in rows:
        return None
    ratio = ratio_interval(rows[over]["seconds"], rows[label]["seconds"])
    return Estimate(*(100 * (value - 1) for value in (ratio.estimate, ratio.low, ratio.high)))


def passes_from(gains: Sequence[tuple[float, Estimate]]) -> float | None:
    """The least spread from which on every gain is significantly above 0; None where that of the largest is not."""
    passed = None
    for spread, value in sorted(gains, key=lambda pair: pair[0], reverse=True):
        if value.low <= 0:
            break
        passed = spread
    return passed
