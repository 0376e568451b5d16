"""Real runs of speculative decoding: load a pair, record it, profile the machine, validate what was predicted.

Names are loaded when they are first used, since torch and transformers are slow to import.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realrun.decode.decoder import Decoder
    from realrun.decode.sampling import Sampler
    from realrun.experiment.run import validate
    from realrun.experiment.settings import ValidationSettings
    from realrun.measure.probe import probe
    from realrun.measure.profile import profile
    from realrun.measure.record import RecordSettings, record
    from realrun.pairs.joined import join_pairs
    from realrun.pairs.pair import load_pair
    from realrun.pairs.prompts import read_prompts
    from realrun.versions.compare import CompareSettings, compare

_HOMES = {  # public name -> module that defines it
    "CompareSettings": "realrun.versions.compare",
    "Decoder": "realrun.decode.decoder",
    "RecordSettings": "realrun.measure.record",
    "Sampler": "realrun.decode.sampling",
    "ValidationSettings": "realrun.experiment.settings",
    "compare": "realrun.versions.compare",
    "join_pairs": "realrun.pairs.joined",
    "load_pair": "realrun.pairs.pair",
    "probe": "realrun.measure.probe",
    "profile": "realrun.measure.profile",
    "read_prompts": "realrun.pairs.prompts",
    "record": "realrun.measure.record",
    "validate": "realrun.experiment.run",
}
__all__ = [
    "CompareSettings",
    "Decoder",
    "RecordSettings",
    "Sampler",
    "ValidationSettings",
    "compare",
    "join_pairs",
    "load_pair",
    "probe",
    "profile",
    "read_prompts",
    "record",
    "validate",
]


def _find_kernels() -> None:
    """In a source tree that nobody installed, the package speckernels lies in kernels/ beside this one."""
    beside = Path(__file__).parents[1] / "kernels"
    found = find_spec("speckernels")
    if (found is None or found.origin is None) and beside.is_dir():
        sys.path.append(str(beside))


_find_kernels()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'realrun' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
