"""What a claim of a policy in full batches comes out as."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.claims.claim import ServingSubject, policy_at
from specsim.claims.measured import Measured, Stamp, stamp_of
from specsim.errors import InputError
from specsim.examples import located
from specsim.speedup.intervals import Estimate

if TYPE_CHECKING:
    from specsim.cost.batches import BatchCost
    from specsim.trace.trace import Trace

GOODPUT = "goodput"


def of_serving(subject: ServingSubject, home: Path) -> Measured:
    """Speedup over the same batch without speculation."""
    from specsim.serving.speedup_map import speedup_map

    place = home / located(subject.serving, "trace")
    trace = _trace(place, stamp_of(place))
    cost = _cost(home / subject.cost, stamp_of(home / subject.cost), subject.cost)
    arm = _arm(subject, trace, cost, home)
    (cell,) = speedup_map(trace, cost, [arm], [subject.batch], contexts=[subject.context], seed=subject.seed).cells
    (speedup,) = cell.speedup.values()
    return Measured(speedup.estimate, Estimate.exact(speedup.estimate), speedup)


def _arm(subject: ServingSubject, trace: Trace, cost: BatchCost, home: Path) -> Any:
    from specsim.fitting.fit import needs_fitting
    from specsim.policy.registry import find_policy, make_policy
    from specsim.serving.draft_length import GoodputK

    settings = subject.settings
    if subject.policy == GOODPUT:
        longest = settings.get("max_draft_tokens")
        if set(settings) != {"max_draft_tokens"} or type(longest) is not int or not 1 <= longest <= trace.depth:
            raise InputError(
                f"{GOODPUT} has the setting max_draft_tokens, from 1 to the trace's {trace.depth}; give it"
            )
        return GoodputK(cost, longest)
    name = policy_at(subject.policy, home)
    if needs_fitting(find_policy(name)):
        raise InputError(f"policy {subject.policy} learns, which claims of batches do not do; choose another")
    return make_policy(name, settings)


@lru_cache(maxsize=4)
def _trace(path: Path, stamp: Stamp) -> Trace:
    from specsim.trace.files import read_trace

    return read_trace(path)


@lru_cache(maxsize=4)
def _cost(path: Path, stamp: Stamp, name: str) -> BatchCost:
    from specsim.cost.files import read_cost
    from specsim.serving.costs import batch_cost

    return batch_cost(read_cost(path if stamp else name))
