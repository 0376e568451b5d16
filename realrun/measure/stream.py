"""Collect costs while decoding: every round of every arm is a sample of its parts' cost at its context.

The arms of a measurement take turns of a few rounds (`realrun.experiment.timing`), so that the measured speedups and a
profile made of the same rounds see the same machine. Probes (`realrun.measure.sweeps`) add samples of rare parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TypedDict

import numpy as np

from realrun.decode.rounds import Round
from realrun.measure.curve import Point, along_contexts, centre, hat_functions
from realrun.measure.rounds import pass_tokens
from specsim.cost.profile import ProfileSeconds
from specsim.io.arrays import Floats
from specsim.policy.base import Policy
from specsim.policy.tree.base import TreePolicy

LAGS = (2, 4, 8, 16, 32, 64, 128)  # tokens that the draft cache is behind, whose cost is profiled
# The tables of a profile: the quantile of the samples, None for the mean.
STATISTICS = {"mean_s": None, "median_s": 0.5, "p25_s": 0.25, "p75_s": 0.75}

Key = tuple[Any, ...]  # of `Stream.points`


class Samples(TypedDict):
    """JSON form of a `Stream`."""

    points: list[list[list[Any]]]
    each: dict[str, list[float]]


class Stream:
    """Samples of the seconds that parts of rounds take.

    points : (context, seconds) by part: ("autoregressive",), ("verify", tokens), ("draft", place), ("behind",) for
        the first step of a draft that has an additional token to ingest, both also as "scored draft" and "scored
        behind", ("catch up", tokens) if it has that many to ingest because other drafters drafted, ("tree draft",
        nodes, place), ("tree verify", tokens), ("refeed", tokens), which is not part of "verify"
    each : seconds that do not depend on the context: "policy", "overhead", "tree policy", "tree overhead"
    """

    def __init__(self) -> None:
        self.points: dict[Key, list[Point]] = defaultdict(list)
        self.each: dict[str, list[float]] = defaultdict(list)

    def add_run(
        self,
        rounds: Iterable[Round],
        prompt_tokens: int,
        policy: Policy | None,
        *,
        masks: bool = False,
        own_pass: bool = True,
        target_states: bool = False,
    ) -> None:
        """Add the rounds of a sequence that was decoded with this policy, or with None, the baseline.

        masks : whether the drafter puts mask tokens behind every verified token
        own_pass : see `add_baseline`; target_states : see `add`
        """
        for round_ in rounds:
            context = prompt_tokens + round_.t - 1
            if policy is None:
                self.add_baseline(round_, context, own_pass=own_pass)
            else:
                scored, tree = "score" in policy.features, isinstance(policy, TreePolicy)
                group = policy.max_draft_tokens if masks else 0
                self.add(round_, context, scored=scored, tree=tree, masks=group, target_states=target_states)

    def add_baseline(self, round_: Round, context: int, *, own_pass: bool = True) -> None:
        """Add a round of the baseline; own_pass : whether the pass that verifies this pair's drafts ran it."""
        self.points["autoregressive",].append((context, round_.seconds))
        if own_pass:
            self.points["verify", 1].append((context, round_.verify_s))

    def add(
        self,
        round_: Round,
        context: int,
        *,
        scored: bool = False,
        tree: bool = False,
        masks: int = 0,
        target_states: bool = False,
        lacking: int = 0,
    ) -> None:
        """Add a round that began with `context` cached tokens.

        masks : mask tokens behind every verified token; lacking : tokens that the draft cache of a probe lacks
        target_states : whether every draft starts by ingesting states of the target, so that no draft lags behind
        """
        lacking = round_.fed - 1 if round_.drafter else lacking
        verify_s = round_.verify_s - round_.refeed_s
        if round_.refed:
            self.points["refeed", round_.refed].append((context, round_.refeed_s))
        if masks:
            self.points["tree verify", pass_tokens(masks, round_.verified)].append((context, verify_s))
        else:
            whole_tree = tree and round_.verified > 0
            self.points["tree verify" if whole_tree else "verify", round_.verified + 1].append((context, verify_s))
        if not round_.step_s or (tree and scored):  # chains tell what scores add
            return
        behind = round_.fed > 1 and not target_states
        for place, step_s in enumerate(round_.step_s, start=1):
            key: Key = ("scored draft" if scored else "draft", place)
            if tree:
                key = ("tree draft", round_.level_nodes[place - 1], place)
            if place == 1 and lacking > 1 and round_.fed > 1:
                key = ("catch up", lacking)
            elif place == 1 and behind:
                key = ("tree behind" if tree else "scored behind" if scored else "behind",)
            self.points[key].append((context, step_s))
        kind = "tree " if tree else ""
        self.each[f"{kind}overhead"].append(round_.other_s + round_.draft_s - sum(round_.step_s))
        if round_.asked:
            self.each[f"{kind}policy"].append(round_.policy_s / round_.asked)

    @classmethod
    def of(cls, samples: Samples) -> Self:
        """Make a stream of samples, as its `as_dict` gives them."""
        stream = cls()
        stream.merge(samples)
        return stream

    def count(self, *parts: Any) -> int:
        """Count the samples whose key begins with these parts."""
        return sum(len(points) for key, points in self.points.items() if key[: len(parts)] == parts)

    def merge(self, samples: Samples) -> None:
        """Add the samples of another stream, as its `as_dict` gives them."""
        for key, points in samples["points"]:
            self.points[tuple(key)] += [(int(context), float(seconds)) for context, seconds in points]
        for name, values in samples["each"].items():
            self.each[name] += values

    def as_dict(self) -> Samples:
        """Make the JSON form of all samples."""
        return {"points": [[list(key), points] for key, points in self.points.items()], "each": dict(self.each)}

    def tables(
        self, contexts: Sequence[int], depth: int, sizes: Sequence[int], *, masks: bool
    ) -> dict[str, ProfileSeconds]:
        """Compute the costs of a profile in seconds (`specsim.cost.profile`): means, medians and quartiles.

        contexts : the profile's grid; depth : places of a draft; sizes : tree sizes, empty if not profiled
        """
        return {name: self._table(contexts, depth, sizes, masks, q) for name, q in STATISTICS.items()}

    def _table(
        self, contexts: Sequence[int], depth: int, sizes: Sequence[int], masks: bool, q: float | None
    ) -> ProfileSeconds:
        places, chains = range(1, depth + 1), range(1, depth + 2)
        drafts = {place: self.points["draft", place] for place in places}
        means = _over_sizes(places, drafts, contexts, None)

        def curve(kind: str) -> Floats:
            return along_contexts(self.points[kind,], contexts, q)

        def beyond(kind: str) -> dict[int, list[Point]]:
            """List seconds beyond a chain's step at the same place, by the number that follows `kind` in the key."""
            longer: dict[int, list[Point]] = defaultdict(list)
            for (name, *rest), points in self.points.items():
                if name == kind:
                    step = means[min(rest[-1], depth) - 1]
                    longer[rest[0]] += [(c, s - float(np.interp(c, contexts, step))) for c, s in points]
            return longer

        def constant(kind: str) -> float:
            return max(0.0, centre(self.each[kind], q)) if self.each[kind] else 0.0

        behind = curve("behind") - means[0] if self.count("behind") else np.zeros(len(contexts))
        scores = [seconds for points in beyond("scored draft").values() for _, seconds in points]
        table: ProfileSeconds = {
            "draft_step": _over_sizes(places, drafts, contexts, q).tolist(),
            "catch_up": np.maximum(behind, 0.0).tolist(),  # a difference may be negative by noise, a time may not
            "verify": _over_sizes(chains, {size: self.points["verify", size] for size in chains}, contexts, q).tolist(),
            "autoregressive": curve("autoregressive").tolist(),
            "policy_step": constant("policy"),
            "round_overhead": constant("overhead"),
            "score_step": max(0.0, centre(scores, q)) if scores else 0.0,
        }
        again = {key[1]: points for key, points in self.points.items() if key[0] == "refeed" and points}
        if again:
            table["refeed"] = _over_sizes(places, again, contexts, q).tolist()
        many = {key[1]: points for key, points in self.points.items() if key[0] == "catch up" and points}
        if many:
            lags = sorted({*(n for n in LAGS if n < max(many)), max(many)})
            curves = _over_sizes(lags, many, contexts, q) - means[0]
            table["catch_up_many"] = {"tokens": lags, "seconds": np.maximum(curves, 0.0).tolist()}
        if not sizes:
            return table
        wider = {} if masks else beyond("tree draft")
        verify = {1: self.points["verify", 1]}
        verify |= {key[1]: points for key, points in self.points.items() if key[0] == "tree verify"}
        known = sorted({*sizes, *wider, *verify})
        prefix = "" if masks else "tree "
        table["tree"] = {
            "sizes": known,
            "wider": np.maximum(_over_sizes(known, wider, contexts, q), 0.0).tolist(),
            "verify": _over_sizes(known, verify, contexts, q).tolist(),
            "policy_step": constant(f"{prefix}policy"),
            "round_overhead": constant(f"{prefix}overhead"),
        }
        return table


def _over_sizes(
    sizes: Sequence[int], points: Mapping[int, Sequence[Point]], contexts: Sequence[int], q: float | None
) -> Floats:
    """Fit curves [S, C] of sizes, or places; a size without samples is interpolated, all are 0 without any."""
    met = sorted(size for size in points if points[size])
    if not met:
        return np.zeros((len(sizes), len(contexts)))
    curves = np.stack([along_contexts(points[size], contexts, q) for size in met])
    return np.asarray(hat_functions(np.array(sizes, dtype=np.float64), met) @ curves)
