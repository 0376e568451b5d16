"""A profile measured by `realrun profile`, as a cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from specsim.arrays import Ints, Seconds, increases
from specsim.cost.model import FALL, MAX_SECONDS, MIN_SECONDS, ConstantCost, CostModel, check_rounds, disturbances
from specsim.errors import InputError
from specsim.json_files import checked

PROFILE_KIND = "specsim-profile"
PROFILE_VERSION = 2
GRID_KIND = "specsim-cost-grid"
AGAIN = "profile again"
MAX_CONTEXT = 2**31  # tokens
LEAST_CONTEXT = 2  # cached tokens that a profile begins with at least: rounds behind fewer cost the same


class TreeSeconds(TypedDict):
    """Of a profile's trees, see `TreeProfile`."""

    sizes: list[int]
    wider: list[list[float]]
    verify: list[list[float]]
    policy_step: float
    round_overhead: float


class CatchUpSeconds(TypedDict):
    """Of a profile's `catch_up_many_s`."""

    tokens: list[int]
    seconds: list[list[float]]


class ProfileSeconds(TypedDict):
    """Of a profile, see `ProfileCost`."""

    draft_step: list[list[float]]
    catch_up: list[float]
    catch_up_many: NotRequired[CatchUpSeconds | None]
    verify: list[list[float]]
    autoregressive: list[float]
    policy_step: float
    round_overhead: float
    score_step: NotRequired[float]
    tree: NotRequired[TreeSeconds | None]


class ProfileDocument(TypedDict):
    """A profile; of older files `median_s` is read, which have no means.

    block_expansion : where the target's identity blocks stand; "after" of files in which all stood behind that layer
    """

    contexts: list[int]
    drafter_kind: NotRequired[str]
    block_expansion: NotRequired[dict[str, int] | None]
    mean_s: NotRequired[ProfileSeconds | None]
    median_s: NotRequired[ProfileSeconds]


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

    A draft step is priced by its place in the draft: the target's pass may have thrown the
    drafter's weights out of a cache, into which they come back step by step. Costs are as they were measured, also
    where a longer pass is cheaper: products of an even number of rows often are. A context or a size that was not
    measured is an error; but for contexts below `LEAST_CONTEXT`, if the profile begins there.

    contexts : int [C], increasing
    draft_step_s : [D, C], the first, second, ... draft step of a round; catch_up_s : [C]
    catch_up_tokens, catch_up_many_s : int [M], increasing from more than 1, and [M, C]: the same for so many tokens,
        linear in between and as steep beyond; where absent, each takes as long as one
    verify_s : [n_max, C] for n_tokens 1..n_max; autoregressive_s : [C]
    """

    contexts: Ints
    draft_step_s: Seconds
    catch_up_s: Seconds
    verify_s: Seconds
    autoregressive_s: Seconds
    policy_step_s: float
    round_overhead_s: float
    score_step_s: float = 0.0  # what a predictor's score adds to a draft step, where the policy reads it
    tree: TreeProfile | None = None
    catch_up_tokens: Ints | None = None
    catch_up_many_s: Seconds | None = None
    remark: str = ""  # what every result at these costs must say of them

    def check(self, name: str) -> None:
        """InputError for rounds that cannot be; not asked while a profile is still being measured."""
        check_rounds(name, self.round_s, self.autoregressive_s)
        if self.tree is not None:
            rounds_s = self.draft_step_s[0] + self.tree.verify_s[1:] + self.tree.round_overhead_s
            # Sizes of trees that were hardly met are extrapolated from few passes, so that more is let pass.
            check_rounds(name, rounds_s, self.autoregressive_s, "a round with a tree", FALL)

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        disturbed = disturbances(self.round_s, self.autoregressive_s, self.verify_s)
        return [self.remark, *disturbed] if self.remark else disturbed

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
                f"{asked.max():g}; profile again with `realrun profile --for` the trace"
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

    def constant(self, context: float) -> ConstantCost:
        """The papers' two numbers, s_d and s_t, read off this profile at one context; s_d is the mean draft step."""
        mean_s = self._along_context(self.draft_step_s.mean(axis=0), context)
        return ConstantCost(s_d=float(mean_s), s_t=float(self.autoregressive_step(context)))


def with_scores(model: CostModel) -> CostModel:
    """What rounds cost where a predictor scores every drafted token; only a profile knows the difference."""
    if not isinstance(model, ProfileCost):
        return model
    return replace(model, draft_step_s=model.draft_step_s + model.score_step_s, score_step_s=0.0)


def _remark(document: ProfileDocument) -> str:
    """Why costs of an older lab-deep do not hold for it as it is; nothing where they do.

    Where identity blocks stand changes the costs of no drafter but EESD's, which runs the layers below its exit.
    """
    after = (document.get("block_expansion") or {}).get("after")
    if after is None or document.get("drafter_kind") != "eesd":
        return ""
    return (
        f"this EESD profile is of a target whose identity blocks all stood behind layer {after}, where the exit costs "
        "less than its share of the layers; profile again"
    )


def profile_from_json(data: Mapping[str, Any], where: str) -> ProfileCost:
    """The cost model of a parsed profile document; InputError where it is malformed."""
    name = f"cost profile {where}"
    document = checked(data, name, ProfileDocument, invalid=AGAIN)
    mean = document.get("mean_s") or document.get("median_s")
    if mean is None:
        raise InputError(f"{name} is malformed (mean_s is missing); {AGAIN}")

    def array(values: Any, axes: int = 2) -> Seconds:
        rows = values if axes == 2 else [values]
        if len({len(row) for row in rows}) > 1:
            raise InputError(f"{name}: an array has rows of several lengths; {AGAIN}")
        return np.asarray(values, dtype=np.float64)

    trees, many = mean.get("tree"), mean.get("catch_up_many")
    contexts = np.asarray(document["contexts"], dtype=np.int64)
    profile = ProfileCost(
        contexts=contexts,
        draft_step_s=array(mean["draft_step"]),
        catch_up_s=array(mean["catch_up"], axes=1),
        verify_s=array(mean["verify"]),
        autoregressive_s=array(mean["autoregressive"], axes=1),
        policy_step_s=float(mean["policy_step"]),
        round_overhead_s=float(mean["round_overhead"]),
        score_step_s=float(mean.get("score_step", 0.0)),
        tree=trees
        and TreeProfile(
            sizes=np.asarray(trees["sizes"], dtype=np.int64),
            wider_s=array(trees["wider"]),
            verify_s=array(trees["verify"]),
            policy_step_s=float(trees["policy_step"]),
            round_overhead_s=float(trees["round_overhead"]),
        ),
        catch_up_tokens=many and np.asarray(many["tokens"], dtype=np.int64),
        catch_up_many_s=many and array(many["seconds"]),
        remark=_remark(document),
    )
    count, tree = contexts.size, profile.tree
    grids, vectors = [profile.draft_step_s, profile.verify_s], [profile.catch_up_s, profile.autoregressive_s]
    numbers = [profile.policy_step_s, profile.round_overhead_s, profile.score_step_s]
    if tree is not None:
        sizes = tree.sizes
        if not sizes.size or sizes[0] != 1 or sizes[-1] >= MAX_CONTEXT or not increases(sizes):
            raise InputError(f"{name}: sizes of trees are not an increasing list from 1; profile again")
        if {tree.wider_s.shape, tree.verify_s.shape} != {(sizes.size, count)}:
            raise InputError(f"{name}: an array of trees does not fit sizes x contexts; profile again")
        grids += [tree.wider_s, tree.verify_s]
        numbers += [tree.policy_step_s, tree.round_overhead_s]
    if profile.catch_up_tokens is not None and profile.catch_up_many_s is not None:
        lacking = profile.catch_up_tokens
        if not lacking.size or lacking[0] < 2 or lacking[-1] >= MAX_CONTEXT or not increases(lacking):
            raise InputError(f"{name}: tokens to catch up on are not an increasing list from 2; profile again")
        if profile.catch_up_many_s.shape != (lacking.size, count):
            raise InputError(f"{name}: what catching up takes does not fit tokens x contexts; profile again")
        grids.append(profile.catch_up_many_s)
    if not count or not 0 <= contexts[0] <= contexts[-1] < MAX_CONTEXT or not increases(contexts):
        raise InputError(f"{name}: contexts are not an increasing list; profile again")
    if any(a.ndim != 2 or not len(a) or a.shape[1] != count for a in grids) or any(
        a.shape != (count,) for a in vectors
    ):
        raise InputError(f"{name}: an array does not fit contexts; profile again")
    if not all(((a >= 0) & (a <= MAX_SECONDS)).all() for a in (*grids, *vectors, np.array(numbers))):
        raise InputError(f"{name}: a time is negative or not finite; profile again")
    if not (profile.autoregressive_s >= MIN_SECONDS).all():
        raise InputError(f"{name}: a token without speculation takes no time; profile again")
    return profile
