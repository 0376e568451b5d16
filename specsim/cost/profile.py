"""A profile measured by `realrun profile`, as a cost model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from specsim.cost.model import FALL, CostModel, check_rounds, checked_axis, checked_table, disturbances
from specsim.io.arrays import Floats, Ints, Seconds
from specsim.io.errors import InputError
from specsim.io.files import digest
from specsim.io.json import checked

PROFILE_KIND = "specsim-profile"
PROFILE_VERSION = 2
GRID_KIND = "specsim-cost-grid"
AGAIN = "profile again"
BAND = 1.6448536269514722  # from the 5th to the 95th percentile, in standard errors on either side
NORMAL = 1.959963984540054  # half-width of a 95 % interval in standard errors
LEAST_CONTEXT = 2  # cached tokens: below, rounds cost the same


class TreeSeconds(TypedDict):
    """Trees of a profile, see `TreeProfile`."""

    sizes: list[int]
    wider: list[list[float]]
    verify: list[list[float]]
    policy_step: float
    round_overhead: float


class CatchUpSeconds(TypedDict):
    """Catching up on several tokens, see `ProfileCost`."""

    tokens: list[int]
    seconds: list[list[float]]


class ProfileSeconds(TypedDict):
    """Seconds of a profile, see `ProfileCost`."""

    draft_step: list[list[float]]
    catch_up: list[float]
    catch_up_many: NotRequired[CatchUpSeconds | None]
    verify: list[list[float]]
    autoregressive: list[float]
    policy_step: float
    round_overhead: float
    score_step: NotRequired[float]
    tree: NotRequired[TreeSeconds | None]
    refeed: NotRequired[list[list[float]] | None]


class ProfileWidths(TypedDict):
    """Half-widths of 95 % intervals of means, relative to them, with a row for each of their rows; None if unknown."""

    draft_step: list[list[float | None]]
    verify: list[list[float | None]]
    autoregressive: list[float | None]
    tree_sizes: NotRequired[list[int]]
    tree_verify: NotRequired[list[list[float | None]]]


class ProfileDocument(TypedDict):
    """A profile. Without `mean_s`, medians are the costs."""

    contexts: list[int]
    mean_s: NotRequired[ProfileSeconds | None]
    median_s: NotRequired[ProfileSeconds]
    relative_half_width: NotRequired[ProfileWidths]
    load: NotRequired[dict[str, float | None]]
    provenance: NotRequired[dict[str, Any]]


@dataclass(frozen=True)
class TreeProfile:
    """Measured costs of trees: at these sizes, and linear in between.

    sizes : int [S], increasing from 1, tokens of a tree or nodes of a draft pass
    wider_s, verify_s : [S, C], as in `TreeTable`
    """

    sizes: Ints
    wider_s: Seconds
    verify_s: Seconds
    policy_step_s: float
    round_overhead_s: float

    def at(self, values: Seconds, size: int) -> Seconds:
        """[C], of [S, C]."""
        if not 1 <= size <= self.sizes[-1]:
            raise InputError(
                f"cost profile covers trees of up to {self.sizes[-1]} tokens, asked for {size}; "
                "profile again with a larger `realrun profile --tree-nodes`"
            )
        right = int(np.searchsorted(self.sizes, size))
        left = max(right - 1, 0)
        share = (size - self.sizes[left]) / max(self.sizes[right] - self.sizes[left], 1)
        return np.asarray(values[left] + (values[right] - values[left]) * share)


@dataclass(frozen=True, repr=False)
class ProfileCost(CostModel):
    """A measured grid: means per context, linear in context between grid points.

    A draft step is priced by its place in the draft, because the target's pass may have evicted the drafter's weights
    from a cache. Costs are used as measured, even if a longer pass is cheaper: products of an even number of rows often
    are. Contexts and sizes outside the measured range are errors, except contexts below `LEAST_CONTEXT` if the profile
    begins there.

    contexts : int [C], increasing
    draft_step_s : [D, C], the first, second, ... draft step of a round; catch_up_s : [C]
    catch_up_tokens, catch_up_many_s : int [M], increasing from more than 1, and [M, C]: the same for so many tokens,
        linear in between and beyond; if absent, n tokens take n times as long as a single token
    times_error : standard deviation of the logarithm of a speedup by the intervals of the measured times; None if
        the profile states none
    verify_s : [n_max, C] for n_tokens 1..n_max; autoregressive_s : [C]
    refeed_s : [D, C], a second pass over 1, 2, ... tokens after a rejection; None of a target without recurrent layers
    """

    contexts: Ints
    draft_step_s: Seconds
    catch_up_s: Seconds
    verify_s: Seconds
    autoregressive_s: Seconds
    policy_step_s: float
    round_overhead_s: float
    score_step_s: float = 0.0  # of a predictor's score in a draft step, where the policy reads it
    tree: TreeProfile | None = None
    catch_up_tokens: Ints | None = None
    catch_up_many_s: Seconds | None = None
    times_error: float | None = None
    refeed_s: Seconds | None = None

    @property
    def error_band(self) -> tuple[float, float] | None:
        if self.times_error is None:
            return None
        ratio = math.exp(BAND * self.times_error)
        return 1 / ratio, ratio

    @property
    def speedup_error(self) -> tuple[float, float]:
        """Mean and standard deviation of log(measured / predicted speedup), by the errors of the measured times."""
        return 0.0, self.times_error or 0.0

    def as_dict(self) -> dict[str, Any]:
        """The times as a profile's document holds them."""

        def times(part: ProfileCost | TreeProfile) -> dict[str, Any]:
            seconds = {name: value for name, value in vars(part).items() if name.endswith("_s") and value is not None}
            return {name.removesuffix("_s"): np.asarray(value).tolist() for name, value in seconds.items()}

        table = times(self)
        if self.catch_up_tokens is not None:
            table["catch_up_many"] = {"tokens": self.catch_up_tokens.tolist(), "seconds": table["catch_up_many"]}
        if self.tree is not None:
            table["tree"] = {"sizes": self.tree.sizes.tolist(), **times(self.tree)}
        return table

    def check(self, name: str) -> None:
        """Raise InputError for impossible rounds; not called while a profile is still being measured."""
        check_rounds(name, self.round_s, self.autoregressive_s)
        if self.tree is not None:
            rounds_s = self.draft_step_s[0] + self.tree.verify_s[1:] + self.tree.round_overhead_s
            # Rare sizes of trees are extrapolated from few passes, so the limit is looser.
            check_rounds(name, rounds_s, self.autoregressive_s, "a round with a tree", FALL)

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        return disturbances(self.round_s, self.autoregressive_s, self.verify_s)

    @property
    def max_tree_tokens(self) -> int:
        return 0 if self.tree is None else int(self.tree.sizes[-1])

    def _along_context(self, values: Seconds, context: npt.ArrayLike) -> Seconds:
        asked = np.asarray(context, dtype=np.float64)
        low, high = self.contexts[0], self.contexts[-1]
        low = low if low > LEAST_CONTEXT else 0
        if asked.size and not (asked.min() >= low and asked.max() <= high):  # also catches NaN
            raise InputError(
                f"cost profile covers contexts {low} to {high} tokens, asked for {asked.min():g} to "
                f"{asked.max():g}; profile again with `realrun profile --for` the trace, or take "
                "costs that cover it (`specsim cost list`)"
            )
        return np.interp(asked, self.contexts, values)

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        if not 1 <= n_tokens <= len(self.draft_step_s):
            raise InputError(
                f"cost profile covers drafts of 1 to {len(self.draft_step_s)} tokens, asked for {n_tokens}; "
                "profile again with a larger `realrun profile --max-draft-tokens`"
            )
        return self._along_context(self.draft_step_s[:n_tokens].sum(axis=0), context)

    def catch_up(self, context: npt.ArrayLike) -> Seconds:
        return self._along_context(self.catch_up_s, context)

    def catch_up_by(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        if self.catch_up_tokens is None or self.catch_up_many_s is None:
            return super().catch_up_by(n_tokens, context)
        tokens = np.concatenate([[0, 1], self.catch_up_tokens])
        curves = np.stack([np.zeros_like(self.catch_up_s), self.catch_up_s, *self.catch_up_many_s])
        right = min(int(np.searchsorted(tokens, n_tokens)), len(tokens) - 1)
        share = (n_tokens - tokens[right - 1]) / (tokens[right] - tokens[right - 1])
        curve = curves[right - 1] + (curves[right] - curves[right - 1]) * share
        return self._along_context(np.maximum(curve, 0.0), context)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        if not 1 <= n_tokens <= len(self.verify_s):
            raise InputError(
                f"cost profile covers verification of 1 to {len(self.verify_s)} tokens, asked for "
                f"{n_tokens}; profile again with a larger `realrun profile --max-draft-tokens`"
            )
        return self._along_context(self.verify_s[n_tokens - 1], context)

    def refeed(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        if self.refeed_s is None:
            return super().refeed(n_tokens, context)
        return self._along_context(self.refeed_s[min(n_tokens, len(self.refeed_s)) - 1], context)

    def policy_step(self) -> float:
        return self.policy_step_s

    def round_overhead(self) -> float:
        return self.round_overhead_s

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self._along_context(self.autoregressive_s, context)

    def wider(self, n_nodes: int, context: npt.ArrayLike) -> Seconds:
        tree = self._trees()
        return self._along_context(tree.at(tree.wider_s, n_nodes), context)

    def tree_verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        tree = self._trees()
        return self._along_context(tree.at(tree.verify_s, n_tokens), context)

    def tree_policy_step(self) -> float:
        return self._trees().policy_step_s

    def tree_round_overhead(self) -> float:
        return self._trees().round_overhead_s

    @property
    def round_s(self) -> Seconds:
        """Rounds of 1, 2, ... drafts [K, C], as long as they are verified."""
        longest = min(len(self.draft_step_s), len(self.verify_s) - 1)
        drafts_s = np.cumsum(self.draft_step_s[:longest], axis=0)
        return np.asarray(drafts_s + self.verify_s[1 : longest + 1] + self.round_overhead_s)

    def _trees(self) -> TreeProfile:
        if self.tree is None:
            raise InputError("cost profile has no trees; profile again with `realrun profile --tree-nodes`")
        return self.tree


def with_scores(model: CostModel) -> CostModel:
    """Costs of rounds in which a predictor scores every drafted token; only profiles have this cost."""
    if not isinstance(model, ProfileCost):
        return model
    return replace(model, draft_step_s=model.draft_step_s + model.score_step_s, score_step_s=0.0)


def _times_error(document: ProfileDocument, seconds: ProfileSeconds, name: str) -> float | None:
    """Standard deviation of the logarithm of the least certain speedup, if the errors of all times are independent.

    None if the profile states no errors. A speedup is proportional to the ratio of a baseline step to a round of K
    drafts, both as means over contexts.
    """

    widths = document.get("relative_half_width")
    if widths is None:
        return None

    def sums(rows: Any, half_widths: Any) -> tuple[Floats, Floats]:
        """Sum and variance over contexts of every row of times."""
        times = np.atleast_2d(np.array(rows, dtype=np.float64))
        known = np.nan_to_num(np.atleast_2d(np.array(half_widths, dtype=np.float64)), nan=1.0, posinf=1.0)
        error = known.clip(max=1.0) / NORMAL  # more than 100 % counts as 100 %, as in `Profile.draws`
        if error.shape != times.shape:
            raise InputError(f"{name} is malformed (relative_half_width does not fit the times); {AGAIN}")
        return times.sum(axis=1), ((times * error) ** 2).sum(axis=1)

    plain_s, plain_var = sums(seconds["autoregressive"], widths["autoregressive"])
    draft_s, draft_var = sums(seconds["draft_step"], widths["draft_step"])
    verify_s, verify_var = sums(seconds["verify"], widths["verify"])
    longest = min(len(draft_s), len(verify_s) - 1)
    rounds_s = draft_s[:longest].cumsum() + verify_s[1 : longest + 1]
    rounds_var = draft_var[:longest].cumsum() + verify_var[1 : longest + 1]
    return float(np.sqrt(plain_var / plain_s**2 + (rounds_var / rounds_s**2).max(initial=0.0)).item())


def profile_from_json(data: Mapping[str, Any], where: str) -> ProfileCost:
    """The cost model of a parsed profile document; InputError where it is malformed."""
    name = f"cost profile {where}"
    document: ProfileDocument = checked(data, name, ProfileDocument, invalid=AGAIN)
    seconds = document.get("mean_s") or document.get("median_s")
    if seconds is None:
        raise InputError(f"{name} is malformed (mean_s is missing); {AGAIN}")
    contexts = checked_axis(document["contexts"], f"{name}: contexts", AGAIN)
    count = len(contexts)

    def read(values: Any, shape: list[int | None], key: str, *, positive: bool = False) -> Seconds:
        return checked_table(values, shape, f"{name}: {key}", AGAIN, positive=positive)

    trees, many, refeed = seconds.get("tree"), seconds.get("catch_up_many"), seconds.get("refeed")
    tree = catch_up_tokens = catch_up_many_s = None
    if trees is not None:
        sizes = checked_axis(trees["sizes"], f"{name}: sizes of trees", AGAIN, least=1)
        if sizes[0] != 1:
            raise InputError(f"{name}: sizes of trees do not begin with 1; {AGAIN}")
        tree = TreeProfile(
            sizes,
            read(trees["wider"], [len(sizes), count], "wider"),
            read(trees["verify"], [len(sizes), count], "verify of trees"),
            float(read(trees["policy_step"], [], "policy_step of trees")),
            float(read(trees["round_overhead"], [], "round_overhead of trees")),
        )
    if many is not None:
        catch_up_tokens = checked_axis(many["tokens"], f"{name}: tokens to catch up on", AGAIN, least=2)
        catch_up_many_s = read(many["seconds"], [len(catch_up_tokens), count], "catch_up_many")
    return ProfileCost(
        contexts,
        read(seconds["draft_step"], [None, count], "draft_step"),
        read(seconds["catch_up"], [count], "catch_up"),
        read(seconds["verify"], [None, count], "verify"),
        read(seconds["autoregressive"], [count], "autoregressive", positive=True),
        float(read(seconds["policy_step"], [], "policy_step")),
        float(read(seconds["round_overhead"], [], "round_overhead")),
        float(read(seconds.get("score_step", 0.0), [], "score_step")),
        tree,
        catch_up_tokens,
        catch_up_many_s,
        _times_error(document, seconds, name),
        None if refeed is None else read(refeed, [None, count], "refeed"),
    )


@dataclass(frozen=True)
class Profile:
    """A profile with all that its document says.

    cost : by its means, or by its medians where it has none
    document : as its file holds it
    """

    cost: ProfileCost
    document: ProfileDocument

    @classmethod
    def from_json(cls, data: Any, where: str) -> Profile:
        """Make a profile of its parsed document; InputError where it is malformed."""
        return cls(profile_from_json(data, where), data)

    def as_dict(self) -> dict[str, Any]:
        """Return the document."""
        return dict(self.document)

    @property
    def others_percent(self) -> float | None:
        """Share of the CPUs that other processes used meanwhile."""
        return self.document.get("load", {}).get("others_percent")

    @property
    def origin(self) -> dict[str, str | None]:
        """Identify the profile by its digest, and by where and when it was measured."""
        made = self.document.get("provenance", {})
        return {"digest": digest(json.dumps(self.document)), **{name: made.get(name) for name in ("date", "device")}}

    def draws(self, count: int, seed: int) -> list[ProfileCost]:
        """Draw costs within the stated errors; none where the profile states none.

        Each time is multiplied by a log-normal factor around 1, by the half-width of the 95 % interval that the
        document states for it; more than 100 % counts as 100 %.
        """
        if (widths := self.document.get("relative_half_width")) is None:
            return []
        rng, cost = np.random.default_rng(seed), self.cost

        def drawn(seconds: Seconds, width: Any) -> Seconds:
            error = np.nan_to_num(np.array(width, dtype=np.float64), posinf=1.0).clip(max=1.0) / NORMAL
            return seconds * np.exp(error * rng.standard_normal(error.shape))

        def draw() -> ProfileCost:
            noisy = replace(
                cost,
                draft_step_s=drawn(cost.draft_step_s, widths["draft_step"]),
                verify_s=drawn(cost.verify_s, widths["verify"]),
                autoregressive_s=drawn(cost.autoregressive_s, widths["autoregressive"]),
            )
            if cost.tree is None or "tree_verify" not in widths:
                return noisy
            return replace(noisy, tree=replace(cost.tree, verify_s=drawn(cost.tree.verify_s, widths["tree_verify"])))

        return [draw() for _ in range(count)]
