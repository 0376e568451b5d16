"""The drafters by their name in drafter files and in --drafter. A new drafter is a new file and a line here."""

from __future__ import annotations

from realrun.drafters.eagle import EagleKind
from realrun.drafters.eagle3 import Eagle3Kind
from realrun.drafters.edd import EDDKind, VDMKind
from realrun.drafters.eesd import EESDKind
from realrun.drafters.independent import IndependentKind
from realrun.drafters.kind import DrafterKind
from realrun.drafters.lookup import LookupKind
from realrun.drafters.medusa import MedusaKind
from realrun.drafters.self_sd import SelfSDKind
from realrun.drafters.space import SpaceKind
from realrun.drafters.sparse_cache import SparseCacheKind

DRAFTERS: dict[str, type[DrafterKind]] = {
    "model": IndependentKind,
    "eesd": EESDKind,
    "medusa": MedusaKind,
    "edd": EDDKind,
    "vdm": VDMKind,
    "eagle": EagleKind,
    "eagle3": Eagle3Kind,
    "self-sd": SelfSDKind,
    "space": SpaceKind,
    "sparse-cache": SparseCacheKind,
    "prompt-lookup": LookupKind,
}
