"""Find rules by name. To add a rule, write a file beside this one and a line in `KINDS`."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

from specsim.cost.batches import BatchCost
from specsim.io.errors import InputError
from specsim.io.user_file import is_file_name, split_file_name
from specsim.learn.space import cap_depth
from specsim.policy.base import Settings
from specsim.policy.registry import NAMED
from specsim.policy.user_file import load_classes
from specsim.serving.draft_length import DraftLengthRule, TurboSpec
from specsim.serving.rules.adaptive_verification import AdaptiveVerification
from specsim.serving.rules.budget import Budget
from specsim.serving.rules.dspark import DSpark
from specsim.serving.rules.oracle import Oracle
from specsim.serving.rules.sglang_adaptive import SGLangAdaptive
from specsim.serving.rules.sglang_throughput import ThroughputAware
from specsim.trace.trace import Trace

KINDS: tuple[type[DraftLengthRule], ...] = (
    TurboSpec,
    SGLangAdaptive,
    ThroughputAware,
    DSpark,
    AdaptiveVerification,
    Budget,
    Oracle,
)
RULES = {kind.name: kind for kind in KINDS}


def rules(files: str | PathLike[str] | Iterable[str | PathLike[str]] = ()) -> dict[str, type[DraftLengthRule]]:
    """List the rules that choose draft lengths for all running requests of a server, by name.

    Parameters
    ----------
    files : str, Path, or several, optional
        Rules of your own, as FILE.py.

    Returns
    -------
    dict
        The class of each rule; `source` names its paper or engine, its fields are its settings.

    Raises
    ------
    InputError
        Where a file is missing, does not run, or a rule in it is incomplete.

    References
    ----------
    Each class names its own in `source`.

    Examples
    --------
    >>> import specsim
    >>> sorted(specsim.rules())
    ['adaptive_verification', 'budget', 'dspark', 'oracle', 'sglang_adaptive', 'sglang_throughput', 'turbospec']
    """
    paths = [files] if isinstance(files, str | PathLike) else files
    own = [kind for path in paths for kind in load_classes(str(path), DraftLengthRule)]
    return {**RULES, **{kind.name: kind for kind in own}}


def find_rule(name: str | PathLike[str]) -> type[DraftLengthRule] | None:
    """The rule of this name, or in this FILE.py or FILE.py:NAME; None where it names a policy.

    Raises InputError for an unknown name, and a file of several rules without a name.
    """
    name = str(name)
    if name in RULES or name in NAMED:
        return RULES.get(name)
    if not is_file_name(name):
        raise InputError(f"unknown policy {name!r}; policies: {', '.join(NAMED)}; rules: {', '.join(RULES)}")
    path, wanted = split_file_name(name)
    kinds = {kind.name: kind for kind in load_classes(path, DraftLengthRule)}
    if not kinds or (wanted and wanted not in kinds):
        return None
    if not wanted and len(kinds) > 1:
        raise InputError(f"{path} has the rules {', '.join(kinds)}; name a rule, such as {path}:{next(iter(kinds))}")
    return kinds[wanted] if wanted else next(iter(kinds.values()))


def make_rule(kind: type[DraftLengthRule], settings: Settings, train: Trace, cost: BatchCost) -> DraftLengthRule:
    """Fit a rule to sequences and costs. Its maximum draft length defaults to the recorded depth."""
    return kind.fit({**cap_depth(kind, train.depth), **settings}, train, cost)
