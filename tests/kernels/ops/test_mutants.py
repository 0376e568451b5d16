"""Kernels broken on purpose: each operation's own check must notice."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import speckernels
from speckernels.runtime import build, dispatch
from tests.support.mutants import Mutant

KERNELS = Path(speckernels.__file__).parents[1]
MUTANTS = {name: importlib.import_module(f"tests.kernels.ops.test_{name}").MUTANTS for name in dispatch.OPERATIONS}


def cases() -> Iterator[Any]:
    """Every broken kernel; all but the first in CUDA and the first in Triton of each operation are slow."""
    for operation, mutants in sorted(MUTANTS.items()):
        languages = set()
        for mutant in mutants:
            language = Path(mutant.file).suffix
            marks = [pytest.mark.slow] if language in languages else []
            languages.add(language)
            yield pytest.param(operation, mutant, id=f"{operation}-{mutant.why.replace(' ', '_')}", marks=marks)


def test_every_operation_has_mutants_of_both_languages() -> None:
    languages = {name: {Path(mutant.file).suffix for mutant in mutants} for name, mutants in MUTANTS.items()}
    assert languages == {name: {".cu", ".py"} for name in dispatch.OPERATIONS}


@pytest.fixture
def fresh_libraries() -> Iterator[None]:
    """Compiled code is looked up anew, before and after."""
    from speckernels.runtime import launch

    caches = (build.load, launch._entry)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def mutated(mutant: Mutant) -> str:
    folder = KERNELS if mutant.file.startswith("csrc/") else KERNELS / "speckernels"
    text = (folder / mutant.file).read_text()
    assert text.count(mutant.find) == 1, f"{mutant.file} holds {mutant.find!r} {text.count(mutant.find)} times"
    return text.replace(mutant.find, mutant.replace)


@pytest.mark.parametrize(("operation", "mutant"), [*cases()])
def test_caught(
    operation: str, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_libraries: None
) -> None:
    check = importlib.import_module(f"tests.kernels.ops.test_{operation}").check
    text = mutated(mutant)
    if mutant.file.startswith("csrc/"):
        shutil.copytree(KERNELS / "csrc", tmp_path / "csrc")
        (tmp_path / mutant.file).write_text(text)
        monkeypatch.setattr(build, "source_folder", lambda: tmp_path / "csrc")
        monkeypatch.setenv("SPECKERNELS_CACHE", str(tmp_path / "cache"))
        backend = "cuda"
    else:
        broken = tmp_path / Path(mutant.file).name
        broken.write_text(text)
        spec = importlib.util.spec_from_file_location(f"mutant_{operation}", broken)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        original = dispatch.implementation

        def implementation(name: str, backend: str) -> object:
            return getattr(module, name) if name == operation and backend == "triton" else original(name, backend)

        monkeypatch.setattr(dispatch, "implementation", implementation)
        backend = "triton"
    with speckernels.use_backend(backend), pytest.raises((AssertionError, RuntimeError)) as caught:
        check("cpu")
    assert "does not compile" not in str(caught.value)
