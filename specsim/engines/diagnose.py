"""Explain a measured speedup, from an engine's tokens per second with and without speculation and its counts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specsim.cost.files import CostLike, as_cost
from specsim.cost.linear import LinearCost, LinearPass
from specsim.cost.model import ConstantCost, CostModel
from specsim.engines.advise import Advice, advise
from specsim.engines.counted import counted
from specsim.engines.flags import kind_of
from specsim.engines.import_records import SourceLike, as_counts
from specsim.engines.signatures import Signature, find_signatures
from specsim.io.errors import InputError
from specsim.replaying.intervals import Estimate, interval_columns
from specsim.replaying.result import Result

if TYPE_CHECKING:
    import pandas as pd

KIND = "specsim-diagnosis"
LEAST = 1e-9  # decode steps of a draft step that costs nothing


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The causes of a gain or loss by speculation.

    speedup : tokens per second with speculation over those without
    draft_tokens : K, drafted in every step that drafts
    tokens_per_round : output tokens per step, the target's own included, with a 95 % credible interval
    round_tokens : duration of a step in baseline decode steps; speculation pays if a step yields more tokens
    parts : parts of a step's time, in baseline decode steps; empty without costs
    advice : the best K under each assumption about a step's cost; empty for an upper bound
    signatures : signs of a fault, each with what to check
    upper_bound : whether the steps without a draft are unknown, so that tokens and duration are at most these
    """

    speedup: float
    draft_tokens: int
    tokens_per_round: Estimate
    round_tokens: float
    parts: dict[str, float]
    advice: tuple[tuple[str, Advice], ...]
    signatures: tuple[Signature, ...] = ()
    upper_bound: bool = False

    def __repr__(self) -> str:
        change = f"{100 * abs(self.speedup - 1):.0f} % {'faster' if self.speedup > 1 else 'slower'}"
        link = "and" if self.speedup > 1 else "but"
        if self.upper_bound:
            return (
                f"{self.speedup:.2f}x ({change}): each step yields at most {self.tokens_per_round:.2f} tokens and "
                f"costs at most {self.round_tokens:.2f} normal decode steps: steps without a draft were not counted; "
                "give generated tokens beside the counts"
            )
        return (
            f"{self.speedup:.2f}x ({change}): each step yields {self.tokens_per_round:.2f} tokens {link} costs as much "
            f"as {self.round_tokens:.2f} normal decode steps"
        )

    def to_frame(self) -> pd.DataFrame:
        """A row for each assumption about a round's cost: the best K, and its speedup."""
        import pandas as pd  # slow to import, and the diagnosis does not need it

        best = [(assumed, advice.k, advice.lengths[advice.candidate].speedup) for assumed, advice in self.advice]
        return pd.DataFrame([{"assumed": name, "k": k, **interval_columns(speedup)} for name, k, speedup in best])

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        advice = [{"assumed": assumption, **advice.as_dict()} for assumption, advice in self.advice]
        signatures = [sign._asdict() for sign in self.signatures]
        return {"kind": KIND, **dataclasses.asdict(self), "advice": advice, "signatures": signatures}


def diagnose(
    source: SourceLike,
    *,
    baseline_tokens_per_s: float,
    tokens_per_s: float,
    cost: CostLike | None = None,
    context: int = 1000,
    policy: str | None = None,
    seed: int = 0,
    drafter: str | None = None,
) -> Diagnosis:
    """Split the gain or loss by speculation into the tokens that drafts add and the time that a round costs.

    A step that yields E tokens takes E / (tokens per second). Without a cost model it is unknown how much of that time
    shorter drafts would save, so the best K is found for both extremes: all overhead is per drafted token, or all of it
    is fixed per round. A cost model gives the time of drafting and of the wider target pass, scaled to the measured
    baseline; the rest is the engine's own overhead.

    Parameters
    ----------
    source : path, mapping, Counters, Rounds, Trace or ImportedRecords
        Acceptance counts of drafts of equal length, as `advise` takes them.
    baseline_tokens_per_s, tokens_per_s : float
        Throughput without and with speculation, at the same load.
    cost : CostModel, str, Path or mapping, optional
        Cost of draft steps and target passes, as `read_cost` takes it.
    context : int
        Cached tokens at which costs are taken.
    policy : str, optional
        Use only rounds recorded under this policy.
    seed : int
        Seed of the draws from the posterior.
    drafter : str, optional
        Kind of drafter, such as "eagle3", as `advise` takes it.

    Returns
    -------
    Diagnosis
        `speedup`, the `parts` of a round's time, and the best K in `advice`; `to_frame()` is a pandas table.

    Raises
    ------
    InputError
        For rates that are not positive, and for a round that would be faster than a baseline decode step.

    Examples
    --------
    >>> import specsim
    >>> counters = {"drafted": [1000, 1000, 1000], "accepted": [700, 400, 200]}
    >>> specsim.diagnose(counters, baseline_tokens_per_s=52, tokens_per_s=41)
    0.79x (21 % slower): each step yields 2.30 tokens but costs as much as 2.92 normal decode steps
    """
    source = as_counts(source, policy=policy)
    for name, rate in (("without", baseline_tokens_per_s), ("with", tokens_per_s)):
        if not 1e-6 <= rate <= 1e9:
            raise InputError(f"{rate} tokens per second {name} speculation; give a positive rate")
    counts = counted(source)
    longest, share, speedup = len(counts.verified), counts.share_drafting, tokens_per_s / baseline_tokens_per_s
    # All times are in baseline decode steps, whatever the rates are of: one request, or all of a server.
    free = advise(source, ConstantCost(LEAST, 1.0), context=context, seed=seed, drafter=drafter)
    emitted = free.lengths[longest].speedup  # with free drafts, the speedup is the tokens per step
    step_tokens = emitted.estimate / speedup
    if free.upper_bound:
        return Diagnosis(speedup, longest, emitted, step_tokens, {}, (), free.signatures, upper_bound=True)
    overhead = (step_tokens - 1) / share  # of a step that drafts
    if overhead <= 0:
        raise InputError(
            f"a step that yields {emitted.estimate:.2f} tokens would be faster than a normal decode step, at "
            f"{tokens_per_s:g} tokens per second for {baseline_tokens_per_s:g}; give rates at the same load"
        )
    parts: dict[str, float] = {}
    if cost is None:
        assumed: dict[str, CostModel] = {
            "best case for short drafts (all overhead is per drafted token)": ConstantCost(overhead / longest, 1.0),
            "worst case (all overhead is fixed per round)": _linear(0.0, 0.0, overhead),
        }
    else:
        drafting, wider = _round_steps(as_cost(cost), longest, context)
        own = overhead - drafting - wider
        parts = {
            "a normal decode step": 1.0,
            f"drafting {longest} tokens": share * drafting,
            f"verifying {longest + 1} tokens instead of one": share * wider,
            "the engine, beyond these costs": share * own,
        }
        assumed = {"at these costs": _linear(drafting / longest, max(wider, 0.0) / longest, max(own, 0.0))}
    advice = tuple((name, advise(source, model, context=context, seed=seed)) for name, model in assumed.items())
    signatures = find_signatures(counts, source, drafter and kind_of(drafter), round_tokens=1 + overhead)
    return Diagnosis(speedup, longest, emitted, step_tokens, parts, advice, signatures)


def _round_steps(cost: CostModel, k: int, context: int) -> tuple[float, float]:
    """Drafting, and verification beyond a decode step, in decode steps."""
    step_s = float(cost.autoregressive_step(context))
    return float(cost.draft(k, context)) / step_s, (
        float(cost.verify(k + 1, context)) + cost.round_overhead()
    ) / step_s - 1


def _linear(draft_step: float, drafted_token: float, round_: float) -> LinearCost:
    """Costs of a draft step, a further token in a pass, and the overhead of a round, in decode steps."""
    target = LinearPass(1.0 - drafted_token, drafted_token)
    return LinearCost(target=target, drafter=LinearPass(max(draft_step, LEAST)), round_s=round_)
