"""The public API of realrun: its names, their examples, and that importing the package costs nothing."""

from __future__ import annotations

import doctest
import subprocess
import sys
from importlib import import_module

import pytest

import realrun


@pytest.mark.parametrize("name", realrun.__all__)
def test_examples_run(name: str) -> None:
    value = getattr(realrun, name)
    module = import_module(value.__module__)
    tests = [test for test in doctest.DocTestFinder(recurse=False).find(value, name, module, {}) if test.examples]
    for test in tests:
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
    assert tests or name.endswith(("Settings", "Sampler"))


def test_importing_the_package_loads_no_models() -> None:
    code = "import sys, realrun; print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]" and set(dir(realrun)) == set(realrun.__all__)
    with pytest.raises(AttributeError, match="module 'realrun' has no attribute 'nothing'"):
        realrun.nothing  # noqa: B018
