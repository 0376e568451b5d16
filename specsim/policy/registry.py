"""Find policies by name. To add a policy, write a file in `chain/`, `tree/` or `switch/` and a line in `KINDS`."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

from specsim.io.errors import InputError
from specsim.io.user_file import is_file_name, plugin, plugin_names, split_file_name
from specsim.policy.base import Policy, Settings, build_policy
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.cali_ts import CaliTS
from specsim.policy.chain.cali_ts_confidence import CaliTSConfidence
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.hugging_face import HuggingFace
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.p_min import LlamaCpp, PMin
from specsim.policy.chain.renewal_stop import RenewalStop
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.chain.time_gain import TimeGain
from specsim.policy.switch.first_that_drafts import FirstThatDrafts
from specsim.policy.switch.match import SwitchMatch
from specsim.policy.switch.one_drafter import OneDrafter
from specsim.policy.tree.base import TreePolicy
from specsim.policy.tree.beta_ts_tree import BetaTSTree
from specsim.policy.tree.cali_ts_tree import CaliTSTree
from specsim.policy.tree.cape import Cape
from specsim.policy.tree.cartesian import Cartesian
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.optimal_tree import OptimalTree
from specsim.policy.tree.pct import PCT
from specsim.policy.tree.sparse_tree import SparseTree
from specsim.policy.tree.vct import VCT
from specsim.policy.user_file import check_policy, load_policy_file

PLUGINS = "specsim.policies"  # entry points by which an installed package adds policies
PolicyName = str | PathLike[str] | type[Policy]  # a name, FILE.py or FILE.py:NAME, or the class itself


def find_policies(policies: PolicyName | Iterable[PolicyName]) -> dict[str, type[Policy]]:
    """Find policies, given as one or several of: a built-in's name, FILE.py (all in it), FILE.py:NAME, a class.

    Raises InputError for an unknown name, a file or class that cannot serve, and two policies of the same name, and
    TypeError for anything else.
    """
    by_name: dict[str, type[Policy]] = {}
    several = isinstance(policies, Iterable) and not isinstance(policies, str | PathLike | type)
    for policy in policies if several else [policies]:  # type: ignore[union-attr]
        for kind in _kinds_of(policy):
            if by_name.setdefault(kind.name, kind) is not kind:
                raise InputError(f"{policy}: another file also has a policy {kind.name!r}; rename it")
    return by_name


def find_policy(policy: PolicyName) -> type[Policy]:
    """Find the policy of that name, or class; raise InputError for a file of several policies without a name."""
    by_name = {kind.name: kind for kind in _kinds_of(policy)}
    if len(by_name) > 1:
        raise InputError(
            f"{policy} has the policies {', '.join(by_name)}; name a policy, such as {policy}:{next(iter(by_name))}"
        )
    return next(iter(by_name.values()))


def _kinds_of(policy: object) -> list[type[Policy]]:
    if isinstance(policy, type) and issubclass(policy, Policy):
        if NAMED.get(getattr(policy, "name", "")) is not policy:
            check_policy(policy)  # type: ignore[arg-type]  # a class hashes well
            _refuse_built_in_name(policy.__name__, policy)
        return [policy]
    if isinstance(policy, Policy):
        raise TypeError(
            f"policy is {policy}, whose settings are already chosen; give its name {policy.name!r} or class where they "
            "are searched, and settings to keep by name"
        )
    if not isinstance(policy, str | PathLike):
        raise TypeError(
            f"policy is a {type(policy).__name__}; expected a name such as 'fixed_k', FILE.py, FILE.py:NAME, or a "
            "class of ChainPolicy or TreePolicy"
        )
    name = str(policy)
    if is_file_name(name):
        return _from_file(name)
    if name in NAMED:
        return [NAMED[name]]
    kind = plugin(PLUGINS, name)
    if kind is None:
        known = ", ".join((*NAMED, *plugin_names(PLUGINS)))
        raise InputError(f"unknown policy {name!r}; known: {known}, or your own FILE.py")
    return _kinds_of(kind)


def _refuse_built_in_name(where: str, kind: type[Policy]) -> None:
    if kind.name in NAMED:
        raise InputError(f"{where}: policy {kind.name!r} has the name of a built-in policy; rename it")


def _from_file(name: str) -> list[type[Policy]]:
    path, wanted = split_file_name(name)
    kinds = load_policy_file(path)
    for kind in kinds:
        _refuse_built_in_name(path, kind)
    if not wanted:
        return kinds
    chosen = [kind for kind in kinds if kind.name == wanted]
    if not chosen:
        raise InputError(f"{path} has no policy {wanted!r}; it has {', '.join(kind.name for kind in kinds)}")
    return chosen


KINDS: tuple[type[Policy], ...] = (
    FixedK,
    MaxConfidence,
    AdaEDL,
    BetaTS,
    CaliTS,
    CaliTSConfidence,
    TimeGain,
    RenewalStop,
    HuggingFace,
    LlamaCpp,
    PMin,
    SpaceK,
    VCT,
    Cartesian,
    SparseTree,
    OptimalTree,
    Cape,
    Eagle2,
    PCT,
    BetaTSTree,
    CaliTSTree,
)


POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in KINDS}


# Of traces with several drafters, which no other policy serves.
SWITCH_POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (OneDrafter, SwitchMatch, FirstThatDrafts)}


NAMED = {**POLICIES, **SWITCH_POLICIES}


CHAIN_POLICIES = {kind.name: kind for kind in KINDS if issubclass(kind, ChainPolicy)}


TREE_POLICIES = {kind.name: kind for kind in KINDS if issubclass(kind, TreePolicy)}


def make_policy(policy: PolicyName | Policy, given: Settings | None = None, /, **settings: Any) -> Policy:
    """Make a policy.

    Parameters
    ----------
    policy : str, Path, class or Policy
        A name that `policies` lists, FILE.py or FILE.py:NAME, a class; of a policy, a copy with other settings.
    given : mapping, optional
        Settings as a mapping, such as the `params` of a result.
    **settings
        Values, or their text; the others stay at their defaults.

    Returns
    -------
    Policy
        As it is before it learns; see `specsim.predict` for those that learn from data.

    Raises
    ------
    InputError
        For an unknown policy or setting, or a value outside its range.

    Examples
    --------
    >>> import specsim
    >>> specsim.make_policy("fixed_k", k=3).k
    3
    """
    chosen = {**(given or {}), **settings}
    if isinstance(policy, Policy):
        return build_policy(type(policy), {**policy.settings, **chosen})
    return build_policy(find_policy(policy), chosen)


def policies(files: PolicyName | Iterable[PolicyName] = ()) -> dict[str, type[Policy]]:
    """List the policies by name.

    Parameters
    ----------
    files : str, Path, class, or several, optional
        Policies of your own, as FILE.py, FILE.py:NAME, or classes.

    Returns
    -------
    dict
        The class of each policy; `source` names its paper, its fields are its settings.

    Raises
    ------
    InputError
        Where a file cannot serve or two policies have the same name.

    References
    ----------
    Each class names its own in `source`.

    Examples
    --------
    >>> import specsim
    >>> specsim.policies()["adaedl"].source
    'Agrawal et al. 2024 (AdaEDL), section 3 and Algorithm 1'
    """
    return {**NAMED, **find_policies(plugin_names(PLUGINS)), **find_policies(files)}
