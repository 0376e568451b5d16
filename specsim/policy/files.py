"""A user's own policies: a Python file, named by its path, whose ChainPolicy classes join the built-in ones.

The file runs, as any program that its user starts; nothing but a path named by the user is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from specsim.errors import InputError
from specsim.policy.base import ChainPolicy, Step

FUNCTIONS = {  # of a policy, with their arguments
    "initial_state": ("params",),
    "keep_drafting": ("state", "params", "step", "depth", "u"),
    "update": ("state", "params", "drafted", "accepted"),
}


def is_file_name(name: str) -> bool:
    """Whether a policy's name is FILE.py or FILE.py:NAME rather than a built-in's."""
    return name.endswith(".py") or ".py:" in name


def find_policies(names: Sequence[str]) -> dict[str, type[ChainPolicy]]:
    """Policies by name, from names of built-in ones, FILE.py (all that it defines) or FILE.py:NAME.

    Raises InputError for an unknown name, a file that cannot serve, and two policies of one name.
    """
    from specsim.policy import POLICIES

    found: dict[str, type[ChainPolicy]] = {}
    for name in names:
        if is_file_name(name):
            kinds = _from_file(name)
        elif name in POLICIES:
            kinds = [POLICIES[name]]
        else:
            raise InputError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}, or a FILE.py of your own")
        for kind in kinds:
            if found.setdefault(kind.name, kind) is not kind:
                raise InputError(f"{name}: another file has a policy {kind.name!r} too; rename one of them")
    return found


def find_policy(name: str) -> type[ChainPolicy]:
    """The one policy of that name; InputError if a file of several is named without saying which."""
    found = find_policies([name])
    if len(found) > 1:
        raise InputError(f"{name} has the policies {', '.join(found)}; name one as {name}:{next(iter(found))}")
    return next(iter(found.values()))


def load_policy_file(path: Path | str) -> list[type[ChainPolicy]]:
    """The ChainPolicy classes that a Python file defines, in its order; a class named _Like_this is none.

    An unchanged file gives the same classes again. Raises InputError, in one line, where the
    file is missing, does not run, defines no policy, or a policy is incomplete, does not
    compile, or has a built-in's name.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise InputError(f"policy file {path} does not exist; give the path of a Python file")
    return list(_load(path, path.read_bytes()))


def _from_file(name: str) -> list[type[ChainPolicy]]:
    path, wanted = (name, "") if name.endswith(".py") else name.rsplit(":", 1)
    kinds = load_policy_file(path)
    if not wanted:
        return kinds
    chosen = [kind for kind in kinds if kind.name == wanted]
    if not chosen:
        raise InputError(f"{path} has no policy {wanted!r}; it has {', '.join(kind.name for kind in kinds)}")
    return chosen


@cache
def _load(path: Path, source: bytes) -> tuple[type[ChainPolicy], ...]:
    from specsim.policy import POLICIES

    module = _run(path, source)
    kinds = [value for name, value in vars(module).items() if _defines(module, name, value)]
    kinds = list(dict.fromkeys(kinds))
    if not kinds:
        raise InputError(f"{path} defines no policy; write a class of ChainPolicy, as the README's example does")
    for kind in kinds:
        _check(path, kind)
    names = [kind.name for kind in kinds]
    for name in names:
        if name in POLICIES:
            raise InputError(f"{path}: policy {name!r} has the name of a built-in one; give it another")
        if names.count(name) > 1:
            raise InputError(f"{path}: two policies are named {name!r}; rename one of them")
    return tuple(kinds)


def _run(path: Path, source: bytes) -> ModuleType:
    """The file as a module. Dataclasses look their module up by name, so it is registered under one of its own."""
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()[:12]
    module = ModuleType(f"specsim_policy_file_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        del sys.modules[module.__name__]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise InputError(f"{_place(path, error)}; correct the file") from None
    return module


def _place(path: Path, error: BaseException) -> str:
    """Where in the file it went wrong, and what."""
    if isinstance(error, SyntaxError):  # of this file, or of one that it imports
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    place = f"{path}, line {lines[-1]}" if lines else str(path)
    return f"{place}: {type(error).__name__}: {_one_line(error)}"


def _defines(module: ModuleType, name: str, value: Any) -> bool:
    if not (isinstance(value, type) and issubclass(value, ChainPolicy)):
        return False
    return value.__module__ == module.__name__ and not name.startswith("_")


def _check(path: Path, kind: type[ChainPolicy]) -> None:
    """InputError unless the class is a complete policy whose functions compile."""
    where = f"{path}: {kind.__name__}"
    for name in ("name", "source"):
        if not isinstance(getattr(kind, name, None), str):
            raise InputError(f'{where} has no {name!r}; add a line such as {name} = "..."')
    own = vars(kind).get("__dataclass_params__")
    if own is None or not own.frozen:
        raise InputError(f"{where} is no frozen dataclass; write @dataclass(frozen=True) above it")
    for field in dataclasses.fields(kind):
        if "tune" not in field.metadata:
            raise InputError(f"{where}.{field.name} has no range; declare it as setting(default, low, high)")
    for name, arguments in FUNCTIONS.items():
        function = inspect.getattr_static(kind, name, None)
        if not isinstance(function, staticmethod) or not hasattr(function.__func__, "py_func"):
            raise InputError(
                f"{where}.{name} is not a compiled function; decorate it with @numba.njit and "
                f"write {name} = staticmethod({name}) in the class"
            )
        if len(inspect.signature(function.__func__.py_func).parameters) != len(arguments):
            raise InputError(f"{where}.{name} must take ({', '.join(arguments)})")
    _try(where, kind)


def _try(where: str, kind: type[ChainPolicy]) -> None:
    """Call the functions once as the replay does, which also compiles them."""
    from numba.core.errors import NumbaError

    policy = kind()  # InputError where a default is out of range
    try:
        longest = policy.max_draft_tokens
    except KeyError:
        raise InputError(f"{where} has no setting max_draft and no max_draft_tokens; add one") from None
    name = "initial_state"
    try:
        state = kind.initial_state(policy.params)
        name = "keep_drafting"
        answer = kind.keep_drafting(state, policy.params, Step(0.5, 0.5, 1.0, 0.5), min(1, longest), 0.5)
        name = "update"
        after = kind.update(state, policy.params, 1, 0)
    except NumbaError as error:
        raise InputError(f"{where}.{name} does not compile: {_one_line(error)}; correct the file") from None
    except Exception as error:
        message = f"{type(error).__name__}: {_one_line(error)}"
        raise InputError(f"{where}.{name} fails: {message}; correct the file") from None
    if not (isinstance(answer, tuple) and len(answer) == 2 and _shape(answer[1]) == _shape(state)):
        raise InputError(f"{where}.keep_drafting must return (draft on?, state), with the state a tuple as it came")
    if _shape(state) != _shape(after) or not isinstance(state, tuple):
        raise InputError(f"{where}: initial_state and update must return tuples of as many floats")


def _shape(state: Any) -> Any:
    return tuple(type(part) for part in state) if isinstance(state, tuple) else None


def _one_line(error: BaseException) -> str:
    """The message without colours and line breaks, numba's without its preamble."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Failed in nopython mode")]
    return " ".join(lines[:3])[:300].rstrip(".;")
