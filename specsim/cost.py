"""What things cost: cost models, and the plain table that replay sees.

Seconds per call at batch size 1 unless the model says otherwise. `context` is the number
of tokens in the cache before the call (prompt plus emitted tokens, less the pending one).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specsim.errors import InputError

Seconds = npt.NDArray[np.float64]
PROFILE_KIND = "specsim-profile"
PROFILE_VERSION = 1
GRID_KIND = "specsim-cost-grid"


class CostModel(Protocol):
    """Answers in seconds, vectorised over context."""

    def draft_step(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        """One draft step that ingests n_tokens (2 after a fully accepted draft)."""

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        """One target pass over the pending token and n_tokens - 1 drafted ones."""

    def policy_step(self) -> float:
        """One decision whether to draft on."""

    def round_overhead(self) -> float:
        """What a round costs besides drafting, policy and verification."""

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        """One token without speculation, by the same code path."""


@dataclass(frozen=True)
class CostTable:
    """A cost model compiled to arrays. Column b covers contexts [b, b+1) x 2^bucket_bits tokens.

    draft_s : [2, B], a draft step that ingests 1 or 2 tokens
    verify_s : [n_max + 1, B], a target pass over n tokens (row 0 is unused)
    autoregressive_s : [B]
    """

    bucket_bits: int
    draft_s: Seconds
    verify_s: Seconds
    autoregressive_s: Seconds
    policy_step_s: float
    round_overhead_s: float


def compile_table(
    model: CostModel, *, max_draft_tokens: int, contexts: tuple[int, int], bucket_bits: int = 4
) -> CostTable:
    """Evaluate a cost model once for everything a replay over these contexts can ask."""
    columns = (contexts[1] >> bucket_bits) + 1
    context = np.clip((np.arange(columns) + 0.5) * 2**bucket_bits, *contexts)
    verify = np.full((max_draft_tokens + 2, columns), np.nan)
    for n in range(1, max_draft_tokens + 2):
        verify[n] = model.verify(n, context)
    return CostTable(
        bucket_bits=bucket_bits,
        draft_s=np.stack([model.draft_step(n, context) for n in (1, 2)]),
        verify_s=verify,
        autoregressive_s=model.autoregressive_step(context),
        policy_step_s=model.policy_step(),
        round_overhead_s=model.round_overhead(),
    )


@dataclass(frozen=True)
class ConstantCost:
    """The papers' cost: one draft step takes s_d, one target pass s_t, nothing else counts."""

    s_d: float
    s_t: float

    def __post_init__(self) -> None:
        for name in ("s_d", "s_t"):
            value = getattr(self, name)
            if not (value > 0 and np.isfinite(value)):
                raise InputError(f"cost: {name}={value} seconds is not positive; give a positive time")

    def draft_step(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_d)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_t)

    def policy_step(self) -> float:
        return 0.0

    def round_overhead(self) -> float:
        return 0.0

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_t)


@dataclass(frozen=True)
class ProfileCost:
    """A measured grid: medians per context, linear in context between grid points.

    Verification is made monotone in n_tokens (running maximum), since noise must not make
    a longer pass look cheaper. A context or a size that was not measured is an error.

    contexts : int [C], increasing
    draft_s : [2, C]; verify_s : [n_max, C] for n_tokens 1..n_max; autoregressive_s : [C]
    """

    contexts: npt.NDArray[np.int64]
    draft_s: Seconds
    verify_s: Seconds
    autoregressive_s: Seconds
    policy_step_s: float
    round_overhead_s: float
    score_step_s: float = 0.0  # what a predictor's score adds to a draft step, where the policy reads it

    def _along_context(self, values: Seconds, context: npt.ArrayLike) -> Seconds:
        asked = np.asarray(context, dtype=np.float64)
        low, high = self.contexts[0], self.contexts[-1]
        if asked.size and not (asked.min() >= low and asked.max() <= high):  # also catches NaN
            raise InputError(
                f"cost profile covers contexts {low} to {high} tokens, asked for {asked.min():g} to "
                f"{asked.max():g}; profile again with `--contexts` that cover them"
            )
        return np.interp(asked, self.contexts, values)

    def draft_step(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        if n_tokens not in (1, 2):
            raise InputError(f"cost profile: a draft step ingests 1 or 2 tokens, not {n_tokens}")
        return self._along_context(self.draft_s[n_tokens - 1], context)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        if not 1 <= n_tokens <= len(self.verify_s):
            raise InputError(
                f"cost profile covers verification of 1 to {len(self.verify_s)} tokens, asked for "
                f"{n_tokens}; profile again with a larger `--depth`"
            )
        return self._along_context(self.verify_s[:n_tokens].max(axis=0), context)

    def policy_step(self) -> float:
        return self.policy_step_s

    def round_overhead(self) -> float:
        return self.round_overhead_s

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self._along_context(self.autoregressive_s, context)

    def constant(self, context: float) -> ConstantCost:
        """The papers' two numbers, s_d and s_t, read off this profile at one context."""
        return ConstantCost(s_d=float(self.draft_step(1, context)), s_t=float(self.autoregressive_step(context)))


def read_cost(path: Path | str) -> ProfileCost | ConstantCost:
    """Read a profile made by `realrun profile`, or {"s_d": seconds, "s_t": seconds}."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"cost file {path} does not exist; make one with `realrun profile`")
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"cost file {path} is no valid JSON ({error}); make it again") from None
    if isinstance(data, dict) and set(data) >= {"s_d", "s_t"}:
        try:
            return ConstantCost(float(data["s_d"]), float(data["s_t"]))
        except (TypeError, ValueError) as error:  # InputError is a ValueError
            raise InputError(f"cost file {path}: {error}; give s_d and s_t in seconds") from None
    if isinstance(data, dict) and data.get("kind") == GRID_KIND:
        raise InputError(
            f"cost file {path} is a {GRID_KIND} of one model, a prediction needs the drafter's as well; "
            "name that with --draft-cost"
        )
    if not isinstance(data, dict) or data.get("kind") != PROFILE_KIND:
        raise InputError(f"cost file {path} is neither a profile nor s_d and s_t; make one with `realrun profile`")
    if data.get("version") != PROFILE_VERSION:
        raise InputError(
            f"cost file {path} has version {data.get('version')}, this program reads {PROFILE_VERSION}; profile again"
        )
    return profile_from_json(data, str(path))


def with_scores(model: CostModel) -> CostModel:
    """What rounds cost where a predictor scores every drafted token; only a profile knows the difference."""
    if not isinstance(model, ProfileCost):
        return model
    return replace(model, draft_s=model.draft_s + model.score_step_s, score_step_s=0.0)


def profile_from_json(data: Mapping[str, Any], where: str) -> ProfileCost:
    """The cost model of a parsed profile document; InputError where it is malformed."""
    try:
        contexts = np.asarray(data["contexts"], dtype=np.int64)
        median = data["median_s"]
        profile = ProfileCost(
            contexts=contexts,
            draft_s=np.asarray(median["draft"], dtype=np.float64),
            verify_s=np.asarray(median["verify"], dtype=np.float64),
            autoregressive_s=np.asarray(median["autoregressive"], dtype=np.float64),
            policy_step_s=float(median["policy_step"]),
            round_overhead_s=float(median["round_overhead"]),
            score_step_s=float(median.get("score_step", 0.0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"cost profile {where} is malformed ({error!r}); profile again") from None
    count, arrays = contexts.size, (profile.draft_s, profile.verify_s, profile.autoregressive_s)
    if contexts.ndim != 1 or count == 0 or (np.diff(contexts) <= 0).any():
        raise InputError(f"cost profile {where}: contexts are not an increasing list; profile again")
    if [a.shape for a in arrays] != [(2, count), (*profile.verify_s.shape[:1], count), (count,)]:
        raise InputError(f"cost profile {where}: an array does not fit contexts; profile again")
    times = (*arrays, np.array([profile.policy_step_s, profile.round_overhead_s, profile.score_step_s]))
    if not all(np.isfinite(a).all() and (a >= 0).all() for a in times):
        raise InputError(f"cost profile {where}: a time is negative or not finite; profile again")
    return profile
