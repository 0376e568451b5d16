"""Simulator of speculative decoding: trace -> policy -> replay -> cost -> speedup.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsim.acceptance import formulas
    from specsim.acceptance.generate import generate
    from specsim.compare.leaderboard import leaderboard
    from specsim.cost.calibrate import calibrate
    from specsim.cost.files import read_cost
    from specsim.cost.joined import JoinedCost
    from specsim.cost.model import ConstantCost, CostModel
    from specsim.engines.advise import advise
    from specsim.engines.diagnose import diagnose
    from specsim.engines.export import export_flags
    from specsim.engines.import_records import import_records
    from specsim.io.errors import InputError
    from specsim.learn.predict import predict, replay
    from specsim.learn.tune import tune
    from specsim.policy.base import setting
    from specsim.policy.chain.base import ChainPolicy
    from specsim.policy.registry import make_policy, policies
    from specsim.policy.tree.base import TreePolicy
    from specsim.servers.bench import bench
    from specsim.servers.doctor import doctor
    from specsim.serving.draft_length import DraftLengthRule
    from specsim.serving.rules.registry import rules
    from specsim.serving.serve import serve, serve_batches, serve_schedule
    from specsim.trace.accepted import accepted_by
    from specsim.trace.files import join_traces, read_trace, write_trace
    from specsim.trace.trace import Trace

__version__ = "0.1.0"

_HOMES = {  # public name -> module that defines it
    "ChainPolicy": "specsim.policy.chain.base",
    "ConstantCost": "specsim.cost.model",
    "CostModel": "specsim.cost.model",
    "DraftLengthRule": "specsim.serving.draft_length",
    "InputError": "specsim.io.errors",
    "JoinedCost": "specsim.cost.joined",
    "Trace": "specsim.trace.trace",
    "TreePolicy": "specsim.policy.tree.base",
    "accepted_by": "specsim.trace.accepted",
    "advise": "specsim.engines.advise",
    "bench": "specsim.servers.bench",
    "calibrate": "specsim.cost.calibrate",
    "diagnose": "specsim.engines.diagnose",
    "doctor": "specsim.servers.doctor",
    "export_flags": "specsim.engines.export",
    "formulas": "specsim.acceptance.formulas",
    "generate": "specsim.acceptance.generate",
    "import_records": "specsim.engines.import_records",
    "join_traces": "specsim.trace.files",
    "leaderboard": "specsim.compare.leaderboard",
    "make_policy": "specsim.policy.registry",
    "policies": "specsim.policy.registry",
    "predict": "specsim.learn.predict",
    "read_cost": "specsim.cost.files",
    "read_trace": "specsim.trace.files",
    "replay": "specsim.learn.predict",
    "rules": "specsim.serving.rules.registry",
    "serve": "specsim.serving.serve",
    "serve_batches": "specsim.serving.serve",
    "serve_schedule": "specsim.serving.serve",
    "setting": "specsim.policy.base",
    "tune": "specsim.learn.tune",
    "write_trace": "specsim.trace.files",
}
__all__ = [
    "ChainPolicy",
    "ConstantCost",
    "CostModel",
    "DraftLengthRule",
    "InputError",
    "JoinedCost",
    "Trace",
    "TreePolicy",
    "accepted_by",
    "advise",
    "bench",
    "calibrate",
    "diagnose",
    "doctor",
    "export_flags",
    "formulas",
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
    "rules",
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
    home = import_module(_HOMES[name])
    return home if name == "formulas" else getattr(home, name)  # which is a module


def __dir__() -> list[str]:
    return sorted(__all__)
