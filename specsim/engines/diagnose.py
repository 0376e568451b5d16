"""Why speculation is as fast as it is: an engine's tokens per second with and without it, and what it accepted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specsim.cost.files import CostLike, as_cost
from specsim.cost.linear import LinearCost, LinearPass
from specsim.cost.model import ConstantCost, CostModel
from specsim.engines.advise import Advice, advise, counts_by_depth
from specsim.engines.formats.imported import SourceLike, as_counts
from specsim.errors import InputError
from specsim.speedup.intervals import Estimate
from specsim.speedup.result import Result

if TYPE_CHECKING:
    import pandas as pd

LEAST_S = 1e-9  # of a draft step that takes nothing


@dataclass(frozen=True)
class Part:
    """What of a round's time goes where.

    Parameters
    ----------
    name : str
    tokens : float
        Time, in tokens that are decoded without speculation in it.
    """

    name: str
    tokens: float


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """Where the gain or the loss of speculation comes from.

    Parameters
    ----------
    speedup : float
        Tokens per second with speculation over those without.
    draft_tokens : int
        K, drafted in every round.
    tokens_per_round : Estimate
        Emitted, the target's own included, with a 95 % credible interval.
    round_tokens : float
        How many tokens are decoded without speculation while a round lasts: so many have to be emitted for
        speculation to pay.
    all_accepted : float
        The speedup, were every draft accepted.
    parts : tuple of Part
        Of a round's time; empty where no costs were given.
    advice : tuple of (str, Advice)
        The K that would pay, by what is assumed of a round's cost.
    """

    speedup: float
    draft_tokens: int
    tokens_per_round: Estimate
    round_tokens: float
    all_accepted: float
    parts: tuple[Part, ...]
    advice: tuple[tuple[str, Advice], ...]

    def __repr__(self) -> str:
        word = "faster" if self.speedup > 1 else "slower"
        emitted, needed = f"{self.tokens_per_round:.2f}", f"{self.round_tokens:.2f}"
        why = f"a round emits {emitted} tokens and takes as long as {needed} without speculation"
        return f"{word}, x {self.speedup:.2f}: {why}"

    def to_frame(self) -> pd.DataFrame:
        """A table of what was found, a row each, with its 95 % interval where it has one."""
        import pandas as pd  # slow to import, and the diagnosis does not need it

        rows: dict[str, Estimate | float] = {
            "speedup": self.speedup,
            "tokens that a round emits": self.tokens_per_round,
            "tokens that it would have to emit to pay": self.round_tokens,
            f"speedup, were all {self.draft_tokens} drafts accepted": self.all_accepted,
            **{f"of a round, in tokens' time: {part.name}": part.tokens for part in self.parts},
        }
        ends = {name: value if isinstance(value, Estimate) else None for name, value in rows.items()}
        low, high = ([getattr(end, name, None) for end in ends.values()] for name in ("low", "high"))
        return pd.DataFrame({"value": map(float, rows.values()), "low": low, "high": high}, index=list(rows))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        found = dataclasses.asdict(self)
        return {**found, "advice": [{"assumed": name, **one.as_dict()} for name, one in self.advice]}


def diagnose(
    source: SourceLike,
    *,
    baseline_tokens_per_s: float,
    tokens_per_s: float,
    cost: CostLike | None = None,
    context: int = 1000,
    policy: str | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Split what speculation gains or loses into what drafts bring and what a round costs.

    A round that emits E tokens takes E / (tokens per second). Without costs of its parts nothing says whether that
    would shrink with shorter drafts, so that the K that would pay is found twice: as if all that a round takes beyond
    a token without speculation grew with K, and as if none of it did. With costs, they say what drafting and a wider
    target pass take, scaled so that a token without speculation takes what was measured, and the rest is the engine's.

    Parameters
    ----------
    source : path, mapping, Counters, Rounds, Trace or Imported
        What was accepted, of drafts of one length, as `advise` takes it.
    baseline_tokens_per_s, tokens_per_s : float
        Measured without and with speculation, at the same load.
    cost : CostModel, str, Path or mapping, optional
        Of draft steps and target passes, as `read_cost` takes it.
    context : int
        Tokens in the cache at which costs are taken.
    policy : str, optional
        Of a file of rounds, only those of this policy.
    seed : int
        Of the draws from the posterior.

    Returns
    -------
    Diagnosis
        `speedup`, where a round's time goes in `parts`, the K that would pay in `advice`; `to_frame()` is a pandas
        table.

    Raises
    ------
    InputError
        For rates that are not positive, and a round that would take less time than a token without speculation.

    Examples
    --------
    >>> import specsim
    >>> counters = {"drafted": [1000, 1000, 1000], "accepted": [700, 400, 200]}
    >>> specsim.diagnose(counters, baseline_tokens_per_s=52, tokens_per_s=41)
    slower, x 0.79: a round emits 2.30 tokens and takes as long as 2.92 without speculation
    """
    source = as_counts(source, policy=policy)
    cost = None if cost is None else as_cost(cost)
    for name, rate in (("without", baseline_tokens_per_s), ("with", tokens_per_s)):
        if not 1e-6 <= rate <= 1e9:
            raise InputError(f"{rate} tokens per second {name} speculation; give a positive rate")
    longest = len(counts_by_depth(source)[1])
    token_s = 1 / baseline_tokens_per_s
    free = advise(source, ConstantCost(LEAST_S * token_s, token_s), context=context, seed=seed)
    emitted = free.lengths[longest].speedup  # were drafts free, what a round emits is the speedup
    round_tokens = emitted.estimate * baseline_tokens_per_s / tokens_per_s
    beyond_s = (round_tokens - 1) * token_s
    if beyond_s <= 0:
        raise InputError(
            f"a round that emits {emitted.estimate:.2f} tokens would take less time than one token without "
            f"speculation, at {tokens_per_s:g} tokens per second for {baseline_tokens_per_s:g}; give rates of one load"
        )
    parts: tuple[Part, ...] = ()
    if cost is None:
        assumed: dict[str, CostModel] = {
            "if all that a round takes beyond a token grows with K": ConstantCost(beyond_s / longest, token_s),
            "if none of it does": _linear(token_s, 0.0, 0.0, beyond_s),
        }
    else:
        alone_s = float(cost.autoregressive_step(context))
        scale = token_s / alone_s
        draft_s = scale * float(cost.draft(longest, context))
        wider_s = scale * (float(cost.verify(longest + 1, context)) + cost.round_overhead() - alone_s)
        own_s = beyond_s - draft_s - wider_s
        parts = (
            Part("a token without speculation", 1.0),
            Part(f"drafting {longest} tokens", draft_s / token_s),
            Part(f"verifying {longest + 1} tokens in place of one", wider_s / token_s),
            Part("the engine, beyond these costs", own_s / token_s),
        )
        assumed = {"at these costs": _linear(token_s, draft_s / longest, max(wider_s, 0.0) / longest, max(own_s, 0.0))}
    found = tuple((name, advise(source, model, context=context, seed=seed)) for name, model in assumed.items())
    return Diagnosis(
        tokens_per_s / baseline_tokens_per_s,
        longest,
        emitted,
        round_tokens,
        (longest + 1) / round_tokens,
        parts,
        found,
    )


def _linear(token_s: float, draft_step_s: float, drafted_token_s: float, round_s: float) -> LinearCost:
    """Costs of a pass, a draft step, a further token in a pass, and a round beside these."""
    target = LinearPass(token_s - drafted_token_s, drafted_token_s)
    return LinearCost(target=target, drafter=LinearPass(max(draft_step_s, LEAST_S * token_s)), round_s=round_s)
