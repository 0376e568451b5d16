"""Compile a replay kernel with a policy's own functions inside, and cache it on disk."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import numba as nb

from specsim.io.files import digest
from specsim.policy.base import Policy
from specsim.policy.compiler import prepare_compiler

Fields = TypeVar("Fields", bound=tuple[Any, ...])
Kernel = Callable[..., int]
PACKAGE = Path(__file__).parents[1]
prepare_compiler()  # ahead of the first function that is compiled, or loaded


def specialise(kernel: Any, names: Mapping[str, Any], kind: type[Policy]) -> Kernel:
    """The kernel compiled with the policy's functions in the place of those that its module names so.

    names : the globals of the kernel's module. The policy's functions become globals of a copy
    of the kernel, so that numba can keep the compiled code on disk; the copy's name carries a
    hash of the policy's file and of the folders `policy` and `replaying`, so that an edited policy is compiled
    anew. Only specsim's own policies are kept: what a user's file calls elsewhere may change
    without the file, and numba loads kept code, of any policy of that name, only where the modules of
    all functions and settings can be imported by name.
    """
    functions = {name: getattr(kind, name) for name in kind.functions}
    modules = {kind.Params.__module__, *(f.py_func.__module__ for f in functions.values())}
    own = all(module.startswith("specsim.") for module in modules)
    version = _source_digest(f.py_func for f in functions.values()) if own else "unkept"
    bound = FunctionType(kernel.__code__, {**names, **functions}, f"replay_{kind.name}_{version}")
    bound.__module__ = names["__name__"]
    bound.__qualname__ = bound.__name__
    compile_kernel: Callable[[Callable[..., int]], Kernel]
    compile_kernel = nb.njit(cache=own, nogil=True, error_model="numpy")
    return compile_kernel(bound)


def select_fields(kind: type[Fields], holder: Any, nearer: Any = None, **values: Any) -> Fields:
    """Fill a NamedTuple for compiled code from values by name, else from attributes of `nearer`, else of `holder`."""
    for name in kind._fields:  # type: ignore[attr-defined]
        if name not in values:
            values[name] = getattr(nearer if nearer is not None and hasattr(nearer, name) else holder, name)
    return kind(**values)


def _source_digest(functions: Iterable[Callable[..., Any]]) -> str:
    """Digest the files that a kernel of specsim's own policies is compiled from."""
    folders = PACKAGE / "policy", PACKAGE / "replaying"
    sources = {PACKAGE / "io" / "rng.py", *(path for folder in folders for path in folder.rglob("*.py"))}
    sources |= {Path(inspect.getfile(function)) for function in functions}
    return digest(*(path.read_bytes() for path in sorted(sources)), length=12)
