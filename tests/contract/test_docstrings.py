"""Every public name is documented in SciPy's form: its parameters, what it returns, what it raises, and an example."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

PACKAGES = ("specsim", "realrun", "speckernels")
SECTION = re.compile(r"^(\w+)\n-{3,}$", re.MULTILINE)
WITH_EXAMPLES = ("specsim", "realrun")  # speckernels' calls need tensors of many shapes; its tests have them


def public() -> Iterator[tuple[str, Any]]:
    for package in PACKAGES:
        module = import_module(package)
        for name in module.__all__:
            documented = getattr(module, name)
            if inspect.ismodule(documented):  # of functions
                functions = [it for it in vars(documented).values() if inspect.isfunction(it)]
                own = [it for it in functions if it.__module__ == documented.__name__]
                yield from ((f"{package}.{name}.{it.__name__}", it) for it in own)
            elif not name.isupper():
                yield f"{package}.{name}", documented


NAMES = dict(public())


def wanted(name: str, documented: Any) -> set[str]:
    """The sections that the docstring of a name has to have."""
    sections = {"Examples"} if name.startswith(WITH_EXAMPLES) else set()
    if inspect.isfunction(documented):
        sections |= {"Parameters"} if inspect.signature(documented).parameters else set()
        sections |= {"Returns"} if documented.__annotations__.get("return") not in (None, "None") else set()
    return sections


def unnamed(documented: Any) -> list[str]:
    """Parameters of a function, or fields of a dataclass, that its docstring does not name."""
    text = inspect.getdoc(documented) or ""
    if inspect.isfunction(documented):
        names = list(inspect.signature(documented).parameters)
    elif dataclasses.is_dataclass(documented):
        names = [field.name for field in dataclasses.fields(documented) if not field.name.startswith("_")]
    else:
        return []
    return [name for name in names if not re.search(rf"\b{name}\b", text)]


def missing(name: str, documented: Any) -> list[str]:
    text = inspect.getdoc(documented) or ""
    sections = set(SECTION.findall(text))
    own = documented.__doc__ or issubclass(documented, enum.Enum)
    return [*([] if own else ["a docstring"]), *sorted(wanted(name, documented) - sections), *unnamed(documented)]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name: str) -> None:
    assert missing(name, NAMES[name]) == []


def test_what_is_missing_is_found() -> None:
    def predict(trace: int, policy: str) -> float:
        """Predict.

        Parameters
        ----------
        trace : int
        """
        return float(trace)

    assert missing("specsim.predict", predict) == ["Examples", "Returns", "policy"]
