"""The public API of realrun: its names, their examples, and that importing the package costs nothing."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import realrun
from tests.support import ROOT


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


def test_a_tree_that_is_not_installed_finds_its_kernels(tmp_path: Path) -> None:
    """As it is carried to a GPU machine."""
    code = (
        "import sys; sys.path = [p for p in sys.path if not (p.endswith('kernels') or 'editable' in p)]; "
        f"sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)]; sys.path.insert(0, {str(ROOT)!r}); "
        "import realrun, importlib.util; print(importlib.util.find_spec('speckernels').origin)"
    )
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=plain, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "kernels" / "speckernels" / "__init__.py"), done.stderr
