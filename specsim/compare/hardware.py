"""Estimate the speedup of a pair on several devices: tune on each, and vary the hardware's constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from specsim.cost.batches import BatchTokens
from specsim.cost.roofline.cost import Overheads, RooflineCost
from specsim.cost.roofline.passes import Roofline
from specsim.cost.table import context_share
from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.io.progress import Counter, no_progress
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Policy
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.prediction import Prediction, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay, replay
from specsim.replaying.table import cost_table
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

KIND, VERSION = "specsim-cost-comparison", 1
SHARE = 0.2  # by which a tornado changes every constant
CONTEXTS: Ints = np.unique(np.geomspace(128, 32768, 33).round().astype(np.int64))  # of the curves, in cached tokens

MEMORY, THROUGHPUT, LAUNCH, OVERLAP, LINK, ALL_REDUCE = (
    "memory bandwidth", "matrix throughput", "time of a launch", "overlap", "bandwidth between devices",
    "time of an all-reduce",
)  # fmt: skip
CONSTANTS = (MEMORY, THROUGHPUT, LAUNCH, OVERLAP, LINK, ALL_REDUCE)  # of passes
OVERHEADS = {
    "step_s": "overhead of a step",
    "sequence_s": "overhead of a sequence",
    "verified_sequence_s": "overhead of a verified sequence",
    "round_s": "overhead of a round",
    "policy_step_s": "a decision",
    "draft_step_s": "overhead of a draft step",
    "cold_start_s": "cold start of drafting",
}


@dataclass(frozen=True)
class Swing:
    """Speedup of the tuned policy with a constant of the hardware smaller, and larger, by a share."""

    constant: str
    less: float
    more: float

    @property
    def width(self) -> float:
        return abs(self.more - self.less)


@dataclass(frozen=True)
class OnDevice:
    """A device at a batch size.

    prediction : of the policy that was best on the tuning part, on the other part
    train_speedup : what it was tuned to
    step_ratio : s_d / s_t over the first of CONTEXTS, as far as their caches fit
    swings : the widest first
    """

    cost: RooflineCost
    prediction: Prediction
    train_speedup: float
    draft_step_s: float
    token_s: float
    step_ratio: Floats
    swings: tuple[Swing, ...]

    @property
    def device(self) -> str:
        return self.cost.target.hardware.name

    def as_dict(self) -> dict[str, Any]:
        """The JSON form; `draft_step_s` and `token_s` are means over the contexts that the trace meets."""
        return {
            "gpu": self.device,
            "title": self.cost.target.hardware.title,
            "batch": self.cost.batch,
            "draft_step_s": self.draft_step_s,
            "token_s": self.token_s,
            "step_ratio": self.draft_step_s / self.token_s,
            "settings": str(self.prediction.policy),
            "train_speedup": self.train_speedup,
            **self.prediction.as_dict(),
            "cost_band": self.cost.error_band,
            "step_ratios": self.step_ratio.tolist(),
            "tornado": [asdict(swing) for swing in self.swings],
        }


@dataclass(frozen=True)
class Comparison:
    """All devices and batches, in the order asked.

    tuning, holdout : sequences that policies were tuned on, and those that are reported on
    share : by which the tornadoes changed every constant
    """

    trace: Trace
    devices: list[OnDevice]
    tuning: int
    holdout: int
    share: float

    def as_dict(self) -> dict[str, Any]:
        meta = self.trace.meta
        return {
            "kind": KIND,
            "version": VERSION,
            "recorded": {key: meta.get(key) for key in ("target", "drafter", "decoding")},
            "sequences": {"tuning": self.tuning, "holdout": self.holdout},
            "contexts": CONTEXTS.tolist(),
            "share": self.share,
            "rows": [device.as_dict() for device in self.devices],
        }


def compare_devices(
    trace: Trace,
    costs: Sequence[RooflineCost],
    kinds: Mapping[str, type[Policy]],
    settings: SearchSettings,
    *,
    tuning_share: float = 0.5,
    progress: Counter = no_progress,
) -> Comparison:
    """Tune policies under every cost model on the tuning part of the trace, and report the best on the held-out part.

    Raises InputError where the trace serves none of the policies.
    """
    reasons = {name: unsupported_reason(trace, kind) for name, kind in kinds.items()}
    served = [kind for name, kind in kinds.items() if reasons[name] is None]
    if not served:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise InputError(f"the trace serves none of the policies ({why}); choose others")
    tuning, rest = split_sequences(trace, tuning_share=tuning_share, seed=settings.seed)
    train, holdout = trace.select(tuning), trace.select(rest)
    devices = []
    for number, cost in enumerate(costs):
        progress(number, len(costs))
        devices.append(_on_device(cost, train, holdout, served, settings, SHARE))
    progress(len(costs), len(costs))
    return Comparison(trace, devices, len(tuning), len(rest), SHARE)


def _on_device(
    cost: RooflineCost,
    train: Trace,
    holdout: Trace,
    kinds: Sequence[type[Policy]],
    settings: SearchSettings,
    share: float,
) -> OnDevice:
    seed, tuned_on, reported_on = settings.seed, PricedTrace(train, cost), PricedTrace(holdout, cost)
    tuned = [best_policy(kind, tuned_on, settings) for kind in kinds]
    gains = [_speedup(tuned_on.replay(policy, seed=seed)) for policy in tuned]
    best = tuned[int(np.argmax(gains))]
    fitting = CONTEXTS[cost.missing_bytes(BatchTokens.alike(cost.batch, 1, CONTEXTS)) == 0]
    table, shares = reported_on.table(), context_share(holdout, reported_on.table())
    # In the best policy's own tables: a chain policy reads no costs of trees, which take longest to compile.
    swings = [
        Swing(
            name, *(_speedup(replay(holdout, best, cost_table(holdout, changed, best), seed=seed)) for changed in both)
        )
        for name, *both in changes(cost, share)
    ]
    return OnDevice(
        cost=cost,
        prediction=summarise(reported_on.replay(best, seed=seed)),
        train_speedup=max(gains),
        draft_step_s=float(table.draft_s[1] @ shares),
        token_s=float(table.autoregressive_s @ shares),
        step_ratio=cost.draft(1, fitting) / cost.autoregressive_step(fitting),
        swings=tuple(sorted(swings, key=lambda swing: -swing.width)),
    )


def _speedup(replay: Replay) -> float:
    """Baseline seconds over the policy's, all sequences together."""
    return float(replay.autoregressive_s.sum() / replay.speculative_s.sum())


class Change(NamedTuple):
    """Costs with a constant smaller and larger by a share."""

    constant: str
    less: RooflineCost
    more: RooflineCost


def scaled_passes(passes: Roofline, constant: str, factor: float) -> Roofline:
    """The same passes where a constant is so many times as large; an overlap stays within 1."""
    hardware, derating = passes.hardware, passes.derating
    if constant == MEMORY:
        return replace(passes, hardware=replace(hardware, memory_bytes_s=factor * hardware.memory_bytes_s))
    if constant == THROUGHPUT:
        flops = {dtype: factor * value for dtype, value in hardware.flops.items()}
        return replace(passes, hardware=replace(hardware, flops=flops))
    if constant == LINK:
        return replace(passes, hardware=replace(hardware, link_bytes_s=factor * hardware.link_bytes_s))
    if constant == LAUNCH:
        return replace(passes, derating=replace(derating, launch_s=factor * derating.launch_s))
    if constant == ALL_REDUCE:
        return replace(passes, derating=replace(derating, all_reduce_s=factor * derating.all_reduce_s))
    assert constant == OVERLAP
    return replace(passes, derating=replace(derating, overlap=min(factor * derating.overlap, 1.0)))


def changes(cost: RooflineCost, share: float) -> Iterator[Change]:
    """Every constant that is not 0, changed by this share of itself.

    Of passes for target and drafter together, as other hardware would, and for each alone, as other kernels would. A
    share that is reached of a ceiling acts as the ceiling does, and is not listed.
    """
    for constant in CONSTANTS:
        if _absent(cost.target, constant):
            continue
        whose = [("target: ", True, False)]
        if cost.draft_passes:
            whose += [("both: ", True, True), ("drafter: ", False, True)]
        for of, target, drafter in whose:
            yield Change(
                f"{of}{constant}",
                *(_scaled(cost, constant, factor, target, drafter) for factor in (1 - share, 1 + share)),
            )
    for field in fields(Overheads):
        value = getattr(cost.overheads, field.name)
        if value and field.name in OVERHEADS:
            less, more = (replace(cost.overheads, **{field.name: f * value}) for f in (1 - share, 1 + share))
            yield Change(OVERHEADS[field.name], replace(cost, overheads=less), replace(cost, overheads=more))


def _absent(passes: Roofline, constant: str) -> bool:
    if constant in (LINK, ALL_REDUCE):
        return passes.tensor_parallel == 1
    return (constant == LAUNCH and not passes.derating.launch_s) or (
        constant == OVERLAP and not passes.derating.overlap
    )


def _scaled(cost: RooflineCost, constant: str, factor: float, target: bool, drafter: bool) -> RooflineCost:
    if target:
        cost = replace(cost, target=scaled_passes(cost.target, constant, factor))
    if drafter and cost.draft_passes:
        cost = replace(cost, draft_passes=scaled_passes(cost.draft_passes, constant, factor))
    return cost
