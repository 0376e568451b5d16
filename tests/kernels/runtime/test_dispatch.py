"""Which backend runs, and how operations are registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speckernels
from speckernels.runtime import build, dispatch, errors, launch

LOGITS = torch.tensor([[0.5, 2.0, -1.0, 1.0]])


def test_override_holds_inside_its_block_only_and_the_reference_is_the_cpus() -> None:
    with speckernels.use_backend("triton"):
        assert speckernels.backend_for("cpu") == "triton"
        with speckernels.use_backend("cuda"):
            assert speckernels.backend_for("cpu") == "cuda"
        assert speckernels.backend_for("cpu") == "triton"
    assert speckernels.backend_for("cpu") == "reference"


def test_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, "cuda")
    assert speckernels.backend_for("cpu") == "cuda"
    monkeypatch.setenv(dispatch.ENVIRONMENT, "cudaa")
    with pytest.raises(ValueError, match="'cudaa' is unknown; known: auto, reference, triton, cuda"):
        speckernels.draft_statistics(LOGITS)


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="backend 'cudnn' is unknown"), speckernels.use_backend("cudnn"):
        pass


def test_operations_trace_without_data() -> None:
    """Fake tensors: torch.compile sees shapes, not values."""
    compiled = torch.compile(speckernels.draft_statistics, backend="eager", fullgraph=True)
    for got, expected in zip(compiled(LOGITS), speckernels.draft_statistics(LOGITS), strict=True):
        assert torch.equal(got, expected)


def fail_on_cuda(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Prefer a cuda backend whose operations raise this."""
    original = dispatch.implementation

    def failing(name: str, backend: str):  # type: ignore[no-untyped-def]
        def fail(*args: object) -> None:
            raise error

        return fail if backend == "cuda" else original(name, backend)

    monkeypatch.setattr(dispatch, "implementation", failing)
    monkeypatch.setattr(dispatch, "_preferred", lambda device: ("cuda", "reference"))


def test_refusal_falls_back_only_when_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on_cuda(monkeypatch, speckernels.Unsupported("not this"))
    assert speckernels.draft_statistics(LOGITS).token.tolist() == [1]
    with speckernels.use_backend("cuda"), pytest.raises(speckernels.Unsupported, match="not this"):
        speckernels.draft_statistics(LOGITS)


def test_a_backend_that_cannot_be_had_is_told_of_once_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch._warn_once.cache_clear()
    fail_on_cuda(monkeypatch, errors.Unavailable("draft_statistics.cu does not compile"))
    with pytest.warns(
        RuntimeWarning, match="draft_statistics runs without the cuda backend: .* does not compile"
    ) as warned:
        results = [speckernels.draft_statistics(LOGITS) for _ in range(3)]
    assert [result.token.tolist() for result in results] == 3 * [[1]]
    assert len(warned) == 1
    with speckernels.use_backend("cuda"), pytest.raises(errors.Unavailable, match="does not compile"):
        speckernels.draft_statistics(LOGITS)


def test_a_signature_is_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of the same types works out nothing about them."""
    with speckernels.use_backend("cuda"):
        first = speckernels.draft_statistics(LOGITS)
        monkeypatch.setattr(launch, "_c_type", None)
        monkeypatch.setattr(build, "load", None)
        second = speckernels.draft_statistics(LOGITS)
    assert all(map(torch.equal, first, second))


def test_tensors_on_the_cpu_beside_a_gpu_are_refused_and_other_errors_are_not() -> None:
    """Triton compiled for a GPU says of them what it said on an NVIDIA H100."""
    from speckernels.runtime.triton_runtime import launch as triton_launch

    class Kernel:
        says = "Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*args: Any, **constants: Any) -> None:
                raise ValueError(self.says)

            return run

    kernel = Kernel()
    with pytest.raises(errors.Unsupported, match="runs on the GPU here; move the tensors there"):
        triton_launch(kernel, (1,), LOGITS)
    kernel.says = "something else"
    with pytest.raises(ValueError, match="something else"):
        triton_launch(kernel, (1,), LOGITS)
