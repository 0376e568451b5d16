"""Real runs of speculative decoding: load a pair, record it, profile the machine, validate what was predicted.

Names are loaded when they are first used, since torch and transformers are slow to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realrun.decode.decoder import Decoder
    from realrun.decode.sampling import Sampler
    from realrun.pairs.joined import join_pairs
    from realrun.pairs.pair import load_pair
    from realrun.pairs.prompts import read_prompts
    from realrun.profiling.profile import profile
    from realrun.recording.record import RecordSettings, record
    from realrun.validation.run import ValidationSettings, validate

_HOMES = {  # public name -> module that defines it
    "Decoder": "realrun.decode.decoder",
    "RecordSettings": "realrun.recording.record",
    "Sampler": "realrun.decode.sampling",
    "ValidationSettings": "realrun.validation.run",
    "join_pairs": "realrun.pairs.joined",
    "load_pair": "realrun.pairs.pair",
    "profile": "realrun.profiling.profile",
    "read_prompts": "realrun.pairs.prompts",
    "record": "realrun.recording.record",
    "validate": "realrun.validation.run",
}
__all__ = [
    "Decoder",
    "RecordSettings",
    "Sampler",
    "ValidationSettings",
    "join_pairs",
    "load_pair",
    "profile",
    "read_prompts",
    "record",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'realrun' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
