"""The simulator stands alone: no room of it imports a deep-learning library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import specsim

SOURCE = str(Path(specsim.__file__).parents[1])

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
import specsim
found = pkgutil.walk_packages(specsim.__path__, "specsim.")
names = [module.name for module in found if not module.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(json.dumps([names, sorted(sys.modules)]))
"""

LIGHT = "import json, sys\nimport specsim\nprint(json.dumps(sorted(sys.modules)))"


def run(code: str) -> list:
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SOURCE)
    return json.loads(out.stdout)


def test_no_module_imports_torch_or_what_runs_models() -> None:
    names, loaded = run(IMPORT_EVERYTHING)
    assert {f"specsim.{room}" for room in ("trace", "policy", "replaying", "cost")} <= set(names)
    roots = {name.split(".")[0] for name in loaded}
    assert "numba" in roots
    assert not roots & {"torch", "transformers", "triton", "realrun", "speckernels"}
    assert "matplotlib.pyplot" not in loaded  # it chooses a display


def test_importing_the_package_itself_loads_nothing_heavy() -> None:
    assert not {name.split(".")[0] for name in run(LIGHT)} & {
        "numpy",
        "numba",
        "pandas",
        "pyarrow",
        "scipy",
        "matplotlib",
    }
