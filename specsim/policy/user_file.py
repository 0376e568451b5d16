"""A user's own policies: a Python file, named by its path, whose policy classes join the built-in ones.

The file runs, as any program that its user starts; nothing but a path named by the user is loaded.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from specsim.io.errors import InputError
from specsim.io.user_file import error_line, own_classes, run_file
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.tree.base import TreePolicy, close_kept, limit_widths, new_tree
from specsim.policy.tree.static import StaticTree, check_shape

CHAIN_FUNCTIONS = {  # of a policy, with their arguments
    "initial_state": ("params",),
    "keep_drafting": ("state", "params", "step", "depth", "u"),
    "update": ("state", "params", "drafted", "accepted"),
}
TREE_FUNCTIONS = {
    "initial_state": ("params",),
    "expand": ("state", "params", "tree", "first", "end", "u", "widths"),
    "select": ("state", "params", "tree", "count", "keep"),
    "update": ("state", "params", "depth", "accepted"),
}


def load_policy_file(path: Path | str) -> list[type[Policy]]:
    """The ChainPolicy and TreePolicy classes that a Python file defines, in its order, but for any named _Like_this.

    An unchanged file gives the same classes again. Raises InputError, on a single line, if the
    file is missing, does not run, defines no policy, or a policy is incomplete, does not
    compile, or has a built-in's name.
    """
    path = Path(path).resolve()
    return list(_load(path, _source(path)))


def load_classes(path: Path | str, base: type[Any]) -> list[type[Any]]:
    """The classes of this base that a Python file defines, in its order, but for any named _Like_this.

    Raises InputError, on a single line, if the file is missing, does not run, or a class is incomplete.
    """
    path = Path(path).resolve()
    kinds = own_classes(_module(path, _source(path)), (base,))
    for kind in kinds:
        _check_declared(f"{path}: {kind.__name__}", kind)
    return kinds


@cache
def _module(path: Path, source: bytes) -> ModuleType:
    return run_file(path, source)


def _source(path: Path) -> bytes:
    if not path.is_file():
        raise InputError(f"policy file {path} does not exist; give the path of a Python file")
    return path.read_bytes()


@cache
def _load(path: Path, source: bytes) -> tuple[type[Policy], ...]:
    kinds = own_classes(run_file(path, source), (ChainPolicy, TreePolicy))
    if not kinds:
        raise InputError(f"{path} defines no policy; write a class of ChainPolicy or TreePolicy, see docs/extending.md")
    for kind in kinds:
        _check(f"{path}: {kind.__name__}", kind)
    names = [kind.name for kind in kinds]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{path}: two policies are named {name!r}; rename a policy")
    return tuple(kinds)


@cache
def check_policy(kind: type[Policy]) -> None:
    """InputError unless a class that a program or notebook defines is a complete policy whose functions compile."""
    _check(kind.__name__, kind)


def _check_declared(where: str, kind: type[Any]) -> None:
    """InputError unless the class has a name and a source, and is a frozen dataclass of settings."""
    for name in ("name", "source"):
        if not isinstance(getattr(kind, name, None), str):
            raise InputError(f'{where} has no {name!r}; add a line such as {name} = "..."')
    own = vars(kind).get("__dataclass_params__")
    if own is None or not own.frozen:
        raise InputError(f"{where} is no frozen dataclass; write @dataclass(frozen=True) above it")
    for field in dataclasses.fields(kind):
        if "tune" not in field.metadata:
            raise InputError(f"{where}.{field.name} has no range; declare it as setting(default, low, high)")


def _check(where: str, kind: type[Policy]) -> None:
    _check_declared(where, kind)
    functions = TREE_FUNCTIONS if issubclass(kind, TreePolicy) else CHAIN_FUNCTIONS
    for name, arguments in functions.items():
        function = inspect.getattr_static(kind, name, None)
        if not isinstance(function, staticmethod) or not hasattr(function.__func__, "py_func"):
            raise InputError(
                f"{where}.{name} is not a compiled function; decorate it with @numba.njit and "
                f"write {name} = staticmethod({name}) in the class"
            )
        if len(inspect.signature(function.__func__.py_func).parameters) != len(arguments):
            raise InputError(f"{where}.{name} must take ({', '.join(arguments)})")
    if issubclass(kind, TreePolicy):
        _try_tree(where, kind)
    elif issubclass(kind, ChainPolicy):
        _try_chain(where, kind)


def _try_chain(where: str, kind: type[ChainPolicy]) -> None:
    """Call the functions once as the replay does, which also compiles them."""
    policy = kind()  # InputError where a default is out of range
    unstated = "prob" in kind.keep_drafting.py_func.__code__.co_names and "prob" not in kind.features  # type: ignore[attr-defined]
    if kind.drops_refused and unstated:
        raise InputError(f'{where} drops tokens by step.prob; name it, as in features = ("prob",)')
    try:
        longest = policy.max_draft_tokens
    except NotImplementedError:
        raise InputError(f"{where} has neither a setting nor a property max_draft_tokens; add a setting") from None
    state = _call(where, kind, "initial_state", policy.params)
    step = Step(0.5, 0.5, 1.0, 0.5, 0.5)
    answer = _call(where, kind, "keep_drafting", state, policy.params, step, min(1, longest), 0.5)
    after = _call(where, kind, "update", state, policy.params, 1, 0)
    if not (isinstance(answer, tuple) and len(answer) == 2 and _shape(answer[1]) == _shape(state)):
        raise InputError(f"{where}.keep_drafting must return (continue?, state), with the state a tuple as it came")
    if _shape(state) != _shape(after) or not isinstance(state, tuple):
        raise InputError(f"{where}: initial_state and update must return tuples of as many floats")


def _try_tree(where: str, kind: type[TreePolicy]) -> None:
    """Draft a tree of two levels and call the functions on it as the replay does, which also compiles them."""
    policy = kind()
    max_depth, max_nodes, width = _bounds(where, policy)
    params, tree = policy.params, new_tree()
    widths = np.zeros(len(tree.path), dtype=np.int32)
    state = _call(where, kind, "initial_state", params)
    if not isinstance(state, tuple):
        raise InputError(f"{where}.initial_state must return a tuple of floats")
    first, count = 0, 1
    for _ in range(min(max_depth, 2)):
        end = count
        after = _call(where, kind, "expand", state, params, tree, first, end, 0.5, widths)
        if _shape(after) != _shape(state):
            raise InputError(f"{where}.expand must return the state, a tuple of as many floats as it came")
        if widths[:first].any() or widths[end:].any():
            raise InputError(f"{where}.expand must write widths[i] of the nodes i from first to end - 1 alone")
        asked = widths.min() if widths.min() < 0 else widths.max()
        if not 0 <= asked <= width:
            raise InputError(
                f"{where}.expand asks for {asked} children of a node; they must be from 0 to max_width = {width}"
            )
        limit_widths(widths, first, end, len(tree.path) - count)
        for parent in range(first, end):
            for rank in range(widths[parent]):
                prob = 0.5 ** (rank + 1)
                tree.path[count], tree.prob[count] = tree.path[parent] * prob, prob
                tree.parent[count], tree.rank[count], tree.depth[count] = parent, rank, tree.depth[parent] + 1
                count += 1
        widths[:] = 0
        first = end
    keep = np.zeros(len(tree.path), dtype=np.bool_)
    keep[0] = True
    floor = _call(where, kind, "select", state, params, tree, count, keep)
    if not isinstance(floor, float):
        raise InputError(f"{where}.select must return its floor, a float: np.inf where the path does not matter")
    if keep[count:].any():
        raise InputError(f"{where}.select must write keep[i] of the nodes i below count alone")
    kept = close_kept(tree, count, keep)[0]
    if kept > max_nodes:
        raise InputError(f"{where}.select keeps {kept} nodes, more than max_nodes = {max_nodes}")
    if _shape(_call(where, kind, "update", state, params, 1, 0)) != _shape(state):
        raise InputError(f"{where}: initial_state and update must return tuples of as many floats")


def _bounds(where: str, policy: TreePolicy) -> tuple[int, int, int]:
    """Deepest level, most nodes verified and largest width that a tree policy can ask for."""
    if isinstance(policy, StaticTree):
        try:
            check_shape(policy.name, policy.shape)
        except NotImplementedError:
            raise InputError(f"{where} has no shape; add a property that gives the children of every node") from None
    found = []
    for name, own in (
        ("max_draft_tokens", "max_depth"),
        ("max_verified_nodes", "max_nodes"),
        ("max_width", "max_width"),
    ):
        try:
            bound = getattr(policy, name)
        except (AttributeError, NotImplementedError):
            raise InputError(f"{where} does not say its {own}; add a setting or a property of that name") from None
        if not isinstance(bound, numbers.Integral) or bound < 1:
            raise InputError(f"{where}.{own} is {bound!r}, not a whole number from 1; correct the file")
        found.append(int(bound))
    return found[0], found[1], found[2]


def _call(where: str, kind: type[Policy], name: str, *arguments: Any) -> Any:
    """Call a compiled function of the policy; raise InputError if it does not compile or fails."""
    from numba.core.errors import NumbaError

    try:
        return getattr(kind, name)(*arguments)
    except NumbaError as error:
        raise InputError(f"{where}.{name} does not compile: {error_line(error)}; correct the file") from None
    except Exception as error:
        message = f"{type(error).__name__}: {error_line(error)}"
        raise InputError(f"{where}.{name} fails: {message}; correct the file") from None


def _shape(state: Any) -> Any:
    return tuple(type(part) for part in state) if isinstance(state, tuple) else None
