"""Rollouts of reinforcement learning: a closed batch that shrinks as texts end, and whose last text ends the step.

Traces in the order of training steps tell how a drafter drifts from its target when it is not trained along: the first
was recorded with a drafter that was just refreshed, the next one a step later, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchCost, BatchTokens
from specsim.cost.files import CostLike, as_cost
from specsim.io.arrays import Seconds
from specsim.io.errors import InputError
from specsim.lookup.from_text import TokenText, suffix_trace
from specsim.lookup.suffix import SuffixRule
from specsim.replaying.result import Result
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import ScheduledK
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import Lockstep, lockstep
from specsim.trace.files import TraceLike, read_plain_trace
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

TAIL = 0.1  # share of the sequences that still run in the tail of a batch


@dataclass(frozen=True)
class RolloutStep:
    """The rollouts of a training step with a drafter.

    step : from 0; drafter : "recorded", or "suffix", which continues the texts of earlier steps
    baseline_s, fixed_s, scheduled_s : makespan without speculation, with the best K, and with K by remaining batch
    tail_share : share of the makespan, as scheduled, in which at most a tenth of the sequences still run
    schedule : K from so many running sequences on
    """

    step: int
    drafter: str
    baseline_s: float
    fixed_k: int
    fixed_s: float
    schedule: Mapping[int, int]
    scheduled_s: float
    tail_share: float

    @property
    def speedup(self) -> float:
        """Makespan without speculation over that with the schedule."""
        return self.baseline_s / self.scheduled_s


@dataclass(frozen=True, repr=False)
class Rollouts(Result):
    """Result of `rollouts`.

    steps : of every trace with its own drafter, and with the texts of earlier steps as drafts where these are recorded
    mean_s : mean seconds of a step with the recorded drafter, if it is refreshed every 1, 2, ... steps
    notes : caveats, in words
    """

    steps: tuple[RolloutStep, ...]
    mean_s: tuple[float, ...]
    notes: tuple[str, ...]

    @property
    def refresh_every(self) -> int:
        """Steps after which refreshing the drafter makes a step shortest."""
        return 1 + int(np.argmin(self.mean_s))

    def __repr__(self) -> str:
        return f"refresh interval of the drafter: {self.refresh_every} steps, {min(self.mean_s):.3g} s a step"

    def to_frame(self) -> pd.DataFrame:
        """Tabulate a row per step and drafter: makespans in seconds, K, schedule, speedup."""
        import pandas as pd  # slow to import

        return pd.DataFrame({**asdict(step), "speedup": step.speedup} for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        steps = [{**asdict(step), "speedup": step.speedup} for step in self.steps]
        return {"steps": steps, "mean_s": list(self.mean_s), "refresh_every": self.refresh_every}


@dataclass(frozen=True)
class FreeDrafts(BatchCost):
    """Costs of a drafter without passes of its own, such as lookup in texts, over those of another drafter's target."""

    model: BatchCost

    @property
    def step_s(self) -> float:
        return self.model.step_s

    @property
    def round_s(self) -> float:
        return self.model.round_s

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        return np.zeros(np.shape(tokens.sequences))

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        return self.model.batch_verify(tokens)


def rollouts(
    traces: TraceLike | Sequence[TraceLike],
    cost: CostLike,
    *,
    max_draft_tokens: int | None = None,
    refresh_s: float = 0.0,
    suffix: SuffixRule | None = None,
) -> Rollouts:
    """Predict how long the rollouts of training steps take, with and without speculation.

    All sequences of a trace start together, and the step ends with the last. K follows the number of sequences that
    still run; its schedule is found on the trace of the step before.

    Parameters
    ----------
    traces : Trace, str or Path, or several
        A trace per training step, in order, of the same prompts. The drafter is that of the first step, so that the
        n-th trace has a drafter that is n steps old.
    cost : CostModel, str, Path or mapping
        Batch-aware costs, as `read_cost` takes them.
    max_draft_tokens : int, optional
        Largest K (default: 8, or the depth of the shallowest trace).
    refresh_s : float
        Seconds that refreshing the drafter takes.
    suffix : SuffixRule, optional
        How texts of earlier steps are continued (default: as vLLM does).

    Returns
    -------
    Rollouts
        Makespans and schedules of every step, and the mean seconds of a step by how often the drafter is refreshed.

    Raises
    ------
    InputError
        For no trace, costs of batch size 1 alone, or an invalid length or time.

    References
    ----------
    Oliaro et al. 2024, arXiv:2411.04975 (suffix decoding).

    Examples
    --------
    >>> import specsim
    >>> fresh, stale = (specsim.generate(rate, sequences=8, output_tokens=40, depth=4, seed=1) for rate in (0.8, 0.5))
    >>> result = specsim.rollouts([fresh, stale], "example:llama-3.1-8b-eagle-h100", refresh_s=0.05)
    >>> [step.drafter for step in result.steps], result.steps[0].speedup > result.steps[1].speedup
    (['recorded', 'recorded'], True)
    """
    given = [traces] if isinstance(traces, str | Trace) or not isinstance(traces, Sequence) else list(traces)
    recorded, model = [read_plain_trace(trace) for trace in given], batch_cost(as_cost(cost))
    if not recorded:
        raise InputError("no trace; give one per training step")
    longest = min(8, *(trace.depth for trace in recorded)) if max_draft_tokens is None else max_draft_tokens
    if not 1 <= longest <= min(trace.depth for trace in recorded) or not refresh_s >= 0:
        raise InputError(
            f"max_draft_tokens={longest}, refresh_s={refresh_s}; give 1 to the depth of the traces, and 0 s or more"
        )
    steps = [
        _step(step, "recorded", trace, recorded[max(step - 1, 0)], model, longest)
        for step, trace in enumerate(recorded)
    ]
    mean_s = np.cumsum([step.scheduled_s for step in steps]) + refresh_s
    looked_up = [_suffix_drafts(recorded[:step], trace, suffix, longest) for step, trace in enumerate(recorded)]
    for step, (before, trace) in enumerate(pairwise(looked_up), start=1):
        if trace is not None:
            steps.append(_step(step, "suffix", trace, before or trace, FreeDrafts(model), longest))
    note = "the schedule of a drafter's first step is found on the step itself"
    return Rollouts(tuple(steps), tuple((mean_s / np.arange(1, 1 + len(mean_s))).tolist()), (note,))


def best_schedule(trace: Trace, cost: BatchCost, longest: int) -> dict[int, int]:
    """K by the number of running sequences, from each power of 2 on, that makes the makespan of a trace short.

    From the best fixed K, the K of one number of sequences at a time is changed for the best, until none gains.
    """
    starts = [1 << place for place in range(trace.sequences.bit_length())]
    options = range(longest + 1)

    def seconds(lengths: dict[int, int]) -> float:
        return together(trace, cost, lengths).total_s

    fixed = min(options, key=lambda k: seconds({1: k}))
    lengths, least = dict.fromkeys(starts, fixed), np.inf
    while (now := seconds(lengths)) < least:
        least = now
        for start in reversed(starts):
            lengths = min(({**lengths, start: k} for k in options), key=seconds)
    return {start: k for start, k in lengths.items() if start == 1 or lengths[start // 2] != k}


def together(trace: Trace, cost: BatchCost, lengths: Mapping[int, int]) -> Lockstep:
    """Decode all sequences of a trace at once, with K by the number of those that still run."""
    return lockstep(drafts_of(trace, ScheduledK(lengths)), cost, trace.sequences)


def _step(step: int, drafter: str, trace: Trace, before: Trace, cost: BatchCost, longest: int) -> RolloutStep:
    fixed = min(range(longest + 1), key=lambda k: together(before, cost, {1: k}).total_s)
    schedule = best_schedule(before, cost, longest)
    run = together(trace, cost, schedule)
    tail = run.seconds.sequences <= TAIL * trace.sequences
    return RolloutStep(
        step=step,
        drafter=drafter,
        baseline_s=together(trace, cost, {1: 0}).total_s,
        fixed_k=fixed,
        fixed_s=together(trace, cost, {1: fixed}).total_s,
        schedule=schedule,
        scheduled_s=run.total_s,
        tail_share=float(run.seconds.total_s[tail].sum() / run.total_s),
    )


def _suffix_drafts(earlier: Sequence[Trace], trace: Trace, rule: SuffixRule | None, depth: int) -> Trace | None:
    """What suffix decoding drafts in a step's texts from those of earlier steps; None without recorded texts."""
    if not earlier or any(each.prompts is None or not each.has_text for each in (*earlier, trace)):
        return None
    texts = [text for each in earlier for text in _texts(each)]
    return suffix_trace(_texts(trace), rule or SuffixRule(), depth, earlier=texts)


def _texts(trace: Trace) -> list[TokenText]:
    outputs, prompts = np.split(trace.token, trace.offsets[1:-1]), trace.prompts or []
    parts = zip(prompts, outputs, trace.domain.tolist(), trace.budget_tokens.tolist(), strict=True)
    return [TokenText(prompt.tolist(), output.tolist(), domain, budget) for prompt, output, domain, budget in parts]
