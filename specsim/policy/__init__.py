"""Policies, of chains and of trees. A new one is a file like `adaedl.py` or `pct.py` and a line in `KINDS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.policy.adaedl import AdaEDL
from specsim.policy.base import ChainPolicy, Policy, Step, Variant, build_policy, setting
from specsim.policy.beta_ts import BetaTS
from specsim.policy.cali_ts import CaliTS
from specsim.policy.files import find_policies, find_policy, load_policy_file
from specsim.policy.fixed_k import FixedK
from specsim.policy.hugging_face import HuggingFace
from specsim.policy.max_confidence import MaxConfidence
from specsim.policy.p_min import PMin
from specsim.policy.renewal_stop import RenewalStop
from specsim.policy.space_k import SpaceK
from specsim.policy.time_gain import TimeGain
from specsim.policy.tree import Tree, TreePolicy

KINDS: tuple[type[Policy], ...] = (
    FixedK,
    MaxConfidence,
    AdaEDL,
    BetaTS,
    CaliTS,
    TimeGain,
    RenewalStop,
    HuggingFace,
    PMin,
    SpaceK,
)
POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in KINDS}


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """The policy of that name, built in or FILE.py, with these settings; InputError names the known ones."""
    return build_policy(find_policy(name), settings or {})


__all__ = [
    "POLICIES",
    "AdaEDL",
    "BetaTS",
    "CaliTS",
    "ChainPolicy",
    "FixedK",
    "HuggingFace",
    "MaxConfidence",
    "PMin",
    "Policy",
    "RenewalStop",
    "SpaceK",
    "Step",
    "TimeGain",
    "Tree",
    "TreePolicy",
    "Variant",
    "build_policy",
    "find_policies",
    "find_policy",
    "load_policy_file",
    "make_policy",
    "setting",
]
