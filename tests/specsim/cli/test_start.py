"""How commands begin: what they and the package import, what they say of versions, missing libraries and compiling."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import specsim
from specsim.trace.files import write_trace
from tests.support import ROOT
from tests.support.commands import assert_refused, call
from tests.support.reference import small_trace

PATHS = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'kernels')!r}]\n"
LATER = ("torch", "transformers", "tokenizers", "safetensors", "peft")  # what the light install does not bring
HEAVY = {
    "torch",
    "scipy.linalg",
    "scipy.special",
    "pandas",
    "matplotlib",
    "sklearn",
    "optuna",
    "joblib",
    "rich",
    "pyarrow.compute",
}
IMPORT_EVERYTHING = """
import importlib, json, pkgutil
import specsim
found = pkgutil.walk_packages(specsim.__path__, "specsim.")
names = [module.name for module in found if not module.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(json.dumps([names, sorted(sys.modules)]))
"""


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run code, with a command's arguments, in a process of its own."""
    return subprocess.run([sys.executable, "-c", PATHS + code, *map(str, args)], capture_output=True, text=True)


def test_a_replay_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """All of these together took half a second and more."""
    write_trace(small_trace(), tmp_path / "trace")
    (tmp_path / "cost.json").write_text('{"s_d": 1e-3, "s_t": 1e-2}')
    code = """
import json
from specsim.cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
    cost = ["--cost", tmp_path / "cost.json", "--json"]
    args = ["replay", tmp_path / "trace", "--policy", "fixed_k", "--set", "k=3", *cost]
    done = python(code, *args)
    assert done.returncode == 0 and json.loads(done.stdout)["policy"] == "fixed_k", done.stderr
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert "numba" in loaded
    assert loaded & HEAVY == set()


def test_no_module_imports_torch_or_what_runs_models() -> None:
    """The simulator stands alone: no room of it imports a deep-learning library."""
    names, loaded = json.loads(python(IMPORT_EVERYTHING).stdout)
    assert {f"specsim.{room}" for room in ("trace", "policy", "replaying", "cost")} <= set(names)
    roots = {name.split(".")[0] for name in loaded}
    assert "numba" in roots
    assert not roots & {"torch", "transformers", "triton", "realrun", "speckernels"}
    assert "matplotlib.pyplot" not in loaded  # it chooses a display


def test_importing_the_package_itself_loads_nothing_heavy() -> None:
    loaded = json.loads(python("import json\nimport specsim\nprint(json.dumps(sorted(sys.modules)))").stdout)
    assert not {name.split(".")[0] for name in loaded} & {
        "numpy",
        "numba",
        "pandas",
        "pyarrow",
        "scipy",
        "matplotlib",
    }


def test_numba_keeps_its_linear_algebra() -> None:
    """It is loaded late, not left out."""
    code = """
import numba, numpy as np
import specsim.replaying.kernel
assert "scipy.linalg" not in sys.modules
x = np.random.default_rng(0).random((3, 9))
square = np.ascontiguousarray(x[:, :3])
f = numba.njit(lambda x, square: np.cov(x) + np.linalg.inv(square) @ square)
print(np.abs(f(x, square) - np.cov(x) - np.eye(3)).max() < 1e-9)
"""
    done = python(code)
    assert done.stdout == "True\n", done.stderr
    assert done.stderr == ""  # a user's own functions are not announced


def test_compiling_is_said_once_and_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook or a script calls it, in a new install and then in the next process."""
    code = """
import specsim
specsim.replay("example:lab-model", "example:lab-deep-model", "fixed_k")  # compiles several functions
assert "scipy.linalg" not in sys.modules
"""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    first, second = python(code), python(code)
    assert first.stderr.count("compiling policies") == first.stderr.count("\n") == 1, first.stderr
    assert (first.stdout, first.returncode) == (second.stdout, second.returncode) == ("", 0)
    assert second.stderr == ""
    process = python("import logging; logging.disable()\n" + code.replace("fixed_k", "adaedl"))
    assert process.stderr == ""  # who asks for silence has it


@pytest.mark.parametrize("command", ["specsim", "realrun"])
def test_a_command_knows_its_version(command: str) -> None:
    assert call(command, "--version") == (0, f"specsim {specsim.__version__}\n", "")


def test_the_distribution_has_one_version_and_a_name_that_nobody_else_has() -> None:
    """The package index has another `specsim`, so no page and no message tells to install that."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] != "specsim"
    assert project["version"] == specsim.__version__
    folders = ("docs", "kernels", "realrun", "specsim", "studies")
    texts = [*ROOT.glob("*.*"), *(path for name in folders for path in (ROOT / name).rglob("*.[mp][dy]"))]
    wrong = re.compile(r"pip install [^`\n]*['\" ]specsim(\[|['\" `]|$)", re.MULTILINE)
    assert not [path for path in texts if path.is_file() and wrong.search(path.read_text())]


ENTRIES = {
    "realrun": "from realrun.cli.main import main; main()",
    "python -m realrun": "import runpy; runpy.run_module('realrun', run_name='__main__')",
}


def in_light_install(entry: str, *args: str) -> subprocess.CompletedProcess[str]:
    missing = f"sys.modules.update(dict.fromkeys({LATER!r}))\n"  # an import of None finds no module
    return python(missing + ENTRIES[entry], *args)


@pytest.mark.parametrize("words", ["record out", "profile out.json", "validate", "board", "train --help", "shapes"])
def test_a_light_install_names_what_is_missing_in_one_line(words: str) -> None:
    done = in_light_install("realrun", *words.split())
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "is not installed; " in done.stderr and "'.[real]'" in done.stderr


def test_the_module_does_too() -> None:
    done = in_light_install("python -m realrun", "shapes")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is not installed; " in done.stderr, done.stderr


def test_help_needs_no_more_than_the_light_install() -> None:
    done = in_light_install("realrun", "--help")
    assert done.returncode == 0 and "record" in done.stdout and done.stderr == ""


def test_a_module_of_the_project_that_is_missing_is_no_matter_of_the_install() -> None:
    start = "sys.modules['specsim.learn.predict'] = None\nfrom specsim.cli.main import main; main()"
    done = python(start, "replay", "t", "--policy", "fixed_k", "--cost", "c")
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_called_one(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    result = call("specsim", "example", tmp_path / "example")
    assert result.code == 2 and result.err.startswith("error: ") and result.err.count("\n") == 1
    message = "the disk is full" if number == errno.ENOSPC else "your disk quota is used up"
    assert result.err.endswith(f"/trace: {message}; free some space, then run the command again\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "memory is used up (out of memory); give smaller input, or the machine more memory"),
        (MemoryError("Unable to allocate 7.45 GiB"), "memory is used up (Unable to allocate 7.45 GiB); give smaller"),
        (RuntimeError("can't start new thread"), "memory is used up (can't start new thread)"),
    ],
)
def test_a_lack_of_memory_is_a_line(error: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("specsim.cost.files.read_cost", fail)
    assert_refused(call("specsim", "cost", "show", "example:lab-deep-model"), line)


def test_a_loop_of_links_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for out in (tmp_path / "a", tmp_path / "a" / "file"):
        assert_refused(call("specsim", "bench", "http://127.0.0.1:9", "--out", out), "Symlink loop", "choose another")
