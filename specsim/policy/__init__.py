"""Chain policies. A new one is a file like `adaedl.py` and a line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.errors import InputError
from specsim.policy.adaedl import AdaEDL
from specsim.policy.base import ChainPolicy, Step, Variant, build_policy, setting
from specsim.policy.fixed_k import FixedK
from specsim.policy.hugging_face import HuggingFace
from specsim.policy.max_confidence import MaxConfidence
from specsim.policy.p_min import PMin
from specsim.policy.space_k import SpaceK
from specsim.policy.time_gain import TimeGain

KINDS: tuple[type[ChainPolicy], ...] = (
    FixedK,
    MaxConfidence,
    AdaEDL,
    TimeGain,
    HuggingFace,
    PMin,
    SpaceK,
)
POLICIES: dict[str, type[ChainPolicy]] = {kind.name: kind for kind in KINDS}


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> ChainPolicy:
    """The policy of that name with these settings; InputError names the known ones."""
    if name not in POLICIES:
        raise InputError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return build_policy(POLICIES[name], settings or {})


__all__ = [
    "POLICIES",
    "AdaEDL",
    "ChainPolicy",
    "FixedK",
    "HuggingFace",
    "MaxConfidence",
    "PMin",
    "SpaceK",
    "Step",
    "TimeGain",
    "Variant",
    "build_policy",
    "make_policy",
    "setting",
]
