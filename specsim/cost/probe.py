"""Rescale a profile measured before to the state of the machine that `realrun probe` finds now.

Other jobs take memory bandwidth and caches, which moves small passes most. So each pass of one to five tokens has a
factor of its own, from the probe's time over the profile's at the same context, and drafting has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from specsim.cost.model import MIN_SECONDS, CostModel, checked_axis, checked_table
from specsim.cost.profile import Profile, ProfileCost, ProfileWidths
from specsim.io.arrays import Floats, Ints, finite_or_null
from specsim.io.errors import InputError
from specsim.io.json import checked

PROBE_KIND, PROBE_VERSION = "specsim-probe", 1
AGAIN = "probe again"
LEVEL = 0.05  # of tests
SETTINGS = ("dtype", "threads", "kernels", "clock")  # of both measurements, where both state them


class ProbeSeconds(TypedDict):
    """Seconds of a probe: of passes over 1, 2, ... tokens and draft steps by place, by context; of decoding steps."""

    verify: list[list[float]]
    draft_step: list[list[float]]
    autoregressive: list[float]


class ProbeWidths(TypedDict):
    """Half-widths of 95 % intervals, relative to the times, of parts over all contexts."""

    verify: list[float]
    draft_step: float | None
    autoregressive: float


class ProbeDocument(TypedDict):
    """What `realrun probe` writes; draft_step : 0, and its half-width None, where nothing is drafted by steps."""

    kind: Literal["specsim-probe"]
    version: Literal[1]
    target: str
    drafter: str
    contexts: list[int]
    sweeps: int
    mean_s: ProbeSeconds
    relative_half_width: ProbeWidths
    load: NotRequired[dict[str, float | None]]
    provenance: NotRequired[dict[str, Any]]


@dataclass(frozen=True)
class Probe:
    """The machine's state as `realrun probe` found it. document : as its file holds it"""

    document: ProbeDocument

    @classmethod
    def from_json(cls, data: Mapping[str, Any], name: str = "probe (a mapping)") -> Probe:
        """Make a probe of its parsed document; InputError where it is malformed."""
        document: ProbeDocument = checked(dict(data), name, ProbeDocument, invalid=AGAIN)
        contexts = checked_axis(document["contexts"], f"{name}: contexts", AGAIN)
        seconds, widths = document["mean_s"], document["relative_half_width"]
        passes = checked_table(seconds["verify"], [None, len(contexts)], f"{name}: verify", AGAIN, positive=True)
        checked_table(seconds["draft_step"], [None, len(contexts)], f"{name}: draft_step", AGAIN)
        checked_table(seconds["autoregressive"], [len(contexts)], f"{name}: autoregressive", AGAIN, positive=True)
        known = [*widths["verify"], widths["autoregressive"], widths["draft_step"] or 0.0]
        fit = len(widths["verify"]) == len(passes) and all(0 <= width < math.inf for width in known)
        if not fit or document["sweeps"] < 2:
            raise InputError(f"{name}: its half-widths do not fit its times; {AGAIN}")
        return cls(document)

    def as_dict(self) -> dict[str, Any]:
        """Return the document."""
        return dict(self.document)

    @property
    def others_percent(self) -> float | None:
        """Share of the CPUs that other processes used meanwhile."""
        return self.document.get("load", {}).get("others_percent")

    @property
    def decoding_step_s(self) -> float:
        """Seconds of a decoding step."""
        return float(np.mean(self.document["mean_s"]["autoregressive"]))

    @property
    def parts(self) -> dict[str, tuple[Floats, float]]:
        """Seconds of each part, by context, and their relative half-width."""
        seconds, widths = self.document["mean_s"], self.document["relative_half_width"]
        parts = {
            f"pass of {n}": (np.array(row), width)
            for n, (row, width) in enumerate(zip(seconds["verify"], widths["verify"], strict=True), start=1)
        }
        if widths["draft_step"] is not None:
            parts["draft step"] = np.sum(seconds["draft_step"], axis=0), widths["draft_step"]
        return parts | {"decoding step": (np.array(seconds["autoregressive"]), widths["autoregressive"])}


class Factors(NamedTuple):
    """Ratios of times now, in a probe, to times when the machine was profiled.

    passes : of passes over 1, 2, ... tokens; longer ones have the last; drafting : of draft steps
    """

    passes: tuple[float, ...]
    drafting: float


def _factors(cost: ProfileCost, probe: Probe) -> Factors:
    """Compare a probe with a profile at the probe's contexts, between which the profile is interpolated."""
    contexts, seconds = np.array(probe.document["contexts"]), probe.document["mean_s"]
    if not cost.contexts[0] <= contexts[0] <= contexts[-1] <= cost.contexts[-1]:
        raise InputError(
            f"the probe's contexts {', '.join(map(str, contexts))} are not within the profile's {cost.contexts[0]} to "
            f"{cost.contexts[-1]}; probe with `realrun probe --contexts {cost.contexts[0]},{cost.contexts[-1]}`"
        )
    sizes = range(1, min(len(seconds["verify"]), len(cost.verify_s)) + 1)
    passes = tuple(_ratio(seconds["verify"][n - 1], cost.verify(n, contexts)) for n in sizes)
    places = min(len(seconds["draft_step"]), len(cost.draft_step_s))
    drafts = np.sum(seconds["draft_step"][:places], axis=0), cost.draft(places, contexts)
    # Drafts that ride in the target's pass take no steps of their own.
    return Factors(passes, _ratio(*drafts) if np.min(drafts) > MIN_SECONDS else 1.0)


def with_probe(cost: CostModel, probe: Probe) -> ProfileCost:
    """Rescale a profile to the state of the machine that a probe found.

    Parameters
    ----------
    cost : ProfileCost
        What `realrun profile` measured before.
    probe : Probe
        Of the same pair.

    Returns
    -------
    ProfileCost
        Passes over one to five tokens, of trees too, are rescaled by the probe's factor of their size, longer passes
        by the factor of five tokens, a decoding step by that of one; draft steps, policy steps and overheads by the
        factor of draft steps.

    Raises
    ------
    InputError
        For a probe at contexts that the profile does not cover.
    TypeError
        For costs that are not a profile.

    Examples
    --------
    >>> import specsim
    >>> from specsim.cost.probe import Probe, with_probe
    >>> profile, contexts = specsim.read_cost("example:lab-deep-model"), [70, 120]
    >>> slower = {  # passes of one token take twice as long as before, passes of two and more 1.5 times
    ...     "verify": [(f * profile.verify(n, contexts)).tolist() for n, f in ((1, 2.0), (2, 1.5))],
    ...     "draft_step": [profile.draft(1, contexts).tolist()],
    ...     "autoregressive": (2 * profile.autoregressive_step(contexts)).tolist()}
    >>> widths = {"verify": [0.01, 0.01], "draft_step": 0.01, "autoregressive": 0.01}
    >>> document = {"kind": "specsim-probe", "version": 1, "target": "lab-deep", "drafter": "lab",
    ...     "contexts": contexts, "sweeps": 10, "mean_s": slower, "relative_half_width": widths}
    >>> now = with_probe(profile, Probe.from_json(document))
    >>> [round(float(now.verify(n, 100) / profile.verify(n, 100)), 3) for n in (1, 2, 7)]
    [2.0, 1.5, 1.5]
    """
    if not isinstance(cost, ProfileCost):
        raise TypeError(f"cost is {cost}; expected a profile, which `realrun profile` writes")
    return _rescaled(cost, _factors(cost, probe))


def _rescaled(cost: ProfileCost, factors: Factors) -> ProfileCost:
    """Multiply the times of a profile by factors."""
    tree, many_s, refeed_s, drafting = cost.tree, cost.catch_up_many_s, cost.refeed_s, factors.drafting
    return replace(
        cost,
        draft_step_s=cost.draft_step_s * drafting,
        catch_up_s=cost.catch_up_s * drafting,
        catch_up_many_s=None if many_s is None else many_s * drafting,
        verify_s=cost.verify_s * _by_size(factors.passes, range(1, len(cost.verify_s) + 1)),
        refeed_s=None if refeed_s is None else refeed_s * _by_size(factors.passes, range(1, len(refeed_s) + 1)),
        autoregressive_s=cost.autoregressive_s * factors.passes[0],
        policy_step_s=cost.policy_step_s * drafting,
        round_overhead_s=cost.round_overhead_s * drafting,
        score_step_s=cost.score_step_s * drafting,
        tree=tree
        and replace(
            tree,
            wider_s=tree.wider_s * drafting,
            verify_s=tree.verify_s * _by_size(factors.passes, tree.sizes),
            policy_step_s=tree.policy_step_s * drafting,
            round_overhead_s=tree.round_overhead_s * drafting,
        ),
    )


def _by_size(values: Sequence[float], sizes: Sequence[int] | Ints) -> Floats:
    """Choose from values for 1, 2, ... tokens those for these sizes [S, 1]; larger sizes have the last value."""
    return np.array(values)[np.minimum(sizes, len(values)) - 1][:, None]


def rescaled(profile: Profile, probe: Probe, sources: Mapping[str, object]) -> Profile:
    """Rescale a profile with its stated errors to the state of the machine that a probe found.

    sources : what is kept of where the profile and the probe come from
    """
    old, new = profile.as_dict(), probe.as_dict()
    before, now = ({**measured, **(measured.get("provenance") or {})} for measured in (old, new))
    for key in ("target", "drafter", *SETTINGS):
        if key in now and key in before and now[key] != before[key]:
            raise InputError(
                f"the probe is of {key} {now[key]}, the profile of {before[key]}; probe with the profile's {key}"
            )
    factors = _factors(profile.cost, probe)
    tables = ("median_s", "p25_s", "p75_s", "precision")  # which held before
    kept = {key: value for key, value in old.items() if key not in tables}
    if "relative_half_width" in kept:
        kept["relative_half_width"] = _widened_as_dict(kept["relative_half_width"], new["relative_half_width"])
    kept |= {"mean_s": _rescaled(profile.cost, factors).as_dict(), "probed": {**factors._asdict(), **sources}}
    return Profile.from_json(kept, "rescaled")


def _widened_as_dict(widths: ProfileWidths, probed: ProbeWidths) -> dict[str, Any]:
    """Add the errors of the factors to the relative half-widths of a profile's times, of which None is unknown."""
    passes = probed["verify"]
    errors: dict[str, Floats | float] = {
        "draft_step": probed["draft_step"] or 0.0,
        "verify": _by_size(passes, range(1, len(widths["verify"]) + 1)),
        "autoregressive": passes[0],
    }
    if "tree_verify" in widths:
        errors["tree_verify"] = _by_size(passes, widths["tree_sizes"])
    old = dict(widths)
    wider = {key: np.hypot(np.array(old[key], dtype=np.float64), error) for key, error in errors.items()}
    return {**old, **{key: finite_or_null(rows) for key, rows in wider.items()}}


class Change(NamedTuple):
    """By how much a part of a round takes longer in one probe than in another, with its 95 % interval.

    significant : whether any change at all follows, at a level of 5 % for all parts together (Bonferroni)
    """

    part: str
    factor: float
    low: float
    high: float
    significant: bool


def changes(before: Probe, after: Probe) -> list[Change]:
    """Compare two probes of the same pair and contexts: by how much each part takes longer in the second.

    Intervals are Student's on the logarithm, with Welch's degrees of freedom.

    Parameters
    ----------
    before, after : Probe

    Returns
    -------
    list of Change
        Of passes over 1, 2, ... tokens, of draft steps if there are any, and of decoding steps.

    Raises
    ------
    InputError
        For probes of several pairs or contexts.
    """
    from scipy.special import stdtrit

    first, second = before.document, after.document
    for key in ("target", "drafter", "contexts"):
        if first[key] != second[key]:
            raise InputError(f"probes differ in their {key}: {first[key]}, {second[key]}; probe the same again")
    old, new = before.parts, after.parts
    parts = [part for part in old if part in new]
    found = []
    for part in parts:
        freedoms = np.array([first["sweeps"] - 1, second["sweeps"] - 1])
        variances = (np.array([old[part][1], new[part][1]]) / stdtrit(freedoms, 0.975)) ** 2
        variance = variances.sum()
        freedom = variance**2 / np.sum(variances**2 / freedoms) if variance else 1.0
        quantiles = stdtrit(freedom, [1 - LEVEL / 2, 1 - LEVEL / len(parts) / 2])
        reach, bound = (math.sqrt(variance) * quantiles).tolist()
        move = math.log(_ratio(new[part][0], old[part][0]))
        found.append(Change(part, math.exp(move), math.exp(move - reach), math.exp(move + reach), abs(move) > bound))
    return found


def _ratio(now: Floats | Sequence[float], before: Floats | Sequence[float]) -> float:
    """Geometric mean over contexts of what a time is now over what it was."""
    return math.exp(float(np.mean(np.log(np.asarray(now) / np.asarray(before)))))
