"""Estimate the speedup of a pair on several devices: tune on each, and vary the hardware's constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specsim.cost.batches import BatchTokens
from specsim.cost.roofline.constants import changes
from specsim.cost.roofline.cost import RooflineCost
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
    share: float = SHARE,
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
        devices.append(_on_device(cost, train, holdout, served, settings, share))
    progress(len(costs), len(costs))
    return Comparison(trace, devices, len(tuning), len(rest), share)


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
