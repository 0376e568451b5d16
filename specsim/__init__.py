"""Simulator of speculative decoding: trace -> policy -> replay -> cost -> speedup.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsim.api.calibrate import calibrate
    from specsim.api.generate import generate
    from specsim.api.join import join_traces
    from specsim.api.predict import policies, predict, replay
    from specsim.api.serve import serve, serve_batches, serve_schedule
    from specsim.api.tune import cross_validate, leaderboard, tune
    from specsim.cost.files import read_cost
    from specsim.cost.joined import JoinedCost
    from specsim.cost.model import ConstantCost, CostModel
    from specsim.engines.advise import advise
    from specsim.engines.diagnose import diagnose
    from specsim.engines.export import export_flags
    from specsim.engines.import_records import import_records
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
    "CostModel": "specsim.cost.model",
    "InputError": "specsim.errors",
    "JoinedCost": "specsim.cost.joined",
    "Trace": "specsim.trace.trace",
    "TreePolicy": "specsim.policy.tree.base",
    "advise": "specsim.engines.advise",
    "calibrate": "specsim.api.calibrate",
    "cross_validate": "specsim.api.tune",
    "diagnose": "specsim.engines.diagnose",
    "export_flags": "specsim.engines.export",
    "generate": "specsim.api.generate",
    "import_records": "specsim.engines.import_records",
    "join_traces": "specsim.api.join",
    "leaderboard": "specsim.api.tune",
    "make_policy": "specsim.policy.registry",
    "policies": "specsim.api.predict",
    "predict": "specsim.api.predict",
    "read_cost": "specsim.cost.files",
    "read_trace": "specsim.trace.files",
    "replay": "specsim.api.predict",
    "serve": "specsim.api.serve",
    "serve_batches": "specsim.api.serve",
    "serve_schedule": "specsim.api.serve",
    "setting": "specsim.policy.base",
    "tune": "specsim.api.tune",
    "write_trace": "specsim.trace.files",
}
__all__ = [
    "ChainPolicy",
    "ConstantCost",
    "CostModel",
    "InputError",
    "JoinedCost",
    "Trace",
    "TreePolicy",
    "advise",
    "calibrate",
    "cross_validate",
    "diagnose",
    "export_flags",
    "generate",
    "import_records",
    "join_traces",
    "leaderboard",
    "make_policy",
    "policies",
    "predict",
    "read_cost",
    "read_trace",
    "replay",
    "serve",
    "serve_batches",
    "serve_schedule",
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
