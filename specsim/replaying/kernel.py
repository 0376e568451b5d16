"""Compile a policy's functions, alone and inside a replay kernel, and cache the code on disk."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

import numba as nb
from numba.core import event

from specsim.io.compiled import UNKEPT, njit
from specsim.io.files import digest
from specsim.policy.base import Policy

COMPILING = "specsim: compiling policies, a few seconds each; those that ship with it are kept for the next process"
UNKEPT_ONES = (
    "specsim: compiling policies, a few seconds each; nothing is kept, as no cache can be written: "
    "set NUMBA_CACHE_DIR to a folder that can"
)
OURS = ("specsim", "realrun")  # first letters of modules whose functions are announced; a user's own are not
Fields = TypeVar("Fields", bound=tuple[Any, ...])
Kernel = Callable[..., int]
PACKAGE = Path(__file__).parents[1]

log = logging.getLogger("specsim")  # where nobody configures logging, a warning is a line on standard error


class Announcement(event.Listener):
    """Says, when the first function of ours is compiled, what takes so long."""

    said = False

    def on_start(self, event: Any) -> None:
        if not self.said and event.data["dispatcher"].py_func.__module__.startswith(OURS):
            self.said = True
            log.warning(UNKEPT_ONES if UNKEPT else COMPILING)

    def on_end(self, event: Any) -> None: ...


def _prepare_compiler() -> None:
    """Have numba announce compiling, and load its registries without SciPy's linear algebra.

    That takes longer than all that a replay does. Numba looks there whether np.cov has what it needs; it has, when it
    is asked for.
    """
    event.register("numba:compile", Announcement())
    if "scipy.linalg" in sys.modules:
        return
    from numba.core.registry import cpu_target

    sys.modules["scipy.linalg"] = None  # type: ignore[assignment]  # not to be imported
    try:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
    finally:
        del sys.modules["scipy.linalg"]
    from numba.np import arraymath

    arraymath._HAVE_BLAS = True


_prepare_compiler()  # ahead of the first function that is compiled, or loaded


def specialise(kernel: Any, names: Mapping[str, Any], kind: type[Policy]) -> Kernel:
    """Compile a kernel for a policy.

    names : the globals of the kernel's module, in which the policy's functions replace those of the same name

    The policy's functions become globals of a copy of the kernel, because numba can then cache the compiled code on
    disk. The copy's name carries a hash of the policy's file and of the folders `policy` and `replaying`, so that an
    edited policy is compiled again. Only specsim's own policies are cached: a user's file may call code that changes
    while the file does not, and numba loads cached code only where the modules of all functions and settings can be
    imported by name.
    """
    version, functions = _version(kind), _step_functions(kind)  # type: ignore[arg-type]  # a class hashes well
    bound = _copy(kernel, {**names, **vars(functions)}, f"replay_{kind.name}_{version or 'unkept'}")
    compile_kernel: Callable[[Callable[..., int]], Kernel]
    compile_kernel = (njit if version is not None else nb.njit)(nogil=True, error_model="numpy")
    return compile_kernel(bound)


def step_functions(policy: Policy) -> SimpleNamespace:
    """Return a policy's functions as the real run calls them, by name; compiled code is cached as by `specialise`."""
    return _step_functions(type(policy))  # type: ignore[arg-type]  # a class hashes well


@cache
def _step_functions(kind: type[Policy]) -> SimpleNamespace:
    version = _version(kind)
    return SimpleNamespace(**{name: _cached(getattr(kind, name), version) for name in kind.functions})


@cache
def _cached(function: Any, version: str | None) -> Any:
    """Return a function whose compiled code is cached on disk under a version; without a version, the same function."""
    if version is None:
        return function
    source = function.py_func
    compile_function = njit(error_model=function.targetoptions.get("error_model", "python"))
    return compile_function(_copy(source, source.__globals__, f"{source.__name__}_{version}"))


def _copy(function: Any, names: Mapping[str, Any], name: str) -> FunctionType:
    """Return the function with other globals, under another name."""
    copied = FunctionType(function.__code__, {**names}, name)
    copied.__module__ = names["__name__"]
    copied.__qualname__ = name
    return copied


def _version(kind: type[Policy]) -> str | None:
    """Return a digest of the files that one of specsim's own policies is compiled from; None for a user's policy."""
    functions = [getattr(kind, name).py_func for name in kind.functions]
    modules = {kind.Params.__module__, *(function.__module__ for function in functions)}
    return _source_digest(functions) if all(module.startswith("specsim.") for module in modules) else None


def select_fields(kind: type[Fields], holder: Any, nearer: Any = None, **values: Any) -> Fields:
    """Fill a NamedTuple for compiled code.

    A field's value comes from `values`, else from an attribute of `nearer`, else from one of `holder`.
    """
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
