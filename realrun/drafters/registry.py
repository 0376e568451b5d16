"""The drafters by their name in drafter files and in --drafter. A new drafter is a new file and a line here.

A user's own are classes in FILE.py, or entry points of an installed package.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path

from realrun.drafters.block import BlockKind
from realrun.drafters.eagle import EagleKind
from realrun.drafters.eagle3 import Eagle3Kind
from realrun.drafters.edd import EDDKind, VDMKind
from realrun.drafters.eesd import EESDKind
from realrun.drafters.independent import IndependentKind
from realrun.drafters.kind import DrafterKind
from realrun.drafters.lookup import LookupKind
from realrun.drafters.medusa import MedusaKind
from realrun.drafters.mtp import MtpKind
from realrun.drafters.self_sd import SelfSDKind
from realrun.drafters.space import SpaceKind
from specsim.io.errors import InputError
from specsim.io.user_file import is_file_name, own_classes, plugin, run_file, split_file_name

PLUGINS = "specsim.drafters"  # entry points by which an installed package adds drafters

DRAFTERS: dict[str, type[DrafterKind]] = {
    "model": IndependentKind,
    "eesd": EESDKind,
    "medusa": MedusaKind,
    "edd": EDDKind,
    "vdm": VDMKind,
    "eagle": EagleKind,
    "eagle3": Eagle3Kind,
    "block": BlockKind,
    "self-sd": SelfSDKind,
    "space": SpaceKind,
    "prompt-lookup": LookupKind,
    "mtp": MtpKind,
}


def find_kind(name: str) -> type[DrafterKind] | None:
    """Find the drafter of this name: built in, FILE.py or FILE.py:NAME, or added by a package; None if there is none.

    Raises InputError if a file does not run or defines no such drafter.
    """
    if name in DRAFTERS:
        return DRAFTERS[name]
    if not is_file_name(name):
        kind: type[DrafterKind] | None = plugin(PLUGINS, name)
        return kind
    path, wanted = split_file_name(name)
    file = Path(path).resolve()
    if not file.is_file():
        raise InputError(f"drafter file {path} does not exist; give the path of a Python file")
    kinds = {kind.name: kind for kind in _kinds_in(file, file.read_bytes()) if not wanted or kind.name == wanted}
    if not kinds:
        missing = f" {wanted!r}" if wanted else ""
        raise InputError(f'{path} defines no drafter{missing}; write a class of DrafterKind with origin = "target"')
    if len(kinds) > 1:
        raise InputError(f"{path} has the drafters {', '.join(kinds)}; name one, such as {path}:{next(iter(kinds))}")
    return next(iter(kinds.values()))


@cache
def _kinds_in(path: Path, source: bytes) -> tuple[type[DrafterKind], ...]:
    """The drafters that any target has and that a file defines; an unchanged file gives the same classes again."""
    kinds = [kind for kind in own_classes(run_file(path, source), (DrafterKind,)) if not inspect.isabstract(kind)]
    for kind in kinds:
        if kind.origin != "target":
            raise InputError(f'{path}: {kind.__name__} has origin {kind.origin!r}; write origin = "target"')
    return tuple(kinds)
