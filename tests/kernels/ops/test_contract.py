"""What every operation promises.

Its own file test_NAME.py has `check`, which compares the backend in force with the reference; `MUTANTS`, kernels broken
on purpose, which `check` must catch; `samples` of arguments; and `refusals`, arguments and what one is told about them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

import speckernels
from speckernels.runtime import dispatch
from tests.kernels.ops import test_tree_attention_hopper as hopper
from tests.support.kernel_trees import BACKENDS, assert_same
from tests.support.mutants import Mutant

OPERATIONS = {name: importlib.import_module(f"tests.kernels.ops.test_{name}") for name in sorted(dispatch.OPERATIONS)}
STRIDED = ("chain_rejection", "tree_rejection", "typical_acceptance")  # take tensors of any strides
BY_BATCH = (*STRIDED, "tree_attention")  # all of whose tensors begin with the batch


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_agrees_with_the_reference(name: str, backend: str, device: str) -> None:
    with speckernels.use_backend(backend):
        OPERATIONS[name].check(device)


@pytest.mark.parametrize("name", OPERATIONS)
def test_registration(name: str) -> None:
    """Schema, fake implementation and tracing."""
    for sample in OPERATIONS[name].samples():
        torch.library.opcheck(getattr(torch.ops.speckernels, name).default, sample)


@pytest.mark.parametrize("name", STRIDED)
def test_strided_arguments(name: str) -> None:
    operation = getattr(importlib.import_module(f"speckernels.ops.{name}"), name)
    for sample in OPERATIONS[name].samples():
        apart = [x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.ndim > 1 else x for x in sample]
        assert any(isinstance(x, torch.Tensor) and not x.is_contiguous() for x in apart)
        assert_same(operation(*apart), operation(*sample), "transposed storage")


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("name", BY_BATCH)
def test_nothing_is_made_of_nothing(name: str) -> None:
    operation, sample = getattr(importlib.import_module(f"speckernels.ops.{name}"), name), OPERATIONS[name].samples()[0]
    empty = operation(*(x[:0] if isinstance(x, torch.Tensor) else x for x in sample))
    with speckernels.use_backend("reference"):
        whole = operation(*sample)
    for all_of_it, nothing in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (whole, empty)), strict=True):
        assert nothing.shape == (0, *all_of_it.shape[1:]) and nothing.dtype == all_of_it.dtype


@pytest.mark.parametrize("name", OPERATIONS)
def test_errors_say_what_to_give(name: str) -> None:
    operation = getattr(importlib.import_module(f"speckernels.ops.{name}"), name)
    good, refusals = OPERATIONS[name].refusals()
    assert refusals
    for message, changes in refusals:
        with pytest.raises(ValueError, match=message):
            operation(**(good | changes))


def broken_kernels() -> Iterator[Any]:
    """All but the first in CUDA and the first in Triton of each operation are slow."""
    for name, module in OPERATIONS.items():
        languages = set[str]()
        for mutant in module.MUTANTS:
            language = "cuda" if mutant.in_cuda else "triton"
            marks = [pytest.mark.slow] if language in languages else []
            languages.add(language)
            yield pytest.param(name, mutant, id=f"{name}-{mutant.why.replace(' ', '_')}", marks=marks)
        assert languages == {"cuda", "triton"}, name
    for mutant in hopper.MUTANTS:
        yield pytest.param(hopper.SOURCE, mutant, id=f"hopper-{mutant.why.replace(' ', '_')}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("operation", "mutant"), [*broken_kernels()])
def test_a_broken_kernel_is_caught(
    operation: str, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_libraries: None
) -> None:
    check = hopper.check if operation == hopper.SOURCE else OPERATIONS[operation].check
    if mutant.in_cuda:
        mutant.break_csrc(tmp_path, monkeypatch)
        backend = "cuda"
    else:
        broken = tmp_path / Path(mutant.file).name
        broken.write_text(mutant.text())
        spec = importlib.util.spec_from_file_location(f"mutant_{operation}", broken)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        original = dispatch.implementation

        def implementation(name: str, backend: str) -> object:
            return getattr(module, name) if name == operation and backend == "triton" else original(name, backend)

        monkeypatch.setattr(dispatch, "implementation", implementation)
        backend = "triton"
    with speckernels.use_backend(backend), pytest.raises((AssertionError, RuntimeError, InterpreterError)) as caught:
        check("cpu")
    assert "does not compile" not in str(caught.value)
