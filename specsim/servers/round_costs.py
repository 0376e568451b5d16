"""What a round costs on a server, fitted to its decoding steps at different K and concurrency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.cost.files import KIND, VERSION
from specsim.cost.model import MIN_SECONDS
from specsim.io.arrays import Floats, Seconds

DRAWS = 400
LEAST_ERROR = 0.01  # relative; times of a server repeat no better
# Scales of the parts before anything is measured, in baseline decode steps: a further verified token of any sequence,
# a draft step, a further sequence in it, and what a round takes besides. They decide only what the steps leave open.
SCALES = {"token_s": 0.1, "draft_s": 0.3, "draft_token_s": 0.05, "round_s": 0.3}


class Step(NamedTuple):
    """A measured decoding step: seconds with so many sequences, drafted tokens per sequence, relative error.

    prompts : of other requests that the server reads meanwhile
    """

    concurrency: float
    draft_tokens: float
    seconds: float
    error: float
    prompts: float = 0.0


@dataclass(frozen=True)
class RoundCosts:
    """Parts of a round's seconds, draws [R] of each from their posterior.

    A pass over n tokens takes pass_s + n token_s, a draft step of B sequences draft_s + B draft_token_s, and a round
    with drafts takes round_s besides. A prompt delays the steps of other requests by prompt_s.
    """

    pass_s: Seconds
    token_s: Seconds
    draft_s: Seconds
    draft_token_s: Seconds
    round_s: Seconds
    prompt_s: Seconds

    def verify(self, concurrency: float, draft_tokens: npt.ArrayLike) -> Seconds:
        """Seconds of a target pass over the drafts and pending tokens, [R, ...]."""
        tokens = concurrency * (1 + np.asarray(draft_tokens, dtype=np.float64))
        return np.add.outer(self.pass_s, 0 * tokens) + np.multiply.outer(self.token_s, tokens)

    def draft(self, concurrency: float, draft_tokens: npt.ArrayLike) -> Seconds:
        """Seconds of drafting, [R, ...]."""
        return np.multiply.outer(self.draft_s + concurrency * self.draft_token_s, np.asarray(draft_tokens, np.float64))

    def step(self, concurrency: float, draft_tokens: npt.ArrayLike) -> Seconds:
        """Seconds of a decoding step without prompts, [R, ...]; never 0, as a fit to contradictory steps may be."""
        speculates = np.asarray(draft_tokens) > 0
        host = np.multiply.outer(self.round_s, speculates)
        seconds = self.verify(concurrency, draft_tokens) + self.draft(concurrency, draft_tokens) + host
        return np.maximum(seconds, MIN_SECONDS)

    def document(
        self, source: str, date: str, concurrency: tuple[int, int], lengths: tuple[int, int]
    ) -> dict[str, Any]:
        """The linear cost file of the means, which `read_cost` takes."""
        mean: Mapping[str, float] = {name: float(np.mean(draws)) for name, draws in vars(self).items()}
        return {
            "kind": KIND,
            "version": VERSION,
            "form": "linear",
            "source": source,
            "date": date,
            "target": {"fixed_s": max(mean["pass_s"], MIN_SECONDS), "token_s": mean["token_s"]},
            "drafter": {"fixed_s": max(mean["draft_s"], MIN_SECONDS), "token_s": mean["draft_token_s"]},
            "round_s": mean["round_s"],
            "fitted": {"batches": list(concurrency), "draft_tokens": list(lengths)},
        }


def fit_round_costs(
    steps: Sequence[Step], *, draft_step_s: float | None = None, most_prompt_s: float = 0.0, seed: int = 0
) -> RoundCosts:
    """Fit the parts of a round, none below 0, to measured steps, some of them without drafts.

    Every draw fits the steps with noise of their errors, beside draws of the parts' scales (randomize-then-optimize).
    Parts that the steps do not tell apart, as at a single K, therefore differ from draw to draw as much as they may.

    steps : measured; those with draft_tokens = 0 are of the baseline
    draft_step_s : seconds of a draft step at the first step's concurrency, where the engine prints them
    most_prompt_s : upper bound of the seconds by which a prompt delays others. Up to there, steps tell it by its growth
        with the load: prompts add the same time to every output token, verification to every verified one

    References: Bardsley et al. 2014, SIAM J. Sci. Comput. 36(4), randomize-then-optimize.

    >>> steps = [Step(1, 0, 0.010, 0.01), Step(1, 2, 0.015, 0.01), Step(1, 6, 0.025, 0.01)]
    >>> costs = fit_round_costs(steps)
    >>> bool(abs(costs.step(1, 4).mean() - 0.020) < 0.001)
    True
    """
    from scipy.optimize import nnls

    rng = np.random.default_rng(seed)
    base_s = min(step.seconds for step in steps if not step.draft_tokens)
    columns = (np.array(column, dtype=np.float64) for column in zip(*steps, strict=True))
    sequences, drafted, seconds, error, prompts = columns
    ones = np.ones(len(steps))
    rows = np.stack([ones, sequences * (1 + drafted), drafted, sequences * drafted, drafted > 0, prompts], axis=1)
    if draft_step_s is not None:
        rows = np.vstack([rows, [0, 0, 1, sequences[0], 0, 0]])
        seconds, error = np.append(seconds, draft_step_s), np.append(error, LEAST_ERROR)
    weights = 1 / (seconds * np.maximum(error, LEAST_ERROR))
    scales = base_s * np.array([1.0, *SCALES.values()])
    own = np.vstack([rows[:, :-1] * weights[:, None], np.diag(1 / scales)[1:]])
    of_prompts = np.append(rows[:, -1] * weights, np.zeros(len(SCALES)))
    prompt_scale = most_prompt_s / math.sqrt(12)  # standard deviation of a uniform distribution
    parts = np.zeros((DRAWS, 1 + len(scales)))
    for draw in range(DRAWS):
        noisy = seconds * weights + rng.standard_normal(len(seconds))
        right = np.concatenate([noisy, np.abs(rng.standard_normal(len(SCALES)))])
        prompt_s = 0.0
        if most_prompt_s > 0:
            before = rng.uniform(0, most_prompt_s) / prompt_scale
            matrix = np.block([[own, of_prompts[:, None]], [np.zeros(own.shape[1]), np.array([1 / prompt_scale])]])
            prompt_s = min(nnls(matrix, np.append(right, before))[0][-1], most_prompt_s)
        parts[draw] = *nnls(own, right - prompt_s * of_prompts)[0], prompt_s
    return RoundCosts(*parts.T)


def tokens_per_round(rates: Floats) -> Floats:
    """Output tokens of rounds with K = 0, 1, ..., D drafts [R, D + 1], by the rates [R, D] of the i-th token."""
    whole = np.cumprod(np.concatenate([np.ones((len(rates), 1)), rates], axis=1), axis=1)
    return np.cumsum(whole, axis=1)
