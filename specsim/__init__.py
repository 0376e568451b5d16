"""Simulator of speculative decoding: trace -> policy -> replay -> cost -> speedup.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsim.api.generate import generate
    from specsim.api.join import join_traces
    from specsim.api.predict import policies, predict, replay
    from specsim.api.tune import cross_validate, leaderboard, tune
    from specsim.cost.files import read_cost
    from specsim.cost.joined import JoinedCost
    from specsim.cost.model import ConstantCost
    from specsim.errors import InputError
    from specsim.policy.base import setting
    from specsim.policy.chain.base import ChainPolicy
    from specsim.policy.registry import make_policy
    from specsim.policy.tree.base import TreePolicy
    from specsim.trace.files import read_trace, write_trace
    from specsim.trace.trace import Trace

__version__ = "0.1.0"

_HOMES = {  # public name -> module that defines it
    "ChainPolicy": "specsim.policy.chain.base",
    "ConstantCost": "specsim.cost.model",
    "InputError": "specsim.errors",
    "JoinedCost": "specsim.cost.joined",
    "Trace": "specsim.trace.trace",
    "TreePolicy": "specsim.policy.tree.base",
    "cross_validate": "specsim.api.tune",
    "generate": "specsim.api.generate",
    "join_traces": "specsim.api.join",
    "leaderboard": "specsim.api.tune",
    "make_policy": "specsim.policy.registry",
    "policies": "specsim.api.predict",
    "predict": "specsim.api.predict",
    "read_cost": "specsim.cost.files",
    "read_trace": "specsim.trace.files",
    "replay": "specsim.api.predict",
    "setting": "specsim.policy.base",
    "tune": "specsim.api.tune",
    "write_trace": "specsim.trace.files",
}
__all__ = [
    "ChainPolicy",
    "ConstantCost",
    "InputError",
    "JoinedCost",
    "Trace",
    "TreePolicy",
    "cross_validate",
    "generate",
    "join_traces",
    "leaderboard",
    "make_policy",
    "policies",
    "predict",
    "read_cost",
    "read_trace",
    "replay",
    "setting",
    "tune",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specsim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
