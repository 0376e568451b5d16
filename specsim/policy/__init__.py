"""Policies, of chains and of trees. A new one is a file like `adaedl.py` or `pct.py` and a line in `KINDS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.policy.adaedl import AdaEDL
from specsim.policy.base import ChainPolicy, Policy, Step, Variant, build_policy, setting
from specsim.policy.beta_ts import BetaTS
from specsim.policy.beta_ts_tree import BetaTSTree
from specsim.policy.cali_ts import CaliTS
from specsim.policy.cape import Cape
from specsim.policy.cartesian import Cartesian
from specsim.policy.eagle2 import Eagle2
from specsim.policy.files import find_policies, find_policy, load_policy_file
from specsim.policy.fixed_k import FixedK
from specsim.policy.hardware_pct import HardwarePCT
from specsim.policy.hugging_face import HuggingFace
from specsim.policy.max_confidence import MaxConfidence
from specsim.policy.optimal_tree import OptimalTree
from specsim.policy.p_min import PMin
from specsim.policy.pct import PCT
from specsim.policy.renewal_stop import RenewalStop
from specsim.policy.space_k import SpaceK
from specsim.policy.sparse_tree import SparseTree
from specsim.policy.time_gain import TimeGain
from specsim.policy.tree import Tree, TreePolicy
from specsim.policy.vct import VCT

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
    VCT,
    Cartesian,
    SparseTree,
    OptimalTree,
    Cape,
    Eagle2,
    PCT,
    HardwarePCT,
    BetaTSTree,
)
POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in KINDS}
CHAIN_POLICIES = {kind.name: kind for kind in KINDS if issubclass(kind, ChainPolicy)}
TREE_POLICIES = {kind.name: kind for kind in KINDS if issubclass(kind, TreePolicy)}


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """The policy of that name, built in or FILE.py, with these settings; InputError names the known ones."""
    return build_policy(find_policy(name), settings or {})


__all__ = [
    "CHAIN_POLICIES",
    "PCT",
    "POLICIES",
    "TREE_POLICIES",
    "VCT",
    "AdaEDL",
    "BetaTS",
    "BetaTSTree",
    "CaliTS",
    "Cape",
    "Cartesian",
    "ChainPolicy",
    "Eagle2",
    "FixedK",
    "HardwarePCT",
    "HuggingFace",
    "MaxConfidence",
    "OptimalTree",
    "PMin",
    "Policy",
    "RenewalStop",
    "SpaceK",
    "SparseTree",
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
